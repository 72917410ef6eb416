"""The three caption rewards of BalCapRL: correctness that is also useful (P), coverage of a reference (C), language (Q).

Source: BalCapRL (arXiv 2605.07394); card caption_gdpo, section 3; prompts of ours. Range [0, 1] each. P = claims that are
true AND pointable / claims, read by a VLM that sees the image; C = units of the reference that the caption states / units; Q
= mean of clarity, fluency and coherence, and 0 where the caption's length / the reference's is outside [0.5, 2]. An empty
caption, or one without claims, scores 0; an unreadable reply is a failed row. Rows without a reference caption are not
applicable to C, and to Q its length condition is not. Use the three together, as rewards of their own, under
`combine: gdpo`.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import gold_answer
from visual_grpo.rewards.judge import Failure, JudgeReward, Question, Scale, render, row_image

__all__ = ["CaptionCorrectness", "CaptionCoverage", "CaptionLanguage", "b_cap_score", "language_gate"]

_CLAIM = re.compile(r"\|\s*true:\s*(yes|no)\s*\|\s*pointable:\s*(yes|no)\b", re.IGNORECASE)
_UNIT = re.compile(r"\|\s*stated:\s*(yes|no)\b", re.IGNORECASE)
_NO_CLAIMS = re.compile(r"\W*(?:no claims?|none)\W*", re.IGNORECASE)
_MARKS = {
    key: Scale(pattern=rf"{key}:[\s*]*([0-9]+(?:\.[0-9]+)?)", low=1, high=10, last=True, zero_based=True)
    for key in ("Clarity", "Fluency", "Coherence")
}


def b_cap_score(correctness: float, coverage: float, language: float) -> float:
    """Harmonic mean of P, C and Q (without its length condition), 0 if one is 0; BalCapRL's evaluation metric.

    >>> round(b_cap_score(0.8, 0.4, 0.9), 6)
    0.617143
    """
    parts = (correctness, coverage, language)
    return 3 / sum(1 / part for part in parts) if all(part > 0 for part in parts) else 0.0


def language_gate(language: float, ratio: float, low: float = 0.5, high: float = 2.0) -> float:
    """Q if low <= length ratio <= high, else 0."""
    return language if low <= ratio <= high else 0.0


class _CaptionReward(JudgeReward):
    needs = frozenset({"texts"})
    prompt_fields: ClassVar[tuple[str, ...]] = ("completion",)

    def __init__(
        self, *, reference_key: str | None = None, image_key: str = "image", device: Any = None, **judge: Any
    ) -> None:
        """Name the columns.

        Args:
            reference_key: metadata column of the reference caption; None: `reference`, else `answers.GOLD_KEYS`.
            image_key: metadata column of the image, see `judge.row_image` (correctness only).
            device: of a local judge.
            judge: see `JudgeSettings`. A prompt file must hold {completion}; {reference} where there is one.
        """
        super().__init__(device=device, **judge)
        self.reference_key, self.image_key = reference_key, image_key

    def reference(self, row: Mapping[str, Any]) -> str | None:
        """Reference caption of a row; a `reference` that is no text is that of another reward (an image)."""
        found = row.get("reference") if self.reference_key is None else None
        found = found if isinstance(found, str) else gold_answer(row, self.reference_key)
        return None if found is None or not str(found).strip() else str(found)

    def score(self, request: RewardRequest, rows: dict[int, Question]) -> list[float | None]:
        """Ask about `rows`; rows with an empty caption score 0, others are not applicable."""
        assert request.texts is not None
        values: list[float | None] = [None] * len(request)
        asked = [row for row in rows if request.texts[row].strip()]
        replies = self.judge.generate([rows[row] for row in asked])
        read = [reply if isinstance(reply, Failure) else self.read(reply) for reply in replies]
        self.report([value for value in read if isinstance(value, Failure)], len(asked))
        for row in rows:
            values[row] = 0.0
        for row, value in zip(asked, read, strict=True):
            values[row] = math.nan if isinstance(value, Failure) else value
        return values

    @abstractmethod
    def read(self, reply: str) -> float | Failure:
        """Value of a reply."""


@register_reward("caption_correctness")
class CaptionCorrectness(_CaptionReward):
    """P: the share of claims that are true and pointable."""

    label = "caption_correctness"
    prompt_name = "caption_correctness"

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        questions = {
            row: Question(
                text=render(self.template, completion=text, prompt=request.prompts[row]),
                images=(row_image(request, row, self.image_key),),
            )
            for row, text in enumerate(request.texts)
        }
        return RewardOutput.from_list(self.score(request, questions))

    def read(self, reply: str) -> float | Failure:
        """Count the claims."""
        claims = _CLAIM.findall(reply)
        if not claims:
            return 0.0 if _NO_CLAIMS.fullmatch(reply) else Failure(f"no claims in the reply {reply[:120]!r}")
        return sum(true.lower() == seen.lower() == "yes" for true, seen in claims) / len(claims)


@register_reward("caption_coverage")
class CaptionCoverage(_CaptionReward):
    """C: the share of the reference's units that the caption states."""

    label = "caption_coverage"
    default_model = "Qwen/Qwen3-8B"
    prompt_name = "caption_coverage"
    prompt_fields = ("completion", "reference")

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        questions = {}
        for row, (text, metadata) in enumerate(zip(request.texts, request.metadata, strict=True)):
            reference = self.reference(metadata)
            if reference is not None:
                filled = render(self.template, completion=text, reference=reference, prompt=request.prompts[row])
                questions[row] = Question(text=filled)
        return RewardOutput.from_list(self.score(request, questions))

    def read(self, reply: str) -> float | Failure:
        """Count the units."""
        units = _UNIT.findall(reply)
        if not units:
            return Failure(f"no units in the reply {reply[:120]!r}")
        return sum(stated.lower() == "yes" for stated in units) / len(units)


