"""Figures of a step: sums and counts that micro-batches and processes add up exactly, reduced once at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from visual_grpo.advantages import flat_groups
from visual_grpo.combination import judged, on_all_processes, signal
from visual_grpo.distributed import Ranks
from visual_grpo.loss import RATIO_BINS, LossInputs
from visual_grpo.method import LoopState
from visual_grpo.types import RewardBatch, RewardStatus, RolloutBatch

Figures = Mapping[str, tuple[Tensor, Tensor]]


class Stats:
    """Accumulates (sum, count) figures by name; `reduce` gives their means over all processes.

    Names ending in `_max` keep the largest value, names starting with `hist/` are vectors of counts.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._fixed: dict[str, float] = {}

    def update(self, figures: Figures) -> None:
        """Add figures."""
        for name, (total, count) in figures.items():
            total, count = total.detach().double().cpu(), torch.as_tensor(count).double().cpu()
            if name not in self._sums:
                self._sums[name] = [total, count]
            elif name.endswith("_max"):
                self._sums[name][0] = torch.maximum(self._sums[name][0], total)
            else:
                self._sums[name] = [self._sums[name][0] + total, self._sums[name][1] + count]

    def set(self, name: str, value: float) -> None:
        """A figure that every process knows already."""
        self._fixed[name] = value

    def reduce(self, ranks: Ranks) -> dict[str, float]:
        """Means over all processes, by name."""
        merged = Stats()
        for part in ranks.gather_objects([self._sums]):
            merged.update({k: (v[0], v[1]) for k, v in part.items()})
        means = {
            name: float(total if name.endswith("_max") else total / count)
            for name, (total, count) in sorted(merged._sums.items())
            if not name.startswith("hist/") and bool(count > 0)
        }
        self._sums = merged._sums
        return means | self._fixed

    def counts(self, name: str) -> list[float]:
        """A histogram's counts after `reduce`; empty if there are none."""
        found = self._sums.get(f"hist/{name}")
        return [] if found is None else found[0].tolist()


def _mean(values: Tensor, where: Tensor | None = None) -> tuple[Tensor, Tensor]:
    kept = torch.isfinite(values) if where is None else where & torch.isfinite(values)
    return values[kept].double().sum(), kept.sum()


def reward_figures(rewards: RewardBatch, rollouts: RolloutBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Means of the clean scores, each part on the rows it applies to; failed rows, lengths, truncation."""
    clean = rewards if rewards.clean is None else rewards.clean
    total = clean.total()
    out = {"reward/total": _mean(total)}
    if rewards.clean is not None:
        out["reward_shaped/total"] = _mean(rewards.total())
    for k, name in enumerate(clean.names):
        applies = clean.status[:, k] != RewardStatus.NOT_APPLICABLE
        out[f"reward/{name}"] = _mean(clean.values[:, k], clean.status[:, k] == RewardStatus.OK)
        out[f"applies/{name}"] = (applies.sum(), torch.tensor(len(applies)))
    for name, values in clean.details.items():
        out[f"reward/{name}"] = _mean(values.float())
    failed = (clean.status == RewardStatus.FAILED).any(1)
    out["reward_failed"] = (failed.sum(), torch.tensor(len(failed)))
    if rollouts.unit_kind == "token":
        out["length"] = _mean(rollouts.unit_mask.sum(1).float().cpu())
    if rollouts.truncated is not None:
        out["truncated"] = _mean(rollouts.truncated.float().cpu())
    return out


def flat_rows(rewards: RewardBatch, group_ids: Tensor, state: LoopState, stats: Stats) -> Tensor:
    """[n] bool, rows whose whole group (its rows of all processes) has nothing to learn from.

    Sets the share of such groups, `flat_groups`, and with several rewards that of each by itself, `flat_groups/NAME`.
    """
    everywhere, ids = on_all_processes(judged(rewards), state.ranks), state.ranks.gather(group_ids)
    if len(ids) == 0:
        return torch.zeros(0, dtype=torch.bool)
    _, dense = torch.unique(ids, return_inverse=True)
    flat = flat_groups(signal(everywhere, dense, state.config), dense)
    stats.set("flat_groups", float(flat.float().mean()))
    if len(everywhere.names) > 1:
        ok = everywhere.status == RewardStatus.OK
        for k, name in enumerate(everywhere.names):
            alone = flat_groups(everywhere.values[:, k], dense, ok[:, k])
            stats.set(f"flat_groups/{name}", float(alone.float().mean()))
    return state.ranks.mine(flat[dense], len(rewards))


def group_figures(rows: LossInputs, advantages: Tensor, world: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Counts of what is trained, and the size of the advantages before flat groups were dropped."""
    share = torch.tensor(1.0 / world)  # counts are summed over the processes, not averaged
    return {
        "rows": (torch.tensor(len(rows)), share),
        "units": (rows.rollouts.unit_mask.sum(), share),
        "advantage_abs": _mean(advantages.abs().flatten()),
    }


def step_histograms(ranks: Ranks, advantages: Tensor, rewards: Tensor, stats: Stats) -> dict[str, Any]:
    """Histograms of advantages, rewards and ratios over all processes."""
    out = {
        "advantage": histogram(ranks.gather(advantages.flatten())),
        "reward": histogram(ranks.gather(rewards)),
    }
    counts = stats.counts("ratio")
    if counts:
        out["ratio"] = {"edges": RATIO_BINS.tolist(), "counts": counts}
    return out


def histogram(values: Tensor, bins: int = 21) -> dict[str, list[float]]:
    """Edges and counts of the finite values."""
    values = values[torch.isfinite(values)].double()
    if len(values) == 0:
        return {"edges": [0.0, 1.0], "counts": [0.0]}
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(values, bins=bins, min=low, max=high)
    return {"edges": torch.linspace(low, high, bins + 1, dtype=torch.float64).tolist(), "counts": counts.tolist()}
