"""Captions with wrong words: what a model sees that was pretrained on pictures and texts from the web.

Every content word (shape, colour, number, relation, quoted word) becomes a random one of its own kind with some probability. A
model trained on them draws clean objects but is unfaithful to the prompt, which is the state that alignment starts from.
"""

from __future__ import annotations

import re

import numpy as np

from visual_grpo.testbed.scenes import COLORS, NUMBERS, RELATIONS, SHAPES, plural
from visual_grpo.testbed.words import WORDS

_CLASSES: tuple[tuple[str, ...], ...] = (
    SHAPES,
    tuple(plural(shape) for shape in SHAPES),
    tuple(COLORS),
    tuple(NUMBERS.values()),
    RELATIONS,
    WORDS,
)
_CLASS_OF = {word: members for members in _CLASSES for word in members}
_CONTENT = re.compile(r"\b(" + "|".join(sorted(_CLASS_OF, key=len, reverse=True)) + r")\b")
_ARTICLE = re.compile(r"\ban? (?=(\w))")


def corrupt_caption(caption: str, rng: np.random.Generator, *, probability: float) -> str:
    """Replace each content word, with the given probability, by a random one of its kind (perhaps itself).

    Args:
        caption: a caption of the testbed.
        rng: source of the choices.
        probability: chance of a replacement, per content word.

    Returns:
        The caption, with articles that fit the new words.

    >>> corrupt_caption("a photo of a red circle", np.random.default_rng(0), probability=0.0)
    'a photo of a red circle'
    """

    def replace(match: re.Match[str]) -> str:
        word = match.group(0)
        if rng.random() >= probability:
            return word
        members = _CLASS_OF[word]
        return members[rng.integers(len(members))]

    changed = _CONTENT.sub(replace, caption)
    return _ARTICLE.sub(lambda match: "an " if match.group(1) in "aeiou" else "a ", changed)
