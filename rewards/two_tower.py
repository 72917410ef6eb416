"""Fit of picture and prompt by the testbed's two-tower model: a learned reward that can be exploited, as CLIP's can.

The cosine of the two towers (`visual_grpo.testbed.two_tower`), times `scale`; a prompt of unknown words has features too, which
say nothing. Range [-1, 1] at scale 1. For drawn scenes of coloured shapes only; to show what a hacked reward looks like
(docs/anti_hacking.md), never to judge a result.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward

__all__ = ["TwoTowerReward"]


@register_reward("two_tower")
class TwoTowerReward(ModelReward):
    """Cosine of picture and prompt by a small learned model of the drawn world, times a scale."""

    label = "two_tower"

    def __init__(
        self,
        *,
        path: str | None = None,
        scale: float = 1.0,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 256,
    ) -> None:
        """Choose weights and scale.

        Args:
            path: folder that `visual-grpo testbed build two_tower` wrote; None: the shipped one.
            scale: factor of the cosine, above 0.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        if not scale > 0:
            raise UserError(f"two_tower: scale must be above 0; it is {scale}.")
        self.path, self.scale = path, scale

    def load(self) -> Any:
        """Load the model."""
        from visual_grpo.testbed.two_tower import load_two_tower

        return load_two_tower(self.path).to(self.device, self.dtype)

    def score(self, loaded: Any, request: RewardRequest) -> dict[str, Tensor]:
        """Cosines of the rows."""
        assert request.images is not None
        images = loaded.image_features(request.images.to(self.device, self.dtype)).float()
        texts = loaded.text_features(request.prompts).float()
        return {"values": self.scale * (images * texts).sum(-1)}
