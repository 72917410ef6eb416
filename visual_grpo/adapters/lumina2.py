"""Lumina-Image 2.0 (any `Lumina2Pipeline`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.memory import BlockShape
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.config import ModelConfig

GEMMA_TOKENS = 256


class Lumina2Adapter(PipelineAdapter):
    """Adapter of diffusers' `Lumina2Pipeline`, with plain guidance (`cfg_normalization=False` there).

    An empty text stands without the pipeline's system prompt, as diffusers encodes the negative prompt. The network's time runs
    from 0 (noise) to 1 and its output towards the image.
    """

    eval_sampling: ClassVar[dict[str, Any]] = {
        "solver": "ode",
        "steps": 30,
        "guidance": 4.0,
    }  # the pipeline's own defaults
    pipeline_class = "Lumina2Pipeline"
    network_class = "Lumina2Transformer2DModel"
    text_encoders = ("text_encoder",)
    lora_targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    linear_start = True

    @classmethod
    def text_tokens(cls, config: ModelConfig, options: DiffusionSampling) -> int:
        """Tokens of Gemma, at most."""
        return options.max_sequence_length or GEMMA_TOKENS

    @classmethod
    def blocks(cls, net: Mapping[str, Any], *, image_tokens: int, text_tokens: int) -> BlockShape:
        """Refiners counted as blocks."""
        layers = net["num_layers"] + 2 * net["num_refiner_layers"]
        return BlockShape(layers=layers, width=net["hidden_size"], image_tokens=image_tokens, text_tokens=text_tokens)

    def shift_tokens(self, sampling: DiffusionSampling) -> int:
        """The pipeline counts channels here, where others count tokens."""
        return self.latent_shape(sampling)[0]

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]."""
        output: Tensor = self.pipeline.transformer(
            hidden_states=latents,
            timestep=1 - sigma,
            encoder_hidden_states=condition["tokens"],
            encoder_attention_mask=condition["mask"].long(),
            return_dict=False,
        )[0]
        return -output

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] of Gemma and their `mask` [P, L]."""
        parts = [
            self.pipeline._get_gemma_prompt_embeds(
                [f"{self.pipeline.system_prompt} <Prompt Start> {text}" if text else ""],
                device=self.device,
                max_sequence_length=sampling.max_sequence_length or GEMMA_TOKENS,
            )
            for text in texts
        ]
        return {"tokens": torch.cat([p[0] for p in parts]), "mask": torch.cat([p[1] for p in parts])}
