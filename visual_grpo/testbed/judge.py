"""A judge for the drawn world: answers questions about shapes, colours, counts and places from the exact detector."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visual_grpo.testbed.detector import Detection, SceneDetector
from visual_grpo.testbed.scenes import COLORS, RELATIONS, SHAPES, relations

__all__ = ["SceneJudge"]

_SHAPE = re.compile(r"\b(" + "|".join(SHAPES) + r")(?:e?s)?\b")
_COLOR = re.compile(r"\b(" + "|".join(COLORS) + r")\b")
_RELATION = re.compile(r"\b(" + "|".join(RELATIONS) + r")\b")
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class SceneJudge:
    """Answers "How many red circles are there?" with a number and any other question with yes or no.

    A question without a shape of the world, or with a third one, is answered with no.
    """

    def __init__(self) -> None:
        self._detector = SceneDetector()

    def answer(self, images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
        """Answer each question about its image."""
        found: dict[int, Mapping[str, list[Detection]]] = {}
        answers = []
        for image, question in zip(images, questions, strict=True):
            if id(image) not in found:
                pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 255
                found[id(image)] = self._detector.detect(pixels)[0]
            answers.append(_answer(found[id(image)], question.lower()))
        return answers

    def probability(
        self, images: Sequence[Image.Image], questions: Sequence[str], forms: Sequence[Sequence[str]]
    ) -> Tensor:
        """1 where the answer is one of the accepted forms, else 0: [n]."""
        given = self.answer(images, questions)
        accepted = [{form.strip().lower() for form in some} for some in forms]
        return torch.tensor([float(answer in some) for answer, some in zip(given, accepted, strict=True)])


def _answer(found: Mapping[str, list[Detection]], question: str) -> str:
    asked = []
    last = 0
    for match in _SHAPE.finditer(question):
        color = _COLOR.search(question, last, match.start())
        last = match.end()
        members = found.get(match[1], [])
        asked.append([item for item in members if color is None or item.color == color[1]])
    if question.startswith("how many"):
        return str(len(asked[0])) if len(asked) == 1 else "0"
    relation = _RELATION.search(question)
    if relation is not None and len(asked) == 2:
        return _yes(any(relation[1] in relations(a.box, b.box) for a in asked[0] for b in asked[1]))
    number = next((i for i, word in enumerate(_WORDS) if re.search(rf"\b(?:{word}|{i})\b", question)), None)
    if number is not None and number > 1 and len(asked) == 1:
        return _yes(len(asked[0]) == number)
    return _yes(bool(asked) and len(asked) <= 2 and all(asked))


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
