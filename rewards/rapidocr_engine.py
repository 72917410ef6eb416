"""PaddleOCR's models in onnxruntime, by the package `rapidocr`, which ships them: no download.

One call an image is the library's own way; it enlarges every picture to 736 pixels before it looks for text, which takes nine
tenths of the time. `recognise_many` searches small copies first, and shares runs: pictures of one size go through the detector
together, and lines that the library would pad to one width through the recogniser. `visual-grpo benchmark ocr_batch` measures it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.rewards.ocr_score import Line

__all__ = ["RapidOcrEngine"]

_TALL_ENOUGH = 14.0
"""pixels of the coarse picture; a lower line might be one of several, of which the coarse search missed the others."""


class RapidOcrEngine:
    """`OcrEngine` with PP-OCR detection and recognition."""

    def __init__(
        self,
        *,
        threads: int = 1,
        detection_side: int = 736,
        coarse_side: int | None = 256,
        detect: bool = True,
        arena: bool = True,
        batch: int = 8,
    ) -> None:
        """Load the models.

        Args:
            threads: threads of one call; 1 by default, for rewards run beside training.
            detection_side: the shorter side is enlarged to this before text is looked for. The engine's own default reads
                large images best; 256 is several times faster on images of 64 to 256 pixels.
            coarse_side: batches are first searched with the shorter side at this; a picture whose lines are all tall enough there
                is done, the others are searched at `detection_side`. Looking for text is nine tenths of the work. None: all are
                searched at `detection_side`, and the lines are exactly those of one call an image.
            detect: look for lines of text; False reads the whole image as one line (cards with a single word).
            arena: keep the memory of a run for the next one. The library's default, off, asks the system for all of it anew in
                every run.
            batch: lines, or pictures of 256 x 256, of a run at most; larger pictures are fewer.
        """
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise UserError(
                "the reward 'ocr' needs the packages rapidocr and onnxruntime; install them with: pip install 'visual-grpo[ocr]'"
            ) from error
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)  # before the first of its lines
        if batch < 1 or (coarse_side is not None and coarse_side < 32):
            raise UserError(
                f"rapidocr: batch is {batch} and coarse_side {coarse_side}; they must be at least 1 and 32."
            )
        self.detect, self.batch, self.coarse_side = detect, batch, coarse_side
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,  # which lines count is the reward's decision
                "Global.use_det": detect,
                "Global.use_cls": False,  # as in the reference: no upside-down text
                "Det.limit_side_len": detection_side,
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": threads,
                "EngineConfig.onnxruntime.enable_cpu_mem_arena": arena,
            }
        )

    def recognise(self, image: Image.Image) -> list[Line]:
        """Read one RGB image by one call of the library."""
        result = self._engine(_bgr(image))
        if result.txts is None:
            return []
        boxes = getattr(result, "boxes", None)  # the answer without detection has no boxes
        return _lines(image, result.txts, result.scores, boxes)

    def recognise_many(self, images: Sequence[Image.Image]) -> list[list[Line]]:
        """Read RGB images of any sizes; a picture's lines do not depend on the others."""
        if not self.detect:
            prepared = [self._engine.preprocess_img(_bgr(image))[0] for image in images]
            read = self._read([[picture] for picture in prepared])
            return [
                _lines(image, [t for t, _ in found], [s for _, s in found], None)
                for image, found in zip(images, read, strict=True)
            ]
        from rapidocr.utils.process_img import apply_vertical_padding, map_boxes_to_original

        engine = self._engine
        pictures, records = [], []
        for image in images:
            picture, record = engine.preprocess_img(_bgr(image))
            picture, record = apply_vertical_padding(picture, record, engine.width_height_ratio, engine.min_height)
            pictures.append(picture)
            records.append(record)
        boxes = self._find(pictures)
        crops = [
            [] if found is None else engine.crop_text_regions(p, found)
            for p, found in zip(pictures, boxes, strict=True)
        ]
        answers: list[list[Line]] = []
        for image, found, record, texts in zip(images, boxes, records, self._read(crops), strict=True):
            kept = [i for i, (text, _) in enumerate(texts) if text.strip()]
            if found is None or not kept:
                answers.append([])
                continue
            places = map_boxes_to_original(found, record, image.height, image.width)
            answers.append(_lines(image, [texts[i][0] for i in kept], [texts[i][1] for i in kept], places[kept]))
        return answers

    def _find(self, pictures: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Corners [k, 4, 2] of the lines of each picture in the library's order, None where there are none."""
        found: list[np.ndarray | None] = [None] * len(pictures)
        waiting = list(range(len(pictures)))
        if self.coarse_side is not None:
            shares = [self.coarse_side / min(p.shape[:2]) for p in pictures]
            small = [_resized(p, share) for p, share in zip(pictures, shares, strict=True)]
            coarse = self._boxes(small, pictures, enlarge=False)
            for i, corners in enumerate(coarse):
                if corners is not None and _lowest(corners) * shares[i] >= _TALL_ENOUGH:
                    found[i] = corners
            waiting = [i for i in waiting if found[i] is None]
        fine = self._boxes([pictures[i] for i in waiting], [pictures[i] for i in waiting], enlarge=True)
        for i, corners in zip(waiting, fine, strict=True):
            found[i] = corners
        return found

    def _boxes(
        self, shown: Sequence[np.ndarray], originals: Sequence[np.ndarray], *, enlarge: bool
    ) -> list[np.ndarray | None]:
        """Corners in pixels of `originals` of what the detector finds in `shown`; `enlarge`: to the engine's `detection_side`."""
        detector = self._engine._load_det_model()
        prepare = detector.get_preprocess()
        if not enlarge:
            prepare.limit_side_len = 1
        inputs = [prepare(picture) for picture in shown]
        found: list[np.ndarray | None] = [None] * len(shown)
        pixels = max((given.shape[2] * given.shape[3] for given in inputs if given is not None), default=1)
        most = max(1, self.batch * 256 * 256 // pixels)  # large pictures are slower together than one by one
        for rows in _equal([None if given is None else given.shape for given in inputs], most):
            maps = detector.session(np.concatenate([inputs[i] for i in rows]))
            for place, i in enumerate(rows):
                corners, _ = detector.postprocess_op(maps[place : place + 1], originals[i].shape[:2])
                if len(corners):
                    found[i] = detector.sorted_boxes(corners)
        return found

    def _read(self, crops: Sequence[Sequence[np.ndarray]]) -> list[list[tuple[str, float]]]:
        """(text, confidence) of the lines of each picture."""
        recogniser = self._engine._load_rec_model()
        _, height, width = recogniser.rec_image_shape
        flat: list[np.ndarray] = []
        ratios: list[float] = []  # width / height that the library would pad the line to, beside its neighbours
        owners: list[tuple[int, int]] = []
        for picture, lines in enumerate(crops):
            own = [line.shape[1] / line.shape[0] for line in lines]
            order = np.argsort(np.array(own)).tolist()
            for start in range(0, len(lines), recogniser.rec_batch_num):
                part = order[start : start + recogniser.rec_batch_num]
                widest = max([width / height, *(own[i] for i in part)])
                for i in part:
                    flat.append(lines[i])
                    ratios.append(widest)
                    owners.append((picture, i))
        answers: list[list[tuple[str, float]]] = [[("", 0.0)] * len(lines) for lines in crops]
        for rows in _equal([int(height * ratio) for ratio in ratios], self.batch):
            widest = ratios[rows[0]]
            inputs = np.stack([recogniser.resize_norm_img(flat[i], widest) for i in rows]).astype(np.float32)
            own = [flat[i].shape[1] / flat[i].shape[0] for i in rows]
            texts, _ = recogniser.postprocess_op(
                recogniser.session(inputs), False, wh_ratio_list=own, max_wh_ratio=widest
            )
            for i, (text, confidence) in zip(rows, texts, strict=True):
                picture, line = owners[i]
                answers[picture][line] = (text, float(confidence))
        return answers


def _resized(picture: np.ndarray, share: float) -> np.ndarray:
    import cv2

    size = (max(32, round(picture.shape[1] * share)), max(32, round(picture.shape[0] * share)))
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA if share < 1 else cv2.INTER_LINEAR))


