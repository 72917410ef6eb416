"""Repetition: a penalty on n-grams that occur more than once.

Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373); card rewards, section 7: (1 -
distinct n-grams / n-grams) * max_penalty over token ids; fewer than n tokens give 0. Range [max_penalty, 0].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, register_reward

__all__ = ["Repetition", "repeated_share"]

Unit = Literal["tokens", "words"]


def repeated_share(units: Sequence[Any], n: int) -> float:
    """Share of the n-grams of `units` that repeat an earlier one, in [0, 1).

    >>> repeated_share([1, 2, 3, 1, 2, 3], 3), repeated_share([1, 2], 3)
    (0.25, 0.0)
    """
    total = len(units) - n + 1
    return 1 - len({tuple(units[i : i + n]) for i in range(total)}) / total if total > 0 else 0.0


@register_reward("repetition")
class Repetition(Reward):
    """Penalty on repeated n-grams; add it to a correctness reward. Details: `repeated`, their share."""

    needs = frozenset({"texts"})

    def __init__(self, n: int = 3, *, max_penalty: float = -1.0, unit: Unit = "tokens") -> None:
        """Set the length of the n-grams, the penalty where all repeat, and what is counted (`words`: between blanks)."""
        if n < 1 or max_penalty > 0:
            raise UserError(
                f"repetition: n is {n} and max_penalty {max_penalty}; it needs n >= 1 and max_penalty <= 0."
            )
        if unit not in get_args(Unit):
            raise UserError(f"repetition: unit is {unit!r}; give one of {', '.join(get_args(Unit))}.")
        self.n, self.max_penalty, self.unit = n, max_penalty, unit

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        rows: Sequence[Sequence[Any]]
        if self.unit == "words":
            rows = [text.split() for text in request.texts]
        elif "completion_ids" in request.extra:
            rows = [[int(i) for i in ids] for ids in request.extra["completion_ids"]]
        else:
            raise RewardError(
                "repetition in tokens needs the column 'completion_ids', which this request has not; set unit: words."
            )
        shares = [repeated_share(row, self.n) for row in rows]
        return RewardOutput.from_list([share * self.max_penalty for share in shares], {"repeated": shares})
