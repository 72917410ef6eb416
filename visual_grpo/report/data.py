"""What a run folder holds, read once for the report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from visual_grpo.config_text import load_yaml
from visual_grpo.errors import UserError
from visual_grpo.grid import Grid, load_grid
from visual_grpo.report.stats import Paired, Sample, mean_of_tags, paired
from visual_grpo.run_folder import RunFolder

__all__ = ["Run", "load_run"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Records, evaluations and samples of one run."""

    path: Path
    config: dict[str, Any]
    config_text: str
    train: list[dict[str, Any]]
    """one a step, by step; a step logged again replaces the first."""
    evals: list[dict[str, Any]]
    """one an evaluation, by step."""
    alarms: list[dict[str, Any]]
    rows: dict[int, list[Row]]
    """step -> the samples of that evaluation."""
    grids: dict[int, Grid]
    """the picture grids of the first evaluation and of the weights in `model/`."""
    self_test: list[dict[str, Any]] | None

    @property
    def name(self) -> str:
        """The folder's name: it tells two runs of one config apart."""
        return self.path.resolve().name

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self.train[-1]["step"]) if self.train else 0

    @property
    def planned(self) -> int:
        """`train.steps`."""
        return int(self.config.get("train", {}).get("steps", self.steps))

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last step, where an evaluation ended it."""
        return self.evals[-1].get("stop") if self.evals and self.evals[-1]["step"] == self.steps else None

    @property
    def finished(self) -> bool:
        """Whether the last step is done and evaluated."""
        last = self.steps >= self.planned or self.stopped is not None
        return last and bool(self.evals) and self.evals[-1]["step"] == self.steps

    @property
    def best(self) -> dict[str, Any] | None:
        """Step, metric and value of the best weights, where `checkpoint.best` names their figure."""
        return best_evaluation(self.evals)

    @property
    def ends(self) -> tuple[int, int] | None:
        """Steps of the evaluations before training and of the weights in `model/`; None until there are two."""
        first, last = self.evals[0]["step"] if self.evals else 0, exported_step(self.config, self.evals)
        return (first, last) if last is not None and last > first else None

    @cached_property
    def watched(self) -> list[str]:
        """Scores that are not trained on: rewards with `eval_only`, and the diversity."""
        rewards = self.config.get("rewards") or {}
        only = [name for name, reward in rewards.items() if reward.get("eval_only")]
        return [name for name in (*only, "diversity") if name in self.scores]

    @cached_property
    def weights(self) -> dict[str, float]:
        """Weights of the rewards that are trained on."""
        rewards = self.config.get("rewards") or {}
        return {n: float(r.get("weight", 1.0)) for n, r in rewards.items() if not r.get("eval_only")}

    @cached_property
    def scores(self) -> list[str]:
        """Names of the held-out scores, the headline first: the trained reward, or the weighted sum of several."""
        names = list(
            dict.fromkeys(name for rows in self.rows.values() for row in rows for name in row.get("values", {}))
        )
        order = [*self.weights, *names]  # rows have sorted keys: take the order of the config
        names.sort(key=order.index)
        details = sorted({d for rows in self.rows.values() for row in rows for d in row.get("details") or {}})
        summed = (self.config.get("combine") or {}).get("how", "sum") in ("sum", "gate")
        return ([TOTAL] if len(self.weights) > 1 and summed else []) + names + details

    def samples(self, step: int, score: str) -> list[Sample]:
        """The values of one score in the evaluation at `step`; samples it does not apply to are left out."""
        found = []
        for row in self.rows.get(step, []):
            value = self._value(row, score)
            if value is not None and math.isfinite(value):
                tag = "" if row.get("tag") is None else str(row["tag"])
                found.append(Sample(prompt=int(row["index"]), sample=int(row["sample"]), tag=tag, value=value))
        return found

    def _value(self, row: Row, score: str) -> float | None:
        values = row.get("values", {})
        if score != TOTAL:
            value = values.get(score, (row.get("details") or {}).get(score))
            return None if value is None else float(value)
        parts = [weight * values[name] for name, weight in self.weights.items() if values.get(name) is not None]
        return math.fsum(parts) if parts else None

    def mark(self, row: Row) -> float | None:
        """The headline score of a sample."""
        return self._value(row, self.scores[0]) if self.scores else None

    def compare(self, score: str, tag: str | None = None) -> Paired | None:
        """Before against after; None where the run has no two evaluations, or the score is in neither."""
        if self.ends is None:
            return None
        before, after = (self.samples(step, score) for step in self.ends)
        return paired(*([s for s in side if tag is None or s.tag == tag] for side in (before, after)))

    def compare_tags(self, score: str) -> Paired | None:
        """As `compare`, for the unweighted mean of the tags."""
        if self.ends is None or len(self.tags) < 2:
            return None
        before, after = (self.samples(step, score) for step in self.ends)
        return mean_of_tags(before, after)

    @cached_property
    def tags(self) -> list[str]:
        """The tags of the held-out prompts."""
        return sorted({str(r["tag"]) for rows in self.rows.values() for r in rows if r.get("tag") is not None})

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one figure of the training records; NaN where a step has no number for it."""
        steps, values = [], []
        for record in self.train:
            if key in record["metrics"]:
                value = record["metrics"][key]
                steps.append(int(record["step"]))
                values.append(math.nan if value is None else float(value))
        return steps, values

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase over the whole run, the longest first."""
        total: dict[str, float] = {}
        for record in (*self.train, *self.evals):
            for key, value in record.get("time", {}).items():
                if value is not None and key != "total" and not key.endswith("_per_s"):
                    total[key] = total.get(key, 0.0) + float(value)
        return dict(sorted(total.items(), key=lambda item: -item[1]))


TOTAL = "weighted total"


def best_evaluation(evals: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Step, metric and value of the newest evaluation that was the best so far."""
    marked = [{"step": e["step"], **e["best"]} for e in evals if e.get("best")]
    return marked[-1] if marked else None


