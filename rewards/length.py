"""Rewards on the length of a completion.

Sources: soft overlong punishment of DAPO (arXiv 2503.14476; card rewards, section 7), range [-1, 0]; target and ceiling are
ours, range [0, 1]. Tokens are counted by the sampler: the request's column `lengths`, or `completion_ids`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, register_reward

__all__ = ["Length", "Overlong", "completion_lengths", "soft_overlong"]

Unit = Literal["tokens", "words", "characters"]


def completion_lengths(request: RewardRequest, unit: Unit) -> Tensor:
    """Lengths [N] float32 of the completions of `request`."""
    if unit == "tokens":
        if "lengths" in request.extra:
            return torch.as_tensor(request.extra["lengths"], dtype=torch.float32).cpu()
        if "completion_ids" in request.extra:
            return torch.tensor([float(len(ids)) for ids in request.extra["completion_ids"]])
        raise RewardError(
            "a length in tokens needs the column 'lengths' or 'completion_ids', which this request has not; "
            "set unit: words or unit: characters."
        )
    assert request.texts is not None
    return torch.tensor([float(len(text.split()) if unit == "words" else len(text)) for text in request.texts])


def _check_unit(name: str, unit: str) -> None:
    if unit not in get_args(Unit):
        raise UserError(f"{name}: unit is {unit!r}; give one of {', '.join(get_args(Unit))}.")


def soft_overlong(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """DAPO's punishment: 0 up to `max_length - cache`, falling to -1 at `max_length`, -1 beyond.

    >>> soft_overlong(torch.tensor([80.0, 90.0, 100.0, 101.0]), 100, 20).tolist()
    [0.0, -0.5, -1.0, -1.0]
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


@register_reward("overlong")
class Overlong(Reward):
    """Soft punishment of answers near the length limit; add it to a correctness reward."""

    needs = frozenset({"texts"})

    def __init__(self, max_length: int, cache: int, *, unit: Unit = "tokens") -> None:
        """Set the limit and the width of the zone before it in which the punishment grows."""
        _check_unit("overlong", unit)
        if not 0 < cache <= max_length:
            raise UserError(
                f"overlong: cache is {cache} and max_length {max_length}; it needs 0 < cache <= max_length."
            )
        self.max_length, self.cache, self.unit = max_length, cache, unit

    def __call__(self, request: RewardRequest) -> RewardOutput:
        lengths = completion_lengths(request, self.unit)
        return RewardOutput(values=soft_overlong(lengths, self.max_length, self.cache), details={"length": lengths})


@register_reward("length")
class Length(Reward):
    """Closeness to a target, max(0, 1 - |L - target| / target), or 1 up to a ceiling and max(0, 2 - L / ceiling) above."""

    needs = frozenset({"texts"})

    def __init__(self, *, target: int | None = None, ceiling: int | None = None, unit: Unit = "tokens") -> None:
        """Give either a target or a ceiling."""
        _check_unit("length", unit)
        bounds = [bound for bound in (target, ceiling) if bound is not None]
        if len(bounds) != 1 or bounds[0] < 1:
            raise UserError(
                f"length: target is {target} and ceiling is {ceiling}; give exactly one of them, 1 or more."
            )
        self.target, self.ceiling, self.unit = target, ceiling, unit

    def __call__(self, request: RewardRequest) -> RewardOutput:
        lengths = completion_lengths(request, self.unit)
        if self.target is not None:
            values = 1 - (lengths - self.target).abs() / self.target
        else:
            assert self.ceiling is not None
            values = 2 - lengths / self.ceiling
        return RewardOutput(values=values.clamp(0.0, 1.0), details={"length": lengths})
