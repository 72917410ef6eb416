"""VLM as judge of images: a mark from 1 to 5 for the looks of an image, or for how well it shows its prompt.

Source: flow_grpo's "qwenvl" reward (Qwen2.5-VL-7B, <Score>N</Score>, N / 5; the aesthetic rubric does not read the prompt); card
rewards, section 2; prompts of ours. Range [0.2, 1]. A reply without a mark is a failed row (the reference gives 0).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.judge import JudgeReward, Question, Scale, render
from visual_grpo.rewards.llm_judge import number_pattern

__all__ = ["VlmJudge"]

Rubric = Literal["aesthetic", "alignment"]


@register_reward("vlm_judge")
class VlmJudge(JudgeReward):
    """The judge's first mark / `high`."""

    needs = frozenset({"images"})
    label = "vlm_judge"

    def __init__(
        self,
        rubric: Rubric = "aesthetic",
        *,
        low: float = 1.0,
        high: float = 5.0,
        pattern: str = r"<Score>\s*([0-9]+(?:\.[0-9]+)?)\s*</Score>",
        device: Any = None,
        **judge: Any,
    ) -> None:
        """Choose prompt and scale.

        Args:
            rubric: stored prompt, "aesthetic" or "alignment"; a `prompt_file` takes its place and may hold {prompt}.
            low, high: least and greatest mark; outside them a reply is unreadable.
            pattern: regular expression whose group is the mark; its first match counts.
            device: of a local judge.
            judge: see `JudgeSettings`.
        """
        if rubric not in get_args(Rubric):
            raise UserError(
                f"vlm_judge: rubric is {rubric!r}; give one of {', '.join(get_args(Rubric))}, or a prompt_file."
            )
        super().__init__(device=device, prompt_name=f"vlm_judge_{rubric}", **judge)
        if not low < high or high <= 0:
            raise UserError(f"vlm_judge: low is {low} and high {high}; it needs low < high and high above 0.")
        self.scale = Scale(pattern=number_pattern(pattern, "vlm_judge"), low=low, high=high)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        images = request.pil_images
        questions = [
            Question(text=render(self.template, prompt=prompt), images=(image,))
            for prompt, image in zip(request.prompts, images, strict=True)
        ]
        return RewardOutput.from_list(self.marks(questions, self.scale))
