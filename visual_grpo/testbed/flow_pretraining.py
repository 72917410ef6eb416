"""Flow-matching pre-training of the testbed's SD3 pipeline: data, text encoding, optimizers, average weights, sampling."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor, nn

from visual_grpo.testbed.muon import Muon
from visual_grpo.testbed.noisy_captions import corrupt_caption
from visual_grpo.testbed.scenes import KINDS, Metadata, all_prompts, draw_prompt
from visual_grpo.testbed.sd3_models import TEXT_TOKENS
from visual_grpo.testbed.vae_pretraining import encode_images
from visual_grpo.testbed.words import all_word_prompts, draw_word_prompt

KIND_WEIGHTS = {
    "single_object": 0.08,
    "two_object": 0.18,
    "counting": 0.14,
    "colors": 0.12,
    "position": 0.2,
    "color_attr": 0.2,
}
"""Shares of the kinds in the data; the rest, 8 %, are words."""


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """Settings of the pre-training.

    Attributes:
        scenes: number of images, encoded once.
        batch: images a step.
        caption_noise: chance that a content word of a caption is replaced.
        caption_dropout: chance that a caption is empty (the unconditional branch).
        muon_lr: learning rate of the matrices in the transformer's blocks.
        adam_lr: learning rate of everything else.
        flat_share: share of the training after which the learning rates fall linearly.
        ema_decay: decay of the average weights.
        compile: compile the transformer: 1.4 times as fast, after about a minute, where a C++ compiler is installed.
    """

    scenes: int = 16_000
    batch: int = 64
    caption_noise: float = 0.15
    caption_dropout: float = 0.1
    muon_lr: float = 4e-3
    adam_lr: float = 2e-3
    flat_share: float = 0.6
    ema_decay: float = 0.995
    compile: bool = False


def draw_data(vae: AutoencoderKL, count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Draw images with true captions and encode them.

    Returns:
        Normalised latents [count, C, h, w] and captions.
    """
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[Metadata]] = {kind: [] for kind in KINDS}
    for entry in all_prompts():
        by_kind[str(entry["tag"])].append(entry)
    words = all_word_prompts()
    latents, captions = [], []
    shares = [*KIND_WEIGHTS.values(), 1 - sum(KIND_WEIGHTS.values())]
    for kind_indices in np.split(rng.choice(len(shares), size=count, p=shares), range(256, count, 256)):
        images = []
        for index in kind_indices:
            is_scene = index < len(KIND_WEIGHTS)
            prompts = by_kind[list(KIND_WEIGHTS)[index]] if is_scene else words
            entry = prompts[rng.integers(len(prompts))]
            images.append(draw_prompt(entry, rng) if is_scene else draw_word_prompt(entry, rng))
            captions.append(str(entry["prompt"]))
        latents.append(encode_images(vae, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1))
    return torch.cat(latents), captions


