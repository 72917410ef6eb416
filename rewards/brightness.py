"""Mean pixel value: a reward for tests and tutorials, learnt by any image model within a few steps. Range [0, 1]."""

from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward

__all__ = ["Brightness"]


@register_reward("brightness")
class Brightness(Reward):
    """Mean over all pixels and channels."""

    needs = frozenset({"images"})

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.images is not None
        return RewardOutput(values=request.images.mean(dim=(1, 2, 3)))  # [N, 3, H, W] -> [N]
