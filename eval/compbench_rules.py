"""T2I-CompBench's scores of one image, and what its prompts ask for.

Source: arXiv 2307.06350 and its repository, restated in the card evaluation, section 6. Published figures use UniDet as detector
and BLIP-VQA as judge; those of other detectors are not comparable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Relation", "asked_counts", "asked_relation", "attribute_score", "lookup", "noun_phrases", "numeracy_score",
           "position_score", "spatial_score"]  # fmt: skip

Box = Sequence[float]
NEAR = ("next to", "on side of", "on the side of", "near")
DIRECTIONS = {
    "left": ("on the left of", "to the left of", "left of"),
    "right": ("on the right of", "to the right of", "right of"),
    "top": ("on the top of", "on top of", "above"),
    "bottom": ("on the bottom of", "below", "under"),
}
_PHRASES = sorted([*NEAR, *(phrase for group in DIRECTIONS.values() for phrase in group)], key=len, reverse=True)
_RELATION = re.compile(r"^(.*?)\s+(?:is\s+|are\s+)?(" + "|".join(_PHRASES) + r")\s+(.*)$")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_IRREGULAR = {
    "people": "person",
    "men": "man",
    "women": "woman",
    "children": "child",
    "mice": "mouse",
    "geese": "goose",
}
_PEOPLE = frozenset({"boy", "girl", "man", "woman"})
"""The detectors know persons only, as in the reference."""
_SKIPPED = {"top", "the top", "the side", "the left", "the right", "the bottom"}
_ARTICLE = re.compile(r"^(?:a|an|the|one)\s+")


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Object A in a place relative to object B."""

    a: str
    b: str
    place: str
    """left, right, top, bottom or near"""


