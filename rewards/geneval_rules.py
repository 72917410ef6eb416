"""GenEval's rules on detected objects: official correctness, strict equality, and flow_grpo's partial credit.

Source: djghosh13/geneval `evaluate_images.py` (official rule, detection filter, relations) and yifan123/reward-server
`gen_eval.py` (strict and partial), restated in the cards evaluation (section 1) and rewards (section 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from visual_grpo.errors import UserError

__all__ = [
    "COLORS",
    "DetectedObject",
    "DetectionFilter",
    "Verdict",
    "filter_detections",
    "judge_official",
    "judge_partial",
    "relations",
]

Box = Sequence[float]
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
"""GenEval's colours, in its order."""


class DetectedObject(Protocol):
    """What a detector reports; the colour may be worked out when it is first asked for."""

    @property
    def box(self) -> Box:
        """(x1, y1, x2, y2) in pixels, y growing downward."""

    @property
    def score(self) -> float:
        """Confidence in [0, 1]."""

    @property
    def color(self) -> str | None:
        """Name of the colour, None where no colour fits."""


Detections = Mapping[str, Sequence[DetectedObject]]
"""One image: class name -> objects; absent classes are absent."""


@dataclass(frozen=True, kw_only=True)
class DetectionFilter:
    """Which detections count; the defaults are the reference's."""

    threshold: float = 0.3
    counting_threshold: float = 0.9
    """in place of `threshold` for prompts with the tag "counting"."""
    max_objects: int = 16
    """best detections kept of each class."""
    max_overlap: float = 1.0
    """a detection that overlaps a better one of its class by this IoU or more is dropped; 1 turns that off, also for
    identical boxes (as in the reference)."""
    margin: float = 0.1
    """share of the summed extents that an offset must exceed before it counts as a relation."""

    def __post_init__(self) -> None:
        """Refuse numbers with which nothing could count.

        Raises:
            UserError: naming the number and its range.
        """
        ranges = {
            "threshold": ("from 0 to below 1", 0 <= self.threshold < 1),
            "counting_threshold": ("from 0 to below 1", 0 <= self.counting_threshold < 1),
            "max_objects": ("1 or more", self.max_objects >= 1),
            "max_overlap": ("above 0 and up to 1", 0 < self.max_overlap <= 1),
            "margin": ("0 or more", self.margin >= 0),
        }
        for key, (range_, holds) in ranges.items():
            if not holds:
                raise UserError(f"geneval: {key} is {getattr(self, key)}; give a number {range_}.")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule says about one image."""

    correct: bool
    score: float = 0.0
    """partial credit: mean of the parts; `judge_official` leaves it at 0."""
    reasons: list[str] = field(default_factory=list)


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union with inclusive pixel sides (+1), as in the reference.

    >>> round(box_iou((0, 0, 9, 9), (5, 0, 14, 9)), 6)
    0.333333
    """

    def area(x1: float, y1: float, x2: float, y2: float) -> float:
        return max(x2 - x1 + 1, 0) * max(y2 - y1 + 1, 0)

    shared = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    union = area(*a[:4]) + area(*b[:4]) - shared
    return shared / union if union else 0.0


def check_clauses(metadata: Mapping[str, Any]) -> None:
    """Refuse clauses that say nothing that can be judged.

    Raises:
        ValueError: a clause without a class, without a count of at least 1, or with a position relative to no clause before it.
    """
    for key in ("include", "exclude"):
        clauses = metadata.get(key) or []
        for index, clause in enumerate(clauses if isinstance(clauses, list | tuple) else [clauses]):
            told = isinstance(clause, Mapping) and isinstance(clause.get("class"), str)
            count = clause.get("count") if told else None
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f'{key}: {clause!r} is no clause such as {{"class": "cat", "count": 1}}')
            place = clause.get("position")
            if place is not None and not (
                isinstance(place, list | tuple)
                and len(place) == 2
                and isinstance(place[0], str)
                and type(place[1]) is int
            ):
                raise ValueError(f'{key}: the position {place!r} is no ["left of", index of a clause before it]')
            if place is not None and not 0 <= place[1] < index:
                raise ValueError(f"position {place} of {clause['class']!r} must name a clause before it, by its index")


def filter_detections(raw: Detections, tag: str | None, keep: DetectionFilter) -> dict[str, list[DetectedObject]]:
    """Return the objects that count, best score first; classes without any are absent."""
    threshold = keep.counting_threshold if tag == "counting" else keep.threshold
    kept: dict[str, list[DetectedObject]] = {}
    for name, objects in raw.items():
        ranked = sorted((o for o in objects if o.score > threshold), key=lambda o: -o.score)[: keep.max_objects]
        chosen: list[DetectedObject] = []
        for candidate in ranked:
            if keep.max_overlap == 1 or all(box_iou(best.box, candidate.box) < keep.max_overlap for best in chosen):
                chosen.append(candidate)
        if chosen:
            kept[name] = chosen
    return kept


def relations(a: Box, b: Box, margin: float = 0.1) -> set[str]:
    """Relations of box `a` to box `b`; two can hold at once.

    >>> sorted(relations((0, 0, 100, 100), (200, 150, 300, 250)))
    ['above', 'left of']
    """
    offset = [(a[i] + a[i + 2]) / 2 - (b[i] + b[i + 2]) / 2 for i in (0, 1)]
    extents = [abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i]) for i in (0, 1)]
    reduced = [math.copysign(max(abs(o) - margin * extent, 0.0), o) for o, extent in zip(offset, extents, strict=True)]
    if all(abs(value) < 1e-3 for value in reduced):
        return set()
    distance = math.hypot(*offset)  # of the offset before the margin was taken off
    x, y = (value / distance for value in reduced)
    held = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in held.items() if holds}


