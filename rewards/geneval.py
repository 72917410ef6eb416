"""GenEval as a reward: does the image show the objects, counts, colours and positions that the prompt asks for?

Source: GenEval (arXiv 2310.11513) and Flow-GRPO's reward server; the rules are in `geneval_rules`.
Range: "official" and "strict" 0 or 1; "partial" up to 1, below 0 for far too many objects unless clipped; "mixed" [0, 1].
Rows whose metadata have no `include` clauses are not applicable.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.geneval_rules import (
    DetectedObject,
    DetectionFilter,
    Verdict,
    check_clauses,
    filter_detections,
    judge_official,
    judge_partial,
)

__all__ = ["Detector", "GenEval", "Judgement", "load_detector"]

Mode = Literal["official", "strict", "partial", "mixed"]
DETECTORS = {
    "testbed": "visual_grpo.testbed.detector:SceneDetector",
    "mask2former": "visual_grpo.rewards.mask2former:Mask2FormerDetector",
}


class Detector(Protocol):
    """Anything that finds objects; `visual_grpo.testbed.detector:SceneDetector` is one."""

    def detect(self, images: Tensor) -> Sequence[Mapping[str, Sequence[DetectedObject]]]:
        """Find objects in images [N, 3, H, W] in [0, 1]: one mapping class -> objects an image."""


def load_detector(given: Any, keep: DetectionFilter | None = None) -> Detector:
    """Return the detector named in `DETECTORS` or "package.module:Name" (a class is built without arguments), or `given`.

    Raises:
        UserError: it is no detector, or its own `threshold` hides objects that `keep` would count.
    """
    if isinstance(given, str):
        given = load_object(DETECTORS.get(given, given), "detector")
    if isinstance(given, type):
        given = given()
    if not callable(getattr(given, "detect", None)):
        raise UserError(
            f"the detector {given!r} has no method detect(images [N, 3, H, W]) -> list of {{class: objects}}."
        )
    hidden = getattr(given, "threshold", None)
    lowest = hidden if keep is None else min(keep.threshold, keep.counting_threshold)
    if hidden is not None and lowest < hidden:
        raise UserError(
            f"geneval: threshold {lowest:g} is below the {hidden:g} of {type(given).__name__}, which drops weaker objects "
            f"itself; raise the threshold, or give a detector built with threshold={lowest:g}."
        )
    found: Detector = given
    return found


class Judgement:
    """Verdicts of the three rules on one image."""

    def __init__(
        self,
        raw: Mapping[str, Sequence[DetectedObject]],
        metadata: Mapping[str, Any],
        keep: DetectionFilter,
        position_bug: Literal["reference", "fixed"] = "reference",
    ) -> None:
        check_clauses(metadata)
        self.objects = filter_detections(raw, metadata.get("tag"), keep)
        self.official: Verdict = judge_official(self.objects, metadata, margin=keep.margin)
        self.partial: Verdict = judge_partial(self.objects, metadata, margin=keep.margin, position_bug=position_bug)


@register_reward("geneval")
class GenEval(Reward):
    """GenEval on the row's `include` and `exclude` clauses.

    Details: `correct` (official rule, 0/1), `strict` (0/1), `partial` (never clipped).
    """

    needs = frozenset({"images"})

    def __init__(
        self,
        mode: Mode = "partial",
        *,
        detector: Any = "testbed",
        position_bug: Literal["reference", "fixed"] = "reference",
        clip: bool = False,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        max_overlap: float = 1.0,
    ) -> None:
        """Choose the rule.

        Args:
            mode: what the value is; "partial" is what Flow-GRPO trains on, "mixed" is half strict correctness and half
                partial credit clipped at 0.
            detector: "testbed", "mask2former" (GenEval's own), "package.module:Name" or an object with `detect`; loaded at
                the first call.
            position_bug: see `judge_partial`.
            clip: clip the partial credit at 0.
            threshold, counting_threshold, max_objects, max_overlap: see `DetectionFilter`.
        """
        if mode not in get_args(Mode):
            raise UserError(f"geneval: mode is {mode!r}; give one of {', '.join(get_args(Mode))}.")
        if position_bug not in ("reference", "fixed"):
            raise UserError(f"geneval: position_bug is {position_bug!r}; give reference or fixed.")
        self.mode, self.clip, self.position_bug = mode, clip, position_bug
        self.keep = DetectionFilter(
            threshold=threshold,
            counting_threshold=counting_threshold,
            max_objects=max_objects,
            max_overlap=max_overlap,
        )
        self._given = detector
        self._detector: Detector | None = None
        self._lock = threading.Lock()

    @property
    def detector(self) -> Detector:
        """The detector, loaded when it is first needed."""
        with self._lock:
            if self._detector is None:
                self._detector = load_detector(self._given, self.keep)
        return self._detector

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.images is not None
        found = self.detector.detect(request.images)
        judged = [
            Judgement(raw, row, self.keep, self.position_bug) if row.get("include") else None
            for raw, row in zip(found, request.metadata, strict=True)
        ]
        absent = float("nan")
        return RewardOutput.from_list(
            [None if j is None else self._value(j) for j in judged],
            {
                "correct": [absent if j is None else float(j.official.correct) for j in judged],
                "strict": [absent if j is None else float(j.partial.correct) for j in judged],
                "partial": [absent if j is None else j.partial.score for j in judged],
            },
        )

    def _value(self, judged: Judgement) -> float:
        if self.mode == "official":
            return float(judged.official.correct)
        strict = float(judged.partial.correct)
        clipped = max(judged.partial.score, 0.0)
        if self.mode == "strict":
            return strict
        if self.mode == "mixed":
            return 0.5 * strict + 0.5 * clipped
        return clipped if self.clip else judged.partial.score
