"""Scores of a short answer about an image: VQA soft accuracy, exact match, ANLS, multiple choice, box IoU.

Source: card rewards, section 8. Each is in [0, 1] and takes (answer, row of the question file).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from visual_grpo.rewards.ocr_score import levenshtein

__all__ = [
    "MIN_ANNOTATORS",
    "Box",
    "anls",
    "box_giou",
    "box_iou",
    "match_boxes",
    "read_boxes",
    "vqa_accuracy",
    "vqa_normalise",
]

Box = tuple[float, float, float, float]
MIN_ANNOTATORS = 4
"""Three others must be able to agree with an annotator."""
ANLS_THRESHOLD = 0.5
_MARKS = ';/[]"{}()=+\\_-><@,?!`'
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_NUMBERS = {"none": 0, **{word: number for number, word in enumerate(_WORDS)}}
_FLOAT = (
    r"(?<![\d.])[-+]?\d++(?:\.\d++)?"  # possessive, and never from the middle of a number: linear in a row of digits
)
_BOX = re.compile(rf"({_FLOAT})[\s,]+({_FLOAT})[\s,]+({_FLOAT})[\s,]+({_FLOAT})")


def vqa_normalise(text: str) -> str:
    """The normalisation of the VQA evaluation, without its table of contractions.

    >>> vqa_normalise("The two cats."), vqa_normalise("1,000"), vqa_normalise("red/blue")
    ('2 cats', '1000', 'red blue')
    """
    original = text.replace("\n", " ").replace("\t", " ").strip()
    out = original
    comma = re.search(r"\d,\d", original) is not None
    for mark in _MARKS:
        touches = f"{mark} " in original or f" {mark}" in original
        out = out.replace(mark, "" if touches or comma else " ")
    out = re.sub(r"\.(?!\d)", "", out)
    words = [str(_NUMBERS.get(word, word)) for word in out.lower().split()]
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def vqa_accuracy(answer: str, annotators: Sequence[str]) -> float:
    """Mean over the leave-one-out subsets of `min(1, matches / 3)`; both sides are normalised.

    Raises:
        ValueError: fewer than 4 annotators.
    """
    if len(annotators) < MIN_ANNOTATORS:
        raise ValueError(
            f"VQA accuracy needs at least {MIN_ANNOTATORS} annotators' answers; there are {len(annotators)}"
        )
    wanted = vqa_normalise(answer)
    agrees = [vqa_normalise(other) == wanted for other in annotators]
    matches = sum(agrees)
    return sum(min(1.0, (matches - own) / 3) for own in agrees) / len(agrees)


def _squeezed(text: str) -> str:
    return " ".join(text.lower().split())


def anls(answer: str, golds: Sequence[str]) -> float:
    """Best `1 - NL` over the gold answers, 0 where the normalised Levenshtein distance NL is 0.5 or more.

    >>> round(anls("Hello Wrld", ["Hello World"]), 6), anls("cat", ["dog", "cart"]), anls("ab", ["abcd"])
    (0.909091, 0.75, 0.0)
    """
    best = 0.0
    for gold in golds:
        left, right = _squeezed(answer), _squeezed(gold)
        longest = max(len(left), len(right))
        distance = levenshtein(left, right) / longest if longest else 0.0
        best = max(best, 1 - distance if distance < ANLS_THRESHOLD else 0.0)
    return best


def read_boxes(text: str) -> list[Box]:
    """All groups of four numbers in a text that are boxes x1, y1, x2, y2 with x1 < x2 and y1 < y2."""
    found = [tuple(map(float, numbers)) for numbers in _BOX.findall(text)]
    return [(x1, y1, x2, y2) for x1, y1, x2, y2 in found if x1 < x2 and y1 < y2]


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def _overlap_and_union(a: Box, b: Box) -> tuple[float, float]:
    overlap = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    return overlap, _area(a) + _area(b) - overlap


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union of boxes in the same coordinates; no pixel is added to the sides.

    >>> round(box_iou((0, 0, 10, 10), (5, 0, 15, 10)), 6)
    0.333333
    """
    overlap, union = _overlap_and_union(a, b)
    return overlap / union if union > 0 else 0.0


def box_giou(a: Box, b: Box) -> float:
    """IoU less the empty share of the smallest box around both, in (-1, 1].

    >>> round(box_giou((0, 0, 10, 10), (20, 20, 30, 30)), 6)
    -0.777778
    """
    overlap, union = _overlap_and_union(a, b)
    hull = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    return (overlap / union if union > 0 else 0.0) - ((hull - union) / hull if hull > 0 else 0.0)


def match_boxes(found: Sequence[Box], golds: Sequence[Box]) -> float:
    """Sum of the IoUs of the best one-to-one match, over the larger number of boxes; 0 where either is empty."""
    if not found or not golds:
        return 0.0
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    overlaps = np.array([[box_iou(a, b) for b in golds] for a in found])
    rows, columns = linear_sum_assignment(1 - overlaps)
    return float(overlaps[rows, columns].sum()) / max(len(found), len(golds))
