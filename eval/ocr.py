"""OCR accuracy (Flow-GRPO): the mean of the OCR reward over images of prompts with a quoted text.

The published "OCR accuracy" is this mean and not a rate of exact matches; the published engine is PaddleOCR 2.9.1 (en). Exact
matches, contained targets and the mean edit distance are reported beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.eval.images import find_samples, load_batches
from visual_grpo.eval.intervals import bootstrap_interval
from visual_grpo.reward import to_pil
from visual_grpo.rewards.ocr import Ocr
from visual_grpo.rewards.ocr_score import match_text

__all__ = ["evaluate", "evaluate_folder", "summarise"]


def evaluate_folder(
    folder: str | Path, reader: Ocr, *, prompts: str | Path | None = None, batch_size: int = 64
) -> list[dict[str, Any]]:
    """Read all images of a folder.

    Returns:
        One line an image: filename, index, prompt, target, recognised, and score, exact, contained, distance (see `OcrMatch`);
        the four are None for a prompt without a quoted text.
    """
    lines = []
    for samples, images in load_batches(find_samples(folder, prompts), batch_size):
        for sample, image in zip(samples, to_pil(images), strict=True):
            prompt = str(sample.metadata.get("prompt", ""))
            target = reader.target(prompt, sample.metadata)
            recognised = reader.read(image) if target else ""
            match = match_text(recognised, target, reader.rules) if target else None
            lines.append(
                {
                    "filename": str(sample.file),
                    "index": sample.index,
                    "prompt": prompt,
                    "target": target,
                    "recognised": recognised,
                    "score": None if match is None else match.score,
                    "exact": None if match is None else match.exact,
                    "contained": None if match is None else match.contained,
                    "distance": None if match is None else match.distance,
                }
            )
    return lines


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
    model: str | None = None,
    adapter: str | Path | None = None,
    **reader: Any,
) -> dict[str, Any]:
    """Score a folder of images; with `out`, writes results.jsonl and summary.json there.

    Args:
        images, prompts: see `find_samples`.
        out: folder for results.
        batch_size: images read from disk at a time.
        reader: arguments of the reward `ocr` (engine, nfkc, ...).

    Returns:
        `summarise`, and `interval`: 95 % bootstrap interval of the accuracy, drawing whole prompts.
    """
    if images is None:
        raise UserError("ocr needs a folder of images (--images DIR).")
    try:
        ocr = Ocr(**reader)
    except TypeError as error:
        raise UserError(f"ocr: {error}.") from error
    results = evaluate_folder(images, ocr, prompts=prompts, batch_size=batch_size)
    summary = summarise(results)
    if not summary["images"]:
        raise UserError(
            'no prompt has a text in double quotes, so there is nothing to read; write a sign that says "Open".'
        )
    scored = [line for line in results if line["score"] is not None]
    interval = bootstrap_interval([line["score"] for line in scored], clusters=[line["index"] for line in scored])
    summary["interval"] = [interval.low, interval.high]
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in results)
        (Path(out) / "results.jsonl").write_text(text, encoding="utf-8")
        (Path(out) / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
