"""Qwen-Image (any `QwenImagePipeline`).

Latents are kept as pictures [C, h, w] and packed into tokens of 2 x 2 only inside the network's call, as FLUX's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_grpo.adapters.conditions import padded_texts, trimmed_texts
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.flux import pack, unpack
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.adapters.sd3 import MMDIT_LORA
from visual_grpo.config import ModelConfig

QWEN_TOKENS = 512


class QwenImageAdapter(PipelineAdapter):
    """Adapter of diffusers' `QwenImagePipeline`; the guided velocity of a token keeps the length of the conditional one."""

    eval_sampling: ClassVar[dict[str, Any]] = {
        "solver": "ode",
        "steps": 50,
        "guidance": 4.0,
    }  # the pipeline's own defaults
    pipeline_class = "QwenImagePipeline"
    network_class = "QwenImageTransformer2DModel"
    text_encoders = ("text_encoder",)
    lora_targets = MMDIT_LORA
    linear_start = True

    @classmethod
    def default_side(cls, net: Mapping[str, Any]) -> int:
        """Of the pipeline: the network's config holds none."""
        return 128

    @classmethod
    def latent_channels(cls, net: Mapping[str, Any]) -> int:
        """A quarter of a token's."""
        return int(net["in_channels"]) // 4

    @classmethod
    def vae_factor(cls, vae: Mapping[str, Any]) -> int:
        """Of the video autoencoder, whose every level halves the sides."""
        return int(2 ** len(vae["temperal_downsample"]))

    @classmethod
    def text_tokens(cls, config: ModelConfig, options: DiffusionSampling) -> int:
        """Tokens of Qwen2.5-VL, at most."""
        return options.max_sequence_length or QWEN_TOKENS

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] of Qwen2.5-VL without those of the pipeline's instruction, and their `mask` [P, L]."""
        length = sampling.max_sequence_length or QWEN_TOKENS
        tokens, mask = self.pipeline.encode_prompt(prompt=texts, device=self.device, max_sequence_length=length)
        if mask is None:  # all texts are equally long
            mask = torch.ones(tokens.shape[:2], device=tokens.device)
        return padded_texts([row[kept] for row, kept in zip(tokens, mask.bool(), strict=True)], length)

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]; the network's time input is sigma."""
        height, width = latents.shape[2:]
        tokens, mask = trimmed_texts(condition)
        velocity: Tensor = self.pipeline.transformer(
            hidden_states=pack(latents),
            timestep=sigma,
            encoder_hidden_states=tokens,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
        )[0]
        return unpack(velocity, height, width)

    def guided(self, free: Tensor, bound: Tensor, scale: float) -> Tensor:
        """As shared, each token then shortened or stretched to its length in the conditional branch."""
        tokens, target = pack(super().guided(free, bound, scale)), pack(bound)
        tokens = tokens * (target.norm(dim=-1, keepdim=True) / tokens.norm(dim=-1, keepdim=True).clamp(min=1e-12))
        return unpack(tokens, *bound.shape[2:])

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Latents [n, C, h, w] of pictures [n, 3, H, W] in [0, 1]: the mean of the autoencoder's posterior, scaled."""
        vae = self.pipeline.vae
        pixels = images.to(self.device, vae.dtype) * 2 - 1
        x: Tensor = vae.encode(pixels.unsqueeze(2), return_dict=False)[0].mean[:, :, 0]
        mean, std = (
            x.new_tensor(value).view(1, -1, 1, 1) for value in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (x - mean) / std

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Images [n, 3, H, W] of latents [n, C, h, w], each a clip of one frame to the autoencoder."""
        vae = self.pipeline.vae
        x = latents.to(vae.dtype)
        mean, std = (
            x.new_tensor(value).view(1, -1, 1, 1) for value in (vae.config.latents_mean, vae.config.latents_std)
        )
        images: Tensor = vae.decode((x * std + mean).unsqueeze(2), return_dict=False)[0][:, :, 0]
        return images / 2 + 0.5
