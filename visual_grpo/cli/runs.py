"""Run folders as `compare` reads them: config.yaml and metrics.jsonl."""

from __future__ import annotations

import json
import math
import statistics
import sys
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
    from visual_grpo.config import load_yaml

    settings = dict(_flat(load_yaml(folder / "config.yaml"), "."))
    metrics: dict[str, dict[int, float]] = {}
    for row in _json_lines(folder / "metrics.jsonl"):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        for key, value in _flat(row, "/"):
            if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                metrics.setdefault(key, {})[step] = float(
                    value
                )  # a step logged again after a resume replaces the first
    return Run(folder=folder, settings=settings, metrics=metrics)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # a run that is writing or was killed
                print(f"warning: {path} line {number} is cut off and was left out.", file=sys.stderr)
                return
            raise UserError(f"{path} line {number} is not JSON: {error.msg}.") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not a JSON object.")
        yield row


def _flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def choose_metrics(runs: Sequence[Run], wanted: Sequence[str]) -> list[str]:
    """Return `wanted` if every run has it; else up to three scores of the evaluation, or of the training reward.

    Raises:
        UserError: a run lacks a wanted metric, or the runs have none in common.
    """
    shared = sorted(set.intersection(*(set(run.metrics) for run in runs)))
    for name in wanted:
        for run in runs:
            if name not in run.metrics:
                known = sorted(run.metrics)
                raise UserError(
                    f"{run.folder} has no metric {name!r}.{did_you_mean(name, known)} It has: {', '.join(known) or 'none'}."
                )
    if wanted:
        return [*wanted]
    for part in ("eval", "reward"):
        named = [name for name in shared if part in name.lower()]
        if named:
            scores = [name for name in named if "score" in name or "mean" in name or "total" in name]
            return (scores or named)[:3]
    if not shared:
        raise UserError("the runs have no metric in common: name one with --metric NAME.")
    return shared[:3]


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
