"""Safety gate: 1 for an image that a classifier calls safe, 0 for one that it does not.

Source: Falconsai/nsfw_image_detection, a ViT-B/16 with the classes "normal" and "nsfw"; any image classifier of transformers
whose unsafe classes are named will do. Range: 0 or 1; the probability is a detail. Multiply other rewards by it, or log it. Every
row is applicable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward, load_weights, resident

__all__ = ["Nsfw"]


@register_reward("nsfw")
class Nsfw(ModelReward):
    """1 if the image is safe, else 0.

    Details: `probability` of the unsafe classes together.
    """

    label = "nsfw"

    def __init__(
        self,
        *,
        model: str = "Falconsai/nsfw_image_detection",
        unsafe: Sequence[str] = ("nsfw",),
        threshold: float = 0.5,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose the classifier and how strict it is.

        Args:
            model: Hub id or folder of an image classifier with its processor.
            unsafe: its classes that are not safe.
            threshold: an image is unsafe if their probability reaches this.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        if not 0 < threshold <= 1:
            raise UserError(f"nsfw: threshold is {threshold}; give a probability above 0 and at most 1.")
        self.model, self.unsafe, self.threshold = model, list(unsafe), threshold

    def load(self) -> tuple[Any, Any, list[int]]:
        """Load the classifier, its processor and the places of its unsafe classes."""
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        def build() -> Any:
            loaded = load_weights(
                "nsfw's model", self.model, AutoModelForImageClassification.from_pretrained, dtype=self.dtype
            )
            return loaded.to(self.device).eval().requires_grad_(False)

        model = resident(("ImageClassification", self.model, str(self.device), self.dtype), build)
        places = {name: int(place) for place, name in model.config.id2label.items()}
        unknown = [name for name in self.unsafe if name not in places]
        if unknown or not self.unsafe:
            raise UserError(
                f"nsfw: {self.model!r} has no class {', '.join(unknown) or '(unsafe is empty)'}; its classes are "
                f"{', '.join(places)}. Name the unsafe ones in `unsafe`."
            )
        processor = load_weights("nsfw's processor", self.model, AutoImageProcessor.from_pretrained)
        return model, processor, [places[name] for name in self.unsafe]

    def score(self, loaded: tuple[Any, Any, list[int]], request: RewardRequest) -> dict[str, Tensor]:
        """Judge the rows."""
        model, processor, places = loaded
        pixels = processor(images=request.pil_images, return_tensors="pt")["pixel_values"]
        logits: Tensor = model(pixel_values=pixels.to(self.device, self.dtype)).logits
        probability = logits.float().softmax(-1)[:, places].sum(-1)
        # A number that is not one must not pass as safe.
        safe = torch.where(torch.isfinite(probability), (probability < self.threshold).float(), torch.nan)
        return {"values": safe, "probability": probability}
