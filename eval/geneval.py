"""GenEval (arXiv 2310.11513): do images show the objects, counts, colours and positions of their prompts?

The rules are `visual_grpo.rewards.geneval_rules`; this file reads folders, writes the original result lines and adds up. The
published detector is Mask2Former Swin-S; numbers of another detector are not comparable with published ones and must not
stand in one table column with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import ImageSample, find_samples
from visual_grpo.eval.intervals import stratified_interval
from visual_grpo.eval.protocol import figure, finish, prompt_clusters, score_samples
from visual_grpo.rewards.geneval import Detector, Judgement, load_detector
from visual_grpo.rewards.geneval_rules import DetectionFilter
from visual_grpo.run_folder import write_atomic

__all__ = [
    "TASKS",
    "evaluate",
    "evaluate_folder",
    "format_summary",
    "judge_images",
    "read_results",
    "summarise",
    "table",
    "write_results",
]

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
        try:
            judged = Judgement(raw, row, keep or DetectionFilter())
        except ValueError as error:
            raise UserError(f"{filename}: {error}; mend its line of the prompt file.") from None
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
    out: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Judge all images of a folder (layouts: `find_samples`); returns the result lines. Resumable where `out` is given."""
    finder = load_detector(detector, keep)

    def score(samples: list[ImageSample], images: Tensor) -> list[dict[str, Any]]:
        return judge_images(images, [s.metadata for s in samples], [str(s.file) for s in samples], finder, keep)

    settings = {"detector": _name(detector), **asdict(keep or DetectionFilter())}
    samples = find_samples(folder, prompts)
    return score_samples(samples, score, name="geneval", out=out, settings=settings, batch_size=batch_size)


def _name(detector: Any) -> str:
    return detector if isinstance(detector, str) else type(detector).__name__


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


def format_summary(results: Sequence[Mapping[str, Any]]) -> str:
    """The text that the original's `summary_scores.py` prints: tasks in the order in which they first appear.

    Raises:
        UserError: no results.
    """
    if not results:
        raise UserError("there are no GenEval results to sum up.")
    found = summarise(results)
    lines = [
        "Summary",
        "=======",
        f"Total images: {found['images']}",
        f"Total prompts: {found['prompts']}",
        f"% correct images: {found['image_accuracy']:.2%}",
        f"% correct prompts: {found['prompt_accuracy']:.2%}",
        "",
        "Task breakdown",
        "==============",
    ]
    for tag in dict.fromkeys(str(line["tag"]) for line in results):
        task = found["tasks"][tag]
        lines.append(f"{tag:<16} = {task['score']:.2%} ({task['correct']} / {task['images']})")
    return "\n".join([*lines, "", f"Overall score (avg. over tasks): {found['overall']:.5f}", ""])


def table(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with intervals: overall (prompts drawn within each task), tasks, images, prompts; flow_grpo's rules where known."""
    clusters = prompt_clusters(results)
    overall = stratified_interval(
        [float(line["correct"]) for line in results], [str(line["tag"]) for line in results], clusters=clusters
    )
    rows: list[dict[str, Any]] = [
        {
            "figure": "overall (mean of tasks)",
            "group": "",
            "value": overall.mean,
            "low": overall.low,
            "high": overall.high,
            "images": len(results),
            "prompts": overall.count,
        }
    ]
    for tag in summarise(results)["tasks"]:
        rows.append(figure(tag, [line for line in results if line["tag"] == tag], "correct"))
    rows.append(figure("correct images", results, "correct"))
    best: dict[int, dict[str, Any]] = {}
    for cluster, line in zip(clusters, results, strict=True):
        entry = best.setdefault(cluster, {"prompt": str(cluster), "correct": False})
        entry["correct"] = entry["correct"] or bool(line["correct"])
    rows.append(figure("prompts with a correct image", list(best.values()), "correct"))
    rows += [figure(key, results, key, group="flow_grpo") for key in ("strict", "partial") if key in results[0]]
    return rows


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
    max_objects: int = 16,
    max_overlap: float = 1.0,
    position_threshold: float = 0.1,
    batch_size: int = 64,
    grid: int = 24,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Score a folder of images; the options are the original's.

    Args:
        images: folder in GenEval's layout, or a flat one (see `find_samples`).
        prompts: prompt file of a flat folder.
        out: result folder (see `visual_grpo.eval.protocol`); beside the usual files it gets summary_scores.txt, in the
            original's format.
        detector: "testbed", "mask2former" (published numbers), "package.module:Name" or an object with `detect`.
        threshold, counting_threshold, max_objects, max_overlap: see `DetectionFilter`.
        position_threshold: its `margin`.
        batch_size: images judged at a time.
        grid: pictures of each grid.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        `summarise`, `table`, and `image_accuracy_interval`: 95 % bootstrap interval of the image accuracy, drawing whole
        prompts.
    """
    if images is None:
        raise UserError("geneval needs a folder of images (--images DIR).")
    keep = DetectionFilter(
        threshold=threshold,
        counting_threshold=counting_threshold,
        max_objects=max_objects,
        max_overlap=max_overlap,
        margin=position_threshold,
    )
    results = evaluate_folder(images, detector, prompts=prompts, keep=keep, batch_size=batch_size, out=out)
    rows = table(results)
    accuracy = next(row for row in rows if row["figure"] == "correct images")
    summary = {
        **summarise(results),
        "image_accuracy_interval": [accuracy["low"], accuracy["high"]],
        "detector": _name(detector),
        "table": rows,
    }
    finish(summary, results, out=out, verdict=_verdict, grid=grid)
    if out is not None:
        write_atomic(Path(out) / "summary_scores.txt", format_summary(results))
    return summary


def _verdict(line: Mapping[str, Any]) -> tuple[bool, float, str]:
    found = ", ".join(f"{len(boxes)} {name}" for name, boxes in json.loads(line["details"]).items()) or "nothing"
    return bool(line["correct"]), float(line["correct"]), str(line["reason"]) or f"right: {found}"
