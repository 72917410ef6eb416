"""What all evaluations share: a resumable loop over samples, tables with intervals, the files of a result folder.

A result folder holds `settings.json` (what the numbers depend on), `results.jsonl` (one line a sample, written as they come),
`summary.json`, `table.md` and, for pictures, `successes.png` and `failures.png`. A run that was interrupted goes on where it
stopped; a picture that has changed since, or whose prompt has, is scored again; other settings need another folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import ImageSample, load_batches
from visual_grpo.eval.intervals import bootstrap_interval
from visual_grpo.json_lines import json_line, read_jsonl
from visual_grpo.run_folder import write_atomic

__all__ = [
    "check_settings",
    "figure",
    "finish",
    "markdown_table",
    "progress_bar",
    "prompt_clusters",
    "score_samples",
    "table_cells",
]

Line = dict[str, Any]
SETTINGS, RESULTS = "settings.json", "results.jsonl"
STAMP = "stamp"
"""key of a result line: size and time of the file that was scored, and a digest of what its prompt asks for."""


def check_settings(folder: Path, settings: Mapping[str, Any], what: str = "results") -> None:
    """Write `settings` into a folder, or refuse to go on in a folder that was begun with others.

    Raises:
        UserError: naming the settings that differ.
    """
    # A function's text holds its address, which is another one in the next process.
    given = json.loads(json.dumps(settings, default=lambda value: getattr(value, "__qualname__", str(value))))
    path = folder / SETTINGS
    if path.is_file():
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {str(path)!r}: {error}; delete the folder to start again.") from error
        differ = [key for key in sorted({*stored, *given}) if stored.get(key) != given.get(key)]
        if differ:
            changes = "; ".join(f"{key} was {stored.get(key)!r} and is now {given.get(key)!r}" for key in differ)
            raise UserError(
                f"{str(folder)!r} holds {what} made with other settings ({changes}). Give another --out, or delete the folder."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(given, indent=2, sort_keys=True) + "\n")


def _stamp(sample: ImageSample) -> str:
    state = sample.file.stat()
    asked = json.dumps([sample.index, sample.metadata], sort_keys=True, default=str)
    return f"{state.st_size}/{state.st_mtime_ns}/{hashlib.sha256(asked.encode()).hexdigest()[:16]}"


def score_samples(
    samples: Sequence[ImageSample],
    score: Callable[[list[ImageSample], Tensor], list[Line]],
    *,
    name: str,
    out: str | Path | None,
    settings: Mapping[str, Any],
    batch_size: int = 64,
    lasts: Callable[[Line], bool] = lambda line: True,
) -> list[Line]:
    """Score images batch by batch with a progress bar, keeping what `out` has already.

    Args:
        samples: in the order of the answer.
        score: gets samples and their images [n, 3, H, W], gives one line each; `filename`, `index` and `sample` are added.
        name: of the evaluation, for the bar and the settings.
        out: result folder, or None to keep nothing.
        settings: what the lines depend on, beside the images.
        batch_size: images read and scored at a time.
        lasts: whether a stored line counts when the evaluation is started again; failures are better tried again.

    Returns:
        One line a sample, in order.

    Raises:
        UserError: other settings than the folder's, or no batch size.
    """
    if batch_size < 1:
        raise UserError(f"{name}: batch_size is {batch_size}; give 1 or more.")
    done: dict[str, Line] = {}
    target = None if out is None else Path(out) / RESULTS
    if target is not None:
        check_settings(target.parent, {"evaluation": name, **settings})
        if target.is_file():
            done = {str(line.get("filename")): line for line in read_jsonl(target, torn_end=True)}
    stamps = {str(s.file): _stamp(s) for s in samples}
    kept = {key: line for key, line in done.items() if line.get(STAMP) == stamps.get(key, "") and lasts(line)}
    if target is not None and target.is_file():  # without a torn end and without lines that no longer count
        write_atomic(target, "".join(map(json_line, kept.values())))
    missing = [s for s in samples if str(s.file) not in kept]
    counted = _sample_numbers(samples)
    with progress_bar(len(missing), name) as advance:
        for part, images in load_batches(missing, batch_size):
            lines = []
            for sample, line in zip(part, score(part, images), strict=True):
                key = str(sample.file)
                where = {"filename": key, "index": sample.index, "sample": counted[key], STAMP: stamps[key]}
                lines.append({**where, **line})
                kept[key] = lines[-1]
            if target is not None:
                with target.open("a", encoding="utf-8") as file:
                    file.write("".join(map(json_line, lines)))
            advance(len(part))
    return [kept[str(s.file)] for s in samples]


@contextmanager
def progress_bar(total: int, name: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr that gives `advance(count)`; silent where there is nothing to do."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=total == 0, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.advance(task, count)


def _sample_numbers(samples: Sequence[ImageSample]) -> dict[str, int]:
    """Which image of its prompt each file is, from 0."""
    seen: dict[int, int] = {}
    numbers = {}
    for sample in samples:
        numbers[str(sample.file)] = seen.get(sample.index, 0)
        seen[sample.index] = numbers[str(sample.file)] + 1
    return numbers


def prompt_clusters(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """[N] ids of distinct prompts: images of one prompt are not independent, wherever it stands in the file."""
    ids: dict[str, int] = {}
    return [ids.setdefault(str(line.get("prompt", line.get("index"))), len(ids)) for line in lines]


def figure(
    name: str,
    lines: Sequence[Mapping[str, Any]],
    key: str | Callable[[Mapping[str, Any]], Any],
    *,
    scale: float = 1.0,
    group: str = "",
) -> dict[str, Any]:
    """One row of a table: the mean of a column with its 95 % bootstrap interval, drawing whole prompts.

    Args:
        name: of the row.
        lines: results.
        key: column, or a function of a line; None and NaN are left out.
        scale: factor of what is shown.
        group: of rows that belong together.

    Returns:
        figure, group, value, low, high (None where no line has a value), images, prompts.
    """
    values = [line.get(key) if isinstance(key, str) else key(line) for line in lines]
    known = {i: float(value) for i, value in enumerate(values) if value is not None and value == value}
    row: dict[str, Any] = {
        "figure": name,
        "group": group,
        "value": None,
        "low": None,
        "high": None,
        "images": len(known),
        "prompts": 0,
    }
    if known:
        clusters = prompt_clusters(lines)
        found = bootstrap_interval(list(known.values()), clusters=[clusters[i] for i in known])
        row |= {"value": found.mean * scale, "low": found.low * scale, "high": found.high * scale}
        row["prompts"] = found.count
    return row


def markdown_table(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `figure` as a Markdown table."""
    text = "| figure | value | 95 % interval | images | prompts |\n|---|---|---|---|---|\n"
    for row in table:
        text += "| " + " | ".join(table_cells(row)) + " |\n"
    return text


