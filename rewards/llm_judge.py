"""LLM as judge: a language model's mark for the answer, from 1 to 10, with a reference answer where the row has one.

Source: the direct marking of MT-Bench (Zheng et al., arXiv 2306.05685) with a prompt of ours. Range [0, 1]: (mark - 1) / 9.
A reply without a mark is a failed row.
"""

from __future__ import annotations

import re
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import gold_answer
from visual_grpo.rewards.judge import JudgeReward, Question, Scale, render

__all__ = ["LlmJudge", "number_pattern"]


def number_pattern(pattern: str, name: str) -> str:
    """Check a pattern of the user's: a regular expression with a group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{name}: pattern {pattern!r} is no regular expression: {error}.") from error
    if compiled.groups < 1:
        raise UserError(f"{name}: pattern {pattern!r} has no group; put the mark in parentheses.")
    return pattern


@register_reward("llm_judge")
class LlmJudge(JudgeReward):
    """The judge's last "Score: N"."""

    needs = frozenset({"texts"})
    label = "llm_judge"
    default_model = "Qwen/Qwen3-8B"
    prompt_name = "llm_judge"
    prompt_fields = ("completion",)

    def __init__(
        self,
        *,
        reference: bool = True,
        gold_key: str | None = None,
        low: float = 1.0,
        high: float = 10.0,
        pattern: str = r"Score:[\s*]*([0-9]+(?:\.[0-9]+)?)",
        device: Any = None,
        **judge: Any,
    ) -> None:
        """Choose prompt and scale.

        Args:
            reference: show the judge the gold answer of rows that have one (another stored prompt).
            gold_key: metadata column of the gold answer; None: see `answers.GOLD_KEYS`.
            low, high: the marks that become 0 and 1; outside them a reply is unreadable.
            pattern: regular expression whose group is the mark; its last match counts.
            device: of a local judge.
            judge: see `JudgeSettings`. A prompt file may hold {prompt}, {reference} and must hold {completion}.
        """
        super().__init__(device=device, **judge)
        if not low < high:
            raise UserError(f"llm_judge: low is {low} and high {high}; low must be the smaller one.")
        self.reference, self.gold_key = reference, gold_key
        self.with_reference = self._template("llm_judge_reference")
        number_pattern(pattern, "llm_judge")
        self.scale = Scale(pattern=pattern, low=low, high=high, last=True, zero_based=True)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        questions = []
        for prompt, text, row in zip(request.prompts, request.texts, request.metadata, strict=True):
            gold = gold_answer(row, self.gold_key) if self.reference else None
            template = self.template if gold is None else self.with_reference
            shown = "" if gold is None else str(gold)
            questions.append(Question(text=render(template, prompt=prompt, completion=text, reference=shown)))
        return RewardOutput.from_list(self.marks(questions, self.scale))
