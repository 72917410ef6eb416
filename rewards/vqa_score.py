"""VQAScore: the probability that a VLM answers Yes when asked whether the image shows the prompt.

Source: Lin et al. (arXiv 2404.01291) and GenEval2's form of it; card rewards, section 2: P(first token is Yes, yes, " yes" or
" Yes"), token ids that two spellings share counted once. With `normalise` P(Yes) / (P(Yes) + P(No)), as Flow-Factory and T2I-R1
have it. Range [0, 1].
"""

from __future__ import annotations

import math
from typing import Any

from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.judge import Failure, JudgeReward, Question, render

__all__ = ["VqaScore"]

YES = ("Yes", "yes", " yes", " Yes")
NO = ("No", "no", " no", " No")


@register_reward("vqa_score")
class VqaScore(JudgeReward):
    """Probability of Yes. Details: `no`, the probability of No.

    An endpoint tells the probabilities of the `top_logprobs` most likely tokens only; a spelling beyond them counts as 0, and
    a row where neither answer is among them has failed.
    """

    needs = frozenset({"images"})
    label = "vqa_score"
    prompt_name = "vqa_score"

    def __init__(
        self, *, normalise: bool = False, question_key: str | None = None, device: Any = None, **judge: Any
    ) -> None:
        """Choose the form.

        Args:
            normalise: divide by P(Yes) + P(No).
            question_key: metadata column with a yes/no question of the row's own (rows without it are not applicable); None:
                the stored prompt with {prompt}.
            device: of a local judge.
            judge: see `JudgeSettings`.
        """
        super().__init__(device=device, **judge)
        self.normalise, self.question_key = normalise, question_key

    def __call__(self, request: RewardRequest) -> RewardOutput:
        texts: list[str | None] = [render(self.template, prompt=prompt) for prompt in request.prompts]
        if self.question_key is not None:
            asked = [row.get(self.question_key) for row in request.metadata]
            texts = [None if text is None else str(text) for text in asked]
        images = request.pil_images
        rows = [row for row, text in enumerate(texts) if text is not None]
        found = self.judge.first_words(
            [Question(text=str(texts[row]), images=(images[row],)) for row in rows], (YES, NO)
        )
        values: list[float | None] = [None] * len(request)
        no = [math.nan] * len(request)
        failures = []
        for row, answer in zip(rows, found, strict=True):
            if not isinstance(answer, Failure) and max(answer) == -math.inf:
                answer = Failure("neither Yes nor No is among the most likely first tokens; raise top_logprobs")
            if isinstance(answer, Failure):
                failures.append(answer)
                values[row] = math.nan
                continue
            # Servers round: the sum of probabilities may pass 1 by an ulp.
            yes, no[row] = (min(1.0, math.exp(value)) for value in answer)
            values[row] = 1 / (1 + math.exp(min(answer[1] - answer[0], 700.0))) if self.normalise else yes
        self.report(failures, len(rows))
        return RewardOutput.from_list(values, {"no": no})
