"""The drawn world of the image testbed: coloured shapes on a 3 x 3 lattice, captioned in GenEval's six kinds.

A scene is a list of objects, each alone in a cell, no two in cells that share an edge (so objects never touch). Prompts carry
GenEval's own metadata (`tag`, `include`, `exclude`, `prompt`), therefore the official rule engine scores them unchanged, and
relation scenes are drawn with that engine's rule: whatever `sample_scene` draws for a prompt is correct for it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

IMAGE_SIZE = 48
"""Height and width of an image in pixels."""
GRID = 3
CELL = IMAGE_SIZE // GRID
BACKGROUND = 245
RADIUS_RANGE = (5.9, 6.9)
JITTER = 0.6

SHAPES = ("circle", "square", "triangle", "cross", "ring", "diamond")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 45),
    "orange": (245, 140, 20),
    "yellow": (245, 215, 30),
    "green": (20, 180, 40),
    "blue": (35, 80, 220),
    "purple": (130, 40, 170),
    "pink": (255, 90, 190),
    "black": (25, 25, 25),
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
KINDS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
OPENINGS = ("a photo of", "a picture of", "an image of", "a drawing of")
"""GenEval says "a photo of"; the two kinds with few prompts also use the others, so that a held-out share means something."""

Metadata = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """One drawn object.

    Attributes:
        shape: one of `SHAPES`.
        color: a key of `COLORS`.
        center: (x, y) in pixels, y downward.
        radius: nominal half extent in pixels.
    """

    shape: str
    color: str
    center: tuple[float, float]
    radius: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(x1, y1, x2, y2) of the drawn shape in pixels."""
        left, top, right, bottom = _EXTENTS[self.shape]
        x, y = self.center
        return (x - left * self.radius, y - top * self.radius, x + right * self.radius, y + bottom * self.radius)


_SQUARE, _TRIANGLE_BASE, _CROSS_ARM, _RING_HOLE, _DIAMOND = 0.88, 0.82, 0.33, 0.52, 1.05
_EXTENTS = {  # left, top, right, bottom in units of the radius
    "circle": (1.0, 1.0, 1.0, 1.0),
    "square": (_SQUARE,) * 4,
    "triangle": (1.0, 1.0, 1.0, _TRIANGLE_BASE),
    "cross": (1.0, 1.0, 1.0, 1.0),
    "ring": (1.0, 1.0, 1.0, 1.0),
    "diamond": (_DIAMOND,) * 4,
}


def plural(name: str) -> str:
    """Return GenEval's plural: "es" after an s, else "s".

    >>> plural("cross"), plural("ring")
    ('crosses', 'rings')
    """
    return name + ("es" if name.endswith("s") else "s")


def with_article(phrase: str) -> str:
    """Put "a" or "an" before a phrase.

    >>> with_article("orange ring")
    'an orange ring'
    """
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def relations(first: Sequence[float], second: Sequence[float]) -> set[str]:
    """Return GenEval's relations of box `first` to box `second` (margin 0.1 of the summed extents, cosine above 0.5).

    >>> sorted(relations((200, 150, 300, 250), (0, 0, 100, 100)))
    ['below', 'right of']
    """
    x = (first[0] + first[2] - second[0] - second[2]) / 2
    y = (first[1] + first[3] - second[1] - second[3]) / 2
    margin_x = 0.1 * (first[2] - first[0] + second[2] - second[0])
    margin_y = 0.1 * (first[3] - first[1] + second[3] - second[1])
    reduced_x = math.copysign(max(abs(x) - margin_x, 0.0), x)
    reduced_y = math.copysign(max(abs(y) - margin_y, 0.0), y)
    if abs(reduced_x) < 1e-3 and abs(reduced_y) < 1e-3:
        return set()
    norm = math.hypot(x, y)
    holds = {
        "left of": reduced_x / norm < -0.5,
        "right of": reduced_x / norm > 0.5,
        "above": reduced_y / norm < -0.5,
        "below": reduced_y / norm > 0.5,
    }
    return {name for name, held in holds.items() if held}


# --- prompts ---------------------------------------------------------------------------------------------------------


