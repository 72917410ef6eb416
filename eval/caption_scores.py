"""Arithmetic of the caption protocols: CaptionQA, CapArena-Auto, DCScore. Source: card evaluation, section 9."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "CANNOT",
    "DcImage",
    "Unit",
    "caparena_scores",
    "captionqa_score",
    "dcscore",
    "is_yes_no",
    "read_letter",
    "read_preference",
    "unit_f1",
]

CANNOT = "Cannot answer from the caption"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CANNOT_BONUS = 0.05
_AUXILIARY = (
    *("is", "are", "was", "were", "do", "does", "did", "have", "has", "had", "can", "could", "will", "would"),
    *("should", "shall", "may", "might", "must"),
)


# -- CaptionQA (arXiv 2511.21025) -------------------------------------------------------------------------------------------


def is_yes_no(question: str, choices: Sequence[str]) -> bool:
    """Whether a question gets no "cannot answer" choice: yes and no among its choices, or an auxiliary verb first.

    As in the reference, "yes" and "no" count anywhere in a choice ("not visible" holds a "no").
    """
    lowered = [choice.lower() for choice in choices]
    if any("yes" in c for c in lowered) and any("no" in c for c in lowered):
        return True
    return question.lower().lstrip().split(" ", 1)[0] in _AUXILIARY


def captionqa_score(chosen: str, answer: str, choices: int) -> float:
    """1 for the right choice, 0 for a wrong one, `1 / choices + 0.05` for "cannot answer".

    Args:
        chosen: text of the choice taken.
        answer: text of the right one.
        choices: their number before "cannot answer" was added.
    """
    if chosen == CANNOT:
        return 1 / choices + CANNOT_BONUS
    return float(chosen.strip() == answer.strip())


def read_letter(text: str, choices: int) -> str:
    """The letter of the choice in an answer such as "B", "Answer: B." or "2".

    Raises:
        ValueError: none, or beyond the choices.
    """
    body = text.split("</think>", 1)[-1].split("Answer: ", 1)[-1].strip()
    letter = re.search(r"\b([A-Z])\b", body) or re.search(r"\b([A-Z])\b", body.upper())
    if letter and LETTERS.index(letter[1]) < choices:
        return letter[1]
    number = re.search(r"\b([1-9][0-9]?)\b", body)
    if number and int(number[1]) <= choices:
        return LETTERS[int(number[1]) - 1]
    raise ValueError(f"no letter of {choices} choices in {text[:80]!r}")


# -- CapArena-Auto (arXiv 2503.12329) -----------------------------------------------------------------------------------------


def read_preference(text: str) -> int:
    """1 or 2 for the better caption, 0 for a tie.

    Raises:
        ValueError: neither.
    """
    found = re.fullmatch(r"\W*(?:caption ([12]) is better|(tie))\W*", text.strip().lower())
    if found is None:
        raise ValueError(f"neither 'Caption 1 is better', 'Caption 2 is better' nor 'Tie': {text[:80]!r}")
    return int(found[1] or 0)


def caparena_scores(results: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Score against each baseline, and their unweighted mean under `average`.

    Args:
        results: baseline -> outcomes, 1 won, 0 tie, -1 lost.

    Returns:
        `100 (wins - losses) / n` each: for the published 200 images a baseline this is (wins - losses) / 2.
    """
    scores = {name: 100 * sum(outcomes) / len(outcomes) for name, outcomes in results.items() if outcomes}
    return {**scores, "average": sum(scores.values()) / len(scores)}


# -- DCScore (arXiv 2503.07906) -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One primitive piece of information in a caption."""

    relevant: bool
    """it describes what is in the image."""
    human: int | None
    """index of the human unit that says the same."""
    verified: bool
    """the judge sees it in the image."""


@dataclass(frozen=True, kw_only=True)
class DcImage:
    """F on all units and on the relevant ones, and their mean; precision and recall are those of all units."""

    precision: float
    recall: float
    f_all: float
    f_relevant: float

    @property
    def score(self) -> float:
        """In [0, 1]; the benchmark prints 100 times the mean over images."""
        return (self.f_all + self.f_relevant) / 2


def unit_f1(units: Sequence[Unit], human_units: int) -> tuple[float, float, float]:
    """(precision, recall, F) of predicted units; all 0 where there is none.

    `P = verified / predicted`. A verified unit that no human unit says adds 1 to what is right and to what there is to say; one
    that says human unit h adds 1 / (predicted units that say h). `F = 2 P R / (P + R + 1e-8)`.
    """
    if not units:
        return 0.0, 0.0, 0.0
    said = Counter(unit.human for unit in units if unit.human is not None)
    extra = sum(unit.verified and unit.human is None for unit in units)
    right = extra + sum(1 / said[unit.human] for unit in units if unit.verified and unit.human is not None)
    total = human_units + extra
    precision = sum(unit.verified for unit in units) / len(units)
    recall = right / total if total else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall + 1e-8)


def dcscore(units: Sequence[Unit], human_units: int) -> DcImage:
    """Score one caption.

    Args:
        units: predicted units of the caption.
        human_units: how many units the human description has.
    """
    precision, recall, everything = unit_f1(units, human_units)
    relevant = unit_f1([unit for unit in units if unit.relevant], human_units)[2]
    return DcImage(precision=precision, recall=recall, f_all=everything, f_relevant=relevant)
