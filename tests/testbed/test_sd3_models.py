"""Tokenizers, architectures, optimizer and the pre-training's own helpers, with fresh weights."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from visual_grpo.adapters.sd3 import SD3Adapter
from visual_grpo.testbed import vae_pretraining
from visual_grpo.testbed.denoiser_build import save
from visual_grpo.testbed.denoiser_pretraining import Settings, pretrain
from visual_grpo.testbed.muon import Muon, orthogonalize
from visual_grpo.testbed.scenes import all_prompts
from visual_grpo.testbed.sd3_models import (
    TEXT_TOKENS,
    build_clip_tokenizer,
    build_pipeline,
    build_t5_tokenizer,
    build_vae,
    parameter_count,
    vocabulary,
)
from visual_grpo.testbed.words import WORDS, all_word_prompts


@pytest.fixture(scope="module")
def pipeline():
    torch.manual_seed(0)
    built = build_pipeline(build_vae(), shift=2.0)
    built.set_progress_bar_config(disable=True)
    return built


def test_every_caption_word_is_one_token():
    clip = build_clip_tokenizer([word.lower() for word in vocabulary()])
    t5 = build_t5_tokenizer(vocabulary())
    for entry in all_prompts()[::17]:
        text = str(entry["prompt"])
        assert clip.convert_ids_to_tokens(clip(text).input_ids)[1:-1] == [word + "</w>" for word in text.split()]
        assert t5.convert_ids_to_tokens(t5(text).input_ids)[:-1] == ["▁" + word for word in text.split()]
    lengths = [
        len(tokenizer(str(e["prompt"])).input_ids)
        for e in all_prompts() + all_word_prompts()
        for tokenizer in (clip, t5)
    ]
    assert max(lengths) <= TEXT_TOKENS


def test_words_in_quotes_keep_their_token():
    clip = build_clip_tokenizer([word.lower() for word in vocabulary()])
    t5 = build_t5_tokenizer(vocabulary())
    for word in WORDS:
        text = f'a sign that says "{word}"'
        assert word.lower() + "</w>" in clip.convert_ids_to_tokens(clip(text).input_ids)
        assert word in t5.convert_ids_to_tokens(t5(text).input_ids)
        assert clip(text).input_ids.count(clip.eos_token_id) == 1


@pytest.mark.parametrize("text", ["", "zebra über 7!", "🙂 x", "a photo of a purple elephant's ear, please"])
def test_any_text_is_tokenized(pipeline, text):
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_3):
        ids = tokenizer(text, padding="max_length", max_length=TEXT_TOKENS, truncation=True).input_ids
        assert len(ids) == TEXT_TOKENS
        assert max(ids) < len(tokenizer)


def test_sizes(pipeline):
    assert parameter_count(pipeline.transformer) == pytest.approx(2.3e6, rel=0.05)
    assert pipeline.vae_scale_factor == 2
    assert (pipeline.transformer.config.sample_size // pipeline.transformer.config.patch_size) ** 2 == 36


def test_save_keeps_the_running_weights_and_replaces_the_folder(pipeline, tmp_path):
    before = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}
    for _ in range(2):
        save(SD3Adapter(pipeline, SD3Adapter.Sampling()), tmp_path / "model", [{"stage": "test"}])
    assert all(torch.equal(value, before[name]) for name, value in pipeline.transformer.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = StableDiffusion3Pipeline.from_pretrained(tmp_path / "model")
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        assert {p.dtype for p in getattr(loaded, name).parameters()} == {torch.float32}, name
    assert (tmp_path / "model" / "build_log.jsonl").read_text() == '{"stage": "test"}\n'


def test_orthogonalize_pushes_singular_values_towards_one():
    matrices = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    for result in (orthogonalize(matrices), orthogonalize(matrices.mT).mT):
        values = torch.linalg.svdvals(result)
        assert 0.3 < values.min() < values.max() < 1.4
    assert torch.equal(orthogonalize(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))


def test_muon_descends_and_refuses_vectors():
    weight = torch.nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon([weight], lr=0.1)
    losses = []
    for _ in range(40):
        loss = weight.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(ValueError, match="matrices only"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_pretraining_lowers_both_losses_and_swaps_in_the_average():
    torch.manual_seed(0)
    vae = build_vae()
    records = []
    vae_pretraining.train_vae(vae, seed=0, steps=2, log=records.append)
    assert vae.config.scaling_factor > 0
    vae.requires_grad_(False)
    built = build_pipeline(vae)
    before = built.transformer.proj_out.weight.detach().clone()
    adapter = SD3Adapter(built, SD3Adapter.Sampling())
    settings = Settings(steps=6, scenes=32, batch=8, ema_decay=0.5)
    snapshots = []
    pretrain(adapter, settings, seed=0, log=records.append, snapshot=snapshots.append, snapshot_minutes=0.0)
    assert snapshots == list(range(6))
    assert records[-1]["stage"] == "denoiser_end"
    assert not any(p.requires_grad for p in built.transformer.parameters()), "left as an adapter hands it out"
    assert not torch.equal(before, built.transformer.proj_out.weight)
    assert all(torch.isfinite(p).all() for p in built.transformer.parameters())


def test_latents_have_unit_scale_after_calibration():
    torch.manual_seed(0)
    vae = build_vae()
    images = vae_pretraining.random_images(np.random.default_rng(0), 16)
    vae_pretraining.set_latent_scale(vae, images)
    latents = vae_pretraining.encode_images(vae, images)
    assert float(latents.mean()) == pytest.approx(0, abs=1e-3)
    assert float(latents.std()) == pytest.approx(1, abs=1e-3)
