"""Stable Diffusion XL (any `StableDiffusionXLPipeline` base model; the refiner takes other inputs)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.unet import UNetAdapter


class SDXLAdapter(UNetAdapter):
    """Adapter of diffusers' `StableDiffusionXLPipeline`.

    An empty text is all zeros where the pipeline says so (`force_zeros_for_empty_prompt`, as in SDXL-base): so diffusers does
    without a negative prompt.
    """

    eval_sampling: ClassVar[dict[str, Any]] = {
        "solver": "ode",
        "steps": 50,
        "guidance": 5.0,
    }  # the pipeline's own defaults
    pipeline_class = "StableDiffusionXLPipeline"
    text_encoders = ("text_encoder", "text_encoder_2")
    load_options = {"add_watermarker": False}  # noqa: RUF012 - declared in the base

    def unet_inputs(self, latents: Tensor, condition: dict[str, Tensor]) -> dict[str, Any]:
        """Tokens, pooled text, and the size in pixels, told as an uncropped original of that size."""
        height, width = (side * self.pipeline.vae_scale_factor for side in latents.shape[2:])
        pooled = condition["pooled"]
        size = pooled.new_tensor([height, width, 0, 0, height, width]).expand(len(pooled), -1)
        return {
            "encoder_hidden_states": condition["tokens"],
            "added_cond_kwargs": {"text_embeds": pooled, "time_ids": size},
        }

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, 77, D] of both CLIP encoders side by side, and `pooled` [P, D'] of the second."""
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts, device=self.device, do_classifier_free_guidance=False
        )
        if self.pipeline.config.force_zeros_for_empty_prompt:
            said = tokens.new_tensor([text != "" for text in texts])
            tokens, pooled = tokens * said[:, None, None], pooled * said[:, None]
        return {"tokens": tokens, "pooled": pooled}
