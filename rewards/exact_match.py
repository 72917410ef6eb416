"""Exact match of the extracted answer with the gold answer, for text and vision-language models.

Source: card rewards, section 8. Range 0 or 1. Rows without a gold answer are not applicable; a completion without an answer
scores 0.
"""

from __future__ import annotations

from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import Extraction, extract_answer, gold_answer, gold_texts, same_answer

__all__ = ["ExactMatch"]


@register_reward("exact_match")
class ExactMatch(Reward):
    """1 if the answer equals the gold answer, or one of several. Details: `answered`, 1 where an answer was found."""

    needs = frozenset({"texts"})

    def __init__(self, extraction: Extraction = "auto", *, gold_key: str | None = None) -> None:
        """Choose where answers are.

        Args:
            extraction: see `extract_answer`; "letter" for multiple choice, "whole" for the whole completion.
            gold_key: metadata column of the gold answer (text, number, or a list of accepted ones); None: see `GOLD_KEYS`.
        """
        extract_answer("", extraction)  # refuses an unknown name now
        self.extraction, self.gold_key = extraction, gold_key

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        answered = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            accepted = [self._gold(item) for item in gold_texts(gold_answer(row, self.gold_key))]
            answer = extract_answer(text, self.extraction)
            answered.append(float(answer is not None))
            if not accepted:
                values.append(None)
                continue
            values.append(float(answer is not None and any(same_answer(answer, item) for item in accepted)))
        return RewardOutput.from_list(values, {"answered": answered})

    def _gold(self, text: str) -> str:
        """The answer of a worked solution: after #### (GSM8K), else in the last box (MATH)."""
        return extract_answer(text, "hashes") or extract_answer(text, "boxed") or text
