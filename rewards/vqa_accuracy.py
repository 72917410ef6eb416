"""VQA soft accuracy: agreement with several annotators.

Source: VQA v2; card rewards, section 8: mean over the leave-one-out subsets of the annotators of min(1, matches / 3), after
VQA's normalisation of both sides. Range [0, 1]. Rows without gold answers are not applicable; an empty answer scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import Extraction, extract_answer, gold_answer, gold_texts

__all__ = ["VqaAccuracy", "normalise_vqa", "soft_accuracy"]

When = Literal["always", "disagreement"]
MIN_ANNOTATORS = 4
"""With fewer, three others who agree are impossible, so full credit would be too."""

_PUNCTUATION = ';/[]"{}()=+\\_-><@,?!`'
_NUMBER_COMMA = re.compile(r"[0-9],[0-9]")
_FULL_STOP = re.compile(r"\.(?![0-9])")
_ARTICLES = frozenset({"a", "an", "the"})
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0", **{word: str(i) for i, word in enumerate(_WORDS)}}


def normalise_vqa(text: str) -> str:
    """Normalise an answer as VQA's evaluation does, but for its table of contractions.

    >>> normalise_vqa("The two cats."), normalise_vqa("1,000"), normalise_vqa("red/blue")
    ('2 cats', '1000', 'red blue')
    """
    text = text.replace("\n", " ").replace("\t", " ").strip()
    number = _NUMBER_COMMA.search(text) is not None
    result = text
    for mark in _PUNCTUATION:
        # Both tests look at the text as it was given, not as earlier marks left it.
        beside_blank = f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if beside_blank or number else " ")
    words = _FULL_STOP.sub("", result).lower().split()
    return " ".join(_NUMBERS.get(word, word) for word in words if word not in _ARTICLES)


def soft_accuracy(matches: int, annotators: int) -> float:
    """Mean over the leave-one-out subsets of min(1, matches / 3); fewer than 4 annotators: 1 for any match.

    >>> [round(soft_accuracy(k, 10), 6) for k in range(6)]
    [0.0, 0.3, 0.6, 0.9, 1.0, 1.0]
    """
    if annotators < MIN_ANNOTATORS:
        return float(matches > 0)
    among, beside = min(1.0, (matches - 1) / 3), min(1.0, matches / 3)
    return (matches * among + (annotators - matches) * beside) / annotators


@register_reward("vqa_accuracy")
class VqaAccuracy(Reward):
    """Soft accuracy of the extracted answer. Details: `matches`, the annotators who gave it."""

    needs = frozenset({"texts"})

    def __init__(
        self, extraction: Extraction = "auto", *, gold_key: str | None = None, normalise: When = "always"
    ) -> None:
        """Choose where answers are and when they are normalised.

        Args:
            extraction: see `answers.extract_answer`; where "auto" finds nothing the whole completion is the answer.
            gold_key: metadata column of the annotators' answers: a list of texts or of {"answer": text}, or one text; None:
                `answers`, else `answers.GOLD_KEYS`.
            normalise: always, or only on "disagreement" among the annotators, as the official script does.
        """
        extract_answer("", extraction)
        if normalise not in get_args(When):
            raise UserError(f"vqa_accuracy: normalise is {normalise!r}; give one of {', '.join(get_args(When))}.")
        self.extraction, self.gold_key, self.normalise = extraction, gold_key, normalise

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        counts = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            given = row.get("answers") if self.gold_key is None else None
            golds = gold_texts(gold_answer(row, self.gold_key) if given is None else given)
            matches = self._matches(self._answer(text), golds)
            counts.append(float(matches))
            values.append(soft_accuracy(matches, len(golds)) if golds else None)
        return RewardOutput.from_list(values, {"matches": counts})

    def _answer(self, text: str) -> str:
        found = extract_answer(text, self.extraction)
        if self.extraction == "auto":
            # VQA answers are short texts: a number inside a sentence is no answer of its own.
            found = extract_answer(text, "answer_tag") or extract_answer(text, "boxed") or text
        return (found or "").strip()

    def _matches(self, answer: str, golds: Sequence[str]) -> int:
        if not answer:
            return 0
        if self.normalise == "always" or len(set(golds)) > 1:
            answer, golds = normalise_vqa(answer), [normalise_vqa(gold) for gold in golds]
        return sum(gold == answer for gold in golds)
