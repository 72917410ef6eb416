"""PickScore: how well people would like the image for its prompt, by a CLIP trained on their choices.

Source: yuvalkirstain/PickScore; flow_grpo's reward is the same figure / 26. Score exp(logit_scale) * cos(text, image) / divisor.
Range: 18 to 24 before the division, so 0.7 to 0.92 after it. Every row with an image is applicable.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward, clip_image_features, features, load_clip

__all__ = ["PickScore"]


@register_reward("pickscore")
class PickScore(ModelReward):
    """PickScore v1 of each image with its own prompt.

    Details: `cosine` of the two embeddings.
    """

    label = "pickscore"

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        divisor: float = 26.0,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose weights and scale; nothing is loaded before the first call.

        Args:
            model: Hub id or folder of the `CLIPModel`.
            processor: Hub id or folder of its image processor and tokenizer.
            divisor: the score is divided by this; 1 gives the published scale.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        if divisor <= 0:
            raise UserError(f"pickscore: divisor must be above 0; it is {divisor}.")
        self.model, self.processor, self.divisor = model, processor, divisor

    def load(self) -> tuple[Any, Any]:
        """Load the model and its processor."""
        return load_clip("pickscore", self.model, self.processor, self.device, self.dtype)

    def score(self, loaded: tuple[Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Scaled cosine of the rows."""
        model, processor = loaded
        # Padded to the full length as the model was trained; its text encoder reads the end token only.
        tokens = processor.tokenizer(
            request.prompts,
            padding="max_length",
            truncation=True,
            max_length=model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.device)
        texts = features(
            model.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        )
        cosine = (texts * clip_image_features(model, processor, request)).sum(-1)
        return {"values": model.logit_scale.float().exp() * cosine / self.divisor, "cosine": cosine}