def encode_text(pipeline: StableDiffusion3Pipeline, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Encode captions as `pipeline.encode_prompt` does, with gradients and without its per-call checks.

    Returns:
        Token states [N, 2 * TEXT_TOKENS, D] and pooled states [N, D].
    """
    states, pooled = [], []
    for tokenizer, encoder in (
        (pipeline.tokenizer, pipeline.text_encoder),
        (pipeline.tokenizer_2, pipeline.text_encoder_2),
    ):
        output = encoder(_token_ids(tokenizer, captions), output_hidden_states=True)
        states.append(output.hidden_states[-2])
        pooled.append(output.text_embeds)
    clip_states = torch.cat(states, dim=-1)
    t5_states = pipeline.text_encoder_3(_token_ids(pipeline.tokenizer_3, captions))[0]
    clip_states = nn.functional.pad(clip_states, (0, t5_states.shape[-1] - clip_states.shape[-1]))
    return torch.cat([clip_states, t5_states], dim=1), torch.cat(pooled, dim=-1)


def _token_ids(tokenizer: Callable[..., dict[str, Tensor]], captions: Sequence[str]) -> Tensor:
    encoded = tokenizer(
        list(captions), padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    )
    return encoded["input_ids"]


@torch.no_grad()
def sample_latents(
    pipeline: StableDiffusion3Pipeline, captions: Sequence[str], noise: Tensor, *, steps: int, guidance: float = 1.0
) -> Tensor:
    """Sample with the pipeline's scheduler by Euler steps; the same result as calling the pipeline, without its overhead.

    Args:
        pipeline: the pipeline.
        captions: one a row.
        noise: standard normal, [N, C, h, w].
        steps: number of steps.
        guidance: scale of classifier-free guidance, 1 for none.

    Returns:
        Normalised latents [N, C, h, w].
    """
    states, pooled = encode_text(pipeline, captions)
    if guidance != 1.0:
        empty_states, empty_pooled = encode_text(pipeline, [""])
        states = torch.cat([empty_states.expand_as(states), states])
        pooled = torch.cat([empty_pooled.expand_as(pooled), pooled])
    scheduler = copy.deepcopy(pipeline.scheduler)
    scheduler.set_timesteps(steps)
    latents = noise
    for index, timestep in enumerate(scheduler.timesteps):
        inputs = torch.cat([latents, latents]) if guidance != 1.0 else latents
        velocity = pipeline.transformer(
            hidden_states=inputs,
            encoder_hidden_states=states,
            pooled_projections=pooled,
            timestep=timestep.expand(len(inputs)),
            return_dict=False,
        )[0]
        if guidance != 1.0:
            without, given = velocity.chunk(2)
            velocity = without + guidance * (given - without)
        latents = latents + (scheduler.sigmas[index + 1] - scheduler.sigmas[index]) * velocity
    return latents


def _trained_modules(pipeline: StableDiffusion3Pipeline) -> nn.ModuleList:
    encoders = [pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3]
    return nn.ModuleList([pipeline.transformer, *encoders])


def _optimizers(modules: nn.ModuleList, settings: FlowSettings) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        in_block = ".transformer_blocks." in name and parameter.ndim == 2 and ".norm1" not in name
        (matrices if in_block else others).append(parameter)
    adam = torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
    return [Muon(matrices, lr=settings.muon_lr), adam]


def _learning_rate_factor(progress: float, step: int, flat_share: float) -> float:
    decay = min(1.0, (1.0 - progress) / (1.0 - flat_share))
    return min(1.0, (step + 1) / 50) * max(decay, 0.02)


def _batches(
    latents: Tensor, captions: Sequence[str], settings: FlowSettings, rng: np.random.Generator
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


def flow_loss(
    transformer: Callable[..., tuple[Tensor]],
    text: tuple[Tensor, Tensor],
    latents: Tensor,
    generator: torch.Generator,
    *,
    shift: float = 1.0,
) -> Tensor:
    """Mean squared error of the velocity `noise - latents` at logit-normal noise levels, stratified over the batch.

    Levels are shifted as the sampler's are (Esser et al., "Scaling Rectified Flow Transformers", equation 23): latents of
    mostly empty pictures have unit variance but strong objects, so what to draw is decided at high noise.

    Args:
        transformer: the pipeline's transformer, perhaps compiled.
        text: token states and pooled states of `encode_text`.
        latents: normalised latents, [N, C, h, w].
        generator: source of noise levels and noise.
        shift: time shift of the levels, 1 for none.

    Returns:
        Scalar.
    """
    count = len(latents)
    quantile = (torch.arange(count) + torch.rand(count, generator=generator)) / count
    sigma = torch.special.ndtri(quantile.clamp(1e-4, 1 - 1e-4)).sigmoid()[:, None, None, None]
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    noise = torch.randn(latents.shape, generator=generator)
    velocity = transformer(
        hidden_states=(1 - sigma) * latents + sigma * noise,
        encoder_hidden_states=text[0],
        pooled_projections=text[1],
        timestep=1000 * sigma.flatten(),
        return_dict=False,
    )[0]
    return nn.functional.mse_loss(velocity, noise - latents)


def train_flow(
    pipeline: StableDiffusion3Pipeline,
    settings: FlowSettings,
    *,
    seed: int,
    steps: int,
    minutes: float | None = None,
    log: Callable[[dict[str, object]], None],
    snapshot: Callable[[int], None],
    snapshot_minutes: float = 5.0,
) -> None:
    """Train transformer and text encoders in place; at the end and for each snapshot the pipeline holds the average weights.

    Args:
        pipeline: pipeline with a trained autoencoder.
        settings: data and optimization.
        seed: seed of data, noise and order.
        steps: optimizer steps.
        minutes: stop earlier after this time (snapshots not counted), with the learning rate decayed accordingly.
        log: receives one record every 25 steps.
        snapshot: called with the step while the average weights are in place.
        snapshot_minutes: time between snapshots.
    """
    latents, captions = draw_data(pipeline.vae, settings.scenes, seed)
    log({"stage": "data", "scenes": len(captions), "latent_std": round(float(latents.std()), 4)})
    generator = torch.Generator().manual_seed(seed)
    transformer = torch.compile(pipeline.transformer) if settings.compile else pipeline.transformer
    modules = _trained_modules(pipeline)
    modules.train()
    parameters: list[Tensor] = list(modules.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizers = _optimizers(modules, settings)
    trained, last_snapshot, mean_loss = 0.0, 0.0, 1.0
    for step, (batch, texts) in enumerate(_batches(latents, captions, settings, np.random.default_rng(seed + 1))):
        progress = max(step / steps, trained / (60 * minutes) if minutes else 0.0)
        if progress >= 1:
            break
        began = time.monotonic()
        factor = _learning_rate_factor(progress, step, settings.flat_share)
        _set_rates(optimizers, factor)
        loss = flow_loss(
            transformer, encode_text(pipeline, texts), batch, generator, shift=pipeline.scheduler.config.shift
        )
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        decay = min(settings.ema_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 1 - decay)
        trained += time.monotonic() - began
        mean_loss = 0.96 * mean_loss + 0.04 * float(loss.detach())
        if step % 25 == 0:
            spent = {"seconds": round(trained, 1), "loss": round(mean_loss, 4), "lr_factor": round(factor, 3)}
            log({"stage": "flow", "step": step, **spent})
        if trained - last_snapshot > 60 * snapshot_minutes:
            last_snapshot = trained
            _with_average(modules, average, lambda at=step: snapshot(at))  # type: ignore[misc]
    modules.eval()
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)
    log({"stage": "flow_end", "step": step, "seconds": round(trained, 1), "loss": round(mean_loss, 4)})


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Begin a step: no gradient, and every learning rate at `factor` of its own start."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])
            group["lr"] = group["base_lr"] * factor
        optimizer.zero_grad()


def _with_average(modules: nn.ModuleList, average: list[Tensor], action: Callable[[], None]) -> None:
    """Run `action` while the average weights are in place."""
    parameters: list[Tensor] = list(modules.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    modules.eval()
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)
        action()
        torch._foreach_copy_(parameters, kept)
    modules.train()
