"""One run of the benchmark text_methods: the toolkit's trainer, evaluated at even distances, with every held-out value kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.eval.benchmarks.flow_arms import CLOCKS, open_trainer

if TYPE_CHECKING:
    from visual_grpo.api import Plan

__all__ = ["train_arm", "training_figures"]


def train_arm(
    made: Plan,
    folder: Path,
    *,
    points: int,
    samples: int,
    final_samples: int,
    limit: float | None,
    clock: str,
    value: Callable[[Mapping[str, Any]], float],
) -> dict[str, Any]:
    """Train `train.steps` steps, or until the step in which `limit` seconds of training are over.

    Args:
        made: resolved run.
        folder: of the run.
        points: evaluations, evenly spaced over `train.steps`; the last is after the last step.
        samples: held-out answers of each but the last.
        final_samples: of the last.
        limit: seconds; None: all steps.
        clock: see `CLOCKS`.
        value: what is compared, of one held-out answer.

    Returns:
        points (step, seconds, score), steps, seconds; rows of the last evaluation (row, index, tag, value, text); training, the
        figures of `training_figures`.
    """
    now, seconds, steps = CLOCKS[clock], 0.0, made.config.train.steps
    at = {math.ceil(steps * (i + 1) / points) for i in range(points - 1)}
    scores: list[dict[str, Any]] = []
    with open_trainer(made, folder) as trainer:

        def evaluated(count: int) -> list[dict[str, Any]]:
            rows = [
                {**{k: row[k] for k in ("row", "index", "tag", "text")}, "value": value(row)}
                for row in trainer.evaluate(count).rows
            ]
            score = statistics.fmean(row["value"] for row in rows)
            scores.append({"step": trainer.step, "seconds": seconds, "score": score})
            return rows

        while True:
            started = now()
            trainer.iteration()
            seconds += now() - started
            if trainer.step >= steps or (limit is not None and seconds >= limit):
                break
            if trainer.step in at:
                evaluated(samples)
        rows = evaluated(final_samples)
        records = [record["metrics"] for record in trainer.writer.folder.read_metrics("train")]
        done = trainer.step
    return {
        "points": scores, "steps": done, "seconds": seconds, "rows": rows, "training": training_figures(records),
    }  # fmt: skip


def training_figures(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the steps that have a figure; `zero_gradient`, the share of steps without one, and `grad_norm_spread`.

    >>> training_figures([{"grad_norm": 1.0, "kl": 0.5}, {"grad_norm": 3.0}, {"grad_norm": 0.0}])["zero_gradient"]
    0.3333333333333333
    """
    names = sorted({name for record in records for name in record})
    figures = {name: statistics.fmean(r[name] for r in records if name in r) for name in names}
    norms = [r["grad_norm"] for r in records if "grad_norm" in r]
    if norms:
        figures["zero_gradient"] = sum(n == 0 for n in norms) / len(norms)
        mean = statistics.fmean(norms)
        figures["grad_norm_spread"] = statistics.pstdev(norms) / mean if mean > 0 else 0.0
    return figures
