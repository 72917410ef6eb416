"""LENS: "Don't Waste Mistakes: Leveraging Negative RL-Groups via Confidence Reweighting", arXiv 2510.08696.

What differs from GRPO: a wrong answer is penalised the more, the more confident the policy was in it. Groups without a right
answer then carry a signal too, away from the confident mistakes; their advantages are centred only and scaled down.
Departures and our readings: the bound on the difficulty uses length-normalised probabilities, as raw ones would vanish;
Bessel std and eps 1e-4; both kinds of groups share one divisor, the rows of the step; confidences are those of the sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.advantages import group_advantages
from visual_grpo.combination import with_part
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import RunError, UserError
from visual_grpo.groups import num_segments_of, segment_count, segment_sum
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.stack import named_methods
from visual_grpo.types import RewardBatch, RolloutBatch

SMALLEST = 1e-12
"""Confidences below it carry no information."""


class LensConfig(MethodConfig):
    """Options of LENS."""

    negative_weight: float = Field(0.25, ge=0, description="factor of the advantages in groups without a right answer")
    groups: Literal["all", "negative", "mixed"] = Field("all", description="which groups' rewards are calibrated")


class Lens(Method[LensConfig]):
    """Confidence-weighted penalties; all-wrong groups are learned from."""

    Config: ClassVar[type[MethodConfig]] = LensConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "bessel", "eps": 1e-4},
        "loss": {"aggregation": "sequence_mean_token_mean"},
        "kl": {"beta": 0.0},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse what would delete the signal of all-wrong groups, or could not add a penalty to a reward."""
        for name, params in named_methods(run.method):
            if name == "dapo" and params.get("dynamic_sampling", True):
                raise UserError(
                    "methods 'lens' and 'dapo' do not fit: dapo's dynamic sampling drops the groups without a right answer, "
                    "which lens learns from; set method.dapo.dynamic_sampling=false or remove one"
                )
        if run.combine.how not in ("sum", "gate"):
            raise UserError(
                f"method lens adds a penalty to the reward, and combine.how={run.combine.how} does not add; use sum or gate"
            )

    def shape_rewards(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """Add the penalty of wrong answers as a part of its own, `confidence`."""
        if rollouts.old_log_prob is None:
            raise RunError("lens needs the log-probs of the policy that sampled, and these rollouts have none")
        clean = rewards if rewards.clean is None else rewards.clean
        right = clean.total().double()
        check_binary(right)
        kept = rollouts.unit_mask.cpu()
        sums = torch.where(kept, rollouts.old_log_prob.double().cpu(), 0.0).sum(1)
        confidence = answer_confidence(sums, kept.sum(1))
        _, ids = torch.unique(rollouts.group_ids, return_inverse=True)
        calibrated = calibrated_rewards(right, confidence, ids, groups=self.config.groups)
        scored = rewards.usable
        negative = ~group_has_right(right, ids)
        state.figure("lens/negative_groups", negative.double())
        state.figure("lens/confidence", confidence, scored)
        return with_part(rewards, "confidence", calibrated - right)

    def advantages(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Normalised where some answer is right, centred and scaled elsewhere; over the rows of all processes."""
        ranks, clean = state.ranks, rewards if rewards.clean is None else rewards.clean
        found = calibrated_advantages(
            ranks.gather(rewards.total().double()),
            ranks.gather(clean.total().double()),
            ranks.gather(rollouts.group_ids),
            state.config,
            negative_weight=self.config.negative_weight,
        )
        return ranks.mine(found, len(rewards))


def check_binary(scores: Tensor) -> None:
    """Refuse scores [N] other than 0, 1 and NaN.

    Raises:
        RunError: naming one.
    """
    other = scores[~scores.isnan() & (scores != 0) & (scores != 1)]
    if len(other):
        raise RunError(
            f"lens needs rewards of 0 or 1, but one is {float(other[0]):g}: use one such reward with weight 1"
        )


def answer_confidence(log_prob_sums: Tensor, lengths: Tensor) -> Tensor:
    """Geometric-mean unit probability of each answer, `exp(S / n)`: [N] in (0, 1]; 0 for an answer without units.

    Args:
        log_prob_sums: S, over the answer's units, [N].
        lengths: n, [N].
    """
    return torch.where(lengths > 0, (log_prob_sums / lengths.clamp(min=1)).exp(), 0.0)


def group_has_right(right: Tensor, ids: Tensor) -> Tensor:
    """[S] bool: some row of the group scored 1."""
    return segment_count(ids, mask=right == 1) > 0


def calibrated_rewards(
    right: Tensor, confidence: Tensor, ids: Tensor, *, groups: Literal["all", "negative", "mixed"] = "all"
) -> Tensor:
    """Rewards with the likelihood-derived penalty of wrong answers (LENS): `r - (1 - r) / G * c / (D - c)`.

    D is twice the group's largest confidence or, where some answer is right, `1 / mean(r / c)` if that is larger.

    Args:
        right: clean rewards, 0, 1 or NaN, [N].
        confidence: see `answer_confidence`, [N].
        ids: dense group ids, [N] int64.
        groups: which groups are calibrated: those without a right answer, those with one, or all.

    Returns:
        [N]; wrong answers fall in [-1/G, 0], NaN stays NaN. A group whose confidences vanish is left as it is.
    """
    scored = ~right.isnan()
    size = segment_count(ids, mask=scored)
    largest = torch.zeros(num_segments_of(ids), dtype=confidence.dtype).scatter_reduce(
        0, ids, torch.where(scored, confidence, 0.0), reduce="amax"
    )
    inverse = segment_sum(right / confidence.clamp(min=SMALLEST), ids, mask=scored) / size.clamp(min=1)
    mixed = group_has_right(right, ids)
    implied = torch.where(mixed, 1 / inverse.clamp(min=SMALLEST), 0.0)
    difficulty = torch.maximum(implied, 2 * largest)
    wanted = largest >= SMALLEST
    if groups != "all":
        wanted = wanted & (mixed if groups == "mixed" else ~mixed)
    gap = torch.where(wanted, difficulty, 1.0)[ids] - torch.where(wanted[ids], confidence, 0.0)
    penalty = torch.where(wanted[ids], confidence / gap, 0.0) / size.clamp(min=1)[ids]
    return torch.where(scored, right - (1 - right) * penalty, torch.nan)


def calibrated_advantages(
    rewards: Tensor, right: Tensor, group_ids: Tensor, config: RunConfig, *, negative_weight: float
) -> Tensor:
    """Advantages [N] of complete groups: `(r - mean) / (std + eps)`, or `negative_weight (r - mean)` without a right answer.

    Args:
        rewards: calibrated, [N]; NaN rows get 0.
        right: clean rewards, [N].
        group_ids: [N] int64.
        config: of the run, for `advantage.*`.
        negative_weight: alpha.
    """
    options = config.advantage
    plain = partial(group_advantages, rewards, group_ids, single_group=options.single_group)
    normalised = plain(scope=options.scope, std=options.std, eps=options.eps)
    return torch.where(group_has_right(right, group_ids)[group_ids], normalised, negative_weight * plain(std="none"))


def lens_text_tiny() -> RunConfig:
    """LENS on the tiny LM's arithmetic, groups of 8 so that many have no right answer."""
    return arithmetic(
        "lens_text_tiny",
        "lens",
        "LENS on the tiny LM's arithmetic: confident mistakes are penalised more, all-wrong groups count",
        train=TrainConfig(
            steps=60, prompts_per_step=32, group_size=8, micro_batch=128, optimizer=OptimizerConfig(lr=3e-4)
        ),
    )


def lens_qwen2_5_3b() -> RunConfig:
    """LENS on Qwen2.5-3B: 32 questions x 16, temperature 1, 4,096 tokens, 1,600 steps; learning rate and clip are our choice."""
    return RunConfig(
        name="lens_qwen2_5_3b",
        summary="LENS on Qwen2.5-3B, the paper's settings",
        model=ModelConfig(adapter="text_lm", path="Qwen/Qwen2.5-3B", dtype="bfloat16", gradient_checkpointing=True),
        method=[{"lens": {"negative_weight": 0.25}}],
        data=DataConfig(source="data/math_numina.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 4096, "temperature": 1.0},
        train=TrainConfig(
            steps=1600, prompts_per_step=32, group_size=16, micro_batch=8, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=50, samples=500, final_samples=500, batch=64),
    )
