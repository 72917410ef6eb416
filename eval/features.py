"""Image features for evaluations that compare images: pixels (no weights), CLIP, DINOv2, or a function of your own."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object

__all__ = ["feature_rows", "load_features", "pack", "pixel_features", "unpack"]

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


def feature_rows(extract: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Features [N, D] of images [N, 3, H, W], float32 on the CPU.

    Raises:
        UserError: the function returns anything else.
    """
    found: Any = extract(images)
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
        given = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"the image features must be a tensor [{len(images)}, D], one row an image; they are {given}.")
    return found.float().cpu()


def pack(row: Tensor) -> str:
    """Features [D] as text for a result line: base64 of little-endian float32."""
    return base64.b64encode(row.detach().cpu().numpy().astype("<f4").tobytes()).decode()


def unpack(lines: Sequence[Mapping[str, Any]]) -> Tensor:
    """Features [N, D] of result lines.

    >>> unpack([{"features": pack(torch.tensor([1.0, 0.5]))}])
    tensor([[1.0000, 0.5000]])
    """
    rows = [np.frombuffer(base64.b64decode(line["features"]), dtype="<f4") for line in lines]
    return torch.from_numpy(np.stack(rows).astype(np.float32))
