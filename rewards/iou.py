"""Grounding: intersection over union of the boxes in a completion with the gold boxes.

Source: card rewards, section 8 (boxes x1, y1, x2, y2; several boxes: Hungarian matching on 1 - IoU, sum of IoU / max(answered,
gold), our choice). Range [0, 1], with mode "giou" [-1, 1]. Rows without a usable gold box are not applicable; no box, or x2 <=
x1, scores the least. Answers and gold boxes may be in pixels, fractions (0..1) or thousandths (0..1000, as Qwen2-VL and Qwen3-VL
write); Qwen2.5-VL writes pixels of the image as it was RESIZED: name the column with that size in `answer_size_key`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import extract_answer, gold_answer

__all__ = ["Iou", "box_overlap", "match_boxes", "parse_boxes"]

Coordinates = Literal["pixel", "unit", "thousand"]
Mode = Literal["iou", "giou", "threshold"]
MAX_MATCHED = 500
"""Boxes of one completion that are matched; further ones only lower the score (matching is cubic)."""

_NUMBER = r"\s*([-+]?[0-9]{1,12}(?:\.[0-9]{0,20})?|[-+]?\.[0-9]{1,20})\s*"
_BOX = re.compile(
    rf"[\[(<]{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}[\])>]"  # [x1, y1, x2, y2], also inside JSON
    rf"|\({_NUMBER},{_NUMBER}\)\s*(?:,\s*)?\({_NUMBER},{_NUMBER}\)"  # (x1,y1),(x2,y2), Qwen's box tokens
)


def parse_boxes(text: str) -> list[list[float]]:
    """Return the boxes [x1, y1, x2, y2] of a text in their order, of its last <answer> body if it has one.

    >>> parse_boxes('{"bbox_2d": [1, 2, 3, 4]}'), parse_boxes("<box>(1,2),(3,4.5)</box>"), parse_boxes("[1, 2]")
    ([[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.5]], [])
    """
    body = extract_answer(text, "answer_tag") or text
    return [[float(n) for n in found.groups() if n is not None] for found in _BOX.finditer(body)]


def box_overlap(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """IoU and GIoU of every pair of proper boxes.

    Args:
        a, b: boxes [A, 4] and [B, 4] with x1 < x2 and y1 < y2, in one coordinate system.

    Returns:
        Two arrays [A, B], IoU in [0, 1] and GIoU in (-1, 1].

    >>> iou, giou = box_overlap(np.array([[0.0, 0, 10, 10]]), np.array([[5.0, 0, 15, 10], [20, 20, 30, 30]]))
    >>> iou.round(6).tolist(), giou.round(6).tolist()
    ([[0.333333, 0.0]], [[0.333333, -0.777778]])
    """
    a, b = a[:, None], b[None]
    sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None)
    hull = (np.maximum(a[..., 2:], b[..., 2:]) - np.minimum(a[..., :2], b[..., :2])).prod(-1)
    inside = sides.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inside
    iou = inside / union
    return iou, iou - (hull - union) / hull


def match_boxes(boxes: np.ndarray, golds: np.ndarray, *, mode: Mode = "iou", threshold: float = 0.5) -> float:
    """Score answered boxes [P, 4] against gold boxes [G, 4]: one-to-one matching, unmatched boxes count as the worst.

    >>> match_boxes(np.array([[0.0, 0, 10, 10], [50, 50, 60, 60]]), np.array([[5.0, 0, 15, 10]]))
    0.16666666666666666
    """
    from scipy.optimize import linear_sum_assignment

    worst = -1.0 if mode == "giou" else 0.0
    count = max(len(boxes), len(golds))
    if count == 0:
        return 1.0
    proper = boxes[_proper(boxes)][:MAX_MATCHED]
    if len(proper) == 0 or len(golds) == 0:
        return worst
    iou, giou = box_overlap(proper, golds)
    pairs = linear_sum_assignment(1 - (giou if mode == "giou" else iou))
    figure = {"iou": iou, "giou": giou, "threshold": (iou > threshold).astype(float)}[mode][pairs]
    return float((figure.sum() + worst * (count - len(figure))) / count)


def _proper(boxes: np.ndarray) -> np.ndarray:
    found: np.ndarray = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return found


@register_reward("iou")
class Iou(Reward):
    """Overlap of the answered boxes with the gold boxes.

    A gold value of four numbers is one box, and the last box of the completion is compared with it; a list of boxes is matched
    with all boxes of the completion (none at all is right for an empty list). Details: `boxes`, how many were answered.
    """

    needs = frozenset({"texts"})

    def __init__(
        self,
        mode: Mode = "iou",
        *,
        threshold: float = 0.5,
        coordinates: Coordinates = "pixel",
        gold_coordinates: Coordinates = "pixel",
        gold_key: str | None = None,
        size_key: str = "image_size",
        answer_size_key: str | None = None,
    ) -> None:
        """Choose the figure and the coordinate systems.

        Args:
            mode: "iou", "giou", or "threshold" for 1[IoU > threshold].
            threshold: see `mode`.
            coordinates: of the completions: "pixel", "unit" (0..1) or "thousand" (0..1000).
            gold_coordinates: of the gold boxes.
            gold_key: metadata column of the gold box or boxes (numbers, or a text with boxes); None: see
                `answers.GOLD_KEYS`.
            size_key: metadata column with the (width, height) to which pixels refer; read only if systems differ.
            answer_size_key: the same for pixels in completions, where the model saw a resized image.
        """
        for name, value, known in (
            ("mode", mode, Mode),
            ("coordinates", coordinates, Coordinates),
            ("gold_coordinates", gold_coordinates, Coordinates),
        ):
            if value not in get_args(known):
                raise UserError(f"iou: {name} is {value!r}; give one of {', '.join(get_args(known))}.")
        if not 0 <= threshold < 1:
            raise UserError(f"iou: threshold is {threshold}; no IoU is above 1, so give a number from 0 to below 1.")
        self.mode, self.threshold, self.gold_key = mode, threshold, gold_key
        self.coordinates, self.gold_coordinates = coordinates, gold_coordinates
        self.size_key, self.answer_size_key = size_key, answer_size_key or size_key
        self.same = coordinates == gold_coordinates and (coordinates != "pixel" or answer_size_key is None)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        counts = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            boxes = parse_boxes(text)
            counts.append(float(len(boxes)))
            gold, single = _gold_boxes(gold_answer(row, self.gold_key))
            if gold is None:
                values.append(None)
                continue
            answered = np.array(boxes[-1:] if single else boxes, dtype=float).reshape(-1, 4)
            if not self.same:
                answered = answered / self._scale(row, self.coordinates, self.answer_size_key)
                gold = gold / self._scale(row, self.gold_coordinates, self.size_key)
            values.append(match_boxes(answered, gold, mode=self.mode, threshold=self.threshold))
        return RewardOutput.from_list(values, {"boxes": counts})

    def _scale(self, row: Mapping[str, Any], system: Coordinates, key: str) -> np.ndarray:
        """What four coordinates are divided by to become fractions of the image."""
        if system != "pixel":
            return np.full(4, 1.0 if system == "unit" else 1000.0)
        try:
            width, height = (float(side) for side in row[key])
        except (KeyError, TypeError, ValueError):
            width = height = 0.0
        if not (0 < width < float("inf") and 0 < height < float("inf")):
            raise UserError(
                f"iou: to compare {self.coordinates} with {self.gold_coordinates} coordinates each row needs the metadata "
                f"column {key!r} with (width, height) above 0; this one has {row.get(key)!r}. Set size_key or answer_size_key."
            )
        return np.array([width, height, width, height])


def _gold_boxes(gold: Any) -> tuple[np.ndarray | None, bool]:
    """Gold boxes [G, 4] and whether they were given as one box; None if they are no proper boxes."""
    if isinstance(gold, str):
        parsed = parse_boxes(gold)
        gold = parsed[0] if len(parsed) == 1 else (parsed or None)
    if isinstance(gold, Mapping):
        gold = gold.get("bbox_2d", gold.get("bbox"))
    if isinstance(gold, Sequence) and gold and all(isinstance(item, Mapping) for item in gold):
        gold = [item.get("bbox_2d", item.get("bbox")) for item in gold]
    try:
        boxes = np.array(gold, dtype=float)
    except (TypeError, ValueError):
        return None, False
    single = boxes.shape == (4,)
    if boxes.size == 0 and boxes.ndim >= 1:
        return boxes.reshape(0, 4), False
    boxes = boxes.reshape(1, 4) if single else boxes
    if boxes.ndim != 2 or boxes.shape[1] != 4 or not np.isfinite(boxes).all() or not _proper(boxes).all():
        return None, False
    return boxes, single
