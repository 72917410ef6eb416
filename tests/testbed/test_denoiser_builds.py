"""`testbed build` of FLUX, SD1.5 and SDXL with a handful of steps: what it writes is a pipeline of the real class that trains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.adapters.unet import unit_scale
from visual_grpo.api import plan
from visual_grpo.cli import main
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.testbed import denoiser_build
from visual_grpo.testbed.build_folder import build_folder
from visual_grpo.testbed.denoiser_build import MODELS, build, sd3_tiny
from visual_grpo.testbed.denoiser_models import FLUX_LAYERS, build_flux, build_flux_vae, build_sd15, unet_vae
from visual_grpo.testbed.denoiser_pretraining import Settings, denoising_loss
from visual_grpo.testbed.vae_pretraining import decode_latents, encode_images

# The recipes of docs/testbed.md.
NEW: dict[str, tuple[str, dict[str, Any]]] = {
    "flux_tiny": ("flow_grpo_tiny", {"sampling.height": 48, "sampling.width": 48}),
    "sd15_tiny": ("dancegrpo_tiny", {"sampling.solver": "ddim", "sampling.noise_scale": 1}),
    "sdxl_tiny": ("v_grpo_tiny", {}),
}


@pytest.fixture(scope="module")
def shared() -> Any:
    return sd3_tiny()


@pytest.mark.parametrize("name", NEW)
def test_build_writes_a_pipeline_that_its_adapter_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(denoiser_build, "SCORED", 6)
    monkeypatch.setattr(denoiser_build, "SCORE_STEPS", 1)
    monkeypatch.setitem(MODELS, name, replace(MODELS[name], vae_steps=1, guidance=(1.0,)))
    few = replace(MODELS[name].settings, steps=2, scenes=8, batch=4)
    build(name, tmp_path / name, settings=few)
    records = [json.loads(line) for line in (tmp_path / name / "build_log.jsonl").read_text().splitlines()]
    stages = [record["stage"] for record in records]
    assert stages == [*(["vae"] if name == "flux_tiny" else []), "setup", "data", "denoiser", "denoiser_end", "score"]
    assert sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file()) < 12e6
    assert not [path for path in (tmp_path / name).rglob("*.json") if "_name_or_path" in path.read_text()]
    cls = MODELS[name].adapter
    config = ModelConfig(adapter=name.removesuffix("_tiny"), path=str(tmp_path / name))
    recipe, options = NEW[name]
    assert plan(recipe, {"model.adapter": config.adapter, "model.path": config.path, **options}).adapter_class is cls
    adapter = cls.load(config, device=torch.device("cpu"), sampling=cls.Sampling())
    assert 1.5e6 < sum(p.numel() for p in adapter.trainable_module.parameters()) < 2.6e6
    assert adapter.latent_shape(cls.Sampling(height=48, width=48)) == (
        (16, 12, 12) if name == "flux_tiny" else (4, 24, 24)
    )


@pytest.mark.parametrize("name", ["flux_tiny", "lm_tiny", "two_tower"])
def test_a_build_replaces_no_folder_of_the_user(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before anything is trained; once the folder of photos was gone in the end."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.png").write_bytes(b"mine")
    assert main(["testbed", "build", name, "--out", str(photos)]) == 2
    assert "holds files that no build has written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["photos", "cat.png"]
    with pytest.raises(UserError, match="cannot write a build"):
        build_folder(photos / "cat.png" / "below")
    (photos / "build_log.jsonl").write_text("")
    assert build_folder(photos) == photos
    assert build_folder(tmp_path / "new" / "folder").is_dir()


def test_a_save_touches_no_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`NAME.old` beside the folder may be the user's own."""
    for name in ("tiny.old", "tiny.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").write_text("mine")
    monkeypatch.setitem(MODELS, "sd15_tiny", replace(MODELS["sd15_tiny"], guidance=()))
    few = replace(MODELS["sd15_tiny"].settings, steps=1, scenes=4, batch=2)
    for _ in range(2):
        build("sd15_tiny", tmp_path / "tiny", settings=few)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "tiny.new", "tiny.old"]
    assert (tmp_path / "tiny.old/kept").read_text() == (tmp_path / "tiny.new/kept").read_text() == "mine"


def test_a_model_without_weights_is_named_with_its_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from visual_grpo.adapters import paths

    monkeypatch.setattr(paths, "packaged_folder", lambda name: tmp_path / name)
    cls = MODELS["flux_tiny"].adapter
    with pytest.raises(
        UserError, match=r"no weights of it .*`visual-grpo testbed build flux_tiny` .*path=build/flux_tiny"
    ):
        cls.load_meta(ModelConfig(adapter="flux", path="testbed/flux_tiny"))


def test_the_unet_autoencoder_is_the_shared_one(shared: Any) -> None:
    images = torch.rand(2, 3, 48, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    vae = unet_vae(shared.vae)
    latents = encode_images(shared.vae, images)
    torch.testing.assert_close(encode_images(vae, images), latents, atol=1e-5, rtol=0)
    torch.testing.assert_close(decode_latents(vae, latents), decode_latents(shared.vae, latents), atol=1e-5, rtol=0)


def test_flux_starts_with_parts_of_sd3(shared: Any) -> None:
    pipeline = build_flux(shared, build_flux_vae())
    own, theirs = pipeline.transformer.transformer_blocks, shared.transformer.transformer_blocks
    assert len(own) == FLUX_LAYERS < len(theirs)
    assert torch.equal(own[1].attn.add_k_proj.weight, theirs[1].attn.add_k_proj.weight)
    words = shared.tokenizer(["a photo of a ring"], return_tensors="pt").input_ids
    with torch.no_grad():
        found = pipeline.text_encoder(words).last_hidden_state
        expected = shared.text_encoder(words).last_hidden_state
    torch.testing.assert_close(found, expected)


def test_power_two_is_the_error_of_the_predicted_noise(shared: Any) -> None:
    """`(1 - sigma)^2` times the velocity's squared error is a UNet's own loss."""
    torch.manual_seed(0)
    cls = MODELS["sd15_tiny"].adapter
    adapter: Any = cls(build_sd15(shared, unet_vae(shared.vae)), cls.Sampling())
    captions, latents = (
        ["a photo of a ring", "a photo of two circles", "", "a photo of a cross"],
        torch.randn(4, 4, 24, 24),
    )
    settings = Settings(signal_power=2.0)
    with torch.no_grad():
        found = denoising_loss(adapter, captions, latents, torch.Generator().manual_seed(3), settings)
        generator = torch.Generator().manual_seed(3)
        quantile = (torch.arange(4) + torch.rand(4, generator=generator)) / 4
        sigma = torch.special.ndtri(quantile).sigmoid()
        sigma = (3 * sigma / (1 + 2 * sigma)).clamp(*adapter.level_range)
        noise = torch.randn(latents.shape, generator=generator)
        level = sigma.view(-1, 1, 1, 1)
        noised = unit_scale(level) * ((1 - level) * latents + level * noise)
        states = adapter.pipeline.encode_prompt(captions, "cpu", 1, False)[0]
        predicted = adapter.pipeline.unet(noised, adapter.train_step(sigma), states, return_dict=False)[0]
    torch.testing.assert_close(found, (predicted - noise).square().mean(), atol=1e-5, rtol=1e-4)
