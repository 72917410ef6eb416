"""Reads what `score` is given: prompts, and the images or texts that belong to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError

__all__ = ["Sample", "image_samples", "read_prompts", "text_samples"]

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One thing to score."""

    prompt: str
    metadata: dict[str, Any]
    prompt_index: int  # its samples are a group
    image: Path | None = None
    text: str | None = None


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text; give a .txt (one a line) or a .jsonl file.") from error
    if not any(line.strip() for line in lines):
        raise UserError(f"{str(path)!r} is empty.")
    return lines


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error.msg}.") from error
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} is not a JSON object.")
        yield row


def _column(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the texts of a .txt file, or of the first of `names` that a .jsonl file's rows have, and the rows."""
    if path.suffix != ".jsonl":
        texts = [line.strip() for line in _lines(path) if line.strip()]
        return texts, [{} for _ in texts]
    rows = [*_objects(path)]
    name = next((name for name in names if name in rows[0]), None)
    if name is None:
        raise UserError(
            f"the rows of {path} have no {' or '.join(map(repr, names))}; they have {', '.join(rows[0]) or 'none'}."
        )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get(name), str):
            raise UserError(f"{path} row {number}: {name!r} must be a text, got {row.get(name)!r}.")
    return [row[name] for row in rows], rows


def read_prompts(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Read prompts: .txt (one a line) or .jsonl (`prompt`; the other columns are metadata)."""
    return _column(path, ("prompt", "question"))


def _per_prompt(count: int, prompts: int, what: str) -> int:
    """Return how many samples each prompt has."""
    if count % prompts:
        raise UserError(
            f"{count} {what} do not belong to {prompts} prompts: give one {what.removesuffix('s')} a prompt, or the same "
            f"number for each, in the order of the prompts."
        )
    return count // prompts


def image_samples(folder: Path, prompts_file: Path) -> list[Sample]:
    """Pair the images of a folder (any depth, by sorted path) with the prompts.

    A prompt row with a column `image` or `file_name` names its file; otherwise the images are taken in order, the same
    number for each prompt.
    """
    prompts, rows = read_prompts(prompts_file)
    column = next((name for name in ("image", "file_name") if name in rows[0]), None)
    if column is not None:
        files = [folder / str(row.get(column, "")) for row in rows]
        for file in files:
            if not file.is_file():
                raise UserError(f"{prompts_file} names the image {str(file)!r}, which does not exist.")
    else:
        files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        if not files:
            raise UserError(f"{str(folder)!r} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}).")
    share = _per_prompt(len(files), len(prompts), "images")
    return [
        Sample(prompt=prompts[i // share], metadata=rows[i // share], prompt_index=i // share, image=file)
        for i, file in enumerate(files)
    ]


def text_samples(texts_file: Path, prompts_file: Path) -> list[Sample]:
    """Pair the texts of a file (.txt one a line, or .jsonl with `text` or `completion`) with the prompts, in order."""
    prompts, rows = read_prompts(prompts_file)
    texts, _ = _column(texts_file, ("text", "completion", "answer"))
    share = _per_prompt(len(texts), len(prompts), "texts")
    return [
        Sample(prompt=prompts[i // share], metadata=rows[i // share], prompt_index=i // share, text=text)
        for i, text in enumerate(texts)
    ]
