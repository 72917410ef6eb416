"""An exact detector for the drawn world: it plays the part of GenEval's object detector and colour classifier.

Nothing is learnt. Every pixel is explained as `background + alpha * (colour - background)`; the best of the eight colour rays
gives the pixel's colour and coverage (a half-covered red pixel is red, not pink). Connected components of covered pixels are
compared with averaged pictures of the six shapes by a soft intersection over union. What resembles no shape is left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from visual_grpo.testbed.scenes import BACKGROUND, COLORS, IMAGE_SIZE, SHAPES, SceneObject, draw_scene

UNKNOWN = "unknown"
_PATCH = 14
_MAX_EXTENT = 24.0  # pixels; the largest object that the world's lattice could hold is 16
_SIZE_RADII = (4.2, 5.3, 6.4, 7.8, 9.5)
_COLOR_NAMES = tuple(COLORS)
_RAYS = (BACKGROUND - np.array(list(COLORS.values()), dtype=np.float32)) / 255.0  # [8, 3], background minus colour
_RAY_NORMS = (_RAYS**2).sum(axis=1)  # [8]
_EIGHT_CONNECTED = np.zeros((3, 3, 3), dtype=bool)
_EIGHT_CONNECTED[1] = True  # within an image only, never across the batch


@dataclass(frozen=True, slots=True)
class Detection:
    """One detected object.

    Attributes:
        box: (x1, y1, x2, y2) in pixels of the image, sub-pixel.
        score: confidence in [0, 1]; 0.5 is the weakest that is reported and clean drawings reach above 0.95.
        color: name of the colour, or None when the pixels fit no colour of the world.
    """

    box: tuple[float, float, float, float]
    score: float
    color: str | None


@dataclass(slots=True)
class _Segmentation:
    labels: np.ndarray  # [N, H, W] int, 0 = background, ids unique over the batch
    alphas: np.ndarray  # [N, H, W, 8] coverage under each colour, in [0, 1]
    residuals: np.ndarray  # [N, H, W, 8] squared distance to each ray
    owner: np.ndarray  # [N, H, W] labels grown by one pixel


class SceneDetector:
    """Find the shapes of the testbed's world in images.

    Args:
        min_pixels: smallest component that is looked at.
        min_overlap: smallest soft intersection over union with a shape's picture.
        max_residual: largest mean squared colour distance of a component, in units of the full range.
        report_unknown: also return components that resemble no shape, under the key "unknown".

    Example:
        >>> scene = [SceneObject(shape="ring", color="red", center=(24.0, 24.0), radius=6.5)]
        >>> image = torch.from_numpy(draw_scene(scene)).permute(2, 0, 1)[None] / 255
        >>> found = SceneDetector().detect(image)[0]
        >>> list(found), found["ring"][0].color
        (['ring'], 'red')
    """

    def __init__(
        self,
        *,
        min_pixels: int = 14,
        min_overlap: float = 0.72,
        max_residual: float = 0.02,
        report_unknown: bool = False,
    ) -> None:
        self.min_pixels = min_pixels
        self.min_overlap = min_overlap
        self.max_residual = max_residual
        self.report_unknown = report_unknown

    def detect(self, images: Tensor) -> list[dict[str, list[Detection]]]:
        """Detect objects in a batch; any image is accepted, non-finite pixels count as background.

        Args:
            images: [N, 3, H, W] in [0, 1]; a size other than the world's is resampled first.

        Returns:
            One dictionary an image: shape name -> detections, best score first; absent shapes are absent.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be [N, 3, H, W], got {tuple(images.shape)}")
        if images.shape[0] == 0:
            return []
        height, width = images.shape[-2:]
        pixels = torch.nan_to_num(images.detach().float().cpu(), nan=BACKGROUND / 255, posinf=1.0, neginf=0.0).clamp(
            0, 1
        )
        if (height, width) != (IMAGE_SIZE, IMAGE_SIZE):
            pixels = torch.nn.functional.interpolate(
                pixels, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True, align_corners=False
            )
        scale = (width / IMAGE_SIZE, height / IMAGE_SIZE)
        found: list[dict[str, list[Detection]]] = [{} for _ in range(images.shape[0])]
        segmentation = _segment(pixels.permute(0, 2, 3, 1).numpy(), self.min_pixels)
        for index, name, detection in self._classify(segmentation, scale):
            found[index].setdefault(name, []).append(detection)
        for detections in found:
            for members in detections.values():
                members.sort(key=lambda detection: -detection.score)
        return found

    def _classify(self, seg: _Segmentation, scale: tuple[float, float]) -> list[tuple[int, str, Detection]]:
        colors = _component_colors(seg)
        results: list[tuple[int, str, Detection]] = []
        for label, window in enumerate(ndimage.find_objects(seg.labels), start=1):
            if window is None:
                continue
            color, residual = colors[label]
            index = window[0].start
            patch, box = _crop(seg, label, index, window[1], window[2], color)
            if patch is None:
                continue
            name, overlap = _best_shape(patch, box)
            good = overlap >= self.min_overlap and residual <= self.max_residual
            if not good and not self.report_unknown:
                continue
            score = float(np.clip((overlap - 0.60) / 0.24, 0.0, 1.0))
            scaled = (box[0] * scale[0], box[1] * scale[1], box[2] * scale[0], box[3] * scale[1])
            color_name = _COLOR_NAMES[color] if residual <= self.max_residual else None
            results.append((index, name if good else UNKNOWN, Detection(scaled, score, color_name)))
        return results


