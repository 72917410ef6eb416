"""DINOv2 similarity: does the image show the same subject as a reference image?

No canonical definition of a "DINO reward" is published. Ours (card on rewards, section 5): cosine of the unit CLS features of
facebook/dinov2-base, shorter side 256 (bicubic), centre crop 224, ImageNet's mean and std. Range [-1, 1]. A row without a
reference image is not applicable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.pictures import to_rgb
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward, load_weights, resident

__all__ = ["DinoSimilarity"]

MODEL = "facebook/dinov2-base"


@register_reward("dino_similarity")
class DinoSimilarity(ModelReward):
    """Cosine of DINOv2's features of the image and of the row's reference image."""

    label = "dino_similarity"

    def __init__(
        self,
        *,
        reference_key: str = "reference",
        root: str = ".",
        model: str = MODEL,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose weights and where references are.

        Args:
            reference_key: metadata column with the reference: a path, or a PIL image.
            root: folder that relative paths start from.
            model: Hub id or folder of a DINOv2 model with its image processor.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        self.model, self.reference_key, self.root = model, reference_key, Path(root)

    def load(self) -> tuple[Any, Any]:
        """Load the model and its image processor."""
        from transformers import AutoImageProcessor, Dinov2Model

        def build() -> Any:
            loaded = load_weights("dino_similarity's model", self.model, Dinov2Model.from_pretrained, dtype=self.dtype)
            return loaded.to(self.device).eval().requires_grad_(False)

        processor = load_weights("dino_similarity's processor", self.model, AutoImageProcessor.from_pretrained)
        return resident(("Dinov2Model", self.model, str(self.device), self.dtype), build), processor

    def features(self, loaded: tuple[Any, Any], images: list[Image.Image]) -> Tensor:
        """Unit CLS features [N, D], float32."""
        model, processor = loaded
        # One by one: references may have any size.
        parts = [processor(images=image, return_tensors="pt")["pixel_values"] for image in images]
        hidden = model(pixel_values=torch.cat(parts).to(self.device, self.dtype)).last_hidden_state
        return torch.nn.functional.normalize(hidden[:, 0].float(), dim=-1)

    def reference(self, row: dict[str, Any]) -> Image.Image | None:
        """Open the reference of a row with metadata `row`; None if it has none.

        Raises:
            UserError: it cannot be read.
        """
        value = row.get(self.reference_key)
        if value is None or isinstance(value, Image.Image):
            return None if value is None else to_rgb(value)
        path = self.root / str(value)
        try:
            with Image.open(path) as opened:
                return to_rgb(opened)
        except Exception as error:  # Pillow's formats raise SyntaxError, ValueError, struct.error and more
            raise UserError(
                f"dino_similarity: the reference image {str(path)!r} of column {self.reference_key!r} cannot be read "
                f"({error}). Mend the column, or set rewards.dino_similarity.params.root to the folder of the images."
            ) from error

    def score(self, loaded: tuple[Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Cosine of the rows that have a reference; the others are not applicable."""
        references = [self.reference(row) for row in request.metadata]
        rows = [i for i, reference in enumerate(references) if reference is not None]
        values = torch.full((len(request),), float("nan"))
        applicable = torch.zeros(len(request), dtype=torch.bool)
        if rows:
            images = self.features(loaded, [request.pil_images[i] for i in rows])
            wanted = self.features(loaded, [image for image in references if image is not None])
            values[rows] = (images * wanted).sum(-1).cpu()
            applicable[rows] = True
        return {"values": values, "applicable": applicable}
