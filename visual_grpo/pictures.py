"""Picture files of any kind as plain RGB."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

__all__ = ["to_rgb"]

WHITE = (255, 255, 255, 255)


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture as a viewer shows it: 8-bit RGB, turned as its EXIF tag says, what is transparent over white.

    Pillow's own conversion clips 16-bit grey to white and shows the colours under transparent pixels.

    Raises:
        ValueError: numbers without a known range (mode F).

    >>> to_rgb(Image.new("I;16", (1, 1), 32768)).getpixel((0, 0)), to_rgb(Image.new("LA", (1, 1), (9, 0))).getpixel((0, 0))
    ((128, 128, 128), (255, 255, 255))
    """
    turned = ImageOps.exif_transpose(image)
    if turned.mode == "F":
        raise ValueError("its pixels are floating-point numbers without a known range; save it with 8 bits a channel")
    if turned.mode == "I" or turned.mode.startswith("I;16"):
        grey = np.asarray(turned).astype(np.float64) / 257
        turned = Image.fromarray(grey.round().clip(0, 255).astype(np.uint8))
    if turned.has_transparency_data:
        clear = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", clear.size, WHITE), clear)
    return turned.convert("RGB")