def _segment(pixels: np.ndarray, min_pixels: int) -> _Segmentation:
    """Explain pixels [N, H, W, 3] by colour rays and label the covered components."""
    offset = np.float32(BACKGROUND / 255.0) - pixels
    dots = offset @ _RAYS.T  # [N, H, W, 8]
    alphas = np.clip(dots / _RAY_NORMS, 0.0, 1.15)
    residuals = (offset**2).sum(axis=-1, keepdims=True) - 2 * alphas * dots + alphas**2 * _RAY_NORMS
    best = residuals.argmin(axis=-1)
    covered = np.take_along_axis(alphas, best[..., None], axis=-1)[..., 0] > 0.5
    labels, count = ndimage.label(covered, structure=_EIGHT_CONNECTED)
    labels = _split_two_colored(labels, count, best, min_pixels)
    sizes = np.bincount(labels.ravel())
    keep = sizes >= min_pixels
    keep[0] = False
    renumber = np.where(keep, np.cumsum(keep), 0)
    labels = renumber[labels]
    grown = ndimage.maximum_filter(labels, size=(1, 3, 3))
    owner = np.where(labels > 0, labels, np.where(covered, 0, grown))
    return _Segmentation(labels, np.minimum(alphas, 1.0), residuals, owner)


def _split_two_colored(labels: np.ndarray, count: int, best: np.ndarray, min_pixels: int) -> np.ndarray:
    """Split components in which a second colour covers at least a quarter, one part a colour."""
    inside = labels > 0
    table = np.bincount(labels[inside] * len(_RAYS) + best[inside], minlength=(count + 1) * len(_RAYS))
    table = table.reshape(count + 1, len(_RAYS))
    area = table.sum(axis=1)
    second = np.sort(table, axis=1)[:, -2]
    flagged = np.flatnonzero((second >= min_pixels) & (second >= 0.25 * area))
    if len(flagged) == 0:
        return labels
    windows = ndimage.find_objects(labels)
    next_label = count + 1
    for label in flagged:
        window = windows[label - 1]
        member = labels[window] == label
        for color in np.flatnonzero(table[label] >= min_pixels):
            parts, found = ndimage.label(member & (best[window] == color), structure=_EIGHT_CONNECTED)
            labels[window][parts > 0] = parts[parts > 0] + next_label - 1
            next_label += found
    return labels


def _component_colors(seg: _Segmentation) -> list[tuple[int, float]]:
    """Return (colour index, mean residual) of every label; entry 0 is the background."""
    inside = seg.labels > 0
    ids = seg.labels[inside]
    count = int(ids.max(initial=0)) + 1
    sizes = np.maximum(np.bincount(ids, minlength=count), 1)
    residuals = seg.residuals[inside]
    means = np.stack(
        [np.bincount(ids, weights=residuals[:, k], minlength=count) / sizes for k in range(len(_RAYS))], axis=1
    )
    return [(int(row.argmin()), float(row.min())) for row in means]


