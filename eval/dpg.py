"""DPG-Bench (ELLA, arXiv 2403.05135): yes/no questions about dense prompts, with dependencies between questions.

1065 prompts, 4 images each, tiled 2 x 2 in one file or in folders of their own. A question counts as right if the answer is
exactly "yes"; one whose parent is wrong is wrong too. Published figures use mPLUG-large as judge, and their script never asks
the first question of the file (`skip_first_row`).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import SUFFIXES, ImageSample, find_samples
from visual_grpo.eval.protocol import figure, finish, score_samples
from visual_grpo.reward import to_pil
from visual_grpo.rewards.vqa_models import opened_judge

__all__ = ["Item", "Question", "apply_dependencies", "evaluate", "read_questions"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One row of the question file."""

    id: int
    text: str
    parents: tuple[int, ...]
    category: str
    """such as "attribute - color"; the part before the hyphen is its broad one."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prompt with its questions."""

    item_id: str
    prompt: str
    questions: list[Question] = field(default_factory=list)


def read_questions(path: str | Path, *, skip_first_row: bool = False) -> list[Item]:
    """Read DPG-Bench's CSV: item_id, text, proposition_id, dependency, tuple, question_natural_language.

    Args:
        path: the file.
        skip_first_row: leave out the first question, as the reference's script does.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the questions {str(path)!r}: {error}.") from error
    needed = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
    missing = [name for name in needed if not rows or name not in rows[0]]
    if missing:
        raise UserError(f"{str(path)!r} is no question file of DPG-Bench: the column {missing[0]!r} is missing.")
    items: dict[str, Item] = {}
    for number, row in enumerate(rows, start=1):
        if lost := [name for name in needed if row[name] is None]:
            raise UserError(f"{path}, row {number}: the column {lost[0]!r} is missing; the line was cut off.")
        item = items.setdefault(row["item_id"], Item(item_id=row["item_id"], prompt=row["text"]))
        if skip_first_row and number == 1:
            continue
        try:
            parents = tuple(int(part) for part in row["dependency"].split(",") if part.strip() and int(part) != 0)
            identity = int(row["proposition_id"])
        except ValueError as error:
            raise UserError(
                f"{path}, row {number}: {error}; proposition_id and dependency are whole numbers."
            ) from error
        if any(identity == other.id for other in item.questions):
            raise UserError(f"{path}, row {number}: a second question {identity} of item {row['item_id']!r}.")
        category = row["tuple"].partition("(")[0].strip()
        text = row["question_natural_language"]
        item.questions.append(Question(id=identity, text=text, parents=parents, category=category))
    return list(items.values())


def apply_dependencies(questions: Sequence[Question], right: Sequence[bool]) -> list[float]:
    """Scores after the rule that a question with a wrong parent is wrong, applied in file order, so that it spreads.

    >>> ask = lambda i, *parents: Question(id=i, text="?", parents=parents, category="entity")
    >>> apply_dependencies([ask(1), ask(2, 1), ask(3, 2), ask(4)], [False, True, True, True])
    [0.0, 0.0, 0.0, 1.0]
    """
    scores = {question.id: float(value) for question, value in zip(questions, right, strict=True)}
    for question in questions:
        if any(scores.get(parent) == 0 for parent in question.parents):
            scores[question.id] = 0.0
    return [scores[question.id] for question in questions]


def _find(folder: str | Path, items: Sequence[Item], prompts: str | Path | None) -> list[ImageSample]:
    """Images by item id: ITEM.png, or GenEval's layout with `item_id` or the prompt in the metadata."""
    root = Path(folder)
    by_id = {item.item_id: (number, item) for number, item in enumerate(items)}
    named = [] if not root.is_dir() else [f for f in sorted(root.iterdir()) if f.suffix.lower() in SUFFIXES]
    found = [(*by_id[f.stem], f) for f in named if f.stem in by_id]
    if found:
        return [
            ImageSample(file=f, index=number, metadata=_metadata(item))
            for number, item, f in sorted(found, key=lambda entry: entry[0])
        ]
    by_text = {item.prompt: item.item_id for item in items}
    samples = []
    for sample in find_samples(folder, prompts):
        identity = str(sample.metadata.get("item_id", by_text.get(str(sample.metadata.get("prompt")))))
        if identity not in by_id:
            raise UserError(f"{sample.file}: the question file has neither its item_id nor its prompt.")
        samples.append(ImageSample(file=sample.file, index=sample.index, metadata=_metadata(by_id[identity][1])))
    return samples


def _metadata(item: Item) -> dict[str, Any]:
    """What a result depends on: other questions are asked anew."""
    return {"prompt": item.prompt, "item_id": item.item_id, "questions": list(map(vars, item.questions))}


