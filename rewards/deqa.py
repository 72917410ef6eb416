"""DeQA-Score: image quality as the mean of five words.

Source: zhiyuanyou/DeQA-Score (arXiv 2501.11561); card rewards, section 1: softmax over the five words excellent, good, fair,
poor, bad where the answer's word comes, times (5, 4, 3, 2, 1); flow_grpo divides by 5. Range [0.2, 1]. The published
checkpoint brings code of its own for an old transformers and is not loadable by the current one: this is its protocol on any
VLM, here or behind an endpoint, and figures are comparable within one model only.
"""

from __future__ import annotations

import math
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.judge import Failure, JudgeReward, Question

__all__ = ["DeQA", "expected_level"]

LEVELS = ("excellent", "good", "fair", "poor", "bad")
SPELLINGS = tuple((f" {word}", word) for word in LEVELS)


def expected_level(log_probs: list[float]) -> float:
    """Mean level, 5 for the first word to 1 for the last, under the softmax of `log_probs` [5]; NaN if all are -inf.

    >>> expected_level([0.0, 0.0, 0.0, 0.0, 0.0]), expected_level([0.0, float("-inf"), 0.0, float("-inf"), float("-inf")])
    (3.0, 4.0)
    """
    top = max(log_probs)
    if top == -math.inf:
        return math.nan
    weights = [math.exp(value - top) for value in log_probs]
    return sum(weight * level for weight, level in zip(weights, (5, 4, 3, 2, 1), strict=True)) / sum(weights)


@register_reward("deqa")
class DeQA(JudgeReward):
    """Expected quality level / `divisor`; a word counts with and without the blank before it."""

    needs = frozenset({"images"})
    label = "deqa"
    prompt_name = "deqa"

    def __init__(
        self,
        *,
        divisor: float = 5.0,
        prefix: str = "The quality of the image is",
        device: Any = None,
        **judge: Any,
    ) -> None:
        """Choose scale and wording.

        Args:
            divisor: levels 1..5 are divided by this; 1 gives the published scale.
            prefix: beginning of the answer that the word follows; empty: the word is the answer's first token.
            device: of a local judge.
            judge: see `JudgeSettings`; an endpoint must accept continue_final_message (vLLM and SGLang do) or prefix be empty.
        """
        super().__init__(device=device, **judge)
        if divisor <= 0:
            raise UserError(f"deqa: divisor is {divisor}; give a number above 0.")
        self.divisor, self.prefix = divisor, prefix

    def __call__(self, request: RewardRequest) -> RewardOutput:
        questions = [Question(text=self.template, images=(image,), prefix=self.prefix) for image in request.pil_images]
        found = self.judge.first_words(questions, SPELLINGS)
        failures = [answer for answer in found if isinstance(answer, Failure)]
        levels = [math.nan if isinstance(answer, Failure) else expected_level(answer) for answer in found]
        lost = sum(math.isnan(level) for level in levels) - len(failures)
        failures += [Failure("none of the five words is among the most likely first tokens; raise top_logprobs")] * lost
        self.report(failures, len(found))
        return RewardOutput.from_list([level / self.divisor for level in levels])
