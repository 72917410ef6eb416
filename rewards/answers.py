"""Finding and normalising the final answer in a completion; shared by text rewards and text evaluation.

Source: card rewards, section 8 (lower case, no articles, no punctuation), with numbers compared as numbers, since dropping
punctuation would make 3.5 equal 35.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

from visual_grpo.errors import UserError

__all__ = [
    "GOLD_KEYS",
    "Extraction",
    "answer_label",
    "extract_answer",
    "gold_answer",
    "normalise_answer",
    "same_answer",
]

Extraction = Literal["auto", "answer_tag", "boxed", "hashes", "last_number", "letter", "whole"]
GOLD_KEYS = ("answer", "solution", "gold", "ground_truth")
"""Metadata columns in which a gold answer is looked for, in this order."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z'])")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _last_tag(text: str) -> str | None:
    # Cut after the last closing tag: openings that nothing closes would be searched to the end each.
    found = _ANSWER.findall(text[: text.rfind("</answer>") + len("</answer>")] if "</answer>" in text else "")
    return found[-1].strip() if found else None


def _boxed(text: str) -> str | None:
    r"""Body of the last \boxed{...}, with nested braces."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def _after_hashes(text: str) -> str | None:
    if "####" not in text:
        return None
    lines = text.rsplit("####", 1)[1].strip().splitlines()
    return lines[0].strip() if lines else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].rstrip(",") if found else None


def _letter(text: str) -> str | None:
    """The last capital letter that stands alone ("B", "(B)", "B.")."""
    found = _LETTER.findall(_last_tag(text) or text)
    return found[-1] if found else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "answer_tag": _last_tag,
    "boxed": _boxed,
    "hashes": _after_hashes,
    "last_number": _last_number,
    "letter": _letter,
    "whole": lambda text: text.strip() or None,
}
_AUTO = ("answer_tag", "boxed", "hashes", "last_number")


def extract_answer(text: str, how: Extraction = "auto") -> str | None:
    r"""Return the final answer of a completion, or None.

    "auto" takes the first that is there of: the last <answer> body, the last \boxed{}, the line after the last ####, the last
    number.

    >>> extract_answer("so 3 + 4 = 7"), extract_answer("<answer> 12 cats </answer>"), extract_answer("no idea")
    ('7', '12 cats', None)
    """
    if how == "auto":
        return next((found for name in _AUTO if (found := _FINDERS[name](text)) is not None), None)
    if how not in _FINDERS:
        raise UserError(f"extraction is {how!r}; give one of {', '.join(get_args(Extraction))}.")
    return _FINDERS[how](text)


def normalise_answer(text: str) -> str:
    """Lower case, without articles, punctuation and repeated blanks.

    >>> normalise_answer(" The  Red, square. ")
    'red square'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text.strip().strip("$").rstrip(".").replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def same_answer(answer: str, gold: str) -> bool:
    """Say whether two answers are equal: as numbers if both are, else normalised.

    >>> same_answer("1,000.0", "1000"), same_answer("-5", "5"), same_answer("A cat.", "cat")
    (True, False, True)
    """
    left, right = _number(answer), _number(gold)
    if left is not None and right is not None:
        return left == right
    if left is not None or right is not None:
        return answer.strip() == gold.strip()
    return normalise_answer(answer) == normalise_answer(gold)


def answer_label(answer: str) -> Decimal | str:
    """A key that equal answers share: the number, or else the normalised text.

    >>> answer_label("1,000.0") == answer_label("1000"), answer_label("The cat.") == answer_label("cat")
    (True, True)
    """
    number = _number(answer)
    return (normalise_answer(answer) or answer.strip()) if number is None else number


def gold_answer(metadata: Mapping[str, Any], key: str | None) -> Any:
    """The gold answer of a row: column `key`, or the first of `GOLD_KEYS` that the row has; None if there is none."""
    keys = GOLD_KEYS if key is None else (key,)
    return next((metadata[name] for name in keys if metadata.get(name) is not None), None)
