"""Files of one JSON object a line, as a run writes them: strict JSON, equal records are equal bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError

__all__ = ["finite", "json_line", "read_jsonl"]


def read_jsonl(path: Path, *, torn_end: bool = False) -> list[dict[str, Any]]:
    """The records of a file with one JSON object a line; with `torn_end` an incomplete last line is left out.

    Raises:
        UserError: the file cannot be read, or a line is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif not (torn_end and number == len(lines)):
            raise UserError(f"line {number} of {str(path)!r} is not a JSON object; delete the line or restore the file")
    return records


def json_line(record: Mapping[str, Any]) -> str:
    """One record as a line: keys sorted, numbers in full; a value that JSON cannot hold is null and listed under `non_finite`."""
    clean, bad = finite(record)
    if bad:
        clean = {**clean, "non_finite": sorted({*clean.get("non_finite", ()), *bad})}
    return json.dumps(clean, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def finite(value: Any, key: str = "") -> tuple[Any, list[str]]:
    """A copy that JSON can hold, and the dotted keys whose numbers were NaN or infinite."""
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None, [key]
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return value, []
    bad: list[str] = []
    out: dict[Any, Any] = {}
    for name, item in items:
        out[name], found = finite(item, f"{key}.{name}" if key else str(name))
        bad += found
    return (out if isinstance(value, Mapping) else list(out.values())), bad
