"""FLUX.1 (any `FluxPipeline`: dev, schnell, and models trained from them).

Guidance is an input of the network (`sampling.embedded_guidance`), so there is no negative branch. Latents are kept as pictures
[C, h, w], as for all families, and packed into tokens of 2 x 2 only inside the network's call: maps of credit stay maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from visual_grpo.adapters.conditions import Condition
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.memory import BlockShape
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.adapters.sd3 import MMDIT_LORA
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError

T5_TOKENS = 512
EMBEDDED_GUIDANCE = 3.5


class FluxSampling(DiffusionSampling):
    """Sampling options of FLUX."""

    embedded_guidance: Annotated[float, Field(ge=0)] = Field(
        EMBEDDED_GUIDANCE, description="guidance scale that the network is told"
    )

    @model_validator(mode="after")
    def _one_branch(self) -> FluxSampling:
        if self.guidance != 1:
            raise ValueError(
                f"FLUX takes its guidance as an input of the network and has no negative branch: "
                f"set embedded_guidance ({self.guidance}) and leave guidance at 1"
            )
        return self


def pack(latents: Tensor) -> Tensor:
    """Tokens [n, h w / 4, 4 C] of latents [n, C, h, w]: each 2 x 2 square is one token.

    >>> pack(torch.arange(16.0).view(1, 1, 4, 4))[0, 0]
    tensor([0., 1., 4., 5.])
    """
    n, channels, height, width = latents.shape
    squares = latents.reshape(n, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(n, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Latents [n, C, height, width] of tokens [n, height width / 4, 4 C]; undoes `pack`."""
    n, _, channels = tokens.shape
    squares = tokens.reshape(n, height // 2, width // 2, channels // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(n, channels // 4, height, width)


def positions(height: int, width: int, device: torch.device) -> Tensor:
    """Position of each token [height width, 3]: (0, row, column)."""
    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3)


class FluxAdapter(PipelineAdapter):
    """Adapter of diffusers' `FluxPipeline`."""

    eval_sampling: ClassVar[dict[str, Any]] = {"solver": "ode", "steps": 28}  # the pipeline's own defaults
    pipeline_class = "FluxPipeline"
    network_class = "FluxTransformer2DModel"
    text_encoders = ("text_encoder", "text_encoder_2")
    Sampling = FluxSampling
    lora_targets = MMDIT_LORA
    linear_start = True

    @classmethod
    def default_side(cls, net: Mapping[str, Any]) -> int:
        """Of the pipeline: the network's config holds none."""
        return 128

    @classmethod
    def cell(cls, net: Mapping[str, Any]) -> int:
        """The side of a token."""
        return 2

    @classmethod
    def latent_channels(cls, net: Mapping[str, Any]) -> int:
        """A quarter of a token's."""
        return int(net["in_channels"]) // 4

    @classmethod
    def text_tokens(cls, config: ModelConfig, options: DiffusionSampling) -> int:
        """Tokens of T5."""
        return options.max_sequence_length or cls._tokenizer_length(config, "tokenizer_2", T5_TOKENS)

    @classmethod
    def blocks(cls, net: Mapping[str, Any], *, image_tokens: int, text_tokens: int) -> BlockShape:
        """Blocks of two streams and of one are counted alike."""
        shape = super().blocks(net, image_tokens=image_tokens, text_tokens=text_tokens)
        return replace(shape, layers=net["num_layers"] + net["num_single_layers"])

    def encode(self, texts: Sequence[str], sampling: DiffusionSampling, *, guided: bool = False) -> Condition:
        """As shared, with the `guidance` [P] that the network is told; None of it where it takes none."""
        condition = super().encode(texts, sampling, guided=guided)
        assert isinstance(sampling, FluxSampling)
        if not self._config.guidance_embeds and sampling.embedded_guidance != EMBEDDED_GUIDANCE:
            raise UserError(
                f"sampling.embedded_guidance is {sampling.embedded_guidance:g}, but this network (as FLUX.1-schnell) takes no "
                "guidance: leave it out"
            )
        if self._config.guidance_embeds:
            count = len(condition.tensors["pooled"])
            scale = torch.full((count,), sampling.embedded_guidance, dtype=torch.float32, device=self.device)
            condition.tensors["guidance"] = scale
        return condition

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] of T5 and `pooled` [P, D'] of CLIP."""
        length = sampling.max_sequence_length or min(T5_TOKENS, self.pipeline.tokenizer_2.model_max_length)
        tokens, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts, prompt_2=None, device=self.device, max_sequence_length=length
        )
        return {"tokens": tokens, "pooled": pooled}

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]; the network's time input is sigma."""
        height, width = latents.shape[2:]
        tokens = condition["tokens"]
        velocity: Tensor = self.pipeline.transformer(
            hidden_states=pack(latents),
            timestep=sigma,
            guidance=condition.get("guidance"),
            pooled_projections=condition["pooled"],
            encoder_hidden_states=tokens,
            txt_ids=torch.zeros(tokens.shape[1], 3, device=latents.device),
            img_ids=positions(height // 2, width // 2, latents.device),
            return_dict=False,
        )[0]
        return unpack(velocity, height, width)
