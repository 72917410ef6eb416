"""Cosine length reward: right answers are worth more when short, wrong ones cost less when long.

Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373); card rewards, section 7: lo + (hi -
lo) / 2 * (1 + cos(pi * L / Lmax)), where right answers run from `correct[1]` at length 0 to `correct[0]` at Lmax and wrong ones
from `wrong[1]` to `wrong[0]`. Range with the defaults [-1, -0.5] and [0.5, 1]. Which rows are right is said by another reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, as_reward, register_reward, to_output
from visual_grpo.rewards.length import Unit, completion_lengths
from visual_grpo.types import RewardStatus

__all__ = ["CosineLength", "cosine_length"]


def cosine_length(lengths: Tensor, max_length: int, low: float, high: float) -> Tensor:
    """Fall along half a cosine from `high` at length 0 to `low` at `max_length` and beyond; same shape as `lengths`.

    >>> cosine_length(torch.tensor([0.0, 50.0, 100.0, 150.0]), 100, 0.5, 1.0).tolist()
    [1.0, 0.75, 0.5, 0.5]
    """
    turn = torch.cos(torch.pi * (lengths.double() / max_length).clamp(0.0, 1.0))
    return (low + (high - low) / 2 * (1 + turn)).to(lengths.dtype)


@register_reward("cosine_length")
class CosineLength(Reward):
    """Correctness and length in one reward; use it in place of the correctness reward. Details: `length`, `correct` (0/1)."""

    needs = frozenset({"texts"})

    def __init__(
        self,
        max_length: int,
        *,
        correctness: Any = "exact_match",
        correctness_params: Mapping[str, Any] | None = None,
        correct: Sequence[float] = (0.5, 1.0),
        wrong: Sequence[float] = (-0.5, -1.0),
        exceeded: float | None = None,
        unit: Unit = "tokens",
    ) -> None:
        """Set the range of lengths and of values.

        Args:
            max_length: length at which the curve ends.
            correctness: name of the reward that says which rows are right (value above 0.5), or a reward.
            correctness_params: its parameters.
            correct, wrong: value at `max_length`, value at length 0.
            exceeded: value of rows at `max_length` and longer, right or wrong (the paper: -10); None: the curve's end.
            unit: of lengths, see `length.completion_lengths`.
        """
        if max_length < 1 or unit not in get_args(Unit):
            raise UserError(
                f"cosine_length: max_length is {max_length} and unit {unit!r}; it needs max_length >= 1 and one of "
                f"{', '.join(get_args(Unit))}."
            )
        if len(correct) != 2 or len(wrong) != 2:
            raise UserError("cosine_length: correct and wrong are two numbers each: at max_length, and at length 0.")
        self.max_length, self.unit, self.exceeded = max_length, unit, exceeded
        self.correct, self.wrong = tuple(correct), tuple(wrong)
        self.judge = as_reward(correctness, params=correctness_params)
        self.needs = self.judge.needs | {"texts"}  # type: ignore[misc]
        self.rows_per_call = self.judge.rows_per_call  # type: ignore[misc]

    def __call__(self, request: RewardRequest) -> RewardOutput:
        verdict = to_output(self.judge(request), len(request), "cosine_length: correctness")
        lengths = completion_lengths(request, self.unit)
        right = verdict.values > 0.5
        values = torch.where(
            right,
            cosine_length(lengths, self.max_length, *self.correct),
            cosine_length(lengths, self.max_length, *self.wrong),
        )
        if self.exceeded is not None:
            values = values.masked_fill(lengths >= self.max_length, self.exceeded)
        assert verdict.status is not None
        unknown = verdict.status != RewardStatus.OK
        return RewardOutput(
            values=values.masked_fill(unknown, torch.nan),
            status=verdict.status,
            details={"length": lengths, "correct": right.float().masked_fill(unknown, torch.nan)},
        )

    def close(self) -> None:
        """Close the correctness reward."""
        self.judge.close()
