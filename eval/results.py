"""What the text protocols write.

`items.jsonl` holds one line an independent item (a problem, an image) with its figures; `results.jsonl` one a sample;
`summary.json` the means with their 95 % bootstrap intervals over items.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.eval.intervals import bootstrap_interval
from visual_grpo.run_folder import write_atomic

__all__ = ["means", "task_text", "write_all"]

Item = Mapping[str, Any]


def task_text(row: Item, otherwise: str | None = None) -> str:
    """What a problem or question asks, by which `--compare` tells one file's items from another's.

    Where it has no such text this is `otherwise`, or the whole row.
    """
    found = next((row[key] for key in ("prompt", "question", "problem") if isinstance(row.get(key), str)), None)
    if found is not None:
        return str(found)
    return json.dumps(row, sort_keys=True, default=str) if otherwise is None else otherwise


def means(items: Sequence[Item], figures: Sequence[str], scale: float = 1.0) -> dict[str, Any]:
    """Mean of each figure over the items that have it, times `scale`, and `intervals`: figure -> [low, high]."""
    out: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for name in figures:
        values = [float(item[name]) * scale for item in items if item.get(name) is not None]
        if values:
            found = bootstrap_interval(values)
            out[name], intervals[name] = found.mean, [found.low, found.high]
    return {**out, "intervals": intervals}


def _write_lines(path: Path, lines: Iterable[Item]) -> None:
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))


def write_all(
    out: str | Path | None, *, summary: Mapping[str, Any], results: Iterable[Item], items: Iterable[Item]
) -> None:
    """Write the three files into folder `out`; None writes nothing."""
    if out is None:
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "results.jsonl", results)
    _write_lines(folder / "items.jsonl", items)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
