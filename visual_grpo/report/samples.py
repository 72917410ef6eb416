"""Before and after on the same prompts: a gallery of pictures, or a table of completions."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from visual_grpo.grid import mark_color, mark_scale
from visual_grpo.report.data import Run

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["samples_section"]

_TINY = 96  # pixels up to which a picture is kept exactly and shown without smoothing
_SHOWN = (
    256  # pixels of the longer side of a larger one: the page shows pairs of about 115, twice that on a sharp screen
)
_PAIRS = 24
_TEXTS = 12
_CHARACTERS = 1500


def samples_section(run: Run) -> str:
    """The first held-out samples before and after; empty where the run kept none."""
    return _gallery(run) or _texts(run)


def _gallery(run: Run) -> str:
    if not run.grids:
        return ""
    first, last = min(run.grids), max(run.grids)
    before, after = run.grids[first], run.grids[last]
    rows = {step: run.rows.get(step, []) for step in (first, last)}
    both = first != last and before.captions[:1] == after.captions[:1]
    count = min(len(before.tiles), len(after.tiles), _PAIRS) if both else min(len(after.tiles), _PAIRS)
    marks = {step: _marks(run, rows[step], grid.marks, count) for step, grid in ((first, before), (last, after))}
    scale = mark_scale([m for values in marks.values() for m in values])
    figures = []
    for i in range(count):
        sides = [(before, first), (after, last)] if both else [(after, last)]
        pictures = "".join(_picture(grid.tiles[i], f"step {step}") for grid, step in sides)
        scores = "".join(f"<span>{_mark(marks[step][i], scale)}</span>" for _, step in sides)
        figures.append(
            f'<figure><div class="pair">{pictures}</div><div class="scores">{scores}</div>'
            f"<figcaption>{escape(after.captions[i])}</figcaption></figure>"
        )
    note = f"Left: step {first}; right: step {last}, same prompt and noise." if both else f"Step {last}."
    note = f'<p class="note">{note} The first {count} held-out samples, not picked.</p>'
    return f'{note}<div class="gallery">{"".join(figures)}</div>'


def _marks(run: Run, rows: list[dict[str, Any]], stored: list[float | None], count: int) -> list[float | None]:
    """Headline scores from the evaluation; the marks of the grid where its file is gone."""
    return [run.mark(row) for row in rows[:count]] if len(rows) >= count else stored[:count]


def _picture(tile: Image, label: str) -> str:
    from PIL import Image as Pillow

    buffer = io.BytesIO()
    if max(tile.size) <= _TINY:
        tile.save(buffer, "PNG", optimize=True)
        kind, style = "png", ' class="tiny"'
    else:
        tile = tile.copy()
        tile.thumbnail((_SHOWN, _SHOWN), Pillow.Resampling.LANCZOS)
        tile.save(buffer, "JPEG", quality=85, optimize=True)
        kind, style = "jpeg", ""
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img{style} alt="{label}" title="{label}" src="data:image/{kind};base64,{data}">'


def _mark(mark: float | None, scale: Callable[[float], float]) -> str:
    if mark is None:
        return "–"
    red, green, blue = mark_color(scale(mark))
    return f'<i class="dot" style="background:rgb({red},{green},{blue})"></i>{mark:.3g}'


def _texts(run: Run) -> str:
    if not run.evals:
        return ""
    first, last = run.ends or (run.evals[-1]["step"],) * 2
    before = {(r["index"], r["sample"]): r for r in run.rows.get(first, []) if "text" in r}
    after = {(r["index"], r["sample"]): r for r in run.rows.get(last, []) if "text" in r}
    keys = [key for key in after if key in before][:_TEXTS]
    if not keys:
        return ""
    scale = mark_scale([run.mark(side[key]) for side in (before, after) for key in keys])
    sides = [before, after] if first != last else [after]
    rows = []
    for key in keys:
        said = "".join(
            f'<td class="text">{_mark(run.mark(side[key]), scale)}'
            f'<div class="said">{escape(_cut(str(side[key]["text"])))}</div></td>'
            for side in sides
        )
        rows.append(f'<tr><td><div class="said">{escape(_cut(str(after[key]["prompt"])))}</div></td>{said}</tr>')
    heads = "".join(f"<th>step {step}</th>" for step in dict.fromkeys((first, last)))
    note = "Same prompts and seeds. " if len(sides) > 1 else ""
    return (
        f'<p class="note">{note}The first {len(keys)} held-out samples, not picked.</p>'
        f'<div class="scroll"><table><tr><th>prompt</th>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _cut(text: str) -> str:
    if len(text) <= _CHARACTERS:
        return text
    return f"{text[:_CHARACTERS]} … ({len(text) - _CHARACTERS} more characters)"
