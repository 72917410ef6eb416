"""How well a recognised text matches the text that a prompt asks for.

Source: flow_grpo's OCR reward, restated in the card rewards, section 4. Range [0, 1]. The default is the reference's scoring;
the options are ours.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["OcrMatch", "TextRules", "levenshtein", "match_text", "quoted_text", "reading_order"]

Box = Sequence[float]
Line = tuple[str, float, Box]
"""One recognised line: text, confidence in [0, 1], box (x1, y1, x2, y2)."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What is done to both texts before they are compared; blanks and case never count."""

    nfkc: bool = False
    """unicode normalisation form NFKC, so that full-width letters and ligatures equal plain ones."""
    strip_punctuation: bool = False
    """drop all that is neither letter, digit nor mark."""
    best_window: bool = False
    """compare with the stretch of recognised text that fits best, so that text around a misspelt target costs nothing."""

    def normalise(self, text: str) -> str:
        """Return `text` as it is compared."""
        if self.nfkc:
            text = unicodedata.normalize("NFKC", text)
        text = text.replace(" ", "").lower()
        if self.strip_punctuation:
            text = "".join(letter for letter in text if unicodedata.category(letter)[0] in "LNM")
        return text


@dataclass(frozen=True, kw_only=True)
class OcrMatch:
    """Comparison of one recognised text with its target."""

    score: float
    """1 if the target is contained, else 1 - min(d, L) / L for edit distance d and target length L."""
    exact: bool
    contained: bool
    distance: int
    """edit distance of the whole texts, without the rule for contained targets and without a cap."""


def levenshtein(text: str, target: str, *, best_window: bool = False) -> int:
    """Edit distance with unit costs; with `best_window`, of `target` to the nearest stretch of `text`.

    >>> levenshtein("kitten", "sitting"), levenshtein("a helo wrld!", "hello", best_window=True)
    (3, 1)
    """
    row = list(range(len(target) + 1))
    best = row[-1]
    for count, letter in enumerate(text, start=1):
        diagonal, row[0] = row[0], 0 if best_window else count
        for j, wanted in enumerate(target, start=1):
            cost = min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != wanted))
            diagonal, row[j] = row[j], cost
        best = min(best, row[-1])
    return best if best_window else row[-1]


def match_text(recognised: str, target: str, rules: TextRules | None = None) -> OcrMatch | None:
    """Score `recognised` against `target`; None if the target is empty once normalised.

    >>> match_text("Helo Wrld", "Hello World").score
    0.8
    """
    rules = rules or TextRules()
    found, wanted = rules.normalise(recognised), rules.normalise(target)
    if not wanted:
        return None
    distance = levenshtein(found, wanted)
    contained = wanted in found
    counted = levenshtein(found, wanted, best_window=True) if rules.best_window else distance
    score = 1.0 if contained else 1 - min(counted, len(wanted)) / len(wanted)
    return OcrMatch(score=score, exact=found == wanted, contained=contained, distance=distance)


_STRAIGHT = re.compile(r'"([^"]*)"')
_ANY = re.compile(r'["\u201c\u201d\u201e]([^"\u201c\u201d\u201e]*)["\u201c\u201d\u201e]')


def quoted_text(prompt: str, *, typographic: bool = False) -> str | None:
    """Text between the first two straight double quotes (or typographic ones too); None if there is no such pair.

    >>> quoted_text('a sign that says "Open Late"')
    'Open Late'
    """
    found = (_ANY if typographic else _STRAIGHT).search(prompt)
    return found.group(1) if found else None


def reading_order(lines: Sequence[Line]) -> list[Line]:
    """Sort lines from top to bottom, and from left to right where their vertical centres lie within half a line's height."""
    waiting = sorted(lines, key=lambda line: (line[2][1] + line[2][3]) / 2)
    ordered: list[Line] = []
    while waiting:
        top = waiting[0][2]
        centre, reach = (top[1] + top[3]) / 2, (top[3] - top[1]) / 2
        row = [line for line in waiting if (line[2][1] + line[2][3]) / 2 - centre <= reach]
        ordered += sorted(row, key=lambda line: line[2][0])
        waiting = waiting[len(row) :]
    return ordered