def _crop(
    seg: _Segmentation, label: int, index: int, rows: slice, columns: slice, color: int
) -> tuple[np.ndarray | None, tuple[float, float, float, float]]:
    """Cut a component to its sub-pixel box and resample its coverage to [_PATCH, _PATCH]."""
    top, left = max(rows.start - 1, 0), max(columns.start - 1, 0)
    window = (index, slice(top, rows.stop + 1), slice(left, columns.stop + 1))
    coverage = np.where(seg.owner[window] == label, seg.alphas[window][..., color], 0.0)
    x1, x2 = _borders(coverage.max(axis=0))
    y1, y2 = _borders(coverage.max(axis=1))
    if x2 - x1 < 2 or y2 - y1 < 2:
        return None, (0.0, 0.0, 0.0, 0.0)
    patch = _resample(y1, y2, coverage.shape[0]) @ coverage @ _resample(x1, x2, coverage.shape[1]).T
    return patch, (left + x1, top + y1, left + x2, top + y2)


def _borders(profile: np.ndarray) -> tuple[float, float]:
    """Return where a coverage profile starts and ends, counting the partly covered pixels at both ends by their share."""
    strong = np.flatnonzero(profile > 0.5)
    if len(strong) == 0:
        return 0.0, 0.0
    first, last = int(strong[0]), int(strong[-1])
    before = profile[first - 1] if first > 0 else 0.0
    after = profile[last + 1] if last + 1 < len(profile) else 0.0
    return first + 1 - min(profile[first], 1.0) - before, last + min(profile[last], 1.0) + after


def _resample(start: float, stop: float, length: int) -> np.ndarray:
    """Return the [_PATCH, length] matrix that averages pixels over equal parts of [start, stop]."""
    edges = np.linspace(start, stop, _PATCH + 1)
    pixel = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return np.maximum(overlap, 0.0) * (_PATCH / (stop - start))


def _best_shape(patch: np.ndarray, box: tuple[float, float, float, float]) -> tuple[str, float]:
    """Return the shape whose picture overlaps a patch most, and the soft intersection over union."""
    width, height = box[2] - box[0], box[3] - box[1]
    if not 0.72 <= width / height <= 1.39 or max(width, height) > _MAX_EXTENT:
        return UNKNOWN, 0.0
    pictures, extents = _pictures()
    sizes = np.abs(extents - max(width, height)).argmin(axis=0)  # nearest size class of each shape
    best_name, best_overlap = UNKNOWN, 0.0
    for shape_index, name in enumerate(SHAPES):
        near = slice(max(sizes[shape_index] - 1, 0), sizes[shape_index] + 2)
        candidates = pictures[near, shape_index]
        shared = np.minimum(candidates, patch).sum(axis=(1, 2)) / np.maximum(candidates, patch).sum(axis=(1, 2))
        if shared.max() > best_overlap:
            best_name, best_overlap = name, float(shared.max())
    return best_name, best_overlap


@functools.cache
def _pictures() -> tuple[np.ndarray, np.ndarray]:
    """Average the crops of drawn shapes over sub-pixel offsets.

    Returns:
        Pictures [sizes, shapes, _PATCH, _PATCH] and the larger extent of the drawn shape in pixels [sizes, shapes].
    """
    pictures = np.zeros((len(_SIZE_RADII), len(SHAPES), _PATCH, _PATCH))
    extents = np.zeros((len(_SIZE_RADII), len(SHAPES)))
    shifts = (-0.375, -0.125, 0.125, 0.375)
    for row, radius in enumerate(_SIZE_RADII):
        for column, shape in enumerate(SHAPES):
            scenes = [
                [SceneObject(shape=shape, color="black", center=(24 + x, 24 + y), radius=radius)]
                for x in shifts
                for y in shifts
            ]
            pixels = np.stack([draw_scene(scene) for scene in scenes]).astype(np.float32) / 255.0
            seg = _segment(pixels, min_pixels=1)
            windows = ndimage.find_objects(seg.labels)
            crops = [
                _crop(seg, k + 1, w[0].start, w[1], w[2], _COLOR_NAMES.index("black")) for k, w in enumerate(windows)
            ]
            pictures[row, column] = np.mean([patch for patch, _ in crops if patch is not None], axis=0)
            extents[row, column] = np.mean([max(box[2] - box[0], box[3] - box[1]) for _, box in crops])
    return pictures, extents