def _iou(a: Box, b: Box) -> float:
    shared = max(min(a[2], b[2]) - max(a[0], b[0]), 0.0) * max(min(a[3], b[3]) - max(a[1], b[1]), 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def position_score(a: Box, b: Box, place: str, *, near: float = 150.0) -> float:
    """How well box `a` stands in `place` relative to box `b`, in [0, 1]; y grows downward.

    Args:
        a, b: (x1, y1, x2, y2) in pixels.
        place: left, right, top, bottom or near.
        near: pixels within which "near" is full; the reference's 150 belong to 512 x 512 images.

    >>> position_score((0, 0, 10, 10), (50, 0, 60, 10), "left"), position_score((0, 0, 10, 10), (50, 0, 60, 10), "top")
    (1.0, 0.0)
    """
    dx, dy = (a[0] + a[2] - b[0] - b[2]) / 2, (a[1] + a[3] - b[1] - b[3]) / 2
    if place == "near":
        return 1.0 if abs(dx) < near or abs(dy) < near else near / max(abs(dx), abs(dy))
    wide, tall = abs(dx) > abs(dy), abs(dy) > abs(dx)  # neither on a diagonal
    right_side = {
        "left": wide and dx < 0,
        "right": wide and dx > 0,
        "top": tall and dy < 0,
        "bottom": tall and dy > 0,
    }[place]
    if not right_side:
        return 0.0
    overlap = _iou(a, b)
    return 1.0 if overlap < 0.1 else 0.1 / overlap


def spatial_score(
    a: tuple[Box, float] | None, b: tuple[Box, float] | None, place: str, *, near: float = 150.0
) -> float:
    """2D spatial score of the best detection (box, confidence) of each object; below 0.5 it becomes 0."""
    score = sum(0.25 * found[1] for found in (a, b) if found is not None)
    if a is not None and b is not None:
        score += 0.5 * position_score(a[0], b[0], place, near=near)
    return score if score >= 0.5 else 0.0


def numeracy_score(counts: Mapping[str, int], found: Mapping[str, int]) -> float:
    """Half of each object's share for being there at all, half for the exact number.

    >>> numeracy_score({"cat": 2, "dog": 3}, {"cat": 2, "dog": 1})
    0.75
    """
    share = 0.5 / len(counts)
    return sum(share * (found.get(n, 0) > 0) + share * (found.get(n, 0) == c) for n, c in counts.items())


def attribute_score(probabilities: Sequence[float]) -> float:
    """Product of P(yes) over the noun phrases, eight at most; no phrase gives 1."""
    return math.prod(probabilities[:8])


def lookup(found: Mapping[str, Sequence[Any]], phrase: str) -> list[Any]:
    """Detections of what a phrase names: whole or its last word, in the plural or not; a boy, girl, man or woman is a person.

    >>> lookup({"wine glass": [1, 2]}, "wine glasses"), lookup({"person": [3]}, "two women")
    ([1, 2], [3])
    """
    words = phrase.split()
    for text in (phrase, words[-1] if words else ""):
        names = [text, *_singulars(text)]
        for name in (*names, *(["person"] if _PEOPLE.intersection(names) else [])):
            if name in found:
                return list(found[name])
    return []


def _singulars(text: str) -> list[str]:
    head, _, last = text.rpartition(" ")
    forms = [_IRREGULAR[last]] if last in _IRREGULAR else []
    for ending, instead in (("ies", "y"), ("ves", "fe"), ("ves", "f"), ("es", ""), ("s", "")):
        if last.endswith(ending):
            forms.append(last[: -len(ending)] + instead)
    return [f"{head} {form}".strip() for form in forms]


def asked_relation(metadata: Mapping[str, Any]) -> Relation | None:
    """What a spatial prompt asks for: GenEval clauses with a position, or the text; None where neither says.

    >>> asked_relation({"prompt": "a bird on the left of a car"})
    Relation(a='bird', b='car', place='left')
    """
    include = metadata.get("include") or []
    for clause in include:
        if "position" in clause:
            words, target = clause["position"]
            return Relation(a=clause["class"], b=include[target]["class"], place=_place(words))
    match = _RELATION.match(str(metadata.get("prompt", "")).strip().rstrip(".").lower())
    if match is None:
        return None
    first, last = (_ARTICLE.sub("", part.strip()) for part in (match[1], match[3]))
    return Relation(a=first, b=last, place=_place(match[2]))


def _place(words: str) -> str:
    return next((place for place, phrases in DIRECTIONS.items() if words in phrases), "near")


def asked_counts(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Objects and their numbers: GenEval clauses, or the text ("two cats, one dog and three birds").

    >>> asked_counts({"prompt": "two cats and a dog"})
    {'cats': 2, 'dog': 1}
    """
    if metadata.get("include"):
        return {clause["class"]: clause["count"] for clause in metadata["include"]}
    counts: dict[str, int] = {}
    for part in re.split(r",\s*(?:and\s+)?|\s+and\s+|\s+with\s+", str(metadata.get("prompt", "")).strip(" .").lower()):
        number, _, name = part.strip().partition(" ")
        value = _NUMBERS.index(number) if number in _NUMBERS else 1 if number in ("a", "an") else None
        if value is not None and name:
            counts[name] = value
    return counts


def noun_phrases(metadata: Mapping[str, Any], parser: str = "rules") -> list[str]:
    """Phrases that the judge is asked about.

    Args:
        metadata: `phrases` (list) wins over everything; else the `prompt` is taken apart.
        parser: "rules" splits at commas, "and" and "with"; "spacy" uses en_core_web_sm as the reference does.
    """
    if metadata.get("phrases"):
        return [str(phrase) for phrase in metadata["phrases"]]
    text = str(metadata.get("prompt", "")).strip().rstrip(".")
    if parser == "spacy":
        found = [chunk.text for chunk in _spacy()(text).noun_chunks]
    else:
        text = re.sub(r"^(?:a|an) (?:photo|picture|image|drawing) of ", "", text)
        found = re.split(r",\s*(?:and\s+)?|\s+and\s+|\s+with\s+", text)
    return [phrase.strip() for phrase in found if phrase.strip() and phrase.strip().lower() not in _SKIPPED]


def _spacy() -> Any:
    from visual_grpo.errors import UserError

    try:
        import spacy

        return spacy.load("en_core_web_sm")
    except (ImportError, OSError) as error:
        raise UserError(
            f"parser=spacy needs the package spacy and its model en_core_web_sm ({error}); install both, give the phrases as a "
            f"list under 'phrases' in the prompt file, or take parser=rules."
        ) from error
