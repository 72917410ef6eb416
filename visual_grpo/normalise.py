"""Bringing each reward to a common scale before rewards are combined; running statistics are part of a checkpoint.

The raw values stay in the batch's details under `NAME/raw`. Not-applicable and failed values pass untouched and count nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from visual_grpo.config_rewards import NormaliseConfig, RewardConfig
from visual_grpo.distributed import Ranks
from visual_grpo.types import RewardBatch, RewardStatus

__all__ = ["Normalisers", "RunningMoments"]


@dataclass(kw_only=True)
class RunningMoments:
    """Mean and variance of all values seen, merged batch by batch (Chan, Golub and LeVeque 1979) in float64.

    >>> import torch
    >>> moments = RunningMoments()
    >>> moments.add(torch.tensor([1.0, 3.0])), moments.add(torch.tensor([5.0]))
    (None, None)
    >>> moments.mean, moments.std
    (3.0, 2.0)
    """

    weight: float = 0.0
    """values seen; earlier ones count less where `decay` is below 1."""
    mean: float = 0.0
    squares: float = 0.0
    """sum of squared deviations from the mean."""

    def add(self, values: Tensor, decay: float = 1.0) -> None:
        """Take in `values` [n]; what was there counts `decay` times. No value changes nothing."""
        count = len(values)
        if count == 0:
            return
        wide = values.double()
        mean = float(wide.mean())
        squares = float((wide - mean).square().sum())
        old = decay * self.weight
        shift = mean - self.mean
        self.weight = old + count
        self.squares = decay * self.squares + squares + shift * shift * old * count / self.weight
        self.mean += shift * count / self.weight

    @property
    def std(self) -> float:
        """Bessel-corrected; 0 until there are two values."""
        return (self.squares / (self.weight - 1)) ** 0.5 if self.weight > 1 else 0.0


class Normalisers:
    """The normalisers of a run's rewards."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        """Take those that are configured."""
        self._configs = {n: r.normalise for n, r in rewards.items() if r.normalise is not None and not r.eval_only}
        self._moments = {n: RunningMoments() for n, c in self._configs.items() if c.kind == "z_score"}

    def observe(self, rewards: RewardBatch, ranks: Ranks) -> RewardBatch:
        """Take a step's raw scores of all processes into the running statistics, then normalise this process's.

        Every process must call it, once a step.
        """
        for name in self._moments:
            if name in rewards.names:
                column = rewards.names.index(name)
                values = ranks.gather(rewards.values[:, column])
                ok = ranks.gather(rewards.status[:, column]) == RewardStatus.OK
                self._moments[name].add(values[ok], self._configs[name].decay)
        return self(rewards)

    def __call__(self, rewards: RewardBatch) -> RewardBatch:
        """Normalise by the present statistics."""
        present = [name for name in self._configs if name in rewards.names]
        if not present:
            return rewards
        values, details = rewards.values.clone(), dict(rewards.details)
        for name in present:
            column = rewards.names.index(name)
            details[f"{name}/raw"] = rewards.values[:, column].clone()
            values[:, column] = self._scaled(name, values[:, column].double()).to(values.dtype)
        return replace(rewards, values=values, details=details)

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        config: NormaliseConfig = self._configs[name]
        if config.kind == "clip":
            return values.clamp(config.low, config.high)
        if config.kind == "min_max":
            assert config.low is not None
            assert config.high is not None
            return (values - config.low) / (config.high - config.low)
        moments = self._moments[name]
        scaled = (values - moments.mean) / (moments.std + config.eps)
        return scaled if config.low is None and config.high is None else scaled.clamp(config.low, config.high)

    def state_dict(self) -> dict[str, Any]:
        """Running statistics by reward."""
        return {n: {"weight": m.weight, "mean": m.mean, "squares": m.squares} for n, m in self._moments.items()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for name, state in values.items():
            if name in self._moments:
                self._moments[name] = RunningMoments(**state)
