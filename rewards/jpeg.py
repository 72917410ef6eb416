"""How well an image compresses: a cheap reward without a model, for checking a training loop.

Source: flow_grpo (after DDPO, arXiv 2305.13301). Size = bytes of Pillow's JPEG at quality 95, in units of 1000.
Range: incompressibility = size, above 0; compressibility = -size / 500, below 0. Equal for equal builds of libjpeg only.
"""

from __future__ import annotations

import io

from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward

__all__ = ["JpegCompressibility", "JpegIncompressibility", "jpeg_kilobytes"]


def jpeg_kilobytes(image: Image.Image, quality: int = 95) -> float:
    """Size of `image` as a JPEG, in units of 1000 bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    return buffer.tell() / 1000


class _Jpeg(Reward):
    needs = frozenset({"images"})
    factor: float

    def __init__(self, quality: int = 95) -> None:
        """Set the JPEG quality; published numbers use 95."""
        if not 1 <= quality <= 100:
            raise UserError(f"jpeg: quality is {quality}; give a whole number from 1 to 100.")
        self.quality = quality

    def __call__(self, request: RewardRequest) -> RewardOutput:
        sizes = [jpeg_kilobytes(image, self.quality) for image in request.pil_images]
        return RewardOutput.from_list([self.factor * size for size in sizes], {"kilobytes": sizes})


@register_reward("jpeg_incompressibility")
class JpegIncompressibility(_Jpeg):
    """Size in kB: rewards detail and noise."""

    factor = 1.0


@register_reward("jpeg_compressibility")
class JpegCompressibility(_Jpeg):
    """Minus the size in kB / 500: rewards smooth images."""

    factor = -1 / 500
