"""Two result folders of one evaluation, sample by sample: paired differences B - A with intervals.

Pairing removes what the prompts share, so a difference is seen with far fewer samples than two separate intervals need.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.data import read_text
from visual_grpo.errors import UserError
from visual_grpo.eval.intervals import paired_bootstrap
from visual_grpo.json_lines import read_jsonl

__all__ = ["compare", "compare_lines", "read_lines_of"]

_NOT_FIGURES = {"index", "item", "sample", "problem", "non_finite", "atom_count", "choices"}
_PLACE = re.compile(r"(\d+)/(?:samples/)?(\d+)\.\w+$")  # GenEval's layout, in result lines that have no index


def read_lines_of(path: str | Path) -> list[dict[str, Any]]:
    """Result lines of a result folder, or of a results.jsonl (ours or GenEval's own).

    The text protocols also write items.jsonl, one line a problem with its pass@k and votes, which then counts.

    Raises:
        UserError: there are none.
    """
    given = Path(path)
    file = given
    if given.is_dir():
        items = given / "items.jsonl"
        file = items if items.is_file() else given / "results.jsonl"
    if not file.is_file():
        raise UserError(f"--compare: there is no {str(file)!r}; give two result folders (--out of an evaluation).")
    lines = read_jsonl(file)
    if not lines:
        raise UserError(f"--compare: {str(file)!r} is empty.")
    return lines


def _keyed(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Lines by (prompt, number of the sample of that prompt)."""
    counts: dict[str, int] = {}
    keyed = {}
    for line in lines:
        place = _PLACE.search(str(line.get("filename", "")))
        index = next((line[k] for k in ("index", "item", "problem") if k in line), int(place[1]) if place else None)
        prompt = f"{index}/{line.get('prompt', '')}"
        number = (
            line["sample"] if isinstance(line.get("sample"), int) else int(place[2]) if place else counts.get(prompt, 0)
        )
        counts[prompt] = counts.get(prompt, 0) + 1
        if (prompt, number) in keyed:
            raise UserError(f"--compare: two result lines are of sample {number} of prompt {prompt!r}; score it again.")
        keyed[prompt, number] = line
    return keyed


def _figures(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns that hold numbers or truth values, or nothing, in all lines."""
    names = list(dict.fromkeys(key for line in lines for key in line))

    def numeric(name: str) -> bool:
        values = [line.get(name) for line in lines]
        return all(v is None or isinstance(v, bool | int | float) for v in values) and any(
            v is not None for v in values
        )

    return sorted(name for name in names if name not in _NOT_FIGURES and numeric(name))


def compare_lines(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare two sets of result lines on the samples that both have.

    Returns:
        samples: pairs; only_a, only_b: samples without a partner; table: rows figure, group (the tag, or ""), a, b, value
        (mean of b - a), low, high, p_value, samples, prompts.

    Raises:
        UserError: they have no sample or no figure in common.
    """
    left, right = _keyed(a), _keyed(b)
    shared = [key for key in left if key in right]
    if not shared:
        raise UserError(
            "--compare: the two have no sample of the same prompt in common; evaluate both on one prompt file."
        )
    names = [name for name in _figures(a) if name in _figures(b)]
    if not names:
        raise UserError("--compare: the result lines have no figure in common; compare two results of one evaluation.")
    tags = list(dict.fromkeys(str(left[key]["tag"]) for key in shared if left[key].get("tag") is not None))
    rows = []
    for name in names:
        rows.append(_row(name, "", [(key[0], left[key].get(name), right[key].get(name)) for key in shared]))
        if len(tags) > 1:
            for tag in tags:
                chosen = [key for key in shared if str(left[key].get("tag")) == tag]
                rows.append(_row(name, tag, [(key[0], left[key].get(name), right[key].get(name)) for key in chosen]))
    return {
        "samples": len(shared),
        "only_a": len(left) - len(shared),
        "only_b": len(right) - len(shared),
        "table": [row for row in rows if row["samples"]],
    }


def _row(name: str, group: str, triples: Sequence[tuple[str, Any, Any]]) -> dict[str, Any]:
    known = [(p, float(x), float(y)) for p, x, y in triples if x is not None and y is not None]
    known = [(p, x, y) for p, x, y in known if math.isfinite(x) and math.isfinite(y)]
    if not known:
        return {"figure": name, "group": group, "samples": 0}
    ids: dict[str, int] = {}
    first, second = [x for _, x, _ in known], [y for _, _, y in known]
    found = paired_bootstrap(first, second, clusters=[ids.setdefault(p, len(ids)) for p, _, _ in known])
    return {
        "figure": name,
        "group": group,
        "a": sum(first) / len(first),
        "b": sum(second) / len(second),
        "value": found.mean,
        "low": found.low,
        "high": found.high,
        "p_value": found.p_value,
        "samples": len(known),
        "prompts": found.count,
    }


def compare(a: str | Path, b: str | Path, evaluation: str | None = None) -> dict[str, Any]:
    """Compare two result folders (see `compare_lines`).

    Args:
        a, b: result folders, or their result lines.
        evaluation: what they must be of, where they say; None: anything.

    Raises:
        UserError: a folder without results, or results of two evaluations or of different settings that decide the score.
    """
    settings = [_settings(Path(path)) for path in (a, b)]
    for path, found in zip((a, b), settings, strict=True):
        if evaluation is not None and found.get("evaluation", evaluation) != evaluation:
            raise UserError(
                f"--compare: {str(path)!r} holds results of {found['evaluation']!r}, not of {evaluation!r}."
            )
    if all(settings):
        differ = [key for key in sorted({*settings[0], *settings[1]}) if settings[0].get(key) != settings[1].get(key)]
        if differ:
            raise UserError(
                f"--compare: the two were scored differently ({differ[0]}: {settings[0].get(differ[0])!r} and "
                f"{settings[1].get(differ[0])!r}), so their difference says nothing; score both in the same way."
            )
    return {"a": str(a), "b": str(b), **compare_lines(read_lines_of(a), read_lines_of(b))}


def _settings(path: Path) -> dict[str, Any]:
    file = (path if path.is_dir() else path.parent) / "settings.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file, "settings"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"--compare: {str(file)!r} is not a JSON object; score the folder again.")
    return found
