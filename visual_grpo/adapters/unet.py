"""Diffusion models of the older kind, a UNet that predicts the noise (or v) of 1000 discrete steps: one base for SD1.5 and SDXL.

A variance-preserving model holds `sqrt(alpha) x0 + sqrt(1 - alpha) noise`. Divided by `c = sqrt(alpha) + sqrt(1 - alpha)` that is
`(1 - sigma) x0 + sigma noise` with `sigma = sqrt(1 - alpha) / c`: a flow model in other units, exactly. Rollouts hold latents in
these units, so every solver, method and surrogate of the flow families serves here too; the Euler step is DDIM with eta 0, solver
`ddim` is DDIM with `noise_scale` as its eta. Only the network's call, the first latents and the finished ones change units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visual_grpo.adapters.conditions import Condition
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.adapters.protocol import SamplingConfig
from visual_grpo.errors import UserError

CLIP_TOKENS = 77


def flow_level(alpha: Tensor) -> Tensor:
    """Noise level sigma of a cumulated alpha, any shape.

    >>> flow_level(torch.tensor([1.0, 0.5, 0.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    signal, noise = alpha.sqrt(), (1 - alpha).sqrt()
    return noise / (signal + noise)


def unit_scale(sigma: Tensor) -> Tensor:
    """What latents `(1 - sigma) x0 + sigma noise` are multiplied by to keep the variance: `1 / sqrt((1 - sigma)^2 + sigma^2)`."""
    return ((1 - sigma).square() + sigma.square()).rsqrt()


class UNetAdapter(PipelineAdapter):
    """Base of the adapters of `UNet2DConditionModel` pipelines; a family fills `unet_inputs` and `encode_texts`.

    The schedule is that of a `DDIMScheduler` made from the pipeline's scheduler config, as DDPO samples, whatever class the
    pipeline came with.
    """

    network_class = "UNet2DConditionModel"
    component = "unet"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    wide_input = True
    recomputed = ("ResnetBlock2D", "BasicTransformerBlock")

    def __init__(self, pipeline: Any, sampling: SamplingConfig) -> None:
        """Take a pipeline as it is; UserError for what its scheduler or UNet does that this adapter does not."""
        super().__init__(pipeline, sampling)
        self.scheduler = ddim_scheduler(pipeline.scheduler.config)
        if getattr(pipeline.unet.config, "time_cond_proj_dim", None) is not None:
            raise UserError(
                "this UNet takes its guidance scale as an input (a consistency model); no adapter trains those"
            )
        self.levels = flow_level(self.scheduler.alphas_cumprod.double())
        """[1000] float64, noise level of each training step, rising."""

    @abstractmethod
    def unet_inputs(self, latents: Tensor, condition: dict[str, Tensor]) -> dict[str, Any]:
        """Arguments of the UNet beside latents [n, C, h, w] and time."""

    @classmethod
    def cell(cls, net: Mapping[str, Any]) -> int:
        """A UNet takes any size."""
        return 1

    @classmethod
    def check_sampling(cls, sampling: DiffusionSampling, where: str) -> None:
        """The schedule is the model's own: it was trained on these levels alone."""
        if sampling.schedule != "scheduler" or sampling.shift is not None:
            raise UserError(
                f"{where}.schedule ({sampling.schedule}) and {where}.shift ({sampling.shift}) are of flow-matching models; this "
                f"one has a schedule of its own: set {where}.schedule=scheduler {where}.shift=null"
            )
        if sampling.max_sequence_length is not None:
            raise UserError(f"{where}.max_sequence_length: CLIP's length is fixed; leave the key out for this model")

    def encode(self, texts: Sequence[str], sampling: DiffusionSampling, *, guided: bool = False) -> Condition:
        """As shared; UserError for a text length, which CLIP fixes."""
        if sampling.max_sequence_length is not None:
            raise UserError("sampling.max_sequence_length: CLIP's length is fixed; leave the key out for this model")
        return super().encode(texts, sampling, guided=guided)

    def noise_levels(self, sampling: DiffusionSampling) -> Tensor:
        """Levels of DDIM's time steps, then of its final alpha."""
        if sampling.shift is not None:
            raise UserError("sampling.shift belongs to flow-matching models; leave it out for this one")
        most = self.scheduler.config.num_train_timesteps
        if sampling.steps > most:
            raise UserError(
                f"sampling.steps ({sampling.steps}) must be at most {most}, the steps this model was trained on"
            )
        self.scheduler.set_timesteps(sampling.steps)
        last = flow_level(torch.as_tensor(self.scheduler.final_alpha_cumprod).double())
        return torch.cat([self.levels[self.scheduler.timesteps.cpu()], last.view(1)]).to(self.step_dtype)

    @property
    def level_range(self) -> tuple[float, float]:
        """Levels of the first and the last training step."""
        return float(self.levels[0]), float(self.levels[-1])

    def first_latents(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """The pure noise that the model starts from, in flow units."""
        return noise / unit_scale(sigma)

    def clean_latents(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """Back to the model's own units."""
        return latents * unit_scale(sigma)

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w] in flow units from the UNet's noise or v."""
        level = sigma.view(-1, *[1] * (latents.dim() - 1)).to(latents)
        scale = unit_scale(level)
        output: Tensor = self.pipeline.unet(
            (latents * scale).to(self.network_dtype),
            self.train_step(sigma),
            **self.unet_inputs(latents, condition),
            return_dict=False,
        )[0]
        output = output.to(latents.dtype)
        if self.scheduler.config.prediction_type == "v_prediction":  # v = sqrt(alpha) noise - sqrt(1 - alpha) x0
            return scale * (output + (2 * level - 1) * scale * latents)
        return (output - latents) / (1 - level)

    def train_step(self, sigma: Tensor) -> Tensor:
        """Time input of the UNet [n] for levels [n]: the training step, between two of them a fraction.

        Raises:
            UserError: a level lies outside those that the model was trained on.
        """
        table = self.levels.to(sigma)
        if bool(((sigma < table[0]) | (sigma > table[-1])).any()):
            raise UserError(
                f"this model knows noise levels from {float(table[0]):.4f} to {float(table[-1]):.4f}, but is asked for "
                f"{float(sigma.min()):.4f} to {float(sigma.max()):.4f}; take the levels of its own schedule"
            )
        after = torch.searchsorted(table, sigma.contiguous()).clamp(1, len(table) - 1)
        low, high = table[after - 1], table[after]
        return (after - 1) + (sigma - low) / (high - low)

    @classmethod
    def meta_call(
        cls, net: Mapping[str, Any], size: tuple[int, int], text_tokens: int, **tensor: Any
    ) -> dict[str, Any]:
        """One sequence; a UNet has no equal blocks that could be counted."""
        call: dict[str, Any] = {
            "sample": torch.empty(1, net["in_channels"], *size, **tensor),
            "timestep": torch.empty(1, **tensor),
            "encoder_hidden_states": torch.empty(1, CLIP_TOKENS, net["cross_attention_dim"], **tensor),
        }
        if net.get("addition_embed_type") == "text_time":
            pooled = net["projection_class_embeddings_input_dim"] - 6 * net["addition_time_embed_dim"]
            call["added_cond_kwargs"] = {
                "text_embeds": torch.empty(1, pooled, **tensor),
                "time_ids": torch.empty(1, 6, **tensor),
            }
        return call


def ddim_scheduler(config: Mapping[str, Any]) -> Any:
    """DDIM with the alphas, spacing and prediction type of a scheduler's config.

    Raises:
        UserError: it predicts neither noise nor v, or cuts the predicted image off on the way.
    """
    from diffusers import DDIMScheduler

    kind = config.get("prediction_type", "epsilon")
    if kind not in ("epsilon", "v_prediction"):
        raise UserError(
            f"the pipeline's scheduler has prediction_type {kind!r}; this adapter knows epsilon and v_prediction"
        )
    for name in ("clip_sample", "thresholding"):
        if config.get(name):
            raise UserError(
                f"the pipeline's scheduler has {name}=true, which cuts predicted latents off; set it to false"
            )
    return DDIMScheduler.from_config(config, clip_sample=False, thresholding=False)
