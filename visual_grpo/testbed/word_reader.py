"""An exact reader of the testbed's words: it plays the part of the OCR engine, which cannot read pictures of 48 pixels.

Nothing is learnt. The ink of a picture (how much darker than the background, whatever the colour) is correlated with that of
each drawn word at every shift: Pearson's coefficient over all pixels of the picture, 1 for the word as it is drawn. The best
word is read if it reaches a threshold; half-drawn letters, scenes and blank pictures stay below.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from visual_grpo.errors import UserError
from visual_grpo.testbed.scenes import BACKGROUND, IMAGE_SIZE
from visual_grpo.testbed.words import WORDS, draw_word

Line = tuple[str, float, tuple[float, float, float, float]]
LEGIBLE = 0.65
"""Two different words as they are drawn correlate by 0.68 at most, and a word that is read must also be the best one."""


def ink(images: Tensor) -> Tensor:
    """How dark each pixel is, [N, H, W] in [0, 1], of pictures [N, 3, H, W] in [0, 1]."""
    return (1 - images.float().mean(1) * 255 / BACKGROUND).clamp(0, 1)


@functools.cache
def templates() -> dict[str, Tensor]:
    """The ink of each word [h, w], cut to its letters."""
    out = {}
    for word in WORDS:
        drawn = torch.from_numpy(draw_word(word).copy()).permute(2, 0, 1)[None] / 255
        shade = ink(drawn)[0]
        rows, columns = torch.nonzero(shade > 0.02, as_tuple=True)
        out[word] = shade[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    return out


def correlations(images: Tensor) -> tuple[Tensor, Tensor]:
    """How like each of `WORDS` the pictures are, at the best shift.

    Args:
        images: [N, 3, H, W] in [0, 1]; another size than the testbed's is brought to it.

    Returns:
        (Pearson's coefficient [N, len(WORDS)] in [-1, 1], (x, y) of the word's top left corner [N, len(WORDS), 2], in pixels of
        the testbed's size). A picture without any ink has 0.

    >>> drawn = torch.from_numpy(draw_word("FISH").copy()).permute(2, 0, 1)[None] / 255
    >>> WORDS[int(correlations(drawn)[0].argmax())]
    'FISH'
    """
    size = (IMAGE_SIZE, IMAGE_SIZE)
    if tuple(images.shape[2:]) != size:
        images = functional.interpolate(images.float(), size, mode="bilinear", antialias=True)
    shade = ink(images)
    pixels = shade[0].numel()
    mean = shade.mean((1, 2))
    spread = (shade - mean[:, None, None]).square().sum((1, 2)).sqrt()
    values, places = [], []
    for drawn in templates().values():
        product = functional.conv2d(shade[:, None], drawn[None, None])[:, 0]
        best, place = product.flatten(1).max(1)
        own_mean = drawn.sum() / pixels
        own_spread = (drawn.square().sum() - pixels * own_mean**2).sqrt()
        covariance = best - pixels * mean * own_mean
        values.append(torch.where(spread > 1e-3, covariance / (spread * own_spread).clamp_min(1e-9), 0.0))
        places.append(torch.stack([place % product.shape[2], place // product.shape[2]], 1))
    return torch.stack(values, 1).clamp(-1, 1), torch.stack(places, 1)


class WordReader:
    """An OCR engine for the reward `ocr` (`engine: testbed`): one of the testbed's words, or nothing."""

    def __init__(self, *, threshold: float = LEGIBLE) -> None:
        """Keep the least correlation of a word that is read.

        Raises:
            UserError: not above 0 and below 1.
        """
        if not 0 < threshold < 1:
            raise UserError(f"threshold is {threshold}; give a correlation above 0 and below 1")
        self.threshold = threshold

    def recognise(self, image: Image.Image) -> list[Line]:
        """Read one picture: (word, correlation, (x1, y1, x2, y2)), or nothing."""
        size = (IMAGE_SIZE, IMAGE_SIZE)
        pixels = image.convert("RGB").resize(size, Image.Resampling.BILINEAR) if image.size != size else image
        values, places = correlations(torch.from_numpy(np.array(pixels.convert("RGB"))).permute(2, 0, 1)[None] / 255)
        best = int(values[0].argmax())
        if float(values[0, best]) < self.threshold:
            return []
        x, y = places[0, best].tolist()
        height, width = templates()[WORDS[best]].shape
        x_scale, y_scale = (side / IMAGE_SIZE for side in image.size)
        box = (x * x_scale, y * y_scale, (x + width) * x_scale, (y + height) * y_scale)
        return [(WORDS[best], float(values[0, best]), box)]
