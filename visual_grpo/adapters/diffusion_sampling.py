"""How the diffusion families sample: the options of `sampling`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from visual_grpo.adapters.protocol import SamplingConfig
from visual_grpo.errors import UserError
from visual_grpo.transitions import Reduction

__all__ = ["DiffusionSampling"]

Positive = Annotated[int, Field(gt=0)]


class DiffusionSampling(SamplingConfig):
    """Sampling options of the diffusion families."""

    steps: Positive = 10
    guidance: Annotated[float, Field(ge=0)] = Field(1.0, description="u + guidance * (c - u); 1 = none, one forward")
    solver: Literal["ode", "dpm", "flow_sde", "dance_sde", "cps", "ddim"] = Field(
        "flow_sde",
        description="ode (Euler) and dpm (second order) have no noise; the others are those of the stochastic steps",
    )
    noise_scale: Annotated[float, Field(gt=0)] = Field(0.7, description="0.7 flow_sde, 0.3 dance_sde, 0.8 cps, 1 ddim")
    height: Positive | None = Field(None, description="pixels; null = the model's default")
    width: Positive | None = None
    shift: Annotated[float, Field(gt=0)] | None = Field(None, description="of the schedule; null = the scheduler's")
    schedule: Literal["scheduler", "linear"] = Field(
        "scheduler", description="linear: 1 - i / steps with `shift`, as DanceGRPO and MixGRPO have it"
    )
    tail_ratio: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Flash: points kept, after the last noisy step, for a second-order solver; null = all, Euler"
    )
    negative_prompt: str = ""
    max_sequence_length: Positive | None = Field(
        None, description="text tokens; null = as the family's pipeline is called"
    )
    same_noise: bool = Field(False, description="one initial noise for all rows of a group")
    logprob_mode: Literal["guided", "cond"] = Field(
        "guided", description="cond: log_prob uses the conditional branch only"
    )
    guidance_gradient: Literal["both", "cond"] = Field(
        "both", description="cond: no gradient through the unconditional branch"
    )
    reduction: Reduction = Field("mean", description="of a transition's log-prob over the latent dimensions")
    self_normalize: bool = Field(True, description="noise pairs: divide the loss by the detached mean absolute error")
    forward_batch: Positive | None = Field(None, description="rows in one network call; null = all")
    decode_batch: Positive = Field(32, description="images decoded at once")
    text_cache: Positive = Field(1024, description="encoded prompts kept in CPU memory")

    @model_validator(mode="after")
    def _noise_scale_fits(self) -> DiffusionSampling:
        if self.solver in ("cps", "ddim") and self.noise_scale > 1:
            raise ValueError(f"noise_scale of solver {self.solver!r} must be at most 1, got {self.noise_scale}")
        return self

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> DiffusionSampling:
        if self.schedule == "linear" and self.shift is None:
            raise ValueError("schedule 'linear' needs shift: 3 for images, 5 for video")
        if self.tail_ratio is not None and self.schedule != "linear":
            raise ValueError("tail_ratio shortens schedule 'linear': set schedule to it, and shift to 3")
        return self

    def check_use(self, unit_kinds: Collection[str]) -> None:
        """See `SamplingConfig.check_use`."""
        if "transition" not in unit_kinds and self.reduction != "mean":
            raise UserError(
                f"sampling.reduction ({self.reduction}) is of a noisy step's log-prob, and this method trains noise pairs: leave "
                "it out"
            )
        if "noise_pair" not in unit_kinds and not self.self_normalize:
            raise UserError(
                "sampling.self_normalize is of noise pairs, and this method trains noisy steps: leave it out"
            )
        if self.tail_ratio is not None and self.deterministic:
            raise UserError(
                f"sampling.tail_ratio shortens what comes after the last noisy step, and solver {self.solver!r} has none: use "
                "fewer sampling.steps"
            )
        if "noise_scale" in self.model_fields_set and self.deterministic:
            raise UserError(
                f"sampling.noise_scale ({self.noise_scale:g}) is of noisy steps, and solver {self.solver!r} has none: leave it "
                "out, or set sampling.solver to flow_sde, dance_sde, cps or ddim"
            )
        if self.same_noise and self.deterministic:
            raise UserError(
                f"sampling.same_noise gives the samples of a prompt one initial noise, and solver {self.solver!r} adds none, so "
                "they would be equal: leave it out, or use a noisy solver"
            )
        if self.negative_prompt and self.guidance == 1:
            raise UserError(
                f"sampling.negative_prompt {self.negative_prompt!r} is read by guidance alone, and sampling.guidance is 1 "
                "(none): raise it, or leave the negative prompt out"
            )

    def check_evaluation(self, given: Mapping[str, Any]) -> None:
        """See `SamplingConfig.check_evaluation`."""
        if given.get("tail_ratio") is not None and self.deterministic:
            raise UserError(
                f"eval.sampling.tail_ratio shortens what comes after the last noisy step, and solver {self.solver!r} has none: "
                "use fewer eval.sampling.steps"
            )

    @property
    def deterministic(self) -> bool:
        """True where no step has noise, so none can be trained as a transition."""
        return self.solver in ("ode", "dpm")

    @property
    def replays_the_sampler(self) -> bool:
        """False where sampling is guided and `log_prob` is not ("CFG distillation")."""
        return self.guidance == 1 or self.logprob_mode == "guided"
