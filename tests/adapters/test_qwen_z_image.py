"""Qwen-Image and Z-Image, whose texts have any length: the contract, diffusers' own sampling, published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visual_grpo.adapters.conditions import padded_texts, trimmed_texts
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.flux import pack
from visual_grpo.adapters.noise import row_noise
from visual_grpo.adapters.published import published
from visual_grpo.adapters.qwen_image import QwenImageAdapter
from visual_grpo.adapters.z_image import ZImageAdapter
from visual_grpo.config import LoraConfig, ModelConfig
from visual_grpo.policy import choose_trainable, inject_lora

FAMILIES: dict[str, Any] = {"qwen_image": QwenImageAdapter, "z_image": ZImageAdapter}
STEPS = 4


def options_of(**options: Any) -> DiffusionSampling:
    return DiffusionSampling(**{"height": 16, "width": 16, "max_sequence_length": 48, "steps": STEPS, **options})


@pytest.fixture(scope="module")
def adapters(tiny_pipelines: Any, tiny_text: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    words = tiny_text.make_tokenizer()
    built = {
        "qwen_image": tiny_pipelines.qwen_image(folder, words),
        "z_image": tiny_pipelines.z_image(folder, tiny_text.make_model(), words),
    }
    return {family: cls(built[family], options_of()) for family, cls in FAMILIES.items()}


@pytest.fixture
def prompts(contract: Any) -> Any:
    """Texts of different lengths: padding and trimming are at work."""
    return contract.prompts_of(["a cat", "two dogs in a boat"])


@pytest.mark.parametrize(("family", "guidance"), [("qwen_image", 3.0), ("z_image", 3.0)])
def test_contract(contract: Any, adapters: Any, prompts: Any, family: str, guidance: float) -> None:
    options = options_of(steps=3, solver="flow_sde", noise_scale=0.7, guidance=guidance)
    contract.check_adapter(adapters[family], prompts, options, trained=".to_q")


def plain(adapter: Any, texts: list[str], noise: torch.Tensor, guidance: float) -> Any:
    """Latents [N, C, h, w] and pictures of the plain pipeline."""
    call = {"prompt": list(texts), "num_inference_steps": STEPS, "height": 16, "width": 16, "max_sequence_length": 48}
    if isinstance(adapter, ZImageAdapter):
        call |= {"guidance_scale": guidance - 1, "latents": noise}
    else:
        call |= {"true_cfg_scale": guidance, "latents": pack(noise)}
        call |= {"negative_prompt": [""] * len(texts)} if guidance > 1 else {}
    given = {k: list(v) if k == "prompt" else v for k, v in call.items()}
    latents = adapter.pipeline(**given, output_type="latent").images
    return latents, adapter.pipeline(**call, output_type="pt").images


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_without_noise_is_the_plain_pipeline(
    adapters: Any, prompts: Any, family: str, guidance: float
) -> None:
    own = adapters[family]
    rows = own.decode(own.sample(prompts, seed=2, sampling=options_of(solver="ode", guidance=guidance)))
    noise = row_noise(2, prompts.row_ids, tuple(rows.data["final"].shape[1:]), "initial")
    latents, images = plain(own, prompts.prompts, noise, guidance)
    final = rows.data["final"] if family == "z_image" else pack(rows.data["final"])
    assert (final - latents).abs().max() <= 1e-5 * latents.abs().max().clamp(min=1)
    assert (rows.images - images).abs().max() <= 1e-5
    assert images.std() > 0.01
    assert not torch.allclose(final[0], final[2], atol=1e-3), "the prompt has no effect"


def test_guidance_of_qwen_keeps_the_length_of_each_token(adapters: Any) -> None:
    free, bound = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
    found = adapters["qwen_image"].guided(free, bound, 4.0)
    torch.testing.assert_close(pack(found).norm(dim=-1), pack(bound).norm(dim=-1))
    turned = torch.nn.functional.cosine_similarity(pack(found), pack(free + 4 * (bound - free)), dim=-1)
    torch.testing.assert_close(turned, torch.ones_like(turned))
    torch.testing.assert_close(adapters["z_image"].guided(free, bound, 4.0), 4 * bound - 3 * free)


def test_branches_that_cancel_give_nothing_and_not_nan(adapters: Any) -> None:
    bound = torch.ones(1, 4, 4, 4)
    assert torch.equal(adapters["qwen_image"].guided(2 * bound, bound, 2.0), torch.zeros_like(bound))


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_encoded_as_latents_that_the_decoder_takes(adapters: Any, family: str) -> None:
    """`decode_latents` undoes the scaling: the plain autoencoder decodes the plain posterior's mean to the same picture."""
    own = adapters[family]
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    latents = own.encode_images(images)
    assert tuple(latents.shape[1:]) == own.latent_shape(options_of())
    clips = images * 2 - 1 if family == "z_image" else (images * 2 - 1).unsqueeze(2)
    with torch.no_grad():
        plain_images = own.pipeline.vae.decode(own.pipeline.vae.encode(clips).latent_dist.mean).sample
        found = own.decode_latents(latents)
    torch.testing.assert_close(found, plain_images.reshape(found.shape) / 2 + 0.5, rtol=0, atol=1e-5)


def test_texts_of_different_lengths_are_padded_and_trimmed() -> None:
    rows = [torch.ones(2, 3), 2 * torch.ones(4, 3)]
    condition = padded_texts(rows, 6)
    assert condition["tokens"].shape == (2, 6, 3)
    assert condition["mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    tokens, mask = trimmed_texts(condition)
    assert tokens.shape == (2, 4, 3)
    assert mask.tolist() == [[True, True, False, False], [True] * 4]
    assert [row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)] == [row.tolist() for row in rows]


@pytest.mark.parametrize(
    ("family", "path", "count", "lora"),
    [
        # Published files: 40,860,802,176 bytes of bfloat16. 60 blocks of 8 layers of width 3072.
        ("qwen_image", "Qwen/Qwen-Image", 20_430_401_088, 60 * 8 * 2 * 3072),
        ("z_image", "Tongyi-MAI/Z-Image-Turbo", 6_154_908_736, (30 + 2 + 2) * 4 * 2 * 3840),
    ],
)
def test_published_sizes(contract: Any, family: str, path: str, count: int, lora: int) -> None:
    """The real network on the meta device has the published number of parameters, its LoRA sits on real layers."""
    cls, known = FAMILIES[family], published(path)
    config = ModelConfig(adapter=family, path=path, dtype="bfloat16", lora=LoraConfig(rank=4))
    module = cls.load_meta(config)
    assert known is not None
    assert sum(p.numel() for p in module.parameters()) == known["parameters"]["transformer"] == count
    inject_lora(module, LoraConfig(rank=4), cls.lora_targets)
    assert sum(p.numel() for p in choose_trainable(module, config).values()) == 4 * lora
    plan = cls.plan_memory(config, module, sampling=cls.Sampling(steps=4), rows=2, units=3)
    contract.check_plan(plan)
    assert plan.parts["frozen weights"] == 2 * count
    assert plan.parts["text encoders"] == 2 * known["parameters"]["text_encoder"]