def _tiles(image: Tensor, resolution: int | None) -> list[Tensor]:
    if resolution is None:
        return [image]
    rows, columns = image.shape[-2] // resolution, image.shape[-1] // resolution
    if not rows or not columns:
        raise UserError(
            f"dpg: an image of {image.shape[-1]} x {image.shape[-2]} holds no tile of resolution={resolution}."
        )
    return [
        image[:, r * resolution : (r + 1) * resolution, c * resolution : (c + 1) * resolution]
        for r in range(rows)
        for c in range(columns)
    ]


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    questions: str | Path | None = None,
    judge: Any = "testbed",
    judge_model: str | None = None,
    judge_options: Mapping[str, Any] | None = None,
    resolution: int | None = None,
    skip_first_row: bool = False,
    batch_size: int = 8,
    grid: int = 24,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Ask a judge all questions about all images.

    Args:
        images: folder with ITEM_ID.png, or GenEval's layout.
        prompts: prompt file of a bare folder; make one with `visual-grpo prompts dpg CSV --out FILE`.
        out: result folder.
        questions: the CSV (dpg_bench.csv of the ELLA repository).
        judge, judge_model, judge_options: see `visual_grpo.rewards.vqa_models.build_judge`.
        resolution: side of one image of a tile; None: a file is one image.
        skip_first_row: see `read_questions`.
        batch_size: files read at a time.
        grid: pictures of each grid.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        score: 100 x mean over prompts of the mean over images; categories: broad category -> 100 x mean of the answers about the
        last image of each prompt, without dependencies; table.
    """
    if images is None or questions is None:
        raise UserError("dpg needs images (--images DIR) or a model, and the question file (questions=dpg_bench.csv).")
    if resolution is not None and resolution < 1:
        raise UserError(f"dpg: resolution is {resolution}; give the side of one image of a tile, or leave it out.")
    items = {item.item_id: item for item in read_questions(questions, skip_first_row=skip_first_row)}
    samples = _find(images, list(items.values()), prompts)
    with opened_judge(judge, judge_model, judge_options) as (name, asked):

        def score(part: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
            return [
                _line(asked, items[s.metadata["item_id"]], _tiles(picture, resolution))
                for s, picture in zip(part, pictures, strict=True)
            ]

        settings = {"judge": name, "resolution": resolution, "skip_first_row": skip_first_row}
        lines = score_samples(samples, score, name="dpg", out=out, settings=settings, batch_size=batch_size)
    by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        by_prompt[line["item_id"]].append(line)
    means = [_mean_line(group) for group in by_prompt.values()]
    rows = [figure("DPG-Bench", means, "score", scale=100.0)]
    answered = [answer for group in by_prompt.values() for answer in group[-1]["answers"]]
    for broad in dict.fromkeys(answer["category"].partition("-")[0].strip() for answer in answered):
        chosen = [a for a in answered if a["category"].partition("-")[0].strip() == broad]
        rows.append(figure(broad, chosen, "right", scale=100.0, group="category"))
    summary = {
        "score": rows[0]["value"],
        "judge": name,
        "prompts": len(means),
        "images": sum(m["images"] for m in means),
    }
    summary |= {"categories": {row["figure"]: row["value"] for row in rows[1:]}, "table": rows}
    return finish(summary, lines, out=out, verdict=_verdict, grid=grid)


def _line(judge: Any, item: Item, tiles: Sequence[Tensor]) -> dict[str, Any]:
    texts = [question.text for question in item.questions]
    scores: list[float] = []
    right: list[bool] = []
    for tile in tiles:
        (picture,) = to_pil(tile[None])
        right = [answer.strip().lower() == "yes" for answer in judge.answer([picture] * len(texts), texts)]
        counted = apply_dependencies(item.questions, right)
        scores.append(sum(counted) / len(counted) if counted else 1.0)
    return {
        "prompt": item.prompt,
        "item_id": item.item_id,
        "score": sum(scores) / len(scores) if texts else None,
        "tile_scores": scores,
        "answers": [
            {"prompt": item.prompt, "question": q.text, "category": q.category, "right": value}
            for q, value in zip(item.questions, right, strict=True)
        ],
    }


def _mean_line(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = [score for line in group if line["score"] is not None for score in line["tile_scores"]]
    mean = sum(scores) / len(scores) if scores else None
    return {"prompt": group[0]["prompt"], "score": mean, "images": sum(len(line["tile_scores"]) for line in group)}


def _verdict(line: Mapping[str, Any]) -> tuple[bool | None, float | None, str]:
    wrong = [answer["question"] for answer in line["answers"] if not answer["right"]]
    value = line["score"]
    return (None if value is None else value == 1), value, f"not so: {'; '.join(wrong)}" if wrong else "all right"
