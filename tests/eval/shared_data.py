"""Published prompt files, where a checkout has them beside it (`shared/data`); nothing else in the tests knows the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACES = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")


def shared_file(name: str) -> Path | None:
    """The file, or None on a machine without it."""
    return next((place / name for place in PLACES if (place / name).is_file()), None)


def geneval_metadata() -> list[dict[str, Any]]:
    """The 553 published prompts; where they are missing, as many of the project's own generator."""
    file = shared_file("geneval/evaluation_metadata.jsonl")
    if file is not None:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    from visual_grpo.eval.geneval_prompts import generate_prompts

    counts = {"single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100, "color_attr": 100}
    return generate_prompts(counts)
