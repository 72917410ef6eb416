"""Reads what `score` is given: prompts, and the images or texts that belong to them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError

__all__ = ["Sample", "image_samples", "read_prompts", "read_texts", "text_samples"]

TEXT_COLUMNS = ("text", "completion", "answer")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One thing to score."""

    prompt: str
    metadata: dict[str, Any]
    prompt_index: int  # its samples are a group
    image: Path | None = None
    text: str | None = None


def read_prompts(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Read prompts and their metadata: .txt (one a line), or .jsonl or .parquet with a column `prompt`."""
    from visual_grpo.config import DataConfig
    from visual_grpo.data import load_prompts

    if path.suffix.lower() not in (".txt", ".jsonl", ".json", ".parquet"):
        raise UserError(f"{str(path)!r} is no prompt file: give a .txt (one prompt a line), .jsonl or .parquet file.")
    rows = load_prompts(DataConfig(source=str(path), shuffle=False))
    return [row.prompt for row in rows], [row.metadata for row in rows]


def read_texts(path: Path) -> list[str]:
    """Read texts, which may be empty: .txt (one a line), or .jsonl with a column `text`, `completion` or `answer`."""
    from visual_grpo.run_folder import read_jsonl

    if path.suffix.lower() == ".jsonl":
        rows = read_jsonl(path)
        column = next((name for name in TEXT_COLUMNS if rows and name in rows[0]), None)
        if column is None:
            have = ", ".join(rows[0]) if rows else "none"
            raise UserError(f"the rows of {path} have no {' or '.join(map(repr, TEXT_COLUMNS))}; they have {have}.")
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get(column), str):
                raise UserError(f"{path} row {number}: {column!r} must be a text, got {row.get(column)!r}.")
        return [row[column] for row in rows]
    from visual_grpo.data import read_text

    text = read_text(path, "the texts")
    if not text:
        raise UserError(f"{str(path)!r} is empty.")
    return text.removesuffix("\n").split("\n")


def natural_order(path: Path) -> list[tuple[int, int | str]]:
    """Return a key that sorts numbers in names by value.

    >>> sorted(map(Path, ["10.png", "2.png", "a/1.png"]), key=natural_order)[0].name
    '2.png'
    """
    parts = re.split(r"(\d+)", path.as_posix())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def _per_prompt(count: int, prompts: int, what: str) -> int:
    """Return how many samples each prompt has."""
    if count % prompts:
        raise UserError(
            f"{count} {what} do not belong to {prompts} prompts: give one {what.removesuffix('s')} a prompt, or the same "
            f"number for each, in the order of the prompts."
        )
    return count // prompts


def image_samples(folder: Path, prompts_file: Path) -> list[Sample]:
    """Pair the images of a folder (any depth, by path, `2.png` before `10.png`) with the prompts.

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
        found = [p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file()]
        files = sorted(found, key=lambda path: natural_order(path.relative_to(folder)))
        if not files:
            raise UserError(f"{str(folder)!r} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}).")
    share = _per_prompt(len(files), len(prompts), "images")
    return [
        Sample(prompt=prompts[i // share], metadata=rows[i // share], prompt_index=i // share, image=file)
        for i, file in enumerate(files)
    ]


def text_samples(texts_file: Path, prompts_file: Path) -> list[Sample]:
    """Pair the texts of a file (see `read_texts`) with the prompts, in order."""
    prompts, rows = read_prompts(prompts_file)
    texts = read_texts(texts_file)
    share = _per_prompt(len(texts), len(prompts), "texts")
    if texts_file.suffix.lower() == ".jsonl":
        from visual_grpo.data import check_pairing
        from visual_grpo.run_folder import read_jsonl

        check_pairing(texts_file, read_jsonl(texts_file), [{"prompt": prompt} for prompt in prompts])
    return [
        Sample(prompt=prompts[i // share], metadata=rows[i // share], prompt_index=i // share, text=text)
        for i, text in enumerate(texts)
    ]
