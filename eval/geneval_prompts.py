"""Prompts by GenEval's rules for any class list, seed and task mix, in its schema; a training set without the test prompts.

Source: djghosh13/geneval `create_prompts.py`, restated in the card evaluation, section 1. The published 553 prompts are a file of
their own and are not made again by any seed of these rules: figures on a generated set need another name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.rewards.geneval_rules import COLORS

__all__ = ["FLOW_GRPO_MIX", "coco_classes", "generate_prompts", "render", "share_out", "write_prompts"]

RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NEVER_COLORED = ("person",)
FLOW_GRPO_MIX = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1, "single_object": 0}
"""Flow-GRPO's training mix."""

Metadata = dict[str, Any]


def coco_classes() -> list[str]:
    """The 80 COCO classes in their order under GenEval's names (from torchvision's metadata: no download)."""
    from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

    from visual_grpo.rewards.mask2former import RENAMED

    names = MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    return [RENAMED.get(name, name) for name in names if name not in ("__background__", "N/A")]


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def render(metadata: Mapping[str, Any]) -> str:
    """The prompt text of GenEval clauses.

    >>> render({"tag": "counting", "include": [{"class": "bus", "count": 2}]})
    'a photo of two buses'
    """
    phrases = []
    for clause in metadata["include"]:
        name = clause["class"]
        if clause["count"] > 1:
            phrases.append(f"{NUMBERS[clause['count']]} {_plural(name)}")
        else:
            phrases.append(_article(f"{clause['color']} {name}" if "color" in clause else name))
    if "position" in metadata["include"][-1]:
        target, moved = phrases
        return f"a photo of {moved} {metadata['include'][-1]['position'][0]} {target}"
    return "a photo of " + " and ".join(phrases)


def _pair(number: int, size: int) -> tuple[int, int]:
    """The `number`-th ordered pair of two different indices below `size`."""
    first, second = divmod(number, size - 1)
    return first, second + (second >= first)


class _Space:
    """All prompts of one task, by number."""

    def __init__(self, classes: Sequence[str], colors: Sequence[str], max_count: int) -> None:
        self.classes, self.colors, self.max_count = classes, colors, max_count
        self.colored = [name for name in classes if name not in NEVER_COLORED]
        n, m, k = len(classes), len(self.colored), len(colors)
        self.tasks: dict[str, tuple[int, Callable[[int], list[Metadata]]]] = {
            "single_object": (n, lambda i: [{"class": classes[i], "count": 1}]),
            "two_object": (n * (n - 1), self._two),
            "counting": (n * (max_count - 1), self._count),
            "colors": (m * k, self._color),
            "position": (n * (n - 1) * len(RELATIONS), self._position),
            "color_attr": (m * (m - 1) * k * (k - 1), self._two_colors),
        }

    def _two(self, number: int) -> list[Metadata]:
        return [{"class": self.classes[i], "count": 1} for i in _pair(number, len(self.classes))]

    def _count(self, number: int) -> list[Metadata]:
        which, more = divmod(number, self.max_count - 1)
        return [{"class": self.classes[which], "count": more + 2}]

    def _color(self, number: int) -> list[Metadata]:
        which, color = divmod(number, len(self.colors))
        return [{"class": self.colored[which], "count": 1, "color": self.colors[color]}]

    def _position(self, number: int) -> list[Metadata]:
        pair, relation = divmod(number, len(RELATIONS))
        moved, target = _pair(pair, len(self.classes))
        return [
            {"class": self.classes[target], "count": 1},
            {"class": self.classes[moved], "count": 1, "position": [RELATIONS[relation], 0]},
        ]

    def _two_colors(self, number: int) -> list[Metadata]:
        pair, shades = divmod(number, len(self.colors) * (len(self.colors) - 1))
        objects, colors = _pair(pair, len(self.colored)), _pair(shades, len(self.colors))
        return [
            {"class": self.colored[i], "count": 1, "color": self.colors[c]}
            for i, c in zip(objects, colors, strict=True)
        ]

    def draw(self, tag: str, rng: np.random.Generator) -> Iterator[Metadata]:
        """Every prompt of a task once, in random order."""
        size, clauses = self.tasks[tag]
        for number in rng.permutation(max(size, 0)).tolist():
            entry: Metadata = {"tag": tag, "include": clauses(number)}
            if tag == "counting":
                (clause,) = entry["include"]
                entry["exclude"] = [{"class": clause["class"], "count": clause["count"] + 1}]
            entry["prompt"] = render(entry)
            yield entry


def share_out(count: int, mix: Mapping[str, float]) -> dict[str, int]:
    """`count` prompts over the tasks in proportion to `mix`, largest remainders first.

    >>> share_out(10, {"position": 2, "colors": 1})
    {'position': 7, 'colors': 3}
    """
    total = sum(mix.values())
    if count < 1 or not 0 < total < math.inf or min(mix.values()) < 0:
        raise UserError(
            f"prompts need a count of at least 1 and weights from 0, not all 0; got {count} and {dict(mix)}."
        )
    exact = {tag: count * weight / total for tag, weight in mix.items()}
    counts = {tag: int(value) for tag, value in exact.items()}
    for tag in sorted(exact, key=lambda t: counts[t] - exact[t])[: count - sum(counts.values())]:
        counts[tag] += 1
    return counts


def generate_prompts(
    counts: Mapping[str, int],
    *,
    classes: Sequence[str] | None = None,
    colors: Sequence[str] = COLORS,
    seed: int = 43,
    max_count: int = 4,
    exclude: Collection[str] = (),
) -> list[Metadata]:
    """Draw different prompts.

    Args:
        counts: prompts of each task; GenEval's own suite asks for all classes once and for 100 of each other task.
        classes: object names; None: COCO's 80. A class named "person" is never coloured.
        colors: colour names.
        seed: a task's prompts depend on it and on the lists, not on the other tasks.
        max_count: largest number of objects in a counting prompt, up to 10.
        exclude: texts that must not be drawn (the test prompts), whatever their case.

    Returns:
        GenEval metadata: tag, include, perhaps exclude, prompt.

    Raises:
        UserError: an unknown task, or fewer different prompts than asked for.
    """
    names = list(dict.fromkeys(coco_classes() if classes is None else classes))
    if not names or not 2 <= max_count <= 10:
        raise UserError(f"prompts need at least one class and max_count in 2..10; got {len(names)} and {max_count}.")
    space = _Space(names, list(dict.fromkeys(colors)), max_count)
    banned = {text.strip().lower() for text in exclude}
    rows: list[Metadata] = []
    for number, tag in enumerate(space.tasks):
        wanted = counts.get(tag, 0)
        drawn: list[Metadata] = []
        stream = space.draw(tag, np.random.default_rng([seed, number])) if wanted else iter(())
        for entry in stream:
            if entry["prompt"].lower() not in banned:
                drawn.append(entry)
                if len(drawn) == wanted:
                    break
        if len(drawn) < wanted:
            raise UserError(
                f"only {len(drawn)} different {tag} prompts are left ({len(names)} classes, {len(banned)} excluded texts), but "
                f"{wanted} were asked for; ask for fewer, or give more classes."
            )
        rows += drawn
    unknown = [tag for tag in counts if tag not in space.tasks]
    if unknown:
        hint = did_you_mean(unknown[0], list(space.tasks))
        raise UserError(f"GenEval has no task {unknown[0]!r}.{hint} Tasks: {', '.join(space.tasks)}.")
    return rows


def write_prompts(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, as evaluations and `data.source` read it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
