"""Pre-training of the testbed's diffusion pipelines: data, loss, optimizers, average weights.

One loop for every family: the adapter encodes captions and gives the velocity, so a flow model and a UNet that predicts the noise
differ by the weight of a noise level alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.testbed.muon import Muon
from visual_grpo.testbed.noisy_captions import corrupt_caption
from visual_grpo.testbed.scenes import KINDS, Metadata, all_prompts, draw_prompt
from visual_grpo.testbed.vae_pretraining import encode_images
from visual_grpo.testbed.words import all_word_prompts, draw_word_prompt
from visual_grpo.transitions import interpolate

KIND_WEIGHTS = {
    "single_object": 0.08,
    "two_object": 0.18,
    "counting": 0.14,
    "colors": 0.12,
    "position": 0.2,
    "color_attr": 0.2,
}
"""Shares of the kinds in the data; the rest, 8 %, are words unless they are left out."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the pre-training.

    Attributes:
        steps: optimizer steps.
        scenes: number of images, encoded once.
        words: whether a twelfth of the images are words.
        batch: images a step.
        caption_noise: chance that a content word of a caption is replaced.
        caption_dropout: chance that a caption is empty (the unconditional branch).
        shift: time shift of the noise levels in training.
        signal_power: a level's loss is the velocity's squared error times `(1 - sigma)` to this power: 0 is flow matching,
            2 the error of the predicted noise, for models that predict it.
        muon_lr: learning rate of the matrices in transformer blocks.
        adam_lr: learning rate of everything else.
        flat_share: share of the training after which the learning rates fall linearly.
        ema_decay: decay of the average weights.
        compile: compile the denoiser: 1.4 times as fast, after about a minute, where a C++ compiler is installed.
    """

    steps: int = 3600
    scenes: int = 16_000
    words: bool = True
    batch: int = 64
    caption_noise: float = 0.15
    caption_dropout: float = 0.1
    shift: float = 3.0
    signal_power: float = 0.0
    muon_lr: float = 4e-3
    adam_lr: float = 2e-3
    flat_share: float = 0.6
    ema_decay: float = 0.995
    compile: bool = False


def draw_data(vae: AutoencoderKL, count: int, seed: int, *, words: bool = True) -> tuple[Tensor, list[str]]:
    """Draw images with true captions and encode them.

    Returns:
        Normalised latents [count, C, h, w] and captions.
    """
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[Metadata]] = {kind: [] for kind in KINDS}
    for entry in all_prompts():
        by_kind[str(entry["tag"])].append(entry)
    word_prompts = all_word_prompts()
    latents, captions = [], []
    shares = np.array([*KIND_WEIGHTS.values(), 1 - sum(KIND_WEIGHTS.values()) if words else 0.0])
    kinds = rng.choice(len(shares), size=count, p=shares / shares.sum())
    for kind_indices in np.split(kinds, range(256, count, 256)):
        images = []
        for index in kind_indices:
            is_scene = index < len(KIND_WEIGHTS)
            prompts = by_kind[list(KIND_WEIGHTS)[index]] if is_scene else word_prompts
            entry = prompts[rng.integers(len(prompts))]
            images.append(draw_prompt(entry, rng) if is_scene else draw_word_prompt(entry, rng))
            captions.append(str(entry["prompt"]))
        latents.append(encode_images(vae, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1))
    return torch.cat(latents), captions


def denoising_loss(
    adapter: PipelineAdapter, captions: list[str], latents: Tensor, generator: torch.Generator, settings: Settings
) -> Tensor:
    """Weighted squared error of the velocity `noise - latents` at logit-normal noise levels, stratified over the batch.

    Levels are shifted as the sampler's are (Esser et al., "Scaling Rectified Flow Transformers", equation 23): latents of
    mostly empty pictures have unit variance but strong objects, so what to draw is decided at high noise.

    Args:
        adapter: of the model; levels stay within those that it knows.
        captions: one a row.
        latents: normalised latents, [N, C, h, w].
        generator: source of noise levels and noise.
        settings: `shift` and `signal_power`.

    Returns:
        Scalar; the mean of `(1 - sigma)^signal_power` times the squared error.
    """
    count = len(latents)
    quantile = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    sigma = torch.special.ndtri(quantile.clamp(1e-4, 1 - 1e-4)).sigmoid()
    sigma = (settings.shift * sigma / (1 + (settings.shift - 1) * sigma)).clamp(*adapter.level_range)
    noise = torch.randn(latents.shape, generator=generator)
    condition = adapter.encode_texts(captions, adapter.sampling)
    velocity = adapter.predict_velocity(interpolate(latents, noise, sigma), sigma, condition)
    error = (velocity - (noise - latents)).square().flatten(1).mean(dim=1)
    return (error * (1 - sigma) ** settings.signal_power).mean()


def pretrain(
    adapter: PipelineAdapter,
    settings: Settings,
    *,
    seed: int,
    minutes: float | None = None,
    log: Callable[[dict[str, object]], None],
    snapshot: Callable[[int], None],
    snapshot_minutes: float = 5.0,
) -> None:
    """Train denoiser and text encoders in place; at the end and for each snapshot the pipeline holds the average weights.

    Args:
        adapter: of a pipeline with a trained autoencoder.
        settings: data and optimization.
        seed: seed of data, noise and order.
        minutes: stop earlier after this processor time (snapshots not counted), with the learning rate decayed accordingly.
        log: receives one record every 25 steps; its seconds are processor time.
        snapshot: called with the step while the average weights are in place.
        snapshot_minutes: processor time between snapshots.
    """
    latents, captions = draw_data(adapter.pipeline.vae, settings.scenes, seed, words=settings.words)
    log({"stage": "data", "scenes": len(captions), "latent_std": round(float(latents.std()), 4)})
    generator = torch.Generator().manual_seed(seed)
    modules = _trained_modules(adapter)
    if settings.compile:
        adapter.trainable_module.compile()
    parameters: list[Tensor] = list(modules.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizers = _optimizers(modules, settings)
    trained, last_snapshot, mean_loss = 0.0, 0.0, 1.0
    for step, (batch, texts) in enumerate(_batches(latents, captions, settings, np.random.default_rng(seed + 1))):
        progress = max(step / settings.steps, trained / (60 * minutes) if minutes else 0.0)
        if progress >= 1:
            break
        began = time.process_time()
        factor = _learning_rate_factor(progress, step, settings.flat_share)
        _set_rates(optimizers, factor)
        loss = denoising_loss(adapter, texts, batch, generator, settings)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(settings.ema_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1 - decay)
        trained += time.process_time() - began
        mean_loss = 0.96 * mean_loss + 0.04 * float(loss.detach())
        if step % 25 == 0:
            spent = {"seconds": round(trained, 1), "loss": round(mean_loss, 4), "lr_factor": round(factor, 3)}
            log({"stage": "denoiser", "step": step, **spent})
        if trained - last_snapshot > 60 * snapshot_minutes:
            last_snapshot = trained
            with _average_in_place(modules, average):
                snapshot(step)
    modules.eval().requires_grad_(False)
    torch._foreach_copy_(parameters, average)
    log({"stage": "denoiser_end", "step": step, "seconds": round(trained, 1), "loss": round(mean_loss, 4)})


def _trained_modules(adapter: PipelineAdapter) -> nn.ModuleList:
    """Denoiser and text encoders, ready to be trained."""
    encoders = [getattr(adapter.pipeline, name) for name in adapter.text_encoders]
    return nn.ModuleList([adapter.trainable_module, *encoders]).requires_grad_(True).train()


def _optimizers(modules: nn.ModuleList, settings: Settings) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        in_block = "transformer_blocks." in name and parameter.ndim == 2 and ".norm" not in name
        (matrices if in_block else others).append(parameter)
    adam = torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
    return [Muon(matrices, lr=settings.muon_lr), adam]


def _learning_rate_factor(progress: float, step: int, flat_share: float) -> float:
    decay = min(1.0, (1.0 - progress) / (1.0 - flat_share))
    return min(1.0, (step + 1) / 50) * max(decay, 0.02)


def _batches(
    latents: Tensor, captions: Sequence[str], settings: Settings, rng: np.random.Generator
) -> Iterator[tuple[Tensor, list[str]]]:
    while True:
        order = rng.permutation(len(captions))
        for start in range(0, len(order) - settings.batch + 1, settings.batch):
            rows = order[start : start + settings.batch]
            texts = [
                ""
                if rng.random() < settings.caption_dropout
                else corrupt_caption(captions[row], rng, probability=settings.caption_noise)
                for row in rows
            ]
            yield latents[torch.from_numpy(rows)], texts


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Begin a step: no gradient, and every learning rate at `factor` of its own start."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * factor
        optimizer.zero_grad()


@contextlib.contextmanager
def _average_in_place(modules: nn.ModuleList, average: list[Tensor]) -> Iterator[None]:
    """Put the average weights in place, in evaluation mode and not compiled: other batches would be compiled anew."""
    parameters: list[Any] = list(modules.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    modules.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch._foreach_copy_(parameters, average)
        yield
        torch._foreach_copy_(parameters, kept)
    modules.train()
