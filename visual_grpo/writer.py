"""What a run writes and shows, in one place: metrics, evaluations, picture grids, trackers, the progress line, the report.

Only the main process writes; on the others every call is free.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.alarms import Alarm
from visual_grpo.config import RunConfig
from visual_grpo.evaluation import Evaluation, main_figures, summarise
from visual_grpo.progress import Progress
from visual_grpo.run_folder import RunFolder
from visual_grpo.selftest import Check
from visual_grpo.tracking import Tracker
from visual_grpo.watchdog import Watchdog

if TYPE_CHECKING:
    from visual_grpo.trainer import Result


class RunWriter:
    """The run's folder, its watchdog and everything that reports."""

    def __init__(self, folder: RunFolder, config: RunConfig, *, main: bool, unit: str) -> None:
        """Open trackers and the progress line.

        Args:
            folder: of the run.
            config: resolved.
            main: whether this process writes.
            unit: what speed counts, `images` or `tokens`.

        Raises:
            UserError: a tracker's package is missing.
        """
        self.folder, self.config, self.main, self.unit = folder, config, main, unit
        self.progress = Progress(config.train.steps, enabled=main, max_minutes=config.train.max_minutes)
        self.tracker = Tracker(config.track, folder, config.model_dump(mode="json"), self.message) if main else None
        self._log = _LogLines(self.message)
        if main:
            logging.getLogger("visual_grpo").addHandler(self._log)
        self.watchdog = Watchdog(
            config.watchdog.timeout_s,
            config.watchdog.action,
            on_timeout=self.message,
            on_phase=self.progress.phase,
            stacks=folder.stacks if main else None,
        )

    def message(self, text: str) -> None:
        """Print a line and keep it in the run's log."""
        if not self.main:
            return
        self.progress.message(text)
        with contextlib.suppress(OSError), self.folder.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _record(self, record: Mapping[str, Any]) -> None:
        if self.main:
            self.folder.append_metrics(record)
            assert self.tracker is not None
            self.tracker.log(record)

    def step(self, step: int, metrics: dict[str, float], histograms: dict[str, Any], *, samples: int) -> None:
        """One iteration is done: its figures and the seconds of each phase since the last."""
        times = self.watchdog.pop_times()
        times["total"] = sum(times.values())
        units = metrics.get("length", 1.0) * samples if self.unit == "tokens" else samples
        times[f"{self.unit}_per_s"] = units / max(times["total"], 1e-9)
        self._record(
            {
                "kind": "train",
                "step": step,
                "metrics": metrics,
                "histograms": histograms,
                "time": times,
                "memory_gb": memory_gb(),
            }
        )
        self.progress.step(step, metrics, times)

    def alarm(self, alarm: Alarm) -> None:
        """An alarm went off."""
        self._record(alarm.record())
        self.message(f"ALARM {alarm.message}" if alarm.action == "warn" else f"STOP {alarm.message}")

    def self_test(self, checks: Sequence[Check]) -> None:
        """Print the self-test and keep it."""
        if not self.main:
            return
        self.folder.write_json(self.folder.self_test, [c.record() for c in checks])
        self.checks("self-test", checks)

    def checks(self, title: str, checks: Sequence[Check]) -> None:
        """Print checks."""
        if not self.main:
            return
        marks = {"ok": "ok  ", "warn": "WARN", "failed": "FAIL"}
        self.message("\n".join([title, *(f"  {marks[c.status]} {c.name}: {c.detail}" for c in checks)]))

    def evaluation(self, step: int, found: Evaluation, marks: Mapping[str, Any]) -> None:
        """Keep every sample's scores, the means and the first samples; `marks` join the record."""
        times = self.watchdog.pop_times()
        if not self.main:
            return
        self.folder.write_eval(step, found.rows)
        self._samples(step, found)
        self._record(
            {
                "kind": "eval",
                "step": step,
                "metrics": found.metrics,
                "by_tag": found.by_tag,
                "n": len(found.rows),
                "time": times,
                **marks,
            }
        )
        self.message(held_out_line(step, found))
        if "stop" in marks:
            self.message(f"STOP step {step}: {marks['stop']}")

    def _samples(self, step: int, found: Evaluation) -> None:
        count = self.config.eval.grid
        if count == 0:
            return
        rows = found.rows[:count]
        marks = [next((v for v in r["values"].values() if v is not None), None) for r in rows]
        if found.images is not None:
            from visual_grpo.grid import save_grid

            n = min(len(found.images), len(rows))
            save_grid(
                found.images[:n], [r["prompt"] for r in rows[:n]], marks[:n], self.folder.samples_path(step, ".png")
            )
        elif rows and "text" in rows[0]:
            self.folder.write_text_samples(step, [r["prompt"] for r in rows], [r["text"] for r in rows], marks)

    def rewind(self, step: int, size: int, *, final: int | None) -> tuple[Evaluation | None, Evaluation | None]:
        """Forget what was written after the checkpoint of `step`, when metrics.jsonl had `size` bytes (main process).

        Args:
            step, size: of the checkpoint.
            final: step whose weights the last evaluation measures, if no training step is left.

        Returns:
            The evaluations before the first step and after the last one, where they were made and still count.
        """
        self.progress.resume(step)
        first = self._stored(0) if step > 0 else None
        wanted, finals = self.config.eval.final_samples, self.folder.read_metrics("eval")
        last = finals[-1] if finals and finals[-1].get("final") else {}
        if final is not None and (last.get("step"), last.get("n")) == (final, wanted):
            return first, self._stored(final)
        self.folder.cut_metrics(size)
        return first, None

    def _stored(self, step: int) -> Evaluation | None:
        rows = self.folder.read_eval(step)
        if not rows:
            return None
        metrics, by_tag = summarise(rows)
        return Evaluation(rows=rows, metrics=metrics, by_tag=by_tag)

    def finish(self, result: Result) -> Path | None:
        """Write the report and close what is open."""
        path = None
        if self.main:
            from visual_grpo.report import write_report

            path = write_report(self.folder.path)
        self.close()
        return path

    def close(self) -> None:
        """Close trackers, the progress line, the watchdog and the folder's lock."""
        logging.getLogger("visual_grpo").removeHandler(self._log)
        self.progress.close()
        self.watchdog.close()
        if self.tracker is not None:
            self.tracker.close()
        self.folder.close()


class _LogLines(logging.Handler):
    """Warnings of the package (a reward that failed on some rows) in the run's log, and above the progress line."""

    def __init__(self, message: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._message = message

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a record on as one line."""
        self._message(f"{record.levelname} {record.getMessage()}")


def memory_gb() -> dict[str, float]:
    """Peak memory of this process so far: resident, and of the accelerator where there is one."""
    import resource

    import torch

    out = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        out["accelerator"] = torch.cuda.max_memory_allocated() / 2**30
    return out


def held_out_line(step: int, found: Evaluation) -> str:
    """An evaluation in one line: means of tasks where prompts have tags, else means of samples."""
    shown = main_figures(found.metrics)
    what = f"n={len(found.rows)}, mean of tasks" if found.by_tag else f"n={len(found.rows)}"
    return f"held-out at step {step} ({what}): " + "  ".join(f"{k} {v:.4f}" for k, v in sorted(shown.items()))
