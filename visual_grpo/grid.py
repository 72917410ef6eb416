"""Picture grids: samples with their captions and a coloured score mark, in one PNG that can be taken apart again."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.errors import UserError
from visual_grpo.run_folder import write_atomic

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

__all__ = ["Grid", "before_after", "load_grid", "mark_color", "mark_scale", "save_grid"]

_INK, _PAPER, _MUTED = (31, 41, 55), (255, 255, 255), (107, 114, 128)
_GAP, _LINES, _FONT = 10, 2, 12
_LINE = _FONT + 4
_SMALLEST, _LARGEST = 128, 512  # pixels of a tile's longer side: tiny samples are enlarged, large ones reduced
_KEY = "visual_grpo"  # of the PNG text that holds the layout


@dataclass(kw_only=True)
class Grid:
    """What `load_grid` reads back."""

    tiles: list[Image]
    """[n] pictures, tiny ones at their own size."""
    captions: list[str]
    marks: list[float | None]


def save_grid(
    images: Tensor,
    captions: Sequence[str],
    marks: Sequence[float | None] | None,
    path: Path,
    columns: int | None = None,
    upscale: int | None = None,
    lines: int = _LINES,
) -> Path:
    """Write a grid of samples.

    Args:
        images: [n, 3, H, W] float in [0, 1]; values outside are clamped.
        captions: [n], one under each picture, cut after `lines` lines; a line break starts a new one.
        marks: [n] scores, red to green over [0, 1], or over their own range where one lies outside; None for no score.
        path: the PNG.
        columns: default: about as wide as high.
        upscale: whole factor without smoothing; default: what makes the longer side at least 128 pixels.
        lines: of a caption.

    Raises:
        ValueError: wrong shapes or lengths.
        RunError: the file cannot be written.
    """
    tiles, factor = _tiles(images, upscale)
    shown = [None] * len(tiles) if marks is None else list(marks)
    if not len(tiles) == len(captions) == len(shown):
        raise ValueError(
            f"{len(tiles)} images, {len(captions)} captions and {len(shown)} marks: these must be equally many"
        )
    columns = columns or math.ceil(math.sqrt(len(tiles) * 1.5))
    _write(_compose(tiles, captions, shown, columns, lines=lines), path, tiles, captions, shown, columns, factor)
    return path


def before_after(
    before: Tensor,
    after: Tensor,
    captions: Sequence[str],
    marks_before: Sequence[float | None] | None,
    marks_after: Sequence[float | None] | None,
    path: Path,
    columns: int = 4,
) -> Path:
    """Write a grid of pairs, before on the left and after on the right, of the same prompts and seeds.

    Args:
        before, after: [n, 3, H, W] float in [0, 1].
        captions: [n] prompts.
        marks_before, marks_after: [n] scores in [0, 1] or None.
        path: the PNG.
        columns: pairs side by side.

    Raises:
        ValueError: `before` and `after` differ in number.
    """
    left, factor = _tiles(before, None)
    right, _ = _tiles(after, None)
    n = len(left)
    if len(right) != n or len(captions) != n:
        raise ValueError(
            f"{n} images before, {len(right)} after and {len(captions)} captions: these must be equally many"
        )
    tiles = [tile for pair in zip(left, right, strict=True) for tile in pair]
    labels = [label for caption in captions for label in (f"before: {caption}", f"after: {caption}")]
    lists = [[None] * n if m is None else list(m) for m in (marks_before, marks_after)]
    marks = [mark for pair in zip(*lists, strict=True) for mark in pair]
    _write(_compose(tiles, labels, marks, 2 * columns, pairs=True), path, tiles, labels, marks, 2 * columns, factor)
    return path


def load_grid(path: Path) -> Grid:
    """Take a grid apart into its pictures, captions and marks.

    Raises:
        UserError: the file is no picture, or was not written by `save_grid`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            file.load()
            sheet, text = file.convert("RGB"), file.info.get(_KEY)
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"cannot read picture {str(path)!r}: {error}") from None
    if text is None:
        raise UserError(f"{str(path)!r} was not written by visual_grpo.grid, so its layout is unknown")
    layout = json.loads(text)
    width, height, factor = layout["width"], layout["height"], layout["factor"]
    tiles = []
    for x, y in layout["corners"]:
        tile = sheet.crop((x, y, x + width, y + height))
        tiles.append(tile.resize((width // factor, height // factor), Image.Resampling.NEAREST) if factor > 1 else tile)
    return Grid(tiles=tiles, captions=layout["captions"], marks=layout["marks"])


def mark_scale(marks: Sequence[float | None]) -> Callable[[float], float]:
    """What maps these scores to [0, 1]: nothing if they lie there, else their range."""
    known = [mark for mark in marks if mark is not None and math.isfinite(mark)]
    low, high = min([0.0, *known]), max([1.0, *known])
    if (low, high) == (0.0, 1.0):
        return lambda mark: mark
    low, high = min(known), max(known)
    return lambda mark: (mark - low) / (high - low) if high > low else 0.5


def mark_color(mark: float) -> tuple[int, int, int]:
    """Red at 0, amber at 0.5, green at 1; the same scale in grids and reports."""
    stops = ((200, 62, 62), (214, 158, 46), (47, 133, 90))
    position = min(max(mark, 0.0), 1.0) * 2
    low = min(int(position), 1)
    share = position - low
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(stops[low], stops[low + 1], strict=True))
    return red, green, blue


def _tiles(images: Tensor, upscale: int | None) -> tuple[list[Image], int]:
    """PIL pictures of the size they are shown in, and the whole factor they were enlarged by (1 when not)."""
    from PIL import Image

    if images.ndim != 4 or images.shape[1] != 3 or images.shape[0] == 0:
        raise ValueError(f"images must be [n, 3, H, W] with n > 0, got {tuple(images.shape)}")
    pixels = (
        images.detach().float().nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    )
    height, width = pixels.shape[1:3]
    factor = upscale or max(1, math.ceil(_SMALLEST / max(height, width)))
    tiles = [Image.fromarray(array) for array in pixels]
    if factor > 1:
        tiles = [tile.resize((width * factor, height * factor), Image.Resampling.NEAREST) for tile in tiles]
    elif upscale is None and max(height, width) > _LARGEST:
        share = _LARGEST / max(height, width)
        size = (max(1, round(width * share)), max(1, round(height * share)))
        tiles = [tile.resize(size, Image.Resampling.LANCZOS) for tile in tiles]
    return tiles, factor


def _corners(count: int, columns: int, width: int, height: int, *, pairs: bool, lines: int) -> list[tuple[int, int]]:
    """Upper left corners of the tiles; the two pictures of a pair stand closer together."""
    cell = height + (lines + 1) * _LINE + _GAP

    def left(column: int) -> int:
        pair = column // 2 if pairs else 0
        gap = _GAP // 2 if pairs else _GAP
        return _GAP + column * (width + gap) + pair * _GAP

    return [(left(i % columns), _GAP + (i // columns) * cell) for i in range(count)]


def _compose(
    tiles: Sequence[Image],
    captions: Sequence[str],
    marks: Sequence[float | None],
    columns: int,
    *,
    pairs: bool = False,
    lines: int = _LINES,
) -> tuple[Image, list[tuple[int, int]]]:
    """The sheet and the corners of its tiles."""
    from PIL import Image, ImageDraw, ImageFont

    width, height = tiles[0].size
    columns = max(1, min(columns, len(tiles)))
    corners = _corners(len(tiles), columns, width, height, pairs=pairs, lines=lines)
    right = max(x for x, _ in corners) + width + _GAP
    bottom = corners[-1][1] + height + (lines + 1) * _LINE + _GAP
    sheet = Image.new("RGB", (right, bottom), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(_FONT)
    scale = mark_scale(marks)
    for tile, caption, mark, (x, y) in zip(tiles, captions, marks, corners, strict=True):
        sheet.paste(tile, (x, y))
        line = y + height + 3
        if mark is not None and math.isfinite(mark):
            color = mark_color(scale(mark))
            draw.rounded_rectangle((x, line + 2, x + 9, line + 11), 2, fill=color)
            draw.text((x + 14, line), f"{mark:.3g}", font=font, fill=_INK)
        for number, words in enumerate(_wrap(caption, width, font, lines), 1):
            draw.text((x, line + number * _LINE), words, font=font, fill=_MUTED)
    return sheet, corners


def _wrap(text: str, width: int, font: Any, most: int = _LINES) -> list[str]:
    """At most `most` lines of `text` that fit into `width` pixels; the rest is cut with an ellipsis."""
    lines: list[str] = []
    for part in text.split("\n"):
        lines.append("")
        for word in part.split():
            joined = f"{lines[-1]} {word}".strip()
            if font.getlength(joined) <= width or not lines[-1]:
                lines[-1] = joined
            else:
                lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [_cut(line, width, font) for line in lines]


def _cut(text: str, width: int, font: Any) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _write(
    composed: tuple[Image, list[tuple[int, int]]],
    path: Path,
    tiles: Sequence[Image],
    captions: Sequence[str],
    marks: Sequence[float | None],
    columns: int,
    factor: int,
) -> None:
    from PIL.PngImagePlugin import PngInfo

    sheet, corners = composed
    width, height = tiles[0].size
    finite = [None if mark is None or not math.isfinite(mark) else float(mark) for mark in marks]
    layout = {
        "width": width,
        "height": height,
        "factor": factor,
        "columns": columns,
        "corners": corners,
        "captions": list(captions),
        "marks": finite,
    }
    info = PngInfo()
    info.add_itxt(_KEY, json.dumps(layout))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", pnginfo=info, optimize=True)
    write_atomic(path, buffer.getvalue())
