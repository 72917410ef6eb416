"""BA: "Balanced Aggregation: Understanding and Fixing Aggregation Bias in GRPO", arXiv 2605.04077.

What differs from GRPO: inside a group the token losses are averaged apart over the answers with a positive advantage and over the
others, and the two means are mixed by the number of answers on each side. The signs balance whatever the lengths are, and no
token of a long answer counts less than its side's others. The loss is the mean over all groups of the step, flat ones too.
Token weights are fixed once a rollout batch on whole groups, so any split gives the same loss.
Departures, where the paper is silent: rows of advantage 0 stand on the negative side (`drop_zero` leaves them out); an advantage
that varies by token is judged by its sum; with several updates a rollout each has its share of the batch's groups as divisor;
the KL keeps `loss.aggregation`, the token mean by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.aggregation import Totals
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.groups import group_index, num_segments_of, segment_sum
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RolloutBatch

if TYPE_CHECKING:
    from visual_grpo.loss import LossInputs

WEIGHTS = "balanced_weights"
"""Entry of `RolloutBatch.data` that carries the weights to `aggregate`."""


def balanced_weights(
    advantages: Tensor, counts: Tensor, group_ids: Tensor, usable: Tensor, *, drop_zero: bool = False
) -> Tensor:
    """Weight of each token of a row: `k_side / (G * N_side)`, k rows and N tokens on its side of the group.

    Args:
        advantages: [N], one sign a row.
        counts: [N] trained tokens.
        group_ids: [N] int64, dense.
        usable: [N] bool; other rows weigh 0 and belong to no side.
        drop_zero: leave rows of advantage 0 out of both sides, where they stand beside others.

    Returns:
        [N] float64; a side without tokens weighs 0, and what it would weigh goes nowhere.

    Example:
        >>> one = torch.zeros(3, dtype=torch.int64)
        >>> balanced_weights(torch.tensor([1.2, -0.6, -0.6]), torch.tensor([2, 3, 4]), one, one == 0)
        tensor([0.1667, 0.0952, 0.0952], dtype=torch.float64)
    """
    positive = usable & (advantages > 0)
    negative = usable & (advantages < 0 if drop_zero else advantages <= 0)
    size = segment_sum((positive | negative).double(), group_ids)
    weights = torch.zeros(len(advantages), dtype=torch.float64)
    for side in (positive, negative):
        rows = segment_sum(side.double(), group_ids)
        tokens = segment_sum(counts.double(), group_ids, mask=side)
        share = torch.where(tokens > 0, rows / (size * tokens).clamp(min=1), 0.0)
        weights = weights + torch.where(side, share[group_ids], 0.0)
    return weights


class BalancedAggregationConfig(MethodConfig):
    """Options of BA."""

    drop_zero: bool = Field(False, description="rows of advantage 0 stand on no side, where others of the group do")


class BalancedAggregation(Method[BalancedAggregationConfig]):
    """Token means by the sign of the advantage."""

    Config: ClassVar[type[MethodConfig]] = BalancedAggregationConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {"loss": {"aggregation": "token_mean"}}

    def before_updates(self, rows: LossInputs, rewards: RewardBatch, state: LoopState) -> LossInputs:
        """Fix the token weights, scaled so that dividing by the rows of the step gives the mean over groups."""
        rollouts = rows.rollouts
        mask, ids = rollouts.unit_mask.cpu(), group_index(rollouts.group_ids)
        signs = _signs(rows.advantages.cpu(), mask)
        weights = balanced_weights(signs, mask.sum(1), ids, rewards.usable, drop_zero=self.config.drop_zero)
        self._log(weights, rows.advantages.cpu(), mask, rewards.usable, ids, state)
        here = torch.tensor([len(ids), num_segments_of(ids)], dtype=torch.float64)
        count, groups = state.ranks.sum(here).tolist()
        scaled = (weights * (count / max(groups, 1)))[:, None] * mask
        data = {**rollouts.data, WEIGHTS: scaled.to(rollouts.unit_mask.device)}
        return replace(rows, rollouts=replace(rollouts, data=data))

    def aggregate(self, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """The fixed weights over the rows of the step."""
        weights: Tensor = rollouts.data[WEIGHTS].to(mask)
        return weights / max(float(totals.rows), 1.0)

    def regulariser_coefficients(
        self, coefficients: Tensor, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """The core's own, by `loss.aggregation`."""
        return super().aggregate(mask, totals, rollouts, state)

    @staticmethod
    def _log(weights: Tensor, advantages: Tensor, mask: Tensor, usable: Tensor, ids: Tensor, state: LoopState) -> None:
        """Mean length of each side, N-/N+, and the mass (sum of weight times advantage) of each side, a group."""
        counts, signs = mask.sum(1), _signs(advantages, mask)
        mass = weights * (advantages * counts if advantages.ndim == 1 else signs)
        positive = usable & (signs > 0)
        negative = usable & ~positive
        figures = {"tokens_negative_over_positive": (counts[negative].sum(), counts[positive].sum())}
        for name, side in (("positive", positive), ("negative", negative)):
            figures[f"length_{name}"] = (counts[side].sum(), side.sum())
            figures[f"mass_{name}"] = (mass[side].sum(), torch.tensor(num_segments_of(ids)))
        state.log({f"balanced_aggregation/{name}": figure for name, figure in figures.items()})


def _signs(advantages: Tensor, mask: Tensor) -> Tensor:
    """A number a row with the sign of its advantage: itself [N], or its sum over trained units (and the map)."""
    if advantages.ndim == 1:
        return advantages
    kept = mask.reshape(*mask.shape, *([1] * (advantages.ndim - 2)))
    return torch.where(kept, advantages, 0.0).flatten(1).sum(1)


def balanced_aggregation_text_tiny() -> RunConfig:
    """BA on the tiny LM's arithmetic, with DAPO's clip range and no filter."""
    return arithmetic(
        "balanced_aggregation_text_tiny",
        [{"dapo": {"dynamic_sampling": False}}, "balanced_aggregation"],
        "BA on the tiny LM's arithmetic: token means by the sign of the advantage",
    )


def balanced_aggregation_qwen2_5_math_7b() -> RunConfig:
    """BA under DAPO on Qwen2.5-Math-7B and DAPO-17k; the paper's batch settings were not found: these are DAPO's.

    Answers of at most 3,072 tokens: the model reads 4,096.
    """
    return RunConfig(
        name="balanced_aggregation_qwen2_5_math_7b",
        summary="BA under DAPO on Qwen2.5-Math-7B, DAPO-17k",
        model=ModelConfig(
            adapter="text_lm", path="Qwen/Qwen2.5-Math-7B", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=[{"dapo": {"max_tries": 10}}, "balanced_aggregation"],
        data=DataConfig(source="data/dapo_math_17k.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 3072, "temperature": 1.0},
        train=TrainConfig(
            steps=500,
            prompts_per_step=512,
            group_size=16,
            updates_per_step=16,
            micro_batch=8,
            optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.1, warmup_steps=20 * 16),
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=20, samples=500, final_samples=500, batch=64),
    )
