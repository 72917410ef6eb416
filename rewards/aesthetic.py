"""LAION aesthetics v2: how good the image looks, whatever its prompt; an affine head on CLIP ViT-L/14.

Source: christophschuhmann/improved-aesthetic-predictor, file sac+logos+ava1-l14-linearMSE.pth (the same head on the Hub:
trl-lib/ddpo-aesthetic-predictor). Range 4.5 to 6.5 on real images, nominally 1 to 10; training pushes it up without bound, so
never use it alone. Every row is applicable.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import (
    ModelReward,
    clip_image_features,
    find_file,
    load_clip,
    load_strict,
    read_state,
    resident,
)

__all__ = ["Aesthetic", "AestheticHead"]


class AestheticHead(nn.Module):
    """The published head: five linear layers and no activation, so one affine map of the feature [N, width] to [N].

    The places of the dropouts are kept, for the names: `layers.0`, `.2`, `.4`, `.6`, `.7`.
    """

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, embedding: Tensor) -> Tensor:
        """Score unit features [N, width]."""
        scores: Tensor = self.layers(embedding).squeeze(-1)
        return scores


@register_reward("aesthetic")
class Aesthetic(ModelReward):
    """Predicted aesthetic rating of the image; the prompt is not read."""

    label = "aesthetic"

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        processor: str | None = None,
        head: str = "trl-lib/ddpo-aesthetic-predictor",
        head_file: str = "aesthetic-model.pth",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose weights; nothing is loaded before the first call.

        Args:
            model: Hub id or folder of the `CLIPModel` whose image features the head was trained on.
            processor: Hub id or folder of its processor; None: as `model`.
            head: path of the head's file (LAION's own .pth works), folder or Hub id that holds `head_file`.
            head_file: name of the head's file.
            device, dtype, batch_size: see `ModelReward`; the head is always float32.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        self.model, self.processor = model, processor or model
        self.head, self.head_file = head, head_file

    def load(self) -> tuple[Any, Any, Any]:
        """Load CLIP, its processor and the head."""
        model, processor = load_clip("aesthetic", self.model, self.processor, self.device, self.dtype)

        def build() -> AestheticHead:
            path = find_file("aesthetic's head", self.head, self.head_file)
            built = AestheticHead(model.config.projection_dim)
            load_strict("aesthetic's head", built, read_state("aesthetic's head", path), path)
            return built.float().to(self.device).eval().requires_grad_(False)

        return model, processor, resident(("aesthetic", self.head, self.head_file, str(self.device)), build)

    def score(self, loaded: tuple[Any, Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Score the rows."""
        model, processor, head = loaded
        return {"values": head(clip_image_features(model, processor, request))}
