"""Run folders as `compare` reads them: the settings, and every figure of metrics.jsonl as a curve.

A metric's name is the record's kind and the figure's name: `eval/geneval/by_tag`, `train/reward/total`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError, did_you_mean

__all__ = ["Arm", "Run", "choose_metrics", "differing_settings", "group_arms", "read_run"]

# Settings that name a run and change nothing of what it does.
_LABELS = {"name", "summary"}
_SEEDS = {"train.seed", "seed"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder."""

    folder: Path
    settings: dict[str, Any]  # dotted key -> value of config.yaml
    metrics: dict[str, dict[int, float]]  # name -> step -> value
    best: dict[str, Any] | None = None  # step, metric and value of the best weights, where the run keeps them

    @property
    def last_step(self) -> int:
        """Last step that any metric was logged at."""
        return max((step for points in self.metrics.values() for step in points), default=0)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value), by step."""
        return sorted(self.metrics.get(metric, {}).items())

    def extremes(self, metric: str) -> dict[str, float | None]:
        """Return the first, last and best (largest) value that is finite."""
        values = [value for _, value in self.series(metric) if math.isfinite(value)]
        if not values:
            return {"first": None, "last": None, "best": None}
        return {"first": values[0], "last": values[-1], "best": max(values)}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Runs whose configs differ in the seed alone."""

    label: str
    runs: list[Run]

    def spread(self, metrics: Sequence[str]) -> dict[str, dict[str, float | None]]:
        """Return mean and (Bessel) standard deviation over the runs of each metric's last value."""
        found: dict[str, dict[str, float | None]] = {}
        for metric in metrics:
            last = [value for run in self.runs if (value := run.extremes(metric)["last"]) is not None]
            found[metric] = {
                "mean": statistics.fmean(last) if last else None,
                "std": statistics.stdev(last) if len(last) > 1 else None,
            }
        return found

    def mean_curve(self, metric: str) -> list[tuple[int, float]]:
        """Return the mean over the runs at the steps that all of them logged."""
        curves = [dict(run.series(metric)) for run in self.runs]
        shared = set.intersection(*(set(curve) for curve in curves))
        return [(step, statistics.fmean(curve[step] for curve in curves)) for step in sorted(shared)]


def read_run(folder: Path) -> Run:
    """Read a run folder; what is missing or broken is a `UserError` naming the file and line."""
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a run folder: there is no such folder.")
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"{str(folder)!r} is not a run folder: it has no {name}.")
    from visual_grpo.config_text import load_yaml
    from visual_grpo.run_folder import read_metrics

    settings = dict(_flat(load_yaml(folder / "config.yaml"), "."))
    metrics: dict[str, dict[int, float]] = {}
    best: dict[str, Any] | None = None
    for record in read_metrics(folder):
        step, figures = record.get("step"), record.get("metrics")
        if not isinstance(step, int) or not isinstance(figures, Mapping):
            continue
        if isinstance(record.get("best"), Mapping):
            best = {"step": step, **record["best"]}
        for name, value in figures.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                metrics.setdefault(f"{record.get('kind')}/{name}", {})[step] = float(value)
    return Run(folder=folder, settings=settings, metrics=metrics, best=best)


def _flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def choose_metrics(runs: Sequence[Run], wanted: Sequence[str]) -> list[str]:
    """Return `wanted` if every run has it; else the rewards of the held-out evaluation, or the training reward.

    Raises:
        UserError: a run lacks a wanted metric, or the runs have no evaluation and no reward in common.
    """
    for name in wanted:
        for run in runs:
            if name not in run.metrics:
                known = sorted(run.metrics)
                raise UserError(
                    f"{run.folder} has no metric {name!r}.{did_you_mean(name, known)} It has: {', '.join(known) or 'none'}."
                )
    if wanted:
        return [*wanted]
    shared = sorted(set.intersection(*(set(run.metrics) for run in runs)))
    rewards = [name for name in shared if name.startswith("eval/") and name.count("/") == 1]
    # Where prompts have kinds, the mean over kinds is the headline (GenEval's overall score).
    headline = [f"{name}/by_tag" if f"{name}/by_tag" in shared else name for name in rewards]
    chosen = headline[:3] or [name for name in ("train/reward/total",) if name in shared]
    if not chosen:
        raise UserError(
            f"the runs have neither an evaluation nor train/reward/total in common; name a metric with --metric. "
            f"All of them have: {', '.join(shared) or 'none'}."
        )
    return chosen


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the dotted keys whose values are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _LABELS)
    return [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]


def group_arms(runs: Sequence[Run]) -> list[Arm]:
    """Pool runs that differ in the seed alone; an arm is labelled by its first run's name and what sets it apart."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key not in _SEEDS | _LABELS}
        by_settings.setdefault(repr(sorted(same.items())), []).append(run)
    arms: list[Arm] = []
    for group in by_settings.values():
        label = group[0].folder.name if len(group) == 1 else str(group[0].settings.get("name", group[0].folder.name))
        taken = sum(arm.label == label for arm in arms)
        arms.append(Arm(label=f"{label} ({taken + 1})" if taken else label, runs=group))
    return arms
