"""Does a completion keep to a required form? Range 0 or 1.

Source: TRL's think format (one <think> block at the start) and DeepSeek-R1's think + answer form; card rewards, section 7.
"""

from __future__ import annotations

import re
from typing import Literal

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward

__all__ = ["STYLES", "Format"]

STYLES: dict[str, re.Pattern[str]] = {
    "think": re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE),
    "think_answer": re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL),
}


@register_reward("format")
class Format(Reward):
    """1 if the completion matches from its first character on."""

    needs = frozenset({"texts"})

    def __init__(self, style: Literal["think", "think_answer"] = "think", *, pattern: str | None = None) -> None:
        """Choose the form.

        Args:
            style: "think" or "think_answer".
            pattern: regular expression in place of a style; the dot matches line ends, end it with $ to match everything.
        """
        if pattern is not None:
            try:
                self.pattern = re.compile(pattern, re.DOTALL)
            except re.error as error:
                raise UserError(f"format: pattern {pattern!r} is no regular expression: {error}.") from error
        elif style in STYLES:
            self.pattern = STYLES[style]
        else:
            raise UserError(f"format: style is {style!r}; give one of {', '.join(STYLES)}, or a pattern.")

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        return RewardOutput.from_list([float(self.pattern.match(text) is not None) for text in request.texts])
