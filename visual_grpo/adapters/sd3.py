"""Stable Diffusion 3 and 3.5 (any `StableDiffusion3Pipeline`: medium, large, the packaged tiny one, with or without T5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.memory import BlockShape
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.config import ModelConfig

CLIP_TOKENS = 77
T5_TOKENS = 256
"""As the published pipelines are called; a tokenizer of a smaller model allows fewer."""
MMDIT_LORA = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""The attention of both streams, image and text."""


class SD3Adapter(PipelineAdapter):
    """Adapter of diffusers' `StableDiffusion3Pipeline`."""

    eval_sampling: ClassVar[dict[str, Any]] = {"solver": "ode", "steps": 40, "guidance": 4.5}  # Flow-GRPO's evaluation
    pipeline_class = "StableDiffusion3Pipeline"
    network_class = "SD3Transformer2DModel"
    text_encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    lora_targets = MMDIT_LORA

    @classmethod
    def largest_side(cls, net: Mapping[str, Any]) -> int:
        """The grid of position embeddings."""
        return int(net["pos_embed_max_size"] * net["patch_size"])

    @classmethod
    def text_tokens(cls, config: ModelConfig, options: DiffusionSampling) -> int:
        """Tokens of the CLIP encoders and of T5."""
        clip = cls._tokenizer_length(config, "tokenizer", CLIP_TOKENS)
        return clip + (options.max_sequence_length or cls._tokenizer_length(config, "tokenizer_3", T5_TOKENS))

    @classmethod
    def blocks(cls, net: Mapping[str, Any], *, image_tokens: int, text_tokens: int) -> BlockShape:
        """As shared, with the second attention of SD3.5-medium."""
        shape = super().blocks(net, image_tokens=image_tokens, text_tokens=text_tokens)
        return replace(shape, extra_attention=len(net.get("dual_attention_layers") or ()))

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]; the network's time input is `1000 * sigma`."""
        velocity: Tensor = self.pipeline.transformer(
            hidden_states=latents,
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=condition["tokens"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] and `pooled` [P, D']; over-long texts are cut, and diffusers logs what was cut off."""
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self._text_length(sampling),
        )
        return {"tokens": tokens, "pooled": pooled}

    def _text_length(self, sampling: DiffusionSampling) -> int:
        """T5 tokens: as asked, or what the tokenizer allows, at most what the published pipelines use."""
        if sampling.max_sequence_length is not None:
            return sampling.max_sequence_length
        tokenizer = self.pipeline.tokenizer_3
        return T5_TOKENS if tokenizer is None else min(T5_TOKENS, tokenizer.model_max_length)
