"""Features of images by CLIP and DINOv2: of whole images, for diversity and distances between sets, and of DINOv2's patches.

Weights load at the first call.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from visual_grpo.reward import to_pil
from visual_grpo.rewards.loading import features, load_weights

__all__ = ["ClipFeatures", "DinoFeatures", "DinoPatches"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


class DinoPatches:
    """Patch features of DINOv2 (with or without registers) at the pictures' own proportions."""

    def __init__(
        self,
        *,
        model: str = "facebook/dinov2-large",
        edge: int | None = None,
        device: str | None = None,
        batch: int = 16,
    ) -> None:
        """Choose weights and size.

        Args:
            model: Hub id or folder.
            edge: shorter side of what the network sees, in pixels; None: the picture's own. Rounded to whole patches.
            device: where it runs; None: CUDA if there is one, else the CPU.
            batch: pictures run at a time.
        """
        self.model, self.edge, self.batch = model, edge, batch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._network: Any = None
        self._lock = threading.Lock()

    def _load(self) -> Any:
        with self._lock:
            if self._network is None:
                from transformers import AutoModel

                network = load_weights("the patch features dinov2", self.model, AutoModel.from_pretrained)
                self._network = network.to(self.device).eval().requires_grad_(False)
            return self._network

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features [N, Hp, Wp, D], float32 in CPU memory, of images [N, 3, H, W] in [0, 1]."""
        network = self._load()
        patch = network.config.patch_size
        scale = 1.0 if self.edge is None else self.edge / min(images.shape[-2:])
        grid = tuple(max(round(side * scale / patch), 1) for side in images.shape[-2:])
        mean, std = (torch.tensor(values).view(3, 1, 1).to(self.device) for values in (IMAGENET_MEAN, IMAGENET_STD))
        parts = []
        for chunk in images.split(self.batch):
            pixels = torch.nn.functional.interpolate(
                chunk.to(self.device, torch.float32),
                size=(grid[0] * patch, grid[1] * patch),
                mode="bicubic",
                antialias=True,
            ).clamp(0, 1)
            hidden = network(pixel_values=(pixels - mean) / std).last_hidden_state
            # The class token and the registers come first.
            parts.append(hidden[:, hidden.shape[1] - grid[0] * grid[1] :].float().cpu())
        return torch.cat(parts).unflatten(1, grid)