@register_reward("caption_language")
class CaptionLanguage(_CaptionReward):
    """Q': language of captions whose length fits. Details: `unmasked` Q, `length_ratio` to the reference in words."""

    label = "caption_language"
    default_model = "Qwen/Qwen3-8B"
    prompt_name = "caption_language"

    def __init__(
        self, *, length_low: float = 0.5, length_high: float = 2.0, device: Any = None, **options: Any
    ) -> None:
        """Set the closed range of caption length / reference length; `options` as for the other caption rewards."""
        if not 0 <= length_low <= length_high:
            raise UserError(f"caption_language: length_low is {length_low} and length_high {length_high}; swap them.")
        super().__init__(device=device, **options)
        self.length_low, self.length_high = length_low, length_high

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        questions = {
            row: Question(text=render(self.template, completion=text, prompt=request.prompts[row]))
            for row, text in enumerate(request.texts)
        }
        unmasked = [math.nan if value is None else value for value in self.score(request, questions)]
        references = [self.reference(row) for row in request.metadata]
        ratios = [
            math.nan if reference is None else len(text.split()) / len(reference.split())
            for text, reference in zip(request.texts, references, strict=True)
        ]
        values = [
            value if math.isnan(ratio) or math.isnan(value) else self._gate(value, ratio)
            for value, ratio in zip(unmasked, ratios, strict=True)
        ]
        return RewardOutput.from_list(values, {"unmasked": unmasked, "length_ratio": ratios})

    def _gate(self, value: float, ratio: float) -> float:
        return language_gate(value, ratio, self.length_low, self.length_high)

    def read(self, reply: str) -> float | Failure:
        """Mean of the three marks."""
        marks = [scale.read(reply) for scale in _MARKS.values()]
        lost = [mark for mark in marks if isinstance(mark, Failure)]
        return lost[0] if lost else sum(mark for mark in marks if not isinstance(mark, Failure)) / len(marks)
