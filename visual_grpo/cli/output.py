"""How commands print: JSON for programs, a table for people."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["as_mapping", "print_figures", "print_json", "print_mapping", "print_table"]


def as_mapping(result: Any) -> dict[str, Any]:
    """Return the content of a result: its `to_dict()`, its dataclass fields, or the mapping that it is."""
    if hasattr(result, "to_dict"):
        return dict(result.to_dict())
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return dataclasses.asdict(result)
    if isinstance(result, Mapping):
        return dict(result)
    raise TypeError(f"{type(result).__name__} is neither a mapping nor a dataclass and has no to_dict()")


def print_json(value: Any) -> None:
    """Print strict JSON: numbers that are not finite become null, paths and tensors their text or list."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")  # else JSON's own escapes, which any reader knows
    print(json.dumps(_plain(value), indent=2, ensure_ascii=not unicode, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if dataclasses.is_dataclass(value) or hasattr(value, "to_dict"):
        return _plain(as_mapping(value))
    return str(value)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, whole: Sequence[str] = ()
) -> None:
    """Print a table; numbers are right-aligned and have four digits after the point.

    A narrow terminal folds texts, but neither numbers nor the columns named by `whole`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    listed = [[*row] for row in rows]
    table = Table(title=Text(title) if title else None, title_justify="left")
    for position, column in enumerate(columns):
        numeric = any(isinstance(row[position], float) for row in listed)
        table.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=column in whole or (numeric and len(column) <= 16),
        )
    for row in listed:
        table.add_row(*(Text(_cell(value)) for value in row))
    Console().print(table)


def print_mapping(title: str, values: Mapping[str, Any]) -> None:
    """Print the scalars of a (nested) mapping as a table of two columns; lists and long texts are left to `--json`."""
    print_table(title, ["", "value"], [[key, value] for key, value in _scalars(values)])


def print_figures(title: str, values: Mapping[str, Any]) -> None:
    """`print_mapping` of a result whose `intervals` hold [low, high] of some of its figures: these get a column."""
    intervals = values.get("intervals")
    if not isinstance(intervals, Mapping) or not intervals:
        print_mapping(title, values)
        return
    rows = []
    for key, value in _scalars({k: v for k, v in values.items() if k != "intervals"}):
        ends = intervals.get(key)
        rows.append([key, value, "" if ends is None else f"[{ends[0]:.4f}, {ends[1]:.4f}]"])
    print_table(title, ["", "value", "95 % interval"], rows)


def _scalars(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 200):
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
    return "" if value is None else str(value)
