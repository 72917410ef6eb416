"""Short answers to questions about images: VQA soft accuracy, exact match, ANLS, multiple choice, grounding.

Source: card rewards, section 8. The answers exist already: no judge, no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.data import check_pairing
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.eval.images import read_lines
from visual_grpo.eval.protocol import check_settings
from visual_grpo.eval.results import means, task_text, write_all
from visual_grpo.eval.vqa_scores import anls, box_iou, match_boxes, read_boxes, vqa_accuracy
from visual_grpo.rewards.answers import extract_answer, gold_texts, same_answer
from visual_grpo.rewards.multiple_choice import chosen_option, gold_option

__all__ = ["METRICS", "evaluate"]

Row = Mapping[str, Any]


def _golds(row: Row) -> list[str]:
    golds = gold_texts(row.get("answers") if row.get("answers") is not None else row.get("answer"))
    if not golds:
        raise ValueError("no 'answers' and no 'answer'")
    return golds


def _exact(text: str, row: Row) -> float:
    return float(any(same_answer(text, gold) for gold in _golds(row)))


def _choice(text: str, row: Row) -> float:
    choices = row.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("no list 'choices'")
    options = [str(choice) for choice in choices]
    answer = row.get("answer")
    if isinstance(answer, int) and row.get("answers") is None and str(answer) not in options:
        golds = {gold_option(answer, options)}  # its place
    else:
        golds = {gold_option(gold, options) for gold in _golds(row)}
    if None in golds:
        raise ValueError(f"the answer {row.get('answers', row.get('answer'))!r} is none of the choices {options}")
    return float(chosen_option(text, options) in golds)


def _boxes(row: Row) -> list[tuple[float, float, float, float]]:
    given = row.get("boxes", [row["box"]] if "box" in row else None)
    if not isinstance(given, list) or any(not isinstance(b, list) or len(b) != 4 for b in given):
        raise ValueError("no 'box' [x1, y1, x2, y2] and no list of 'boxes'")
    try:
        boxes = [(float(b[0]), float(b[1]), float(b[2]), float(b[3])) for b in given]
    except TypeError:
        raise ValueError(f"the box {given!r} is not of numbers") from None
    if any(not (x1 < x2 < math.inf and y1 < y2 < math.inf) for x1, y1, x2, y2 in boxes):
        raise ValueError(f"the box {given!r} is not x1 < x2, y1 < y2 (it may be x, y, width, height)")
    return boxes


def _iou(text: str, row: Row) -> float:
    golds, found = _boxes(row), read_boxes(text)
    if len(golds) == 1:
        return box_iou(found[0], golds[0]) if found else 0.0
    return match_boxes(found, golds)


METRICS: dict[str, Callable[[str, Row], float]] = {
    "vqa_accuracy": lambda text, row: vqa_accuracy(text, _golds(row)),
    "exact_match": _exact,
    "anls": lambda text, row: anls(text, _golds(row)),
    "multiple_choice": _choice,
    "iou": _iou,
}


def evaluate(
    *,
    texts: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    metric: str | Sequence[str] = "vqa_accuracy",
    by: str = "category",
    model: str | None = None,
    adapter: str | Path | None = None,
    images: str | Path | None = None,
) -> dict[str, Any]:
    """Score a file of answers.

    Args:
        texts: JSON lines with `completion` (or `text`); the same number of lines for each question, in order.
        prompts: JSON lines with `answers` (ten annotators, or all accepted answers) or `answer`; `choices` for multiple_choice;
            `box` or `boxes` (x1, y1, x2, y2 in the coordinates of the answers) for iou.
        out: folder for results.jsonl, items.jsonl and summary.json.
        metric: one or several of `METRICS`.
        by: column of the question file whose values get means of their own, where it has one.

    Returns:
        Mean of each metric over questions with its 95 % bootstrap interval; `iou@0.5` beside `iou`; means by `by`.
    """
    if texts is None or prompts is None:
        raise UserError("vqa needs a file of answers (--texts FILE.jsonl) and the questions (--prompts FILE.jsonl).")
    wanted = [metric] if isinstance(metric, str) else list(metric)
    for name in wanted:
        if name not in METRICS:
            raise UserError(f"metric is {name!r}.{did_you_mean(name, METRICS)} Known: {', '.join(METRICS)}.")
    questions, rows = read_lines(prompts), read_lines(texts)
    if len(rows) % len(questions):
        raise UserError(f"{len(rows)} answers for {len(questions)} questions: each needs the same number, in order.")
    check_pairing(texts, rows, questions)
    if out is not None:
        check_settings(Path(out), {"evaluation": "vqa"})
    share = len(rows) // len(questions)
    results = []
    for number, row in enumerate(rows):
        question = questions[number // share]
        text = row.get("completion", row.get("text"))
        if not isinstance(text, str):
            raise UserError(f"{texts}, line {number + 1}: no text under 'completion' or 'text'.")
        answer = extract_answer(text, "answer_tag") or text.strip()
        line: dict[str, Any] = {"item": str(number // share), "answer": answer}
        for name in wanted:
            try:
                line[name] = METRICS[name](answer, question)
            except ValueError as error:
                raise UserError(f"{prompts}, question {number // share + 1}: {error} (metric={name}).") from None
        if "iou" in wanted:
            line["iou@0.5"] = float(line["iou"] > 0.5)
        results.append(line)
    figures = [*wanted, *(["iou@0.5"] if "iou" in wanted else [])]
    items = [
        {
            "item": str(q),
            "prompt": task_text(questions[q]),
            **{n: sum(r[n] for r in results[q * share : (q + 1) * share]) / share for n in figures},
        }
        for q in range(len(questions))
    ]
    summary = {"questions": len(questions), "answers": len(rows), **means(items, figures)}
    kinds = dict.fromkeys(str(q[by]) for q in questions if by in q)
    if kinds:
        summary["by"] = {
            kind: {n: m for n, m in means(_of(items, questions, by, kind), figures).items() if n != "intervals"}
            for kind in kinds
        }
    write_all(out, summary=summary, results=results, items=items)
    return summary


def _of(items: Sequence[Row], questions: Sequence[Row], by: str, kind: str) -> list[Row]:
    return [item for item, question in zip(items, questions, strict=True) if str(question.get(by)) == kind]
