"""Flow-OPD: "On-Policy Distillation for Flow Matching Models", arXiv 2605.08063.

What differs from GRPO: no reward is maximised. Experts, one for each task, say at every state of the student's own noisy
trajectories which velocity they would use; the loss is the KL of the two Gaussian steps. Behind a method that samples noisy
steps: `[flow_grpo, flow_opd, task_cycle]`. `teachers` owns each task of `data.sources`; the anchor (MAR) pulls all prompts to one
more set of weights. The cold start (mean of the teachers, or `flow_sft`) is an earlier stage of a pipeline.

`opd_reward` says how the KL becomes a gradient. The paper's form, a detached state reward under a ratio (`detached`), has an
expected gradient of 0, since the reward does not depend on the sampled action; the published code does not detach it and so
distils directly, plus that noise (`released`). Default is the distillation without the noise (`direct`, the code's mode gkd);
`sampled` is the unbiased policy gradient, from the log-probs of the action.
Departures from the code: ratios and rewards meet row by row ([N] * [N], no broadcast to [N, N]); teachers are loaded whatever
`anchor_beta` is; rows of equal task rewards are trained; a task without a teacher is refused; a KL that is not finite drops its
sample. The scale is the code's (mean over dimensions, std without sqrt(dt)), to which `anchor_beta` belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import RunConfig
from visual_grpo.divergences import gaussian_kl
from visual_grpo.errors import UserError
from visual_grpo.exports import read_weights
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.objectives import Metrics, clipped_surrogate, importance_log_ratio
from visual_grpo.teachers import by_teacher, check_teachers, load_teachers
from visual_grpo.types import LogProb, MicroBatch, RewardBatch, RolloutBatch

ANCHOR = "anchor"
LIMIT = 5.0
"""Rewards of a step are clamped to +-this, as the code does."""


class FlowOpdConfig(MethodConfig):
    """Options of Flow-OPD."""

    teachers: dict[str, str] = Field(
        default_factory=dict, description="{task: exported weights}: a folder, a hub id or stage://NAME"
    )
    reward_mode: Literal["kl_only", "gkd", "mixed", "task_only"] = Field(
        "kl_only",
        description="gkd: kl_only with opd_reward=direct; mixed: the task's advantage as well; task_only: it alone",
    )
    opd_reward: Literal["direct", "released", "sampled", "detached"] = Field(
        "direct",
        description="how the KL to the teacher becomes a gradient; detached is for comparison, it teaches nothing",
    )
    kl_scale: float = Field(-1.0, lt=0, description="factor of the KL as a reward")
    kl_norm: Literal["none", "per_sample", "per_timestep", "global"] = Field(
        "none",
        description="z-score of the KL as a reward (and, in mixed, of the task's advantages); the code makes all three alike, "
        "over the rows of a micro-batch at each step, so the result depends on train.micro_batch",
    )
    anchor: str | None = Field(
        None, description="exported weights of the anchor; null = the base of the LoRA, or the start of full weights"
    )
    anchor_beta: float = Field(0.04, ge=0, description="weight of the pull to the anchor (MAR); 0 = none")


def z_score(values: Tensor) -> Tensor:
    """`(x - mean) / (std + 1e-4)` over the rows of each step, [n, u]; Bessel's std, 0 for one row."""
    if len(values) < 2:
        return torch.zeros_like(values)
    return (values - values.mean(0)) / (values.std(0) + 1e-4)


def action_reward(following: Tensor, mean: Tensor, teacher_mean: Tensor, kl_std: Tensor) -> Tensor:
    """`dt * sum_d (log p_teacher - log p_student)` of the sampled next latents, [n, u], detached.

    Under a ratio of mean log-probs its expected gradient is minus that of `gaussian_kl`.

    Args:
        following: sampled latents [n, u, ...].
        mean: of the student's step, same shape.
        teacher_mean: of the teacher's step, same shape.
        kl_std: [n, u], the std without sqrt(dt).
    """
    difference = (following - mean).square() - (following - teacher_mean).square()
    return (difference.flatten(2).sum(2) / (2 * kl_std.square())).detach()


