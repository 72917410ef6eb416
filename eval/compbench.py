"""T2I-CompBench (arXiv 2307.06350): attributes by a judge; 2D spatial relations and numeracy by a detector.

Protocol: the validation prompts of a category (300), 10 images each. Non-spatial prompts are `eval preference
rewards=clip_score`; 3D spatial (depth) and the complex category are not here. Published figures use UniDet and BLIP-VQA; their
numeracy counts boxes of one class that overlap by 0.9 once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.compbench_rules import (
    asked_counts,
    asked_relation,
    attribute_score,
    lookup,
    noun_phrases,
    numeracy_score,
    spatial_score,
)
from visual_grpo.eval.images import ImageSample, find_samples
from visual_grpo.eval.protocol import figure, finish, score_samples
from visual_grpo.reward import to_pil
from visual_grpo.rewards.geneval import load_detector
from visual_grpo.rewards.geneval_rules import DetectionFilter, check_clauses, filter_detections
from visual_grpo.rewards.vqa_models import YES, opened_judge

__all__ = ["CATEGORIES", "SAMPLES", "evaluate"]

SAMPLES = 10
CATEGORIES = ("color", "shape", "texture", "spatial", "numeracy")


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    category: str = "color",
    detector: Any = "testbed",
    judge: Any = "testbed",
    judge_model: str | None = None,
    judge_options: Mapping[str, Any] | None = None,
    threshold: float = 0.3,
    near: float = 150.0,
    parser: str = "rules",
    batch_size: int = 32,
    grid: int = 24,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Score a folder of images of one category.

    Args:
        images, prompts: see `find_samples`.
        out: result folder.
        category: color, shape, texture (judge), spatial or numeracy (detector).
        detector: see the reward `geneval`.
        judge, judge_model, judge_options: see `visual_grpo.rewards.vqa_models.build_judge`.
        threshold: detections at or below it do not count.
        near: see `position_score`.
        parser: of noun phrases, "rules" or "spacy".
        batch_size: images at a time.
        grid: pictures of each grid.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        score: mean over images to which the category applies; category, images, not_applicable, table.

    Raises:
        UserError: no prompt asks for anything of the category.
    """
    if images is None:
        raise UserError("compbench needs a folder of images (--images DIR) or a model (--model PATH).")
    if category not in CATEGORIES or parser not in ("rules", "spacy"):
        raise UserError(
            f"compbench: category is {category!r} and parser {parser!r}; give {', '.join(CATEGORIES)}, and rules or spacy."
        )
    if near <= 0:
        raise UserError(f"compbench: near is {near}; give pixels above 0.")
    keep = DetectionFilter(threshold=threshold, counting_threshold=threshold)
    samples = find_samples(images, prompts)
    for sample in samples:
        try:
            check_clauses(sample.metadata)
        except ValueError as error:
            raise UserError(f"{sample.file}: {error}; mend its line of the prompt file.") from None
    settings: dict[str, Any] = {"category": category, "threshold": threshold, "near": near, "parser": parser}
    kwargs: dict[str, Any] = {"name": "compbench", "out": out, "settings": settings, "batch_size": batch_size}
    if category in ("color", "shape", "texture"):
        with opened_judge(judge, judge_model, judge_options) as (settings["source"], asked):
            lines = score_samples(samples, _judged(asked, parser), **kwargs)
    else:
        finder = load_detector(detector, keep)
        settings["source"] = detector if isinstance(detector, str) else type(detector).__name__
        rule = _spatial if category == "spatial" else _numeracy
        lines = score_samples(samples, _detected(finder, keep, rule, near), **kwargs)
    row = figure(f"T2I-CompBench {category}", lines, "score")
    if not row["images"]:
        raise UserError(f"compbench: no prompt asks for anything of the category {category!r}; see docs/evaluation.md.")
    summary = {"score": row["value"], "category": category, "judged_by": settings["source"], "images": row["images"]}
    summary |= {"not_applicable": len(lines) - row["images"], "table": [row]}
    return finish(summary, lines, out=out, verdict=_verdict, grid=grid)


Scorer = Callable[[list[ImageSample], Tensor], list[dict[str, Any]]]
"""One line for each picture of a batch."""


def _judged(judge: Any, parser: str) -> Scorer:
    """Scores by a judge's answers."""

    def score(samples: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
        pairs = zip(to_pil(pictures), samples, strict=True)
        return [_by_judge(judge, image, sample.metadata, parser) for image, sample in pairs]

    return score


def _detected(finder: Any, keep: DetectionFilter, rule: Callable[..., dict[str, Any]], near: float) -> Scorer:
    """Scores by what a detector finds."""

    def score(samples: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
        found = zip(finder.detect(pictures), samples, strict=True)
        return [rule(filter_detections(raw, None, keep), sample.metadata, near) for raw, sample in found]

    return score


def _entry(row: Mapping[str, Any], score: float | None, reason: str) -> dict[str, Any]:
    return {"prompt": str(row.get("prompt", "")), "score": score, "reason": reason}


def _by_judge(judge: Any, image: Any, row: Mapping[str, Any], parser: str) -> dict[str, Any]:
    phrases = noun_phrases(row, parser)[:8]
    if not phrases:
        return _entry(row, None, "no noun phrase")
    values = judge.probability(
        [image] * len(phrases), [f"{phrase}?" for phrase in phrases], [YES] * len(phrases)
    ).tolist()
    reason = ", ".join(f"{phrase} {value:.2f}" for phrase, value in zip(phrases, values, strict=True))
    return _entry(row, attribute_score(values), reason)


def _spatial(objects: Mapping[str, Any], row: Mapping[str, Any], near: float) -> dict[str, Any]:
    wanted = asked_relation(row)
    if wanted is None:
        return _entry(row, None, "no relation")
    best = [next(iter(lookup(objects, name)), None) for name in (wanted.a, wanted.b)]
    a, b = (None if item is None else (item.box, item.score) for item in best)
    missing = [name for name, item in zip((wanted.a, wanted.b), best, strict=True) if item is None]
    value = spatial_score(a, b, wanted.place, near=near)
    text = f"not found: {', '.join(missing)}" if missing else f"{wanted.a} {wanted.place} {wanted.b}: {value:.2f}"
    return _entry(row, value, text)


def _numeracy(objects: Mapping[str, Any], row: Mapping[str, Any], near: float) -> dict[str, Any]:
    wanted = asked_counts(row)
    if not wanted:
        return _entry(row, None, "no numbers")
    found = {name: len(lookup(objects, name)) for name in wanted}
    reason = ", ".join(f"{name} {found[name]} of {count}" for name, count in wanted.items())
    return _entry(row, numeracy_score(wanted, found), reason)


def _verdict(line: Mapping[str, Any]) -> tuple[bool | None, float | None, str]:
    value = line["score"]
    return (None if value is None else value >= 0.5), value, str(line["reason"])
