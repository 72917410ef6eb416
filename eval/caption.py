"""Captions under CaptionQA, DCScore and CapArena-Auto, with a judge of your own. Source: card evaluation, section 9.

CaptionQA: a language model that sees only the caption answers multiple-choice questions. DCScore: a judge splits the caption into
pieces of information, maps them to human ones and checks each against the image. CapArena-Auto: a judge sees the image, a human
caption, and the caption beside that of a baseline in random order. Questions whose answer could not be read are left out and
counted (`judge_failed`); CaptionQA's own script scores them 0. The wording of the prompts is ours.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.eval.caption_scores import (
    CANNOT,
    LETTERS,
    Unit,
    caparena_scores,
    captionqa_score,
    dcscore,
    is_yes_no,
    read_letter,
    read_preference,
)
from visual_grpo.eval.images import read_lines
from visual_grpo.eval.intervals import bootstrap_interval
from visual_grpo.eval.judging import Answers, Question, ask, load_judge, parse_json
from visual_grpo.eval.protocol import check_settings
from visual_grpo.eval.results import means, write_all
from visual_grpo.rewards.vqa_models import opened_judge

__all__ = ["PROTOCOLS", "evaluate"]

Row = dict[str, Any]
Captions = Mapping[str, str]
Ask = Callable[..., list[Any]]


def read_captions(path: str | Path) -> dict[str, str]:
    """Image name -> caption, from JSON lines with `image` and `caption` (or `completion`, `text`)."""
    found: dict[str, str] = {}
    for number, row in enumerate(read_lines(path), start=1):
        caption = row.get("caption", row.get("completion", row.get("text")))
        if not isinstance(caption, str) or "image" not in row:
            raise UserError(f"{path}, line {number}: a caption needs 'image' and 'caption'.")
        if str(row["image"]) in found:
            raise UserError(f"{path}, line {number}: a second caption of image {row['image']!r}.")
        found[str(row["image"])] = caption
    return found


def _need(row: Row, where: str, **kinds: type) -> None:
    for key, kind in kinds.items():
        if not isinstance(row.get(key), kind):
            raise UserError(f"{where}: {key!r} must be a {kind.__name__}, got {row.get(key)!r}.")


# -- CaptionQA ----------------------------------------------------------------------------------------------------------------

QA_PROMPT = """A caption of an image and a question about that image follow. Use the caption only.
Answer with one letter and nothing else.

Caption:
{caption}

Question: {question}
{choices}

Letter:"""


def captionqa(rows: list[Row], captions: Captions, where: str, asked: Ask, seed: int, _: Any) -> tuple[Row, list[Row]]:
    """Average score and accuracy over questions; the interval draws whole images."""
    generator = random.Random(seed)  # one for all questions in file order, as in the original
    lines: list[Row] = []
    questions, answers = [], []
    for number, row in enumerate(rows, start=1):
        _need(row, f"{where}, line {number}", question=str, choices=list, answer=str)
        if "image" not in row:
            raise UserError(f"{where}, line {number}: 'image' is missing.")
        choices = [str(choice) for choice in row["choices"]]
        if row["answer"].strip() not in [c.strip() for c in choices]:
            raise UserError(f"{where}, line {number}: the answer {row['answer']!r} is none of the choices {choices}.")
        if len(choices) >= len(LETTERS):
            raise UserError(f"{where}, line {number}: {len(choices)} choices are more than there are letters.")
        shown = [*choices] if is_yes_no(row["question"], choices) else [*choices, CANNOT]
        generator.shuffle(shown)  # also for images without a caption, so that two models get the same orders
        if str(row["image"]) not in captions:
            continue
        listed = "\n".join(f"{LETTERS[i]}. {text}" for i, text in enumerate(shown))
        prompt = QA_PROMPT.format(caption=captions[str(row["image"])], question=row["question"], choices=listed)
        questions.append(Question(prompt=prompt, read=partial(read_letter, choices=len(shown))))
        answers.append(row["answer"])
        lines.append({"item": str(row["image"]), "question": row["question"], "shown": shown, "choices": len(choices)})
    for line, answer, letter in zip(lines, answers, asked(questions, description="answering"), strict=True):
        chosen = None if letter is None else line["shown"][LETTERS.index(letter)]
        line["chosen"] = chosen
        line["score"] = None if chosen is None else captionqa_score(chosen, answer, line["choices"])
        line["accuracy"] = None if chosen is None else float(line["score"] == 1.0)
        line["cannot_answer"] = None if chosen is None else float(chosen == CANNOT)
    scored = [line for line in lines if line["score"] is not None]
    ids = {image: i for i, image in enumerate(dict.fromkeys(line["item"] for line in scored))}
    summary: Row = {"questions": len(lines), "judge_failed": len(lines) - len(scored), "intervals": {}}
    for name in ("score", "accuracy", "cannot_answer"):
        found = bootstrap_interval([line[name] for line in scored], clusters=[ids[line["item"]] for line in scored])
        summary[name], summary["intervals"][name] = found.mean, [found.low, found.high]
    return summary, lines


# -- CapArena-Auto ------------------------------------------------------------------------------------------------------------

ARENA_PROMPT = """Two captions of the image follow, and one that a person wrote for reference.
Compare how precisely and how completely the two describe the image; do not favour the longer one for its length,
and count what is not in the image against a caption.

