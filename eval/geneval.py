"""GenEval (arXiv 2310.11513): do images show the objects, counts, colours and positions of their prompts?

The rules are `visual_grpo.rewards.geneval_rules`; this file reads folders, writes the original result lines and adds up. The
published detector is Mask2Former Swin-S; numbers of another detector are not comparable with published ones and must not
stand in one table column with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import find_samples, load_batches
from visual_grpo.eval.intervals import bootstrap_interval
from visual_grpo.rewards.geneval import Detector, Judgement, load_detector
from visual_grpo.rewards.geneval_rules import DetectionFilter

__all__ = ["TASKS", "evaluate", "evaluate_folder", "judge_images", "read_results", "summarise", "write_results"]

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def judge_images(
    images: Tensor,
    metadata: Sequence[Mapping[str, Any]],
    filenames: Sequence[str],
    detector: Detector,
    keep: DetectionFilter | None = None,
) -> list[dict[str, Any]]:
    """Judge images by the official rule, one result line an image.

    Args:
        images: [N, 3, H, W] in [0, 1].
        metadata: [N] objects with `tag`, `prompt`, `include` and perhaps `exclude`.
        filenames: [N], for the result lines.
        detector: finds objects.
        keep: which detections count; None: the reference's settings.

    Returns:
        [N] lines: filename, tag, prompt, correct, reason, metadata (JSON text), details (JSON text: class -> boxes
        [x1, y1, x2, y2, score]), and beside the original fields strict and partial (flow_grpo's rule).
    """
    lines = []
    for raw, row, filename in zip(detector.detect(images), metadata, filenames, strict=True):
        missing = [key for key in ("tag", "prompt", "include") if key not in row]
        if missing:
            raise UserError(
                f"{filename}: its metadata has no {', '.join(missing)}; GenEval needs tag, prompt and include."
            )
        judged = Judgement(raw, row, keep or DetectionFilter())
        boxes = {name: [[*map(float, o.box), float(o.score)] for o in found] for name, found in judged.objects.items()}
        lines.append(
            {
                "filename": filename,
                "tag": row["tag"],
                "prompt": row["prompt"],
                "correct": judged.official.correct,
                "reason": "\n".join(judged.official.reasons),
                "metadata": json.dumps(row),
                "details": json.dumps(boxes),
                "strict": judged.partial.correct,
                "partial": judged.partial.score,
            }
        )
    return lines


def evaluate_folder(
    folder: str | Path,
    detector: Any = "testbed",
    *,
    prompts: str | Path | None = None,
    keep: DetectionFilter | None = None,
    batch_size: int = 64,
) -> list[dict[str, Any]]:
    """Judge all images of a folder (layouts: `find_samples`); returns the result lines."""
    finder = load_detector(detector, keep)
    lines: list[dict[str, Any]] = []
    for samples, images in load_batches(find_samples(folder, prompts), batch_size):
        lines += judge_images(images, [s.metadata for s in samples], [str(s.file) for s in samples], finder, keep)
    return lines


def summarise(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up result lines as the original does.

    Returns:
        overall: unweighted mean of the task scores present (None without results); tasks: tag -> {score, correct, images};
        missing_tasks; images, image_accuracy; prompts (by their metadata), prompt_accuracy: share with a correct image.
    """
    tasks: dict[str, dict[str, Any]] = {}
    prompts: dict[str, bool] = {}
    correct = count = 0
    for line in results:
        right = bool(line["correct"])
        task = tasks.setdefault(line["tag"], {"score": 0.0, "correct": 0, "images": 0})
        task["correct"] += right
        task["images"] += 1
        prompts[line["metadata"]] = prompts.get(line["metadata"], False) or right
        correct += right
        count += 1
    for task in tasks.values():
        task["score"] = task["correct"] / task["images"]
    ranked = sorted(tasks, key=lambda tag: (TASKS.index(tag) if tag in TASKS else len(TASKS), tag))
    return {
        "overall": sum(task["score"] for task in tasks.values()) / len(tasks) if tasks else None,
        "tasks": {tag: tasks[tag] for tag in ranked},
        "missing_tasks": [tag for tag in TASKS if tag not in tasks],
        "images": count,
        "image_accuracy": correct / count if count else None,
        "prompts": len(prompts),
        "prompt_accuracy": sum(prompts.values()) / len(prompts) if prompts else None,
    }


def write_results(path: str | Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Write result lines as JSON lines, which the original `summary_scores.py` reads."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in results), encoding="utf-8")


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """Read result lines, ours or the original's."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read GenEval results from {str(path)!r}: {error}.") from error
    needed = ("tag", "correct", "metadata")
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or any(key not in line for key in needed):
            raise UserError(f"{path}, line {number}: no GenEval result; it needs {', '.join(needed)}.")
    return lines


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    detector: Any = "testbed",
    threshold: float = 0.3,
    counting_threshold: float = 0.9,
    max_overlap: float = 1.0,
    batch_size: int = 64,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Score a folder of images; with `out`, writes results.jsonl and summary.json there.

    Returns:
        `summarise`, and `image_accuracy_interval`: 95 % bootstrap interval of the image accuracy, drawing whole prompts.
    """
    if images is None:
        raise UserError("geneval needs a folder of images (--images DIR).")
    keep = DetectionFilter(threshold=threshold, counting_threshold=counting_threshold, max_overlap=max_overlap)
    results = evaluate_folder(images, detector, prompts=prompts, keep=keep, batch_size=batch_size)
    summary = summarise(results)
    ids = {text: index for index, text in enumerate(dict.fromkeys(line["metadata"] for line in results))}
    interval = bootstrap_interval(
        [float(line["correct"]) for line in results], clusters=[ids[line["metadata"]] for line in results]
    )
    summary["image_accuracy_interval"] = [interval.low, interval.high]
    summary["detector"] = detector if isinstance(detector, str) else type(detector).__name__
    if out is not None:
        write_results(Path(out) / "results.jsonl", results)
        (Path(out) / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
