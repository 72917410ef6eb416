"""Builds the diffusion pipelines of the testbed: pretrains small ones on the drawn world, on a CPU.

`sd3_tiny` starts from nothing: the autoencoder (minutes), then flow matching in its latent space on deliberately noisy captions
(about an hour on one thread). The result draws crisp objects and follows its prompt in a third of the cases, so there is
something to align. The others start with parts of it (`denoiser_models`) and are trained by the same loop.

The schedule is in steps, so a seed gives the same model on the same machine; `minutes` ends the training earlier.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline

from visual_grpo.adapters.flux import FluxAdapter
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.adapters.sd3 import SD3Adapter
from visual_grpo.adapters.sd15 import SD15Adapter
from visual_grpo.adapters.sdxl import SDXLAdapter
from visual_grpo.testbed.build_folder import build_folder
from visual_grpo.testbed.denoiser_models import build_flux, build_flux_vae, build_sd15, build_sdxl, unet_vae
from visual_grpo.testbed.denoiser_pretraining import Settings, pretrain
from visual_grpo.testbed.scene_scores import sample_images, score_images, score_prompts
from visual_grpo.testbed.sd3_models import build_pipeline, build_vae
from visual_grpo.testbed.vae_pretraining import train_vae

WEIGHTS_DIR = Path(__file__).parent / "weights"
"""Where the shipped pipelines lie: pass `WEIGHTS_DIR / NAME` to the pipeline's `from_pretrained`."""

SCORE_STEPS = 6
SCORED = 120

Log = Callable[[dict[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class TinyDenoiser:
    """What tells one of the small models from the others.

    Attributes:
        adapter: class of the adapter.
        pipeline: the untrained pipeline of a trained autoencoder; further parts come from the shipped `sd3_tiny`.
        vae: an untrained autoencoder, or None for that of `sd3_tiny`.
        vae_steps: optimizer steps of it.
        guidance: scales of the scores in the log.
        settings: data and optimization.
    """

    adapter: type[PipelineAdapter]
    pipeline: Callable[[AutoencoderKL | None], Any]
    vae: Callable[[], AutoencoderKL] | None = None
    vae_steps: int = 1000
    guidance: tuple[float, ...] = (1.0, 2.5)
    settings: Settings = field(default_factory=Settings)


def sd3_tiny() -> StableDiffusion3Pipeline:
    """The shipped pipeline, in float32."""
    return StableDiffusion3Pipeline.from_pretrained(WEIGHTS_DIR / "sd3_tiny")


def _unet_pipeline(make: Callable[..., Any], vae: AutoencoderKL | None) -> Any:
    shared = sd3_tiny()
    return make(shared, unet_vae(shared.vae))


# A UNet predicts the noise: power 2 is its own error; 1 tells more of what happens at high noise.
_UNET = Settings(steps=1300, batch=32, words=False, signal_power=1.0, adam_lr=1e-3)
MODELS: dict[str, TinyDenoiser] = {
    "sd3_tiny": TinyDenoiser(adapter=SD3Adapter, pipeline=partial(build_pipeline, shift=3.0), vae=build_vae),
    "flux_tiny": TinyDenoiser(
        adapter=FluxAdapter,
        pipeline=lambda vae: build_flux(sd3_tiny(), vae),
        vae=build_flux_vae,
        guidance=(1.0,),
        settings=Settings(steps=1500, words=False, caption_dropout=0.0),
    ),
    "sd15_tiny": TinyDenoiser(adapter=SD15Adapter, pipeline=partial(_unet_pipeline, build_sd15), settings=_UNET),
    "sdxl_tiny": TinyDenoiser(adapter=SDXLAdapter, pipeline=partial(_unet_pipeline, build_sdxl), settings=_UNET),
}


def build(
    name: str,
    out_dir: Path | str,
    seed: int = 0,
    *,
    minutes: float | None = None,
    threads: int = 1,
    vae_dir: Path | str | None = None,
    settings: Settings | None = None,
) -> None:
    """Pretrain a pipeline and write it, with `build_log.jsonl`, to a folder.

    Args:
        name: a key of `MODELS`.
        out_dir: folder of the finished pipeline; snapshots of the average weights appear there every few minutes.
        seed: seed of data, weights and order.
        minutes: processor time after which the denoiser's training ends; None runs all steps.
        threads: threads of torch; one is best on a busy machine.
        vae_dir: folder of an autoencoder trained by this function before; None trains it, where the model has its own.
        settings: data and optimization of the denoiser; None = those of `MODELS`.
    """
    model, out = MODELS[name], build_folder(out_dir)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    used = settings or model.settings
    records: list[dict[str, object]] = []
    start = time.monotonic()

    def log(record: dict[str, object]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)

    vae = _trained_vae(model, seed, vae_dir, log, records)
    adapter = model.adapter(model.pipeline(vae), model.adapter.Sampling())
    versions = {"seed": seed, "threads": threads, "torch": torch.__version__}
    log({"stage": "setup", "model": name, **versions, "settings": str(used)})

    def snapshot(step: int) -> None:
        prompts = score_prompts(SCORED)
        captions = [str(entry["prompt"]) for entry in prompts]
        for guidance in model.guidance:
            images = sample_images(adapter, captions, seed=1234, steps=SCORE_STEPS, guidance=guidance)
            when = {"step": step, "wall": round(time.monotonic() - start), "guidance": guidance}
            log({"stage": "score", **when, **score_images(prompts, images)})
        save(adapter, out, records)

    pretrain(adapter, used, seed=seed, minutes=minutes, log=log, snapshot=snapshot)
    snapshot(-1)


def _trained_vae(
    model: TinyDenoiser, seed: int, vae_dir: Path | str | None, log: Log, records: list[dict[str, object]]
) -> AutoencoderKL | None:
    """The model's own autoencoder, trained or loaded with its part of the log; None where it has none."""
    if model.vae is None:
        return None
    if vae_dir is None:
        vae = model.vae()
        train_vae(vae, seed=seed, steps=model.vae_steps, log=log)
    else:
        vae = AutoencoderKL.from_pretrained(vae_dir)
        log_file = Path(vae_dir) / "build_log.jsonl"
        records += [json.loads(line) for line in log_file.read_text().splitlines()] if log_file.exists() else []
    return vae.requires_grad_(False).eval()


def save(adapter: PipelineAdapter, out: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write a pipeline so that a reader of `out` never sees half of it; denoiser and autoencoder in float16.

    `from_pretrained` gives float32 modules back.
    """
    fresh, old = (out.with_name(f".{out.name}.{which}.tmp") for which in ("new", "old"))
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    modules = (adapter.trainable_module, adapter.pipeline.vae)
    kept = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    for module in modules:
        module.half()
    adapter.save(str(fresh))
    for module, state in zip(modules, kept, strict=True):
        module.float().load_state_dict(state)
    for file in fresh.rglob("config.json"):  # diffusers notes the folder of a part that was loaded
        values = json.loads(file.read_text())
        if values.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    (fresh / "build_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


build_sd3_tiny = partial(build, "sd3_tiny")
build_flux_tiny = partial(build, "flux_tiny")
build_sd15_tiny = partial(build, "sd15_tiny")
build_sdxl_tiny = partial(build, "sdxl_tiny")