def through_reward(surrogate: Tensor, advantages: Tensor, log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Add to a clipped surrogate of detached `advantages` [n, u] their own gradient; the value stays."""
    ratio, fixed = log_ratio.exp().detach(), advantages.detach()
    clipped = ratio.clamp(1 - low, 1 + high)
    chosen = torch.where(ratio * fixed <= clipped * fixed, ratio, clipped)
    return surrogate - chosen * (advantages - fixed)


class FlowOpd(Method[FlowOpdConfig]):
    """The KL to the teacher of the row's task, at the student's own states."""

    Config: ClassVar[type[MethodConfig]] = FlowOpdConfig
    needs: ClassVar[Needs] = Needs(
        unit_kinds=frozenset({"transition"}), kinds=frozenset({"diffusion"}), single_samples=True
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"drop_flat": False},
        "train": {"optimizer": {"lr": 1e-4, "weight_decay": 1e-4}},
    }

    def __init__(self, config: FlowOpdConfig) -> None:
        """Without the task's advantage equal rewards are no fault."""
        super().__init__(config)
        compares = config.reward_mode in ("mixed", "task_only")
        self.needs = replace(type(self).needs, compares_rewards=compares)  # type: ignore[misc]

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Every task needs a teacher, and the options must fit one another."""
        config = self.config
        if config.reward_mode != "task_only":
            check_teachers("flow_opd", config.teachers, run)
            _check_distillation(run, sampling)
        if sampling.deterministic:
            raise UserError("flow_opd distils noisy steps: stack it behind flow_grpo, or set sampling.solver=flow_sde")
        if config.reward_mode in ("mixed", "task_only") and run.train.group_size < 2:
            raise UserError(
                f"method.flow_opd.reward_mode={config.reward_mode} compares the samples of a prompt: set "
                "train.group_size to 2 or more"
            )
        if config.reward_mode == "gkd" and config.opd_reward != "direct":
            raise UserError(
                f"method.flow_opd.reward_mode=gkd is the direct loss, but opd_reward is {config.opd_reward!r}: use kl_only"
            )
        if config.kl_norm != "none" and config.opd_reward not in ("released", "detached"):
            raise UserError(
                f"method.flow_opd.kl_norm={config.kl_norm} normalises the KL as a reward; opd_reward={config.opd_reward} has "
                "none: use released, or kl_norm=none"
            )
        if config.kl_norm != "none" and run.train.micro_batch == 1:
            raise UserError(
                f"method.flow_opd.kl_norm={config.kl_norm} compares the rows of a micro-batch, and train.micro_batch is 1, so "
                "every reward would be 0: raise it, or use kl_norm=none"
            )
        if config.opd_reward == "sampled" and sampling.reduction != "mean":
            raise UserError(
                f"method.flow_opd.opd_reward=sampled is scaled for mean log-probs, but sampling.reduction is "
                f"{sampling.reduction!r}"
            )

    def passes_matter(self) -> bool:
        """Where the KL is normalised over a micro-batch."""
        return self.config.kl_norm != "none"

    def setup(self, state: LoopState) -> None:
        """Load the teachers and the anchor."""
        if self.config.reward_mode != "task_only":
            load_teachers("flow_opd", self.config.teachers, state)
        if self.config.anchor is not None:
            state.policy.keep(ANCHOR, read_weights(state.policy, self.config.anchor, "method.flow_opd.anchor"))
        elif state.policy.config.lora is None:
            state.policy.keep(ANCHOR, {k: p.detach().clone() for k, p in state.policy.trainable.items()})

    def filter_rows(
        self, keep: Tensor, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Rows whose latents are not finite would make every gradient so; a step without noise has none to train."""
        if "latents" not in rollouts.data:
            return keep
        finite = [torch.isfinite(rollouts.data[key]).flatten(1).all(1).cpu() for key in ("latents", "next_latents")]
        return keep & finite[0] & finite[1]

    def surrogate(self, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
        """The distillation loss per step [n, u], by `opd_reward` and `reward_mode`."""
        config, now = self.config, micro.log_prob
        if config.reward_mode == "task_only":
            return self._clipped(micro, micro.advantages, state)
        assert now.mean is not None
        assert now.kl_std is not None
        target = self._targets(micro, state)
        kept = torch.isfinite(_kl(now, target.detach())).all(1)  # [n]
        shape = (-1, *[1] * (target.ndim - 1))
        target = torch.where(kept.view(shape), target, now.mean.detach())
        kl = _kl(now, target)
        assert kl.shape == micro.mask.shape, "one KL for each row and step"  # [n, 1] would broadcast against the ratio
        figures = self._figures(kl, kept, micro, state)
        live = kept[:, None].to(kl.dtype)
        task = self._task_part(micro, kl) * live if config.reward_mode == "mixed" else None
        if config.opd_reward == "direct":
            loss = -config.kl_scale * kl
            if task is None:
                return loss, figures
            surrogate, more = self._clipped(micro, task, state)
            return surrogate + loss, figures | more
        reward = self._reward(kl, target, micro) * live
        advantages = (reward if task is None else task + reward).clamp(-LIMIT, LIMIT)
        loss, more = self._clipped(micro, advantages, state)
        if config.opd_reward == "released":
            ratio = state.config.ratio
            log_ratio = importance_log_ratio(now.value, micro.old_log_prob, micro.mask, level=ratio.level)
            loss = through_reward(loss, advantages, log_ratio, ratio.clip_low, ratio.clip_high)
        return loss, figures | more

    def _task_part(self, micro: MicroBatch, kl: Tensor) -> Tensor:
        """The task's advantages [n, u] for `mixed`; `kl_norm` normalises them too."""
        task = micro.advantages.expand_as(kl).clamp(-LIMIT, LIMIT)
        return task if self.config.kl_norm == "none" else z_score(task)

    def _reward(self, kl: Tensor, target: Tensor, micro: MicroBatch) -> Tensor:
        """The reward of each step [n, u]; only `released` has a gradient."""
        config, now = self.config, micro.log_prob
        if config.opd_reward == "sampled":
            following = micro.rollouts.data["next_latents"].to(target.device)[:, micro.units]
            assert now.mean is not None
            assert now.kl_std is not None
            return -config.kl_scale * action_reward(following, now.mean, target, now.kl_std)
        scaled = kl if config.opd_reward == "released" else kl.detach()
        return config.kl_scale * (scaled if config.kl_norm == "none" else z_score(scaled))

    def _clipped(self, micro: MicroBatch, advantages: Tensor, state: LoopState) -> tuple[Tensor, Metrics]:
        ratio = state.config.ratio
        return clipped_surrogate(
            micro.log_prob.value, micro.old_log_prob, advantages, micro.mask,
            level=ratio.level, clip_low=ratio.clip_low, clip_high=ratio.clip_high,
        )  # fmt: skip

    @torch.no_grad()
    def _targets(self, micro: MicroBatch, state: LoopState) -> Tensor:
        """Means of the teachers' steps, [n, u, ...]."""
        assert micro.log_prob.mean is not None
        target = torch.empty_like(micro.log_prob.mean)
        for _, weights, rows in by_teacher(micro.rollouts.prompts, self.config.teachers, state):
            with state.policy.weights(weights):
                found = state.policy.log_prob(micro.rollouts.select(rows), micro.units)
            assert found.mean is not None
            target[rows.to(target.device)] = found.mean.to(target.dtype)
        return target

    def _figures(self, kl: Tensor, kept: Tensor, micro: MicroBatch, state: LoopState) -> Metrics:
        """The KL of all rows and of each task's, and the dropped samples."""
        kept, values = kept.cpu(), kl.detach().double().cpu() * micro.mask.cpu()
        count = micro.mask.cpu() * kept[:, None]
        out = {
            "flow_opd/kl": (values.sum(), count.sum()),
            "flow_opd/dropped": ((~kept).sum(), torch.tensor(len(kept))),
        }
        for name, _, rows in by_teacher(micro.rollouts.prompts, self.config.teachers, state):
            if state.tasks:
                out[f"flow_opd/kl/{name}"] = (values[rows].sum(), count[rows].sum())
        return out

    def regularise(
        self, micro: MicroBatch, coefficients: Tensor, weights: Tensor, state: LoopState
    ) -> dict[str, Tensor]:
        """MAR: the same KL to the anchor, on the prompts of all tasks."""
        if self.config.anchor_beta == 0:
            return {}
        with torch.no_grad(), self._anchor(state):
            anchor = state.policy.log_prob(micro.rollouts, micro.units)
        assert anchor.mean is not None
        assert micro.log_prob.mean is not None
        finite = torch.isfinite(_kl(replace(micro.log_prob, mean=micro.log_prob.mean.detach()), anchor.mean))
        shape = (*finite.shape, *[1] * (anchor.mean.ndim - 2))
        unit = _kl(micro.log_prob, torch.where(finite.view(shape), anchor.mean, micro.log_prob.mean.detach()))
        state.figure("flow_opd/anchor_kl", unit, micro.mask.bool())
        return {"mar": self.config.anchor_beta * (unit * coefficients).sum()}

    @contextmanager
    def _anchor(self, state: LoopState) -> Iterator[None]:
        fresh = self.config.anchor is None and state.policy.config.lora is not None
        with state.policy.base() if fresh else state.policy.weights(ANCHOR):
            yield


def _check_distillation(run: RunConfig, sampling: Any) -> None:
    """A KL for each row and step needs log-probs without a map, and rows whatever their rewards are."""
    if sampling.reduction not in ("mean", "sum"):
        raise UserError(
            f"flow_opd has one KL a step, but sampling.reduction is {sampling.reduction!r}, which leaves a map: use mean, and no "
            "method that needs maps (vipo)"
        )
    if run.advantage.drop_flat:
        raise UserError(
            "flow_opd distils rows of equal rewards too, but advantage.drop_flat drops them: set it to false (flow_grpo sets it: "
            "put flow_opd behind it, method=[flow_grpo, flow_opd])"
        )


def _kl(now: LogProb, target: Tensor) -> Tensor:
    """`mean_d (mean - target)^2 / (2 std^2)` of each step, [n, u], with the std without sqrt(dt); gradient through `now`."""
    assert now.mean is not None
    assert now.kl_std is not None
    flat = gaussian_kl(now.mean.flatten(0, 1), target.flatten(0, 1), now.kl_std.flatten())
    return flat.view(now.mean.shape[:2])
