"""GenEval2 (arXiv 2512.16853): soft answers of a judge to the questions of compositional prompts (Soft-TIFA).

800 prompts of 3 to 10 atoms, one image each. Published judge: Qwen3-VL-8B-Instruct (judge=vlm), greedy. The data are CC BY-NC 4.0
and are not shipped: give the prompt file with `vqa_list`, `skills` and `atom_count`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import ImageSample, find_samples
from visual_grpo.eval.protocol import figure, finish, score_samples
from visual_grpo.reward import to_pil
from visual_grpo.rewards.vqa_models import accepted_forms, opened_judge

__all__ = ["SAMPLES", "arithmetic_mean", "evaluate", "geometric_mean"]

SAMPLES = 1
SUFFIX = " Answer in one word."


def arithmetic_mean(scores: Sequence[float]) -> float:
    """Soft-TIFA AM of a prompt."""
    return sum(scores) / len(scores)


def geometric_mean(scores: Sequence[float]) -> float:
    """Soft-TIFA GM of a prompt; any 0 gives 0.

    >>> geometric_mean([0.25, 1.0]), geometric_mean([0.0, 1.0])
    (0.5, 0.0)
    """
    return 0.0 if min(scores) <= 0 else math.exp(math.fsum(map(math.log, scores)) / len(scores))


def _questions(sample: ImageSample) -> list[tuple[str, str]]:
    given = sample.metadata.get("vqa_list")
    usable = isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)
    if not given or not usable:
        raise UserError(
            f"{sample.file}: its metadata has no vqa_list of [question, answer]; geneval2 needs its prompt file."
        )
    return [(str(question), str(answer)) for question, answer in given]


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    judge: Any = "testbed",
    judge_model: str | None = None,
    judge_options: Mapping[str, Any] | None = None,
    suffix: str = SUFFIX,
    batch_size: int = 8,
    grid: int = 24,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Ask a judge all questions about all images.

    Args:
        images, prompts: see `find_samples`; lines with `vqa_list`, and `skills` and `atom_count` where known.
        out: result folder.
        judge, judge_model, judge_options: see `visual_grpo.rewards.vqa_models.build_judge`.
        suffix: put after each question.
        batch_size: images read at a time.
        grid: pictures of each grid.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        am, gm: 100 x mean over images of the two means; skills: skill -> 100 x mean score of its questions; atoms: atom count ->
        100 x mean GM; table.
    """
    if images is None:
        raise UserError("geneval2 needs a folder of images (--images DIR) or a model (--model PATH).")

    samples = find_samples(images, prompts)
    for sample in samples:
        _questions(sample)
    with opened_judge(judge, judge_model, judge_options) as (name, asked):

        def score(part: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
            return [_line(asked, s, picture, suffix) for s, picture in zip(part, to_pil(pictures), strict=True)]

        settings = {"judge": name, "suffix": suffix}
        lines = score_samples(samples, score, name="geneval2", out=out, settings=settings, batch_size=batch_size)
    rows = [figure("Soft-TIFA AM", lines, "am", scale=100.0), figure("Soft-TIFA GM", lines, "gm", scale=100.0)]
    answers = [
        {"prompt": line["prompt"], "skill": skill, "score": value}
        for line in lines
        for skill, value in zip(line["skills"], line["scores"], strict=True)
    ]
    for skill in dict.fromkeys(a["skill"] for a in answers if a["skill"] is not None):
        rows.append(figure(skill, [a for a in answers if a["skill"] == skill], "score", scale=100.0, group="skill"))
    for atoms in sorted({line["atom_count"] for line in lines if line["atom_count"] is not None}, key=_by_size):
        chosen = [line for line in lines if line["atom_count"] == atoms]
        rows.append(figure(str(atoms), chosen, "gm", scale=100.0, group="atoms"))
    summary = {"am": rows[0]["value"], "gm": rows[1]["value"], "judge": name, "images": len(lines)}
    for key, group in (("skills", "skill"), ("atoms", "atoms")):
        summary[key] = {row["figure"]: row["value"] for row in rows if row["group"] == group}
    return finish({**summary, "table": rows}, lines, out=out, verdict=_verdict, grid=grid)


def _by_size(atoms: Any) -> tuple[float, str]:
    return (float(atoms), "") if isinstance(atoms, int | float) else (math.inf, str(atoms))


def _line(judge: Any, sample: ImageSample, picture: Any, suffix: str) -> dict[str, Any]:
    pairs = _questions(sample)
    forms = [accepted_forms(question, answer) for question, answer in pairs]
    scores = judge.probability([picture] * len(pairs), [question + suffix for question, _ in pairs], forms).tolist()
    skills = sample.metadata.get("skills")
    return {
        "prompt": str(sample.metadata.get("prompt", "")),
        "am": arithmetic_mean(scores),
        "gm": geometric_mean(scores),
        "scores": scores,
        "skills": skills if isinstance(skills, list) and len(skills) == len(scores) else [None] * len(scores),
        "atom_count": sample.metadata.get("atom_count"),
        "questions": [question for question, _ in pairs],
    }


def _verdict(line: Mapping[str, Any]) -> tuple[bool, float, str]:
    worst = min(range(len(line["scores"])), key=lambda i: line["scores"][i])
    text = f"{line['scores'][worst]:.2f}: {line['questions'][worst]}"
    return line["gm"] >= 0.5, line["gm"], text
