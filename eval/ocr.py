"""OCR accuracy (Flow-GRPO): the mean of the OCR reward over images of prompts with a quoted text.

The published "OCR accuracy" is this mean and not a rate of exact matches; the published engine is PaddleOCR 2.9.1 (en). Exact
matches, contained targets and the mean edit distance are reported beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import ImageSample, find_samples
from visual_grpo.eval.protocol import figure, finish, score_samples
from visual_grpo.option_types import check_types
from visual_grpo.reward import to_pil
from visual_grpo.rewards.ocr import Ocr
from visual_grpo.rewards.ocr_score import match_text

__all__ = ["SAMPLES", "evaluate", "evaluate_folder", "summarise"]

SAMPLES = 1
"""images of a prompt in the published protocol"""


def evaluate_folder(
    folder: str | Path,
    reader: Ocr,
    *,
    prompts: str | Path | None = None,
    batch_size: int = 64,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Read all images of a folder, a batch at a time; resumable where `out` is given.

    Returns:
        One line an image: filename, index, prompt, target, recognised, and score, exact, contained, distance (see `OcrMatch`);
        the four are None for a prompt without a quoted text.
    """

    def score(samples: list[ImageSample], images: Tensor) -> list[dict[str, Any]]:
        asked = [str(sample.metadata.get("prompt", "")) for sample in samples]
        targets = [reader.target(prompt, s.metadata) for prompt, s in zip(asked, samples, strict=True)]
        wanted = [i for i, target in enumerate(targets) if target and reader.rules.normalise(target)]
        pictures = to_pil(images)
        read = dict(zip(wanted, reader.read_many([pictures[i] for i in wanted]), strict=True))
        return [_line(asked[i], targets[i], read.get(i), reader) for i in range(len(samples))]

    samples = find_samples(folder, prompts)
    return score_samples(samples, score, name="ocr", out=out, settings=settings or {}, batch_size=batch_size)


def _line(prompt: str, target: str | None, recognised: str | None, reader: Ocr) -> dict[str, Any]:
    match = None if recognised is None or target is None else match_text(recognised, target, reader.rules)
    return {
        "prompt": prompt,
        "target": target,
        "recognised": recognised or "",
        "score": None if match is None else match.score,
        "exact": None if match is None else match.exact,
        "contained": None if match is None else match.contained,
        "distance": None if match is None else match.distance,
    }


def summarise(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up result lines: accuracy (mean score), exact_match, contained and edit_distance over images with a target.

    The four are None when no image has a target; `images` counts those that have one, `without_target` the others.
    """
    lines = list(results)
    scored = [line for line in lines if line["score"] is not None]

    def mean(key: str) -> float | None:
        return sum(float(line[key]) for line in scored) / len(scored) if scored else None

    return {
        "accuracy": mean("score"),
        "exact_match": mean("exact"),
        "contained": mean("contained"),
        "edit_distance": mean("distance"),
        "images": len(scored),
        "without_target": len(lines) - len(scored),
    }


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    batch_size: int = 64,
    grid: int = 24,
    model: str | None = None,
    adapter: str | Path | None = None,
    **reader: Any,
) -> dict[str, Any]:
    """Score a folder of images.

    Args:
        images, prompts: see `find_samples`.
        out: result folder (see `visual_grpo.eval.protocol`).
        batch_size: images read at a time.
        grid: pictures of each grid.
        model, adapter: not used; a model is sampled before this is called.
        reader: arguments of the reward `ocr` (engine, nfkc, ...).

    Returns:
        `summarise`, `table`, and `interval`: 95 % bootstrap interval of the accuracy, drawing whole prompts.
    """
    if images is None:
        raise UserError("ocr needs a folder of images (--images DIR).")
    try:
        ocr = Ocr(**reader)
    except TypeError as error:
        raise UserError(f"ocr: {error}.") from error
    check_types(Ocr, reader, "evaluation 'ocr'")
    results = evaluate_folder(images, ocr, prompts=prompts, batch_size=batch_size, out=out, settings=reader)
    summary = summarise(results)
    if not summary["images"]:
        raise UserError(
            'no prompt has a text in double quotes, so there is nothing to read; write a sign that says "Open".'
        )
    rows = [
        figure("OCR accuracy (mean score)", results, "score"),
        figure("exact match", results, "exact"),
        figure("contained", results, "contained"),
        figure("edit distance", results, "distance"),
    ]
    summary |= {"interval": [rows[0]["low"], rows[0]["high"]], "table": rows}
    return finish(summary, results, out=out, verdict=_verdict, grid=grid)


def _verdict(line: Mapping[str, Any]) -> tuple[bool | None, float | None, str]:
    if line["score"] is None:
        return None, None, ""
    return bool(line["contained"]), float(line["score"]), f"wanted {line['target']!r}, read {line['recognised']!r}"
