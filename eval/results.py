"""What the text protocols write, and the paired comparison of two such results.

`items.jsonl` holds one line an independent item (a problem, an image) with its figures; `results.jsonl` one a sample;
`summary.json` the means with their 95 % bootstrap intervals over items.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.eval.intervals import bootstrap_interval, paired_bootstrap

__all__ = ["compare", "means", "write_all"]

Item = Mapping[str, Any]


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
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


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
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _read_items(folder: str | Path) -> dict[str, dict[str, Any]]:
    path = Path(folder) / "items.jsonl"
    if not path.is_file():
        raise UserError(
            f"{str(path)!r} is missing, so there is nothing to compare; run the evaluation with --out {folder} first."
        )
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {str(line["item"]): line for line in lines}


def compare(a: str | Path, b: str | Path) -> dict[str, Any]:
    """Paired differences b - a of every figure that both results have, over the items that both have.

    Returns:
        items; only_a, only_b: items without a partner; table: rows figure, a, b, value (mean of b - a), low, high (95 % paired
        bootstrap over items), p_value, items.

    Raises:
        UserError: no results there, or no item in common.
    """
    left, right = _read_items(a), _read_items(b)
    shared = [key for key in left if key in right]
    if not shared:
        raise UserError(f"{str(a)!r} and {str(b)!r} have no item in common: they are evaluations of different sets.")
    names = dict.fromkeys(n for key in shared for n in left[key] if n != "item")
    table: list[dict[str, Any]] = []
    for name in names:
        pairs = [(left[key].get(name), right[key].get(name)) for key in shared]
        kept = [(float(x), float(y)) for x, y in pairs if x is not None and y is not None]
        if kept:
            first, second = zip(*kept, strict=True)
            found = paired_bootstrap(first, second)
            table.append(
                {
                    "figure": name,
                    "a": sum(first) / len(first),
                    "b": sum(second) / len(second),
                    "value": found.mean,
                    "low": found.low,
                    "high": found.high,
                    "p_value": found.p_value,
                    "items": found.count,
                }
            )
    return {
        "items": len(shared),
        "only_a": len(left) - len(shared),
        "only_b": len(right) - len(shared),
        "table": table,
    }
