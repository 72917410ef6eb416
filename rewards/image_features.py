"""Features of images by CLIP and DINOv2, for diversity and distances between sets of images. Weights load at the first call."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from visual_grpo.reward import to_pil
from visual_grpo.rewards.loading import features, load_weights

__all__ = ["ClipFeatures", "DinoFeatures"]


class _Features(ABC):
    """Image features [N, D] of unit length of images [N, 3, H, W] in [0, 1]."""

    name = ""

    def __init__(self, *, model: str, device: str | None = None) -> None:
        self.model = model
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def _load(self) -> tuple[Any, Any]:
        with self._lock:
            if self._loaded is None:
                from transformers import AutoImageProcessor, AutoModel

                processor = load_weights(
                    f"the processor of {self.name}", self.model, AutoImageProcessor.from_pretrained
                )
                model = load_weights(self.name, self.model, AutoModel.from_pretrained)
                self._loaded = model.to(self.device).eval().requires_grad_(False), processor
            return self._loaded

    @abstractmethod
    def _encode(self, model: Any, pixels: Tensor) -> Any:
        """The library's output for preprocessed pixels."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        model, processor = self._load()
        pixels = processor(images=to_pil(images), return_tensors="pt")["pixel_values"].to(self.device)
        return features(self._encode(model, pixels)).cpu()


class ClipFeatures(_Features):
    """Projected image features of CLIP ViT-L/14."""

    name = "the features clip"

    def __init__(self, *, model: str = "openai/clip-vit-large-patch14", device: str | None = None) -> None:
        super().__init__(model=model, device=device)

    def _encode(self, model: Any, pixels: Tensor) -> Any:
        return model.get_image_features(pixel_values=pixels)


class DinoFeatures(_Features):
    """CLS features of DINOv2."""

    name = "the features dino"

    def __init__(self, *, model: str = "facebook/dinov2-base", device: str | None = None) -> None:
        super().__init__(model=model, device=device)

    def _encode(self, model: Any, pixels: Tensor) -> Any:
        return model(pixel_values=pixels).last_hidden_state[:, 0]
