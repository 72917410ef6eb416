"""Z-Image (any `ZImagePipeline`: Z-Image, Z-Image-Turbo)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_grpo.adapters.conditions import padded_texts
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.memory import BlockShape
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.config import ModelConfig

QWEN_TOKENS = 512


class ZImageAdapter(PipelineAdapter):
    """Adapter of diffusers' `ZImagePipeline`, with plain guidance (`cfg_normalization=False` there).

    The pipeline's `guidance_scale` g is `guidance` 1 + g here. The network's time runs from 0 (noise) to 1 and its output towards
    the image.
    """

    eval_sampling: ClassVar[dict[str, Any]] = {
        "solver": "ode",
        "steps": 50,
        "guidance": 6.0,
    }  # the pipeline's own defaults; Turbo: 9 steps, guidance 1
    pipeline_class = "ZImagePipeline"
    network_class = "ZImageTransformer2DModel"
    text_encoders = ("text_encoder",)
    lora_targets = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
    linear_start = True

    @classmethod
    def default_side(cls, net: Mapping[str, Any]) -> int:
        """Of the pipeline: the network's config holds none."""
        return 128

    @classmethod
    def cell(cls, net: Mapping[str, Any]) -> int:
        """The side of a token: the pipeline takes the network's default, whatever else it knows."""
        return 2

    @classmethod
    def text_tokens(cls, config: ModelConfig, options: DiffusionSampling) -> int:
        """Tokens of Qwen3, at most."""
        return options.max_sequence_length or QWEN_TOKENS

    @classmethod
    def blocks(cls, net: Mapping[str, Any], *, image_tokens: int, text_tokens: int) -> BlockShape:
        """Refiners counted as blocks."""
        layers = net["n_layers"] + 2 * net["n_refiner_layers"]
        return BlockShape(layers=layers, width=net["dim"], image_tokens=image_tokens, text_tokens=text_tokens)

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] of Qwen3, its chat template's among them, and their `mask` [P, L]."""
        length = sampling.max_sequence_length or QWEN_TOKENS
        rows, _ = self.pipeline.encode_prompt(
            list(texts),  # overwritten there
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return padded_texts(rows, length)

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]; the network takes lists of clips of one frame and of texts."""
        texts = [row[kept] for row, kept in zip(condition["tokens"], condition["mask"].bool(), strict=True)]
        clips = list(latents.unsqueeze(2).unbind())
        output: list[Tensor] = self.pipeline.transformer(clips, 1 - sigma, texts, return_dict=False)[0]
        return -torch.stack(output).squeeze(2)