def _lowest(corners: np.ndarray) -> float:
    """Height in pixels of the lowest line of [k, 4, 2] corners, clockwise from the upper left."""
    return float(np.linalg.norm(corners[:, 0] - corners[:, 3], axis=-1).min())


def _bgr(image: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1])


def _lines(image: Image.Image, texts: Any, confidences: Any, boxes: Any) -> list[Line]:
    whole = (0.0, 0.0, float(image.width), float(image.height))
    if boxes is None:
        return [(text, float(score), whole) for text, score in zip(texts, confidences, strict=True)]
    lines: list[Line] = []
    for text, confidence, corners in zip(texts, confidences, boxes, strict=True):
        low, high = np.min(corners, axis=0), np.max(corners, axis=0)
        lines.append((text, float(confidence), (float(low[0]), float(low[1]), float(high[0]), float(high[1]))))
    return lines


def _equal(keys: Sequence[Any], most: int) -> list[list[int]]:
    """Indices with equal keys together, at most `most` in a list; None is left out.

    >>> _equal([3, 5, None, 3, 3], 2)
    [[0, 3], [4], [1]]
    """
    groups: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        if key is not None:
            groups.setdefault(key, []).append(index)
    return [rows[start : start + most] for rows in groups.values() for start in range(0, len(rows), most)]