def _entry(
    tag: str, prompt: str, include: list[dict[str, object]], exclude: list[dict[str, object]] | None = None
) -> Metadata:
    entry: Metadata = {"tag": tag, "include": include}
    if exclude is not None:
        entry["exclude"] = exclude
    entry["prompt"] = prompt
    return entry


def all_prompts() -> list[Metadata]:
    """Return the metadata of every prompt of the world, kind by kind, in a fixed order (1,974 entries)."""
    prompts: list[Metadata] = []
    for opening, shape in itertools.product(OPENINGS, SHAPES):
        prompts.append(_entry("single_object", f"{opening} {with_article(shape)}", [{"class": shape, "count": 1}]))
    for first, second in itertools.permutations(SHAPES, 2):
        include = [{"class": first, "count": 1}, {"class": second, "count": 1}]
        prompts.append(_entry("two_object", f"a photo of {with_article(first)} and {with_article(second)}", include))
    for opening, (count, word), shape in itertools.product(OPENINGS, NUMBERS.items(), SHAPES):
        include = [{"class": shape, "count": count}]
        exclude = [{"class": shape, "count": count + 1}]
        prompts.append(_entry("counting", f"{opening} {word} {plural(shape)}", include, exclude))
    for color, shape in itertools.product(COLORS, SHAPES):
        include = [{"class": shape, "count": 1, "color": color}]
        prompts.append(_entry("colors", f"a photo of {with_article(f'{color} {shape}')}", include))
    for (moved, target), relation in itertools.product(itertools.permutations(SHAPES, 2), RELATIONS):
        include = [{"class": target, "count": 1}, {"class": moved, "count": 1, "position": [relation, 0]}]
        prompts.append(
            _entry("position", f"a photo of {with_article(moved)} {relation} {with_article(target)}", include)
        )
    for (first, second), (one, two) in itertools.product(
        itertools.permutations(SHAPES, 2), itertools.permutations(COLORS, 2)
    ):
        include = [{"class": first, "count": 1, "color": one}, {"class": second, "count": 1, "color": two}]
        text = f"a photo of {with_article(f'{one} {first}')} and {with_article(f'{two} {second}')}"
        prompts.append(_entry("color_attr", text, include))
    return prompts


