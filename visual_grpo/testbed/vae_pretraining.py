"""Pre-training of the testbed's autoencoder on drawn scenes and words."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from visual_grpo.testbed.scenes import IMAGE_SIZE, KINDS, Metadata, all_prompts, draw_prompt
from visual_grpo.testbed.words import all_word_prompts, draw_word_prompt

BATCH = 16
WORD_SHARE = 0.2
KL_WEIGHT = 3e-3
LEARNING_RATE = 3e-3


def random_images(rng: np.random.Generator, count: int, *, word_share: float = WORD_SHARE) -> Tensor:
    """Draw images of random prompts, all kinds equally often.

    Returns:
        [count, 3, H, W] float32 in [-1, 1].
    """
    by_kind: dict[str, list[Metadata]] = {kind: [] for kind in KINDS}
    for entry in all_prompts():
        by_kind[str(entry["tag"])].append(entry)
    words = all_word_prompts()
    images = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for row in range(count):
        if rng.random() < word_share:
            images[row] = draw_word_prompt(words[rng.integers(len(words))], rng)
        else:
            prompts = by_kind[KINDS[rng.integers(len(KINDS))]]
            images[row] = draw_prompt(prompts[rng.integers(len(prompts))], rng)
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def _batches(rng: np.random.Generator, batch: int) -> Iterator[Tensor]:
    while True:
        pool = random_images(rng, 4 * batch)
        yield from pool.split(batch)


def train_vae(
    vae: AutoencoderKL, *, seed: int, steps: int, minutes: float | None = None, log: Callable[[dict[str, object]], None]
) -> None:
    """Train an autoencoder in place, then set its latent scale and shift.

    The loss is the mean absolute plus five times the mean squared error plus `KL_WEIGHT` times the mean KL of a latent to
    the unit Gaussian.

    Args:
        vae: a fresh `build_vae()`.
        seed: seed of data and latent noise.
        steps: optimizer steps of `BATCH` windows.
        minutes: stop earlier after this time, with the learning rate decayed accordingly.
        log: receives one record every 50 steps.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    start = time.monotonic()
    vae.train()
    for step, images in enumerate(_batches(rng, BATCH)):
        elapsed = time.monotonic() - start
        progress = max(step / steps, elapsed / (60 * minutes) if minutes else 0.0)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * progress) + 0.005)
        posterior = vae.encode(images).latent_dist
        output = vae.decode(posterior.sample()).sample
        difference = output - images
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1.0 - posterior.logvar).mean()
        loss = difference.abs().mean() + 5 * (difference**2).mean() + KL_WEIGHT * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            error = float(difference.detach().abs().mean())
            log(
                {
                    "stage": "vae",
                    "step": step,
                    "seconds": round(elapsed, 1),
                    "abs_error": round(error, 5),
                    "kl": round(float(kl.detach()), 4),
                }
            )
    vae.eval()
    set_latent_scale(vae, random_images(rng, 256))


@torch.no_grad()
def set_latent_scale(vae: AutoencoderKL, images: Tensor) -> None:
    """Set `scaling_factor` and `shift_factor` so that `(latents - shift) * scale` has mean 0 and standard deviation 1.

    Args:
        vae: the trained autoencoder.
        images: sample of the data, [N, 3, H, W] in [-1, 1].
    """
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in images.split(64)])
    vae.register_to_config(scaling_factor=1.0 / float(latents.std()), shift_factor=float(latents.mean()))


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Encode images [N, 3, H, W] in [-1, 1] to normalised latents [N, C, h, w] (the posterior's mean)."""
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in images.split(64)])
    return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


@torch.no_grad()
def decode_latents(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Decode normalised latents [N, C, h, w] to images [N, 3, H, W] in [0, 1]."""
    raw = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    images = torch.cat([vae.decode(part).sample for part in raw.split(64)])
    return (images / 2 + 0.5).clamp(0, 1)
