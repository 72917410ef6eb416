"""Text rendering: is the text in the prompt's double quotes readable in the image?

Source: flow_grpo's OCR reward; scoring in `ocr_score`. Range [0, 1]. A prompt without a quoted text is not applicable, an image
on which nothing is read scores 0, an engine that raises is a failed row (the reference gives 0).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.ocr_score import Line, OcrMatch, TextRules, match_text, quoted_text, reading_order

__all__ = ["Ocr", "OcrEngine", "RapidOcrEngine"]


class OcrEngine(Protocol):
    """Anything that reads images."""

    def recognise(self, image: Image.Image) -> Sequence[Line]:
        """Read an RGB image: (text, confidence, (x1, y1, x2, y2)) a line."""


class RapidOcrEngine:
    """PaddleOCR's models in onnxruntime, which the package `rapidocr` ships: no download."""

    def __init__(self, *, threads: int = 1, detection_side: int = 736, detect: bool = True) -> None:
        """Load the models.

        Args:
            threads: threads of one call; 1 by default, for rewards run beside training.
            detection_side: the shorter side is enlarged to this before text is looked for. The engine's own default reads
                large images best; 256 is several times faster on images of 64 to 256 pixels.
            detect: look for lines of text; False reads the whole image as one line (cards with a single word).
        """
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise UserError(
                "the reward 'ocr' needs the packages rapidocr and onnxruntime; install them with: pip install 'visual-grpo[ocr]'"
            ) from error
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)  # before the first of its lines
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,  # which lines count is the reward's decision
                "Global.use_det": detect,
                "Global.use_cls": False,  # as in the reference: no upside-down text
                "Det.limit_side_len": detection_side,
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": threads,
            }
        )

    def recognise(self, image: Image.Image) -> list[Line]:
        """Read one RGB image."""
        bgr = np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1])
        result = self._engine(bgr)
        if result.txts is None:
            return []
        whole = (0.0, 0.0, float(image.width), float(image.height))
        boxes = getattr(result, "boxes", None)  # the answer without detection has no boxes
        if boxes is None:
            return [(text, float(score), whole) for text, score in zip(result.txts, result.scores, strict=True)]
        lines: list[Line] = []
        for text, confidence, corners in zip(result.txts, result.scores, boxes, strict=True):
            low, high = np.min(corners, axis=0), np.max(corners, axis=0)
            lines.append((text, float(confidence), (float(low[0]), float(low[1]), float(high[0]), float(high[1]))))
        return lines


@register_reward("ocr")
class Ocr(Reward):
    """Read the image and compare with the target text.

    Details: `exact`, `contained` (0/1) and `distance` (edit distance of the whole texts), after normalisation.
    """

    needs = frozenset({"images"})
    rows_per_call = 16  # up to 2 seconds an image on a busy CPU

    def __init__(
        self,
        *,
        engine: Any = "rapidocr",
        engine_params: dict[str, Any] | None = None,
        target_key: str | None = None,
        typographic_quotes: bool = False,
        min_confidence: float = 0.0,
        reading_order: bool = False,
        nfkc: bool = False,
        strip_punctuation: bool = False,
        best_window: bool = False,
        upscale_to: int | None = None,
    ) -> None:
        """Choose engine and scoring; the defaults score as the reference does.

        Args:
            engine: "rapidocr", "package.module:Name" or an object with `recognise`; loaded at the first call.
            engine_params: arguments of the engine's constructor.
            target_key: metadata column with the target text; None: the prompt's first double-quoted text.
            typographic_quotes: accept curly quotes in prompts too.
            min_confidence: lines at or below this are not read.
            reading_order: join lines from top left to bottom right and not in the engine's order.
            nfkc, strip_punctuation, best_window: see `TextRules`.
            upscale_to: enlarge (bicubic) images whose shorter side is smaller than this.
        """
        self.rules = TextRules(nfkc=nfkc, strip_punctuation=strip_punctuation, best_window=best_window)
        self.target_key, self.typographic_quotes = target_key, typographic_quotes
        self.min_confidence, self.reading_order, self.upscale_to = min_confidence, reading_order, upscale_to
        self._given, self._params = engine, dict(engine_params or {})
        self._engine: OcrEngine | None = None
        self._lock = threading.Lock()

    @property
    def engine(self) -> OcrEngine:
        """The engine, loaded once, when it is first needed."""
        with self._lock:
            if self._engine is None:
                self._engine = _load_engine(self._given, self._params)
        return self._engine

    def read(self, image: Image.Image) -> str:
        """All text of an image as one string without separators, as in the reference."""
        if self.upscale_to is not None and min(image.size) < self.upscale_to:
            scale = self.upscale_to / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        lines = [line for line in self.engine.recognise(image) if line[1] > self.min_confidence]
        return "".join(line[0] for line in (reading_order(lines) if self.reading_order else lines))

    def target(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        """The text that a row asks for, or None."""
        if self.target_key is None:
            return quoted_text(prompt, typographic=self.typographic_quotes)
        value = metadata.get(self.target_key)
        return None if value is None else str(value)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        matches: list[OcrMatch | None] = []
        for index, (prompt, row) in enumerate(zip(request.prompts, request.metadata, strict=True)):
            target = self.target(prompt, row)
            if target is None or not self.rules.normalise(target):
                matches.append(None)
            else:
                matches.append(match_text(self.read(request.pil_images[index]), target, self.rules))
        absent = float("nan")
        return RewardOutput.from_list(
            [None if m is None else m.score for m in matches],
            {
                "exact": [absent if m is None else float(m.exact) for m in matches],
                "contained": [absent if m is None else float(m.contained) for m in matches],
                "distance": [absent if m is None else float(m.distance) for m in matches],
            },
        )


def _load_engine(given: Any, params: dict[str, Any]) -> OcrEngine:
    if given == "rapidocr":
        given = RapidOcrEngine
    elif isinstance(given, str):
        given = load_object(given, "OCR engine")
    if isinstance(given, type):
        try:
            given = given(**params)
        except TypeError as error:
            raise UserError(f"the OCR engine cannot be built with engine_params {params}: {error}.") from error
    if not callable(getattr(given, "recognise", None)):
        raise UserError(f"the OCR engine {given!r} has no method recognise(image) -> list of (text, confidence, box).")
    found: OcrEngine = given
    return found