def exported_step(config: Mapping[str, Any], evals: Sequence[Mapping[str, Any]]) -> int | None:
    """The step whose weights `model/` holds, or would hold now; None without an evaluation."""
    best = best_evaluation(evals) if (config.get("eval") or {}).get("final") == "best" else None
    newest = best or (evals[-1] if evals else None)
    return None if newest is None else int(newest["step"])


def load_run(folder: RunFolder) -> Run:
    """Read everything the report shows.

    Raises:
        UserError: no run there, or a broken file.
    """
    if not folder.config.is_file():
        raise UserError(f"{str(folder.path)!r} is not a run folder: it has no config.yaml")
    records = folder.read_metrics()
    train, evals = (_by_step(records, kind) for kind in ("train", "eval"))
    rows = {e["step"]: folder.read_eval(e["step"]) for e in evals}
    grids: dict[int, Grid] = {}
    config = load_yaml(folder.config)
    for step in {e["step"] for e in evals[:1]} | {exported_step(config, evals)}:
        if step is None:
            continue
        path = folder.samples_path(step, ".png")
        if path.is_file():
            grids[step] = load_grid(path)
    return Run(
        path=folder.path,
        config=config,
        config_text=folder.config.read_text(encoding="utf-8"),
        train=train,
        evals=evals,
        alarms=[r for r in records if r.get("kind") == "alarm"],
        rows=rows,
        grids=grids,
        self_test=_self_test(folder.self_test),
    )


def _by_step(records: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    found = {int(r["step"]): dict(r) for r in records if r.get("kind") == kind}
    return [found[step] for step in sorted(found)]


def _self_test(path: Path) -> list[dict[str, Any]] | None:
    if not path.is_file():
        return None
    try:
        checks = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not valid JSON: {error}") from None
    return [dict(check) for check in checks]
