"""What a finished run prints: before and after by task, with a paired interval, and where the report is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visual_grpo.run_folder import RunFolder

if TYPE_CHECKING:
    from visual_grpo.trainer import Result


def paired_difference(
    before: Sequence[float], after: Sequence[float], tags: Sequence[str] | None = None, *, draws: int = 2000
) -> tuple[float, float, float]:
    """Mean difference of paired samples and its 95 % bootstrap interval (seeded).

    With `tags` the figure is the unweighted mean over tags, and samples are drawn again within each tag.
    """
    difference = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    labels = np.asarray(tags if tags is not None else [""] * len(difference))
    groups = [difference[labels == t] for t in sorted(set(labels.tolist()))]
    rng = np.random.default_rng(0)
    means = np.mean([g[rng.integers(0, len(g), (draws, len(g)))].mean(1) for g in groups], axis=0)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.mean([g.mean() for g in groups])), float(low), float(high)


def figures_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of values and details that a sample has: a reward may apply to a part of them."""
    names = dict.fromkeys(n for part in ("values", "details") for r in rows for n in r[part])
    return [n for n in names if any(_figure(r, n) is not None for r in rows)]


def _figure(row: dict[str, Any], name: str) -> float | None:
    value: float | None = {**row["values"], **row["details"]}.get(name)
    return value


def print_summary(result: Result) -> None:
    """Print the before/after table by task and the paths of the report and the model."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    folder = RunFolder(result.folder)
    if result.before is not None and result.after is not None and result.before.rows and result.step > 0:
        steps = f"{result.step if result.measured is None else result.measured} steps"
        table = Table(title=f"held-out, before and after {steps} (n={len(result.after.rows)}, same prompts and noises)")
        table.add_column("figure, by task", overflow="fold")
        for column in ("before", "after", "change", "95 % interval"):
            table.add_column(column, justify="right", no_wrap=True)
        shown = ""
        for figure, *row in comparison(result.before.rows, result.after.rows):
            if figure != shown:  # a line of its own: beside the tasks it would leave the numbers no room
                table.add_section()
                table.add_row(Text(figure, style="bold"))
                shown = figure
            table.add_row(Text(f"  {row[0]}"), *map(Text, row[1:]))
        console.print(table)
    if result.stopped:
        console.print(f"stopped early: {result.stopped}", markup=False)
    paths = {"run": folder.path, "model": folder.path / "model"}
    if result.best is not None:
        apart = (folder.path / "best").is_dir()
        console.print(f"best weights: {result.best}, in {'best' if apart else 'model'}/", markup=False)
        paths |= {"best": folder.path / "best"} if apart else {}
    if folder.report.is_file():
        paths["report"] = Path(folder.report).resolve()
    for name, path in paths.items():  # a path may hold [brackets], and is copied from a narrow terminal in one piece
        console.print(f"{name:8s}{path}", soft_wrap=True, markup=False, highlight=False)


def comparison(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (figure, task, before, after, change, interval); the mean of the tasks last.

    A figure that only some samples have is compared on those that have it both times, and its name says on how many.
    """
    out: list[tuple[str, ...]] = []
    n = min(len(before), len(after))
    before, after = before[:n], after[:n]
    shared = [f for f in figures_of(before) if f in figures_of(after)]
    tagged = all(r["tag"] is not None for r in after)
    for figure in shared:
        both = [i for i in range(n) if None not in (_figure(before[i], figure), _figure(after[i], figure))]
        if not both:
            continue
        name = figure if len(both) == n else f"{figure} (n={len(both)})"
        tags = [str(after[i]["tag"]) for i in both] if tagged else None
        x, y = (np.asarray([_figure(rows[i], figure) for i in both], dtype=float) for rows in (before, after))
        if tags is not None:
            labels = np.asarray(tags)
            for tag in sorted(set(tags)):
                chosen = labels == tag
                out.append(_line(name, tag, x[chosen], y[chosen], None))
        out.append(_line(name, "mean of tasks" if tags is not None else "all", x, y, tags))
    return out


def _line(name: str, tag: str, x: Any, y: Any, tags: Sequence[str] | None) -> tuple[str, ...]:
    change, low, high = paired_difference(x, y, tags)
    start = float(np.mean([x[np.asarray(tags) == t].mean() for t in sorted(set(tags))])) if tags else float(x.mean())
    return name, tag, f"{start:.3f}", f"{start + change:.3f}", f"{change:+.3f}", f"[{low:+.3f}, {high:+.3f}]"
