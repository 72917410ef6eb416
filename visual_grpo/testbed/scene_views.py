"""Neighbours of a caption of the drawn world: captions of the training split that say less, more, or what a picture shows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from visual_grpo.testbed.detector import Detection
from visual_grpo.testbed.scenes import (
    COLORS,
    NUMBERS,
    OPENINGS,
    RELATIONS,
    Metadata,
    plural,
    relations,
    split_prompts,
    with_article,
)

INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@functools.cache
def training_entries() -> dict[str, Metadata]:
    """Metadata of every training prompt by its text; held-out prompts stay unseen."""
    return {str(entry["prompt"]): entry for entry in split_prompts()[0]}


def neighbours(entry: Mapping[str, Any]) -> list[str]:
    """Captions near a prompt: an attribute or object dropped, the order turned, a colour or relation added.

    Args:
        entry: metadata of a prompt of the world (`tag`, `include`, `prompt`).

    Returns:
        Distinct texts of the training split, without the prompt itself, in a fixed order.

    >>> [text for text in neighbours({"tag": "colors", "include": [{"class": "ring", "count": 1, "color": "red"}]})]
    ['a photo of a ring', 'an image of a ring', 'a drawing of a ring']
    """
    clauses = entry["include"]
    names = [(clause["class"], clause.get("color")) for clause in clauses]
    texts: list[str] = []
    if entry["tag"] == "counting":
        shape, count = names[0][0], clauses[0]["count"]
        texts += [f"{opening} {NUMBERS[count]} {plural(shape)}" for opening in OPENINGS]
        texts += _single(shape, None)
    elif len(names) == 1:
        texts += _single(*names[0])
    else:
        if entry["tag"] == "position":
            names.reverse()  # the second clause is the one that is moved
            relation = clauses[1]["position"][0]
            texts.append(_related(names[1][0], names[0][0], by=INVERSE[relation]))
        (first, one), (second, two) = names
        pairs = [(first, second), (second, first)]
        if one is not None and two is not None:
            texts.append(_pair(f"{two} {second}", f"{one} {first}"))
            texts += [_colored(shape, color) for shape, color in names if color is not None]
        texts += [_pair(*pair) for pair in pairs]
        if entry["tag"] == "two_object":
            texts += [_related(*pair, by=relation) for pair in pairs for relation in RELATIONS]
        texts += [f"{opening} {with_article(shape)}" for shape, _ in names for opening in OPENINGS]
    return _known(texts, str(entry.get("prompt", "")))


def described(objects: Mapping[str, Sequence[Detection]], prompt: str = "") -> list[str]:
    """Captions of the training split, other than `prompt`, that fit what the detector found in a picture; often none."""
    found = [(shape, item) for shape, items in sorted(objects.items()) for item in items]
    texts: list[str] = []
    shapes = {shape for shape, _ in found}
    if len(found) == 1:
        shape, item = found[0]
        texts += [] if item.color is None else [_colored(shape, item.color)]
        texts += _single(shape, item.color or "unknown")
    elif len(found) == 2 and len(shapes) == 2:
        for (first, one), (second, two) in (found, found[::-1]):
            texts.append(_pair(f"{one.color} {first}", f"{two.color} {second}"))
            texts += [_related(first, second, by=relation) for relation in sorted(relations(one.box, two.box))]
            texts.append(_pair(first, second))
    elif len(found) in NUMBERS and len(shapes) == 1:
        texts += [f"{opening} {NUMBERS[len(found)]} {plural(found[0][0])}" for opening in OPENINGS]
    return _known(texts, prompt)


def _single(shape: str, color: str | None) -> list[str]:
    """One object: with the other openings, and in every colour where none is given."""
    plain = [f"{opening} {with_article(shape)}" for opening in OPENINGS]
    return plain if color is not None else [*plain, *(_colored(shape, name) for name in COLORS)]


def _colored(shape: str, color: str) -> str:
    return f"a photo of {with_article(f'{color} {shape}')}"


def _pair(first: str, second: str) -> str:
    return f"a photo of {with_article(first)} and {with_article(second)}"


def _related(first: str, second: str, by: str) -> str:
    return f"a photo of {with_article(first)} {by} {with_article(second)}"


def _known(texts: Sequence[str], prompt: str) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text in training_entries() and text != prompt]