def text_hash(text: str) -> int:
    """Return a 64-bit hash of a text that is the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_prompts(heldout: float = 0.3) -> tuple[list[Metadata], list[Metadata]]:
    """Split all prompts into (train, heldout); of each kind the share with the smallest hashes is held out.

    Pre-training sees every combination; the held-out prompts are the ones that reinforcement learning never sees.

    >>> train, heldout = split_prompts()
    >>> len(train), len(heldout)
    (1382, 592)
    """
    return split_by_hash(all_prompts(), heldout=heldout)


def split_by_hash(prompts: Iterable[Metadata], *, heldout: float) -> tuple[list[Metadata], list[Metadata]]:
    """Split prompts by the hash of their text, within each `tag`, keeping the order."""
    by_tag: dict[object, list[Metadata]] = {}
    for prompt in prompts:
        by_tag.setdefault(prompt["tag"], []).append(prompt)
    train: list[Metadata] = []
    held: list[Metadata] = []
    for members in by_tag.values():
        ranked = sorted(str(member["prompt"]) for member in members)
        ranked.sort(key=text_hash)
        chosen = set(ranked[: round(heldout * len(ranked))])
        train += [member for member in members if member["prompt"] not in chosen]
        held += [member for member in members if member["prompt"] in chosen]
    return train, held


# --- scenes ----------------------------------------------------------------------------------------------------------


def _independent_cells(count: int) -> list[tuple[int, ...]]:
    """All ordered choices of `count` cells (row-major indices) of which no two share an edge."""

    def apart(first: int, second: int) -> bool:
        return abs(first // GRID - second // GRID) + abs(first % GRID - second % GRID) > 1

    cells = itertools.permutations(range(GRID * GRID), count)
    return [choice for choice in cells if all(apart(a, b) for a, b in itertools.combinations(choice, 2))]


_CELLS = {count: _independent_cells(count) for count in (1, 2, 3, 4)}


def sample_scene(metadata: Metadata, rng: np.random.Generator) -> list[SceneObject]:
    """Draw a random scene that GenEval's rules judge correct for `metadata`, without any further object.

    Args:
        metadata: an entry of `all_prompts`.
        rng: source of cells, sizes, jitter and of colours that the prompt leaves open (one colour for all objects of a count).

    Returns:
        Objects in the order of the prompt's `include` clauses.
    """
    wanted: list[tuple[str, str | None]] = []
    relation: str | None = None
    for clause in metadata["include"]:  # type: ignore[attr-defined]
        color = clause.get("color") or str(rng.choice(list(COLORS)))
        wanted += [(clause["class"], color)] * clause["count"]
        relation = clause["position"][0] if "position" in clause else relation
    cells = _CELLS[len(wanted)]
    while True:
        choice = cells[rng.integers(len(cells))]
        objects = [_place(shape, color, cell, rng) for (shape, color), cell in zip(wanted, choice, strict=True)]
        if relation is None or relation in relations(objects[1].box, objects[0].box):
            return objects


def _place(shape: str, color: str | None, cell: int, rng: np.random.Generator) -> SceneObject:
    shift_x, shift_y = rng.uniform(-JITTER, JITTER, size=2)
    center = ((cell % GRID + 0.5) * CELL + shift_x, (cell // GRID + 0.5) * CELL + shift_y)
    return SceneObject(shape=shape, color=str(color), center=center, radius=float(rng.uniform(*RADIUS_RANGE)))


def signed_distance(shape: str, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """Return the (approximate) signed distance in pixels to a centred shape, negative inside.

    Args:
        shape: one of `SHAPES`.
        x: horizontal offsets from the centre, broadcastable with `y`.
        y: vertical offsets, downward.
        radius: nominal half extent.

    Returns:
        Distances, the broadcast shape of `x` and `y`.
    """
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "ring":
        middle, half = radius * (1 + _RING_HOLE) / 2, radius * (1 - _RING_HOLE) / 2
        return np.abs(np.hypot(x, y) - middle) - half
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - _SQUARE * radius
    if shape == "diamond":
        return (np.abs(x) + np.abs(y) - _DIAMOND * radius) / math.sqrt(2)
    if shape == "cross":
        arm = _CROSS_ARM * radius
        upright = np.maximum(np.abs(x) - arm, np.abs(y) - radius)
        return np.minimum(upright, np.maximum(np.abs(x) - radius, np.abs(y) - arm))
    if shape == "triangle":
        height = 1 + _TRIANGLE_BASE
        side = (height * np.abs(x) - (y + radius)) / math.hypot(height, 1)
        return np.maximum(side, y - _TRIANGLE_BASE * radius)
    raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")


def draw_scene(objects: Sequence[SceneObject], *, size: int = IMAGE_SIZE) -> np.ndarray:
    """Draw objects with anti-aliased borders.

    Args:
        objects: what to draw, later ones on top; positions are in pixels of the image.
        size: height and width.

    Returns:
        [size, size, 3] uint8.
    """
    image = np.full((size, size, 3), float(BACKGROUND), dtype=np.float32)
    axis = np.arange(size, dtype=np.float32) + 0.5
    for item in objects:
        x1, y1, x2, y2 = item.box
        columns = slice(max(int(x1) - 1, 0), max(int(x2) + 2, 0))
        rows = slice(max(int(y1) - 1, 0), max(int(y2) + 2, 0))
        distance = signed_distance(
            item.shape, axis[None, columns] - item.center[0], axis[rows, None] - item.center[1], item.radius
        )
        coverage = np.clip(0.5 - distance, 0.0, 1.0)[..., None]
        color = np.asarray(COLORS[item.color], dtype=np.float32)
        image[rows, columns] = (1 - coverage) * image[rows, columns] + coverage * color
    return np.rint(image).astype(np.uint8)


def draw_prompt(metadata: Metadata, rng: np.random.Generator) -> np.ndarray:
    """Draw one random correct image of a prompt, [IMAGE_SIZE, IMAGE_SIZE, 3] uint8."""
    return draw_scene(sample_scene(metadata, rng))
