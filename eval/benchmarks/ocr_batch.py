"""OCR of test cards: one call an image as the library does it, against batches; images a second, and whether the texts agree.

    visual-grpo benchmark ocr_batch

Cards are drawn with Pillow's own font: the quoted texts of a prompt file (or of the testbed's words) at several sizes and places.
CPU seconds stand beside wall seconds, which other load on the machine distorts. The parts show where the time goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from visual_grpo.rewards.ocr_score import quoted_text
from visual_grpo.rewards.rapidocr_engine import RapidOcrEngine
from visual_grpo.testbed.words import WORDS

__all__ = ["cards", "run"]

TEXTS = (*WORDS, "Spring Collection", "NASA 2049", "Hello World", "Grand Opening", "Forever Yours", "50% OFF")


def cards(texts: Sequence[str], side: int, seed: int) -> list[Image.Image]:
    """Square cards [side x side] with one text each, in black or white on a plain colour, at a random place."""
    rng = np.random.default_rng(seed)
    drawn = []
    for text in texts:
        dark = bool(rng.integers(2))
        ground = tuple(int(v) for v in rng.integers(0, 90, 3) + (0 if dark else 165))
        image = Image.new("RGB", (side, side), ground)
        draw = ImageDraw.Draw(image)
        points = side // 5
        while draw.textlength(text, ImageFont.load_default(points)) > side * 0.9 and points > 6:
            points -= 1
        font = ImageFont.load_default(points)
        left, top, right, bottom = draw.textbbox((0, 0), text, font)
        x = rng.uniform(2, max(side - (right - left) - 2, 3))
        y = rng.uniform(2, max(side - (bottom - top) - 2, 3))
        draw.text((x - left, y - top), text, fill="white" if dark else "black", font=font)
        drawn.append(image)
    return drawn


def _timed(engine: RapidOcrEngine, pictures: Sequence[Image.Image], many: bool) -> tuple[Any, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    answer = engine.recognise_many(pictures) if many else [engine.recognise(picture) for picture in pictures]
    return answer, time.perf_counter() - wall, time.process_time() - cpu


def _texts(lines: Sequence[Sequence[Any]]) -> list[str]:
    return ["".join(line[0] for line in found) for found in lines]


def run(
    *, seeds: int = 1, out: Path | None = None, side: int = 256, prompts: Path | None = None, limit: int = 24
) -> dict[str, Any]:
    """Measure.

    Args:
        seeds: sets of cards.
        out: folder for ocr_batch.json.
        side: of the cards in pixels.
        prompts: prompt file whose quoted texts are drawn; None: `TEXTS`.
        limit: cards of a set at most.

    Returns:
        A row an arm: images_per_second, images_per_cpu_second, speedup (of CPU seconds over the first arm), same_texts (share of
        cards with the text of the first arm).
    """
    texts = list(TEXTS)
    if prompts is not None:
        quoted = [quoted_text(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
        texts = [text for text in quoted if text]
    pictures = [card for seed in range(seeds) for card in cards(texts[:limit], side, seed)]
    arms: list[tuple[str, RapidOcrEngine, bool]] = [
        ("one call an image, as the library is set", RapidOcrEngine(arena=False), False),
        ("one call an image, arena", RapidOcrEngine(), False),
        ("batch, text searched at 736", RapidOcrEngine(coarse_side=None), True),
        ("batch, text searched at 256 first (the default)", RapidOcrEngine(), True),
    ]
    rows: dict[str, dict[str, float]] = {}
    reference: list[str] = []
    base = 0.0
    for name, engine, many in arms:
        engine.recognise(pictures[0])  # loads the networks
        found, wall, cpu = _timed(engine, pictures, many)
        answers = _texts(found)
        reference, base = reference or answers, base or cpu
        rows[name] = {
            "images_per_second": len(pictures) / wall,
            "images_per_cpu_second": len(pictures) / cpu,
            "speedup": base / cpu,
            "same_texts": float(np.mean([a == b for a, b in zip(answers, reference, strict=True)])),
        }
    result = {"cards": len(pictures), "side": side, "arms": rows}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ocr_batch.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