def _first_wrong_pair(
    found: Sequence[DetectedObject], targets: Sequence[DetectedObject], wanted: str, margin: float
) -> set[str] | None:
    """Relations of the first pair that lacks `wanted`, or None if every pair has it."""
    for item in found:
        for target in targets:
            held = relations(item.box, target.box, margin)
            if wanted not in held:
                return held
    return None


def judge_official(objects: Detections, metadata: Mapping[str, Any], *, margin: float = 0.1) -> Verdict:
    """Apply the published rule: every include clause must hold and no exclude clause may.

    Args:
        objects: filtered detections, best first. An include clause looks at its `count` best, an exclude clause at all.
        metadata: `include` and `exclude` clauses of the prompt.
        margin: see `DetectionFilter`.
    """
    reasons: list[str] = []
    matched: list[Sequence[DetectedObject] | None] = []
    for clause in metadata.get("include") or []:
        name, count = clause["class"], clause["count"]
        found = list(objects.get(name, []))[:count]
        if len(found) < count:
            reasons.append(f"expected {name}>={count}, found {len(found)}")
            matched.append(None)
            continue
        before = len(reasons)
        if "color" in clause:
            right = sum(item.color == clause["color"] for item in found)
            if right < count:
                reasons.append(
                    f"expected {clause['color']} {name}>={count}, found {right} {clause['color']}; and "
                    + _count_colors(item.color for item in found)
                )
        if "position" in clause and len(reasons) == before:
            reasons.extend(_judge_position(clause, found, matched, margin))
        matched.append(found if len(reasons) == before else None)
    for clause in metadata.get("exclude") or []:
        present = len(objects.get(clause["class"], []))
        if present >= clause["count"]:
            reasons.append(f"expected {clause['class']}<{clause['count']}, found {present}")
    return Verdict(correct=not reasons, reasons=reasons)


def _count_colors(colors: Iterable[str | None]) -> str:
    """How often each colour was seen ("1 red, 2 blue"), GenEval's ten first and in its order."""
    seen = Counter("no named colour" if color is None else color for color in colors)
    ranked = sorted(seen, key=lambda color: (COLORS.index(color) if color in COLORS else len(COLORS), color))
    return ", ".join(f"{seen[color]} {color}" for color in ranked)


def _judge_position(
    clause: Mapping[str, Any],
    found: Sequence[DetectedObject],
    matched: Sequence[Sequence[DetectedObject] | None],
    margin: float,
) -> list[str]:
    """Reasons against the position of `found`; `matched` holds the clauses before this one."""
    wanted, target_index = clause["position"]
    if not 0 <= target_index < len(matched):
        raise ValueError(
            f"position {clause['position']} of {clause['class']!r} must name a clause before it, by its index"
        )
    targets = matched[target_index]
    if targets is None:
        return [f"no target for {clause['class']} to be {wanted}"]
    held = _first_wrong_pair(found, targets, wanted, margin)
    if held is None:
        return []
    return [f"expected {clause['class']} {wanted} target, found {' and '.join(sorted(held))} target"]


def judge_partial(
    objects: Detections,
    metadata: Mapping[str, Any],
    *,
    margin: float = 0.1,
    position_bug: Literal["reference", "fixed"] = "reference",
) -> Verdict:
    """Apply flow_grpo's training rule: counts must be equal, and every part earns credit of its own.

    Args:
        objects: filtered detections; all of a class count, not the first ones only.
        metadata: `include` clauses; `exclude` is ignored, for equality covers it.
        margin: see `DetectionFilter`.
        position_bug: the reference gives 1 for a position after having given 0 for a wrong pair (0.75 for a wrong side);
            "fixed" gives it only if every pair is right (0.667).

    Returns:
        `correct`: strict correctness; `score`: mean of the parts, below 0 where more than twice the count was found.
    """
    parts: list[float] = []
    reasons: list[str] = []
    matched: list[Sequence[DetectedObject] | None] = []
    for clause in metadata.get("include") or []:
        name, count = clause["class"], clause["count"]
        found = list(objects.get(name, []))
        parts.append(1 - abs(count - len(found)) / count)
        if len(found) != count:
            reasons.append(f"expected {name}=={count}, found {len(found)}")
            if "color" in clause or "position" in clause:
                parts.append(0.0)
            matched.append(None)
            continue
        before = len(reasons)
        if "color" in clause:
            right = sum(item.color == clause["color"] for item in found)
            parts.append(1 - abs(count - right) / count)
            if right != count:
                reasons.append(f"expected {clause['color']} {name}=={count}, found {right}")
        if "position" in clause and len(reasons) == before:
            against = _judge_position(clause, found, matched, margin)
            reasons.extend(against)
            if against:
                parts.append(0.0)
            target_missing = matched[clause["position"][1]] is None
            if not against or (position_bug == "reference" and not target_missing):
                parts.append(1.0)
        matched.append(found if len(reasons) == before else None)
    score = sum(parts) / len(parts) if parts else 0.0
    return Verdict(correct=not reasons, score=score, reasons=reasons)