def table_cells(row: Mapping[str, Any]) -> list[str]:
    """A row of `figure` as texts: figure, value, interval, images, prompts."""

    def number(value: Any) -> str:
        return "" if value is None else f"{value:.4f}"

    interval = "" if row.get("low") is None else f"{number(row['low'])} to {number(row['high'])}"
    label = f"{row['group']}: {row['figure']}" if row.get("group") else str(row["figure"])
    return [label, number(row["value"]), interval, str(row.get("images", "")), str(row.get("prompts", ""))]


def finish(
    summary: dict[str, Any],
    lines: Sequence[Line],
    *,
    out: str | Path | None,
    verdict: Callable[[Mapping[str, Any]], tuple[bool | None, float | None, str]] | None = None,
    grid: int = 24,
) -> dict[str, Any]:
    """Write the files of a result folder.

    Args:
        summary: with the rows of `figure` under `table`.
        lines: all results, in order.
        out: result folder; None writes nothing.
        verdict: (success, score, reason) of a line for the picture grids; None for success leaves the line out.
        grid: pictures of each grid at most; 0 for none.

    Returns:
        `summary`.
    """
    if out is None:
        return summary
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / RESULTS, "".join(map(json_line, lines)))
    write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomic(folder / "table.md", markdown_table(summary.get("table", ())))
    if verdict is not None and grid > 0:
        from visual_grpo.eval.grids import write_grids

        write_grids(folder, lines, verdict, count=grid)
    return summary
