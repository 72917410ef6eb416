"""The progress line of a run: a live line in a terminal, one plain line a step elsewhere (a CI log, nohup)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import IO, Any

__all__ = ["Progress", "format_seconds"]

# metrics key -> label, in the order of the line
_FIGURES = {
    "reward/total": "reward",
    "kl": "KL",
    "clip_fraction": "clip",
    "grad_norm": "grad",
}
_RATES = {"tokens_per_s": "tok/s", "images_per_s": "img/s", "samples_per_s": "samples/s"}


class Progress:
    """Shows phase, step, reward, KL, clip fraction, speed and time left.

    Example:
        >>> import io
        >>> out = io.StringIO()
        >>> with Progress(2, file=out) as progress:
        ...     progress.step(1, {"reward/total": 0.5, "kl": 0.001}, {"total": 2.0, "images_per_s": 8.0})
        >>> out.getvalue()
        'step 1/2  reward 0.5000  KL 0.0010  8.0 img/s  2.0 s  left 0 s\\n'

    Args:
        total_steps: `train.steps`.
        enabled: False on every process but the main one.
        max_minutes: `train.max_minutes`, an upper bound of the time left.
        file: default the standard error output, so that output for programs stays clean.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        enabled: bool = True,
        max_minutes: float | None = None,
        file: IO[str] | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.max_minutes = max_minutes
        self.enabled = enabled
        self._file: IO[str] | None = file if file is not None else sys.stderr
        self._first = self._done = 0
        self._started = time.monotonic()
        self._phase = ""
        self._figures = ""
        self._live: Any = None
        self._task: Any = None
        if self._file is None:  # a process without standard error output
            self.enabled = False
        elif enabled and self._file.isatty():
            self._open_live()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resume(self, step: int) -> None:
        """Start at `step` steps done; the time left is reckoned from here."""
        self._first = self._done = step
        self._started = time.monotonic()
        self._refresh()

    def phase(self, name: str) -> None:
        """Show what the run is doing; nothing is printed outside a terminal."""
        self._phase = name
        self._refresh()

    def step(self, step: int, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Show the figures of a step that is done.

        Args:
            step: 1-based.
            metrics: the record's `metrics`.
            times: the record's `time`; `total` and one of `tokens_per_s`, `images_per_s`, `samples_per_s` are shown.
        """
        self._done = step
        self._figures = "  ".join(_figures(metrics, times))
        if not self.enabled:
            return
        if self._live is not None:
            self._refresh()
            return
        left = self._left()
        self._print(
            f"step {step}/{self.total_steps}  {self._figures}"
            + (f"  left {format_seconds(left)}" if left is not None else "")
        )

    def message(self, text: str) -> None:
        """Print a line (an evaluation's result, an alarm) above the live line."""
        if not self.enabled:
            return
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text))
        else:
            self._print(text)

    def _print(self, line: str) -> None:
        """A reader that has gone (`2>&1 | head`, a dead tee) ends the lines, not the run: its log and records go on."""
        try:
            print(line, file=self._file, flush=True)
        except (OSError, ValueError):
            self.enabled = False

    def close(self) -> None:
        """Leave the live display; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _left(self) -> float | None:
        """Seconds until the last step, by the mean of this process's steps."""
        steps = self._done - self._first
        if steps <= 0:
            return None
        spent = time.monotonic() - self._started
        left = spent / steps * max(self.total_steps - self._done, 0)
        return left if self.max_minutes is None else max(min(left, self.max_minutes * 60 - spent), 0.0)

    def _open_live(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._live = RichProgress(
            TextColumn("[bold]{task.fields[phase]}", table_column=Column(width=10, no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            console=Console(file=self._file),
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._live.add_task(
            "", total=self.total_steps, completed=self._done, phase="", figures="", left=""
        )
        self._live.start()

    def _refresh(self) -> None:
        if self._live is None:
            return
        left = self._left()
        self._live.update(
            self._task,
            completed=self._done,
            phase=self._phase,
            figures=self._figures,
            left="" if left is None else f"left {format_seconds(left)}",
        )


def _figures(metrics: Mapping[str, float], times: Mapping[str, float]) -> list[str]:
    parts = [f"{label} {metrics[key]:.4f}" for key, label in _FIGURES.items() if metrics.get(key) is not None]
    rate = next((key for key in _RATES if times.get(key)), None)
    if rate is not None:
        value = times[rate]
        parts.append(f"{value:.0f} {_RATES[rate]}" if value >= 100 else f"{value:.1f} {_RATES[rate]}")
    if times.get("total") is not None:
        parts.append(f"{times['total']:.1f} s")
    return parts


def format_seconds(seconds: float) -> str:
    """A duration for people.

    >>> format_seconds(42.3), format_seconds(312), format_seconds(7560)
    ('42 s', '5 min 12 s', '2 h 06 min')
    """
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"
