"""Stable Diffusion 1.x and 2.x (any `StableDiffusionPipeline`)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.unet import UNetAdapter


class SD15Adapter(UNetAdapter):
    """Adapter of diffusers' `StableDiffusionPipeline`, without its safety checker: rewards need the pictures as they are."""

    eval_sampling: ClassVar[dict[str, Any]] = {
        "solver": "ode",
        "steps": 50,
        "guidance": 7.5,
    }  # the pipeline's own defaults
    pipeline_class = "StableDiffusionPipeline"
    text_encoders = ("text_encoder",)
    load_options = {"safety_checker": None, "requires_safety_checker": False}  # noqa: RUF012 - declared in the base

    def unet_inputs(self, latents: Tensor, condition: dict[str, Tensor]) -> dict[str, Any]:
        """The tokens."""
        return {"encoder_hidden_states": condition["tokens"]}

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, 77, D] of CLIP; over-long texts are cut, and diffusers logs what was cut off."""
        tokens, _ = self.pipeline.encode_prompt(texts, self.device, 1, False)
        return {"tokens": tokens}
