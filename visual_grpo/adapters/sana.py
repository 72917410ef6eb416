"""SANA (any `SanaPipeline`: 0.6B, 1.6B, 4.8B; not Sprint, which takes its guidance as an input)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.schedules import flow_match_sigmas

GEMMA_TOKENS = 300


class SanaAdapter(PipelineAdapter):
    """Adapter of diffusers' `SanaPipeline`.

    An empty text stands without the pipeline's instruction to the language model, as diffusers encodes the negative prompt.
    """

    eval_sampling: ClassVar[dict[str, Any]] = {
        "solver": "ode",
        "steps": 20,
        "guidance": 4.5,
    }  # the pipeline's own defaults
    pipeline_class = "SanaPipeline"
    network_class = "SanaTransformer2DModel"
    text_encoders = ("text_encoder",)
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    recomputed = ("SanaTransformerBlock",)

    @classmethod
    def vae_factor(cls, vae: Mapping[str, Any]) -> int:
        """Of the deep-compression autoencoder."""
        return int(2 ** (len(vae["encoder_block_out_channels"]) - 1))

    @classmethod
    def meta_call(
        cls, net: Mapping[str, Any], size: tuple[int, int], text_tokens: int, **tensor: Any
    ) -> dict[str, Any]:
        """One sequence."""
        return {
            "hidden_states": torch.empty(1, net["in_channels"], *size, **tensor),
            "encoder_hidden_states": torch.empty(1, GEMMA_TOKENS, net["caption_channels"], **tensor),
            "encoder_attention_mask": torch.empty(1, GEMMA_TOKENS, **tensor),
            "timestep": torch.empty(1, **tensor),
        }

    def noise_levels(self, sampling: DiffusionSampling) -> Tensor:
        """As shared; SANA's published scheduler is a DPM-Solver whose levels are shifted by `flow_shift`."""
        scheduler = self.pipeline.scheduler
        if hasattr(scheduler.config, "flow_shift") and sampling.shift is None:
            scheduler.set_timesteps(sampling.steps, device="cpu")
            levels: Tensor = scheduler.sigmas.to(self.step_dtype)
            return levels
        if sampling.shift is not None:
            return flow_match_sigmas(sampling.steps, sampling.shift, dtype=self.step_dtype)
        return super().noise_levels(sampling)

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]; a network that also predicts a variance gives it in further channels."""
        net, known = self._config, self.pipeline.scheduler.config
        time = sigma * known.num_train_timesteps
        if hasattr(known, "flow_shift"):  # this scheduler tells the network whole numbers
            time = time.floor()
        output: Tensor = self.pipeline.transformer(
            latents,
            encoder_hidden_states=condition["tokens"],
            encoder_attention_mask=condition["mask"],
            timestep=time * net.timestep_scale,
            return_dict=False,
        )[0]
        return output[:, : net.in_channels]

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] of Gemma and their `mask` [P, L]."""
        known = inspect.signature(type(self.pipeline).__call__).parameters["complex_human_instruction"].default
        parts = [
            self.pipeline.encode_prompt(
                [text],
                do_classifier_free_guidance=False,
                device=self.device,
                max_sequence_length=sampling.max_sequence_length or GEMMA_TOKENS,
                complex_human_instruction=known if text else None,
            )
            for text in texts
        ]
        return {"tokens": torch.cat([p[0] for p in parts]), "mask": torch.cat([p[1] for p in parts])}
