"""Text rendering: is the text in the prompt's double quotes readable in the image?

Source: flow_grpo's OCR reward; scoring in `ocr_score`. Range [0, 1]. A prompt without a quoted text is not applicable, an image
on which nothing is read scores 0, an engine that raises is a failed row (the reference gives 0).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.ocr_score import Line, OcrMatch, TextRules, match_text, quoted_text, reading_order
from visual_grpo.rewards.rapidocr_engine import RapidOcrEngine

__all__ = ["Ocr", "OcrEngine", "RapidOcrEngine"]


class OcrEngine(Protocol):
    """Anything that reads images; one that also has `recognise_many(images) -> list of such lists` is given batches."""

    def recognise(self, image: Image.Image) -> Sequence[Line]:
        """Read an RGB image: (text, confidence, (x1, y1, x2, y2)) a line."""


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
            engine: "rapidocr", "testbed" (reads its small pictures), "package.module:Name" or an object with `recognise`; loaded
                at the first call.
            engine_params: arguments of the engine's constructor.
            target_key: metadata column with the target text; None: the prompt's first double-quoted text.
            typographic_quotes: accept curly quotes in prompts too.
            min_confidence: lines at or below this are not read.
            reading_order: join lines from top left to bottom right and not in the engine's order.
            nfkc, strip_punctuation, best_window: see `TextRules`.
            upscale_to: enlarge (bicubic) images whose shorter side is smaller than this.
        """
        if not 0 <= min_confidence < 1 or (upscale_to is not None and upscale_to < 1):
            raise UserError(
                f"ocr: min_confidence is {min_confidence} and upscale_to {upscale_to}; give a confidence from 0 to below 1, and "
                f"pixels of 1 or more."
            )
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
        return self.read_many([image])[0]

    def read_many(self, images: Sequence[Image.Image]) -> list[str]:
        """The text of each image, in one call of an engine that reads batches."""
        engine = self.engine
        sized = [self._enlarged(image) for image in images]
        many = getattr(engine, "recognise_many", None)
        found = many(sized) if many is not None and sized else [engine.recognise(image) for image in sized]
        texts = []
        for lines in found:
            kept = [line for line in lines if line[1] > self.min_confidence]
            texts.append("".join(line[0] for line in (reading_order(kept) if self.reading_order else kept)))
        return texts

    def _enlarged(self, image: Image.Image) -> Image.Image:
        if self.upscale_to is not None and min(image.size) < self.upscale_to:
            scale = self.upscale_to / min(image.size)
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        return image

    def target(self, prompt: str, metadata: dict[str, Any]) -> str | None:
        """The text that a row asks for, or None."""
        if self.target_key is None:
            return quoted_text(prompt, typographic=self.typographic_quotes)
        value = metadata.get(self.target_key)
        return None if value is None else str(value)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        matches: list[OcrMatch | None] = [None] * len(request)
        targets = [self.target(p, row) for p, row in zip(request.prompts, request.metadata, strict=True)]
        wanted = [i for i, target in enumerate(targets) if target and self.rules.normalise(target)]
        if wanted:
            pictures = request.pil_images
            for i, text in zip(wanted, self.read_many([pictures[i] for i in wanted]), strict=True):
                matches[i] = match_text(text, targets[i] or "", self.rules)
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
    elif given == "testbed":
        given = load_object("visual_grpo.testbed.word_reader:WordReader", "OCR engine")
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
