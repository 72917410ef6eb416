"""Folders of generated images: the layout of GenEval's generator, and flat ones with a prompt file.

out/00000/metadata.jsonl        the prompt's object (one line of JSON)
out/00000/samples/0000.png      its images
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visual_grpo.data import read_text
from visual_grpo.errors import UserError
from visual_grpo.pictures import to_rgb
from visual_grpo.reward import to_pil
from visual_grpo.run_folder import write_atomic

__all__ = [
    "ImageSample",
    "find_pictures",
    "find_samples",
    "load_batches",
    "load_image",
    "read_lines",
    "read_prompts",
    "write_samples",
]

logger = logging.getLogger(__name__)

OWN = ("successes.png", "failures.png")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_FLAT = re.compile(r"^(\d+)(?:[_-](\d+))?$")


@dataclass(frozen=True, kw_only=True)
class ImageSample:
    """One image and the prompt that it was made for."""

    file: Path
    index: int
    """of the prompt."""
    metadata: dict[str, Any]
    """the prompt's object; `prompt` is its text."""


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Read a prompt file: JSON objects with a `prompt`, one a line (.jsonl), or plain prompts (any other suffix)."""
    file = Path(path)
    lines = read_text(file, "prompt file").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            rows.append({"prompt": line.strip()})
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: no JSON object ({getattr(error, 'msg', error)}).") from error
        if not isinstance(row, dict):
            raise UserError(f'{file}, line {number}: expected a JSON object such as {{"prompt": ...}}.')
        rows.append(row)
    if not rows:
        raise UserError(f"{str(file)!r} has no prompts.")
    return rows


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Read a prompt file of pictures, each line with a text under `prompt`.

    Raises:
        UserError: a line without one, which would be scored against an empty prompt.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, start=1):
        named = isinstance(row.get("prompt"), str) and row["prompt"].strip()
        if not named and "item_id" not in row:  # DPG-Bench's items are found by their number
            raise UserError(
                f"{path}, prompt {number}: 'prompt' must be a text, got {row.get('prompt')!r}; the line has "
                f"{', '.join(map(repr, row)) or 'nothing'}."
            )
    return rows


def find_samples(folder: str | Path, prompts: str | Path | None = None) -> list[ImageSample]:
    """List the images of a folder with their prompts, sorted by prompt and name.

    Args:
        folder: GenEval's layout (`00000/samples/0000.png`), or flat files `00000.png` or `00000_1.png` whose number is the
            line of the prompt file, counted from 0.
        prompts: prompt file; needed for a flat folder, and in place of the folder's own metadata.jsonl otherwise.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"there is no folder {str(root)!r}.")
    rows = None if prompts is None else read_prompts(prompts)
    numbered = sorted((d for d in root.iterdir() if d.is_dir() and d.name.isdecimal()), key=lambda d: int(d.name))
    samples = [*_nested(numbered, rows)] if numbered else [*_flat(root, rows)]
    if not samples:
        raise UserError(f"{str(root)!r} has no images: neither 00000/samples/0000.png nor 00000.png was found.")
    _tell_left_out(root, samples, rows, numbered)
    return samples


def _tell_left_out(
    root: Path, samples: Sequence[ImageSample], rows: Sequence[dict[str, Any]] | None, folders: Sequence[Path]
) -> None:
    """Warn of prompts without an image and of images whose name says no prompt: a figure over a part looks like any other."""
    there = {sample.index for sample in samples}
    empty = sorted({int(folder.name) for folder in folders} - there)
    if rows is not None:
        empty = [index for index in range(len(rows)) if index not in there]
    if empty:
        logger.warning("%s: %d prompts have no image (the first: number %d, from 0).", root, len(empty), empty[0])
    used = {sample.file for sample in samples}
    other = [f for f in root.iterdir() if f.suffix.lower() in SUFFIXES and f not in used and f.name not in OWN]
    if other:
        logger.warning(
            "%s: %d images are left out, such as %s: names say the prompt, 00000.png.", root, len(other), other[0].name
        )


def find_pictures(folder: str | Path) -> list[ImageSample]:
    """List all images of a folder and below, sorted by path, each a sample of its own without a prompt."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"there is no folder {str(root)!r}.")
    files = sorted(f for f in root.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
    return [ImageSample(file=f, index=i, metadata={}) for i, f in enumerate(files)]


def _nested(folders: Sequence[Path], rows: Sequence[dict[str, Any]] | None) -> Iterator[ImageSample]:
    for folder in folders:
        index = int(folder.name)
        if rows is None:
            source = folder / "metadata.jsonl"
            if not source.is_file():
                raise UserError(f"{str(source)!r} is missing; add it, or give the prompt file (--prompts FILE).")
            metadata = read_prompts(source)[0]
        else:
            metadata = _row(rows, index, folder)
        inner = folder / "samples" if (folder / "samples").is_dir() else folder
        for file in sorted(inner.iterdir()):
            if file.suffix.lower() in SUFFIXES and file.stem.isdecimal():
                yield ImageSample(file=file, index=index, metadata=metadata)


def _flat(root: Path, rows: Sequence[dict[str, Any]] | None) -> Iterator[ImageSample]:
    found = []
    for file in root.iterdir():
        name = _FLAT.match(file.stem)
        if name and file.suffix.lower() in SUFFIXES:
            found.append((int(name[1]), int(name[2] or 0), file))
    if found and rows is None:
        raise UserError(f"the flat folder {str(root)!r} needs its prompt file: --prompts FILE, one prompt a line.")
    for index, _, file in sorted(found):
        assert rows is not None
        yield ImageSample(file=file, index=index, metadata=_row(rows, index, file))


def _row(rows: Sequence[dict[str, Any]], index: int, where: Path) -> dict[str, Any]:
    if index >= len(rows):
        raise UserError(
            f"{str(where)!r} belongs to prompt {index}, but the prompt file ends at {len(rows) - 1} (from 0)."
        )
    return rows[index]


def load_image(file: Path) -> Tensor:
    """Read one image [3, H, W] in [0, 1], as `to_rgb` shows it."""
    try:
        with Image.open(file) as opened:
            image = to_rgb(opened)
    except Exception as error:  # Pillow's formats raise SyntaxError, ValueError, struct.error and more
        raise UserError(f"cannot read the image {str(file)!r}: {error}.") from error
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def load_batches(samples: Sequence[ImageSample], size: int) -> Iterator[tuple[list[ImageSample], Tensor]]:
    """Read the images, at most `size` of equal height and width at a time: samples and [n, 3, H, W] in [0, 1]."""
    waiting: list[tuple[ImageSample, Tensor]] = []
    for sample in samples:
        image = load_image(sample.file)
        if waiting and (len(waiting) == size or waiting[0][1].shape != image.shape):
            yield [s for s, _ in waiting], torch.stack([i for _, i in waiting])
            waiting = []
        waiting.append((sample, image))
    if waiting:
        yield [s for s, _ in waiting], torch.stack([i for _, i in waiting])


def write_samples(folder: str | Path, index: int, metadata: Mapping[str, Any], images: Tensor) -> None:
    """Write the images [n, 3, H, W] of prompt `index` in GenEval's layout, losslessly."""
    target = Path(folder) / f"{index:05d}"
    (target / "samples").mkdir(parents=True, exist_ok=True)
    (target / "metadata.jsonl").write_text(json.dumps(metadata) + "\n", encoding="utf-8")
    for number, image in enumerate(to_pil(images)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        write_atomic(target / "samples" / f"{number:04d}.png", buffer.getvalue())  # a torn file would count as made
