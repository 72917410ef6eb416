"""Short rendered words for the OCR reward: images of a word and captions that quote it."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visual_grpo.testbed.scenes import BACKGROUND, IMAGE_SIZE, Metadata, split_by_hash

WORDS = ("CAT", "DOG", "SUN", "BOX", "TEA", "BUS", "FISH", "TREE", "STAR", "BOOK", "OPEN", "STOP")
TEMPLATES = (
    'a sign that says "{word}"',
    'a photo of a sign that says "{word}"',
    'a picture of the word "{word}"',
    'a drawing of the word "{word}"',
)
KIND = "text"


def all_word_prompts() -> list[Metadata]:
    """Return the metadata of every word prompt: `tag` "text", `word` and `prompt` (48 entries)."""
    return [
        {"tag": KIND, "word": word, "prompt": template.format(word=word)} for template in TEMPLATES for word in WORDS
    ]


def split_prompts(heldout: float = 0.3) -> tuple[list[Metadata], list[Metadata]]:
    """Split the word prompts into (train, heldout) by the hash of their text."""
    return split_by_hash(all_word_prompts(), heldout=heldout)


@functools.lru_cache(maxsize=256)
def _fitted_font(word: str, width: int, height: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own TrueType font at the largest size at which `word` fits."""
    for size in range(height, 4, -1):
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont)
        left, top, right, bottom = font.getbbox(word)
        if right - left <= width and bottom - top <= height:
            return font
    raise ValueError(f"the word {word!r} does not fit into {width} x {height} pixels; use a larger image")


def draw_word(word: str, rng: np.random.Generator | None = None, *, size: int = IMAGE_SIZE) -> np.ndarray:
    """Draw a word in black in the middle of an image.

    Args:
        word: text of one line; it is scaled to fill the width.
        rng: source of a shift of up to 1/16 of the height; None draws it centred.
        size: height and width.

    Returns:
        [size, size, 3] uint8.
    """
    image = Image.new("RGB", (size, size), (BACKGROUND,) * 3)
    font = _fitted_font(word, round(size * 0.88), size // 2)
    left, top, right, bottom = font.getbbox(word)
    x, y = (size - right - left) / 2, (size - bottom - top) / 2
    if rng is not None:
        slack = max((size - (right - left)) / 2 - 1, 0)
        x += rng.uniform(-slack, slack)
        y += rng.uniform(-size / 16, size / 16)
    ImageDraw.Draw(image).text((round(x), round(y)), word, font=font, fill=(25, 25, 25))
    return np.asarray(image)


def draw_word_prompt(metadata: Metadata, rng: np.random.Generator) -> np.ndarray:
    """Draw one random image of a word prompt, [IMAGE_SIZE, IMAGE_SIZE, 3] uint8."""
    return draw_word(str(metadata["word"]), rng)
