"""Picture grids of an evaluation: successes and failures, each with its prompt and the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from visual_grpo.eval.images import load_image
from visual_grpo.grid import save_grid

__all__ = ["pick_evenly", "write_grids"]

SIDE = 192
Verdict = tuple[bool | None, float | None, str]


def pick_evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, spread evenly over the sequence.

    >>> pick_evenly(range(10), 4)
    [0, 2, 5, 7]
    """
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def write_grids(
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    verdict: Callable[[Mapping[str, Any]], Verdict],
    *,
    count: int = 24,
) -> list[Path]:
    """Write successes.png and failures.png; a grid without pictures is not written, and one of before is removed.

    Args:
        folder: where.
        lines: results with `filename` and `prompt`.
        verdict: (success or None, score, reason) of a line.
        count: pictures of a grid at most.
    """
    judged = [(line, *verdict(line)) for line in lines]
    written = []
    for name, wanted in (("successes", True), ("failures", False)):
        path = folder / f"{name}.png"
        chosen = pick_evenly([entry for entry in judged if entry[1] is wanted], count)
        if not chosen:
            path.unlink(missing_ok=True)
            continue
        images = torch.stack([_fit(load_image(Path(line["filename"]))) for line, _, _, _ in chosen])
        captions = [f"{line.get('prompt', '')}\n{reason}" for line, _, _, reason in chosen]
        save_grid(images, captions, [score for _, _, score, _ in chosen], path, lines=5)
        written.append(path)
    return written


def _fit(image: Tensor) -> Tensor:
    """[3, H, W] to [3, SIDE, SIDE] with white borders; small pictures are enlarged without smoothing."""
    height, width = image.shape[-2:]
    scale = SIDE / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    if scale >= 1:
        shown = interpolate(image[None], size=size, mode="nearest")[0]
    else:
        shown = interpolate(image[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    bottom, right = SIDE - size[0], SIDE - size[1]
    return pad(shown, (right // 2, right - right // 2, bottom // 2, bottom - bottom // 2), value=1.0)