Reference: {reference}

Caption 1: {first}

Caption 2: {second}

Answer with exactly one of: Caption 1 is better / Caption 2 is better / Tie"""


def first_is_ours(seed: int, image: str) -> bool:
    """Whether the caption under test stands first: a fair coin of (seed, image) alone."""
    return hashlib.sha256(f"{seed}:{image}".encode()).digest()[7] % 2 == 0


def caparena(
    rows: list[Row], captions: Captions, where: str, asked: Ask, seed: int, pictures: Any
) -> tuple[Row, list[Row]]:
    """Score against each baseline, their mean, and the mean length in words."""
    lines, questions = [], []
    for number, row in enumerate(rows, start=1):
        _need(row, f"{where}, line {number}", baseline=str, caption=str, reference=str)
        image, ours = str(row["image"]), captions[str(row["image"])]
        first = first_is_ours(seed, image)
        pair = (ours, row["caption"]) if first else (row["caption"], ours)
        prompt = ARENA_PROMPT.format(reference=row["reference"], first=pair[0], second=pair[1])
        questions.append(Question(prompt=prompt, read=read_preference, image=pictures(image)))
        lines.append({"item": image, "baseline": row["baseline"], "first": first, "length": len(ours.split())})
    for line, better in zip(lines, asked(questions, description="comparing"), strict=True):
        line["outcome"] = None if better is None else 0 if better == 0 else 1 if (better == 1) == line["first"] else -1
    outcomes: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        if line["outcome"] is not None:
            outcomes[line["baseline"]].append(line["outcome"])
    summary: Row = {
        "captions": len(lines),
        "judge_failed": sum(line["outcome"] is None for line in lines),
        "length": sum(line["length"] for line in lines) / len(lines),
        "intervals": {},
    }
    for name, score in caparena_scores(outcomes).items():
        summary[name] = score
        if name in outcomes:
            found = bootstrap_interval([100.0 * o for o in outcomes[name]])
            summary["intervals"][name] = [found.low, found.high]
    return summary, lines


# -- DCScore ------------------------------------------------------------------------------------------------------------------

SPLIT_PROMPT = """Split the caption into its smallest pieces of information (object, attribute, count, relation, ...), each
a sentence of its own. A piece is relevant if it states what the image shows, and not relevant if it is about mood, guesses or the
text itself. Answer with a JSON list and nothing else: [{{"unit": "...", "relevant": true}}, ...]

Caption: {caption}"""
MATCH_PROMPT = """Below are numbered statements A and numbered statements B about one image. For every A in order, give the number
of the B that says the same, or null if none does. Answer with a JSON list of {count} entries and nothing else.

A:
{units}

B:
{human}"""
VERIFY_PROMPT = """For every numbered statement, say whether the image shows that it is true: 1 if so, 0 if not.
Answer with a JSON list of {count} entries and nothing else.

