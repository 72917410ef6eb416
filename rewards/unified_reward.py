"""UnifiedReward: a VLM trained to mark images for alignment and quality.

Source: CodeGoat24/UnifiedReward (arXiv 2503.05236) as flow_grpo uses it; card rewards, section 2: image resized to 512 x
512, greedy, the first "Final Score: x" with x in 1..5, reward x / 5. Version 2 gives three marks in three lines; its value
is their mean / 5 (our choice). Range [0.2, 1]. A reply without its marks is a failed row (the reference gives 0). The stored
prompts paraphrase the published ones: for published figures put the wording that the checkpoint was trained with into a
`prompt_file`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.judge import Failure, JudgeReward, Question, Scale, render

__all__ = ["UnifiedReward"]

Version = Literal["v1.5", "qwen", "v2"]

VERSIONS: dict[str, tuple[str, str]] = {
    "v1.5": ("CodeGoat24/UnifiedReward-7b-v1.5", "unified_reward"),
    "qwen": ("CodeGoat24/UnifiedReward-qwen-7b", "unified_reward_qwen"),
    "v2": ("CodeGoat24/UnifiedReward-2.0-qwen-7b", "unified_reward_v2"),
}
"""Hub id and stored prompt of each version."""

_MARK = r"\s*([0-9]+(?:\.[0-9]+)?)"
FINAL = {"final": Scale(pattern=r"Final Score:" + _MARK, low=1, high=5)}
THREE = {
    key: Scale(pattern=rf"{key.capitalize()} Score \(1-5\):" + _MARK, low=1, high=5)
    for key in ("alignment", "coherence", "style")
}


@register_reward("unified_reward")
class UnifiedReward(JudgeReward):
    """Mark / 5. Details of version 2: `alignment`, `coherence`, `style`, each / 5."""

    needs = frozenset({"images"})
    label = "unified_reward"
    prompt_fields = ("prompt",)

    def __init__(self, version: Version = "v1.5", *, side: int = 512, device: Any = None, **judge: Any) -> None:
        """Choose the version.

        Args:
            version: "v1.5", "qwen" (lists the prompt's elements first) or "v2" (three marks).
            side: images are resized to this square.
            device: of a local judge.
            judge: see `JudgeSettings`; a prompt file must hold {prompt}.
        """
        if version not in VERSIONS:
            raise UserError(f"unified_reward: version is {version!r}; give one of {', '.join(VERSIONS)}.")
        model, stored = VERSIONS[version]
        super().__init__(device=device, prompt_name=stored, **{"model": model, **judge})
        if side < 1:
            raise UserError(f"unified_reward: side is {side}; give pixels, 1 or more.")
        self.side = side
        self.scales = THREE if version == "v2" else FINAL

    def __call__(self, request: RewardRequest) -> RewardOutput:
        questions = [
            Question(text=render(self.template, prompt=prompt), images=(image.resize((self.side, self.side)),))
            for prompt, image in zip(request.prompts, request.pil_images, strict=True)
        ]
        marks: dict[str, list[float]] = {key: [] for key in self.scales}
        failures = []
        for reply in self.judge.generate(questions):
            read = {
                key: reply if isinstance(reply, Failure) else scale.read(reply) for key, scale in self.scales.items()
            }
            lost = [value for value in read.values() if isinstance(value, Failure)]
            failures += lost[:1]
            for key, value in read.items():
                marks[key].append(math.nan if isinstance(value, Failure) or lost else value)
        self.report(failures, len(questions))
        values = [sum(row) / len(row) for row in zip(*marks.values(), strict=True)]
        return RewardOutput.from_list(values, marks if len(marks) > 1 else None)
