"""ANLS: average normalised Levenshtein similarity, the score of document VQA.

Source: Biten et al. (arXiv 1905.13648); card rewards, section 8: the best over the gold answers of 1 - NL where NL <
threshold, else 0, with NL = edit distance / length of the longer text, lower case, white space squeezed. Range [0, 1]. Rows
without a gold answer are not applicable; an empty answer scores 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import Extraction, extract_answer, gold_answer, gold_texts
from visual_grpo.rewards.ocr_score import levenshtein

__all__ = ["Anls", "anls"]


def _squeeze(text: str) -> str:
    return " ".join(text.lower().split())


def anls(answer: str, golds: Sequence[str], threshold: float = 0.5) -> float:
    """Similarity of `answer` with the nearest of `golds`.

    >>> round(anls("Hello Wrld", ["hello world"]), 6), anls("cat", ["dog", "cart"]), anls("ab", ["abcd"])
    (0.909091, 0.75, 0.0)
    """
    best = 0.0
    answer = _squeeze(answer)
    for gold in map(_squeeze, golds):
        longer = max(len(answer), len(gold))
        # The distance is at least the difference in length: a huge answer is not compared letter by letter.
        if longer == 0 or abs(len(answer) - len(gold)) >= threshold * longer:
            continue
        distance = levenshtein(answer, gold) / longer
        if distance < threshold:
            best = max(best, 1 - distance)
    return best


@register_reward("anls")
class Anls(Reward):
    """Similarity of the extracted answer with the nearest gold answer."""

    needs = frozenset({"texts"})

    def __init__(self, extraction: Extraction = "auto", *, gold_key: str | None = None, threshold: float = 0.5) -> None:
        """Choose where answers are.

        Args:
            extraction: see `answers.extract_answer`; "auto" takes the last <answer> body, else the whole completion.
            gold_key: metadata column of the gold answer, a text or a list of accepted ones; None: `answers`, else
                `answers.GOLD_KEYS`.
            threshold: distances from here on score 0, in (0, 1].
        """
        extract_answer("", extraction)
        if not 0 < threshold <= 1:
            raise UserError(f"anls: threshold is {threshold}; give a number above 0 and up to 1 (published: 0.5).")
        self.extraction, self.gold_key, self.threshold = extraction, gold_key, threshold

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            given = row.get("answers") if self.gold_key is None else None
            golds = gold_texts(gold_answer(row, self.gold_key) if given is None else given)
            values.append(anls(self._answer(text), golds, self.threshold) if golds else None)
        return RewardOutput.from_list(values)

    def _answer(self, text: str) -> str:
        if self.extraction == "auto":
            return extract_answer(text, "answer_tag") or text
        return extract_answer(text, self.extraction) or ""
