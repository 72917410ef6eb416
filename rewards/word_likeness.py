"""Partial credit for the testbed's words: how like the word that the prompt quotes is the picture?

Source: ours, for the drawn words of the testbed. Pearson's coefficient of the picture's ink and the drawn word's, at the best
shift; range [0, 1]. The reward `ocr` with `engine: testbed` counts only what can be read, which a model that draws half
letters hardly ever reaches. A prompt that quotes no word of the testbed is not applicable.
"""

from __future__ import annotations

import torch

from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.ocr_score import quoted_text

__all__ = ["WordLikeness"]


@register_reward("word_likeness")
class WordLikeness(Reward):
    """Correlation with the drawn target word, 0 where it is negative.

    Details: `margin`, the distance to the best other word (negative where another word fits better).
    """

    needs = frozenset({"images"})

    def __call__(self, request: RewardRequest) -> RewardOutput:
        from visual_grpo.testbed.word_reader import WORDS, correlations

        targets = [(quoted_text(prompt) or "").upper() for prompt in request.prompts]
        wanted = [i for i, target in enumerate(targets) if target in WORDS]
        values: list[float | None] = [None] * len(request)
        margins = [float("nan")] * len(request)
        if wanted:
            assert request.images is not None
            found, _ = correlations(request.images[torch.tensor(wanted)])
            for row, i in zip(found, wanted, strict=True):
                place = WORDS.index(targets[i])
                others = torch.cat([row[:place], row[place + 1 :]])
                values[i] = max(float(row[place]), 0.0)
                margins[i] = float(row[place] - others.max())
        return RewardOutput.from_list(values, {"margin": margins})
