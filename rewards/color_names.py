"""Colour names from mean RGB, for detectors on machines without CLIP weights.

Source: card evaluation, section 10 (the project's own rule; GenEval's figures use CLIP and are not comparable).
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image

__all__ = ["box_color", "color_name"]

CENTRE = 0.6


def color_name(red: float, green: float, blue: float) -> str | None:
    """One of GenEval's ten colours for RGB in [0, 255], None for grey.

    >>> color_name(255, 165, 0), color_name(128, 128, 128)
    ('orange', None)
    """
    turn, saturation, value = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
    hue = turn * 360
    if value < 0.2:
        return "black"
    if saturation < 0.15:
        return "white" if value > 0.8 else None
    if hue >= 345 or hue < 45:
        reddish = hue >= 345 or hue < 15
        if reddish and saturation < 0.5 and value > 0.7:
            return "pink"
        if value < 0.7 and (not reddish or saturation < 0.85):
            return "brown"
        return "red" if reddish else "orange"
    for limit, name in ((70, "yellow"), (165, "green"), (255, "blue"), (310, "purple")):
        if hue < limit:
            return name
    return "pink"


def box_color(image: Image.Image, box: Sequence[float]) -> str | None:
    """Name the mean colour of the central 60 % (each way) of a box (x1, y1, x2, y2) in pixels."""
    x1, y1, x2, y2 = box
    margin_x, margin_y = (1 - CENTRE) / 2 * (x2 - x1), (1 - CENTRE) / 2 * (y2 - y1)
    left, top = round(x1 + margin_x), round(y1 + margin_y)
    right, bottom = max(round(x2 - margin_x), left + 1), max(round(y2 - margin_y), top + 1)
    red, green, blue = np.asarray(image.convert("RGB").crop((left, top, right, bottom))).reshape(-1, 3).mean(0)
    return color_name(float(red), float(green), float(blue))
