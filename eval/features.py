"""Image features for evaluations that compare images: pixels (no weights), CLIP, DINOv2, or a function of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object

__all__ = ["load_features", "pixel_features"]

FEATURES = {
    "pixels": "visual_grpo.eval.features:pixel_features",
    "clip": "visual_grpo.rewards.image_features:ClipFeatures",
    "dino": "visual_grpo.rewards.image_features:DinoFeatures",
}


def pixel_features(images: Tensor) -> Tensor:
    """[N, 3, H, W] in [0, 1] to [N, 768]: a 16 x 16 picture, less 0.5.

    Sees layout and colour, and nothing of meaning; for tests and drawn worlds.
    """
    small = interpolate(images.float(), size=(16, 16), mode="bilinear", antialias=True, align_corners=False)
    return (small - 0.5).flatten(1)


def load_features(given: Any) -> Callable[[Tensor], Tensor]:
    """Return features by name (`FEATURES` or "package.module:Name"; a class is built without arguments), or `given`.

    Raises:
        UserError: it cannot be called.
    """
    if isinstance(given, str):
        given = load_object(FEATURES.get(given, given), "image features")
    if isinstance(given, type) and not issubclass(given, torch.nn.Module):
        given = given()
    elif isinstance(given, type):
        given = given().eval()
    if not callable(given):
        raise UserError(f"the image features {given!r} are no function of images [N, 3, H, W] that returns [N, D].")
    found: Callable[[Tensor], Tensor] = given
    return found