{units}"""


def _read_units(text: str) -> list[Row]:
    found = parse_json(text)
    if not isinstance(found, list) or any(not isinstance(u, dict) or "unit" not in u for u in found):
        raise ValueError('expected a list of {"unit", "relevant"}')
    return [{"unit": str(u["unit"]), "relevant": bool(u.get("relevant", True))} for u in found]


def _read_list(text: str, count: int, allowed: list[int | None]) -> list[Any]:
    found = parse_json(text)
    if not isinstance(found, list) or len(found) != count or any(value not in allowed for value in found):
        raise ValueError(f"expected a list of {count} entries, each one of {allowed}; got {str(found)[:80]}")
    return found


def _numbered(units: list[str]) -> str:
    return "\n".join(f"{i}. {unit}" for i, unit in enumerate(units, start=1))


def dcscore_protocol(
    rows: list[Row], captions: Captions, where: str, asked: Ask, seed: int, pictures: Any
) -> tuple[Row, list[Row]]:
    """100 x the mean of DCScore over images, with precision and recall."""
    lines: list[Row] = []
    for number, row in enumerate(rows, start=1):
        _need(row, f"{where}, line {number}", units=list)
        lines.append({"item": str(row["image"]), "human": [str(u) for u in row["units"]]})
    split = [Question(prompt=SPLIT_PROMPT.format(caption=captions[line["item"]]), read=_read_units) for line in lines]
    for line, found in zip(lines, asked(split, description="splitting"), strict=True):
        line["units"] = found
    told = [line for line in lines if line["units"]]
    match, verify = [], []
    for line in told:
        units, count = _numbered([u["unit"] for u in line["units"]]), len(line["units"])
        top = len(line["human"])
        prompt = MATCH_PROMPT.format(count=count, units=units, human=_numbered(line["human"]))
        match.append(Question(prompt=prompt, read=partial(_read_list, count=count, allowed=[None, *range(1, top + 1)])))
        verify.append(
            Question(
                prompt=VERIFY_PROMPT.format(count=count, units=units),
                read=partial(_read_list, count=count, allowed=[0, 1]),
                image=pictures(line["item"]),
            )
        )
    matched = asked(match, description="matching") if match else []
    verified = asked(verify, description="verifying") if verify else []
    for line, matches, truths in zip(told, matched, verified, strict=True):
        line["matches"], line["verified"] = matches, truths
    for line in lines:
        line |= _dc_figures(line)
    figures = ("dcscore", "f_all", "f_relevant", "precision", "recall")
    failed = sum(line["dcscore"] is None for line in lines)
    return {"captions": len(lines), "judge_failed": failed, **means(lines, figures, scale=100)}, lines


def _dc_figures(line: Row) -> Row:
    """Figures of one image; None where a step of the judge failed."""
    names = ("dcscore", "precision", "recall", "f_all", "f_relevant")
    if line["units"] is None or (line["units"] and None in (line["matches"], line["verified"])):
        return dict.fromkeys(names)
    units = [
        Unit(relevant=u["relevant"], human=m, verified=bool(v))
        for u, m, v in zip(line["units"], line.get("matches", []), line.get("verified", []), strict=True)
    ]
    found = dcscore(units, len(line["human"]))
    return {
        "dcscore": found.score,
        "precision": found.precision,
        "recall": found.recall,
        "f_all": found.f_all,
        "f_relevant": found.f_relevant,
    }


PROTOCOLS: dict[str, Callable[..., tuple[Row, list[Row]]]] = {
    "captionqa": captionqa,
    "caparena": caparena,
    "dcscore": dcscore_protocol,
}
SEES_IMAGES = ("caparena", "dcscore")


def evaluate(
    *,
    texts: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    protocol: str = "captionqa",
    judge: Any = None,
    judge_model: str | None = None,
    judge_options: Mapping[str, Any] | None = None,
    pictures: str | Path | None = None,
    workers: int = 8,
    retries: int = 2,
    order_seed: int = 0,
    model: str | None = None,
    adapter: str | Path | None = None,
    images: str | Path | None = None,
) -> Row:
    """Score a file of captions.

    Args:
        texts: captions, JSON lines with `image` and `caption`.
        prompts: the protocol's file, JSON lines with `image` and: captionqa `question`, `choices`, `answer` (the text of a
            choice); caparena `baseline`, `caption` (the baseline's), `reference`; dcscore `units` (the human ones).
        out: folder for results and for the judge's answers, which an interrupted evaluation takes up again.
        protocol: of `PROTOCOLS`.
        judge, judge_model, judge_options: see `visual_grpo.eval.judging` and `visual_grpo.rewards.vqa_models.build_judge`.
        pictures: folder of the images, for caparena and dcscore.
        workers: questions asked at a time.
        retries: of a question whose answer could not be read.
        order_seed: of the orders of choices and of captions.
    """
    if texts is None or prompts is None:
        raise UserError(
            "caption needs the captions (--texts FILE.jsonl) and the protocol's file (--prompts FILE.jsonl)."
        )
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol is {protocol!r}.{did_you_mean(protocol, PROTOCOLS)} Known: {', '.join(PROTOCOLS)}.")
    if protocol in SEES_IMAGES and pictures is None:
        raise UserError(f"the judge of {protocol} sees the images: pictures=DIR.")
    captions, everything = read_captions(texts), read_lines(prompts)
    rows = [row for row in everything if str(row.get("image")) in captions]
    if not rows:
        raise UserError(f"no image of {str(prompts)!r} has a caption in {str(texts)!r}: the 'image' names differ.")
    answers = Answers(None if out is None else Path(out) / "answers.jsonl")

    def picture(name: str) -> Path:
        path = Path(str(pictures)) / name
        if not path.is_file():
            raise UserError(f"there is no image {str(path)!r}; set pictures to the folder of the images.")
        return path

    with opened_judge(judge, judge_model, judge_options, load=load_judge) as (name, found):
        if out is not None:
            asked_about = hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]
            settings = {"evaluation": "caption", "protocol": protocol, "judge": name, "order_seed": order_seed}
            check_settings(Path(out), {**settings, "prompts": asked_about})
        asked: Ask = partial(ask, found, name=name, answers=answers, workers=workers, retries=retries)
        told = everything if protocol == "captionqa" else rows
        summary, lines = PROTOCOLS[protocol](told, captions, str(prompts), asked, order_seed, picture)
    summary = {"protocol": protocol, "judge": name, "without_caption": len(everything) - len(rows), **summary}
    write_all(out, summary=summary, results=lines, items=_items(lines))
    return summary


def _items(lines: list[Row]) -> list[Row]:
    """Means of an image's figures, for paired comparisons."""
    by_image: dict[str, list[Row]] = defaultdict(list)
    for line in lines:
        by_image[line["item"]].append(line)
    names = ("score", "accuracy", "outcome", "length", "dcscore", "precision", "recall")
    items = []
    for image, found in by_image.items():
        item: Row = {"item": image}
        for name in names:
            values = [line[name] for line in found if line.get(name) is not None]
            if values:
                item[name] = sum(values) / len(values)
        items.append(item)
    return items
