"""GenEval's rules on samples of held-out prompts: how the testbed's models are judged while they are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from visual_grpo.adapters.pipeline import PipelineAdapter
from visual_grpo.testbed.detector import Detection, SceneDetector
from visual_grpo.testbed.scenes import IMAGE_SIZE, KINDS, Metadata, relations, split_prompts
from visual_grpo.types import PromptBatch

BATCH = 60


def score_prompts(count: int) -> list[Metadata]:
    """Return `count` held-out prompts, the kinds in equal shares, repeating where a kind has few."""
    heldout = split_prompts()[1]
    by_kind = [[entry for entry in heldout if entry["tag"] == kind] for kind in KINDS]
    chosen = []
    for index in range(count):
        members = by_kind[index % len(KINDS)]
        place = index // len(KINDS)
        chosen.append(members[place * max(len(members) * len(KINDS) // count, 1) % len(members)])
    return chosen


def sample_images(
    adapter: PipelineAdapter, captions: Sequence[str], *, seed: int, steps: int, guidance: float = 1.0
) -> Tensor:
    """Sample one image a caption without noise on the way, [N, 3, H, W] in [0, 1]; a row's first noise is its own."""
    adapter.forget_texts()
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}  # FLUX has no default of its own
    options = adapter.Sampling.model_validate(
        {"steps": steps, "solver": "ode", "guidance": guidance, "forward_batch": BATCH, **size}
    )
    rows = torch.arange(len(captions))
    prompts = PromptBatch(prompts=list(captions), metadata=[{} for _ in captions], group_ids=rows, row_ids=rows.clone())
    images = adapter.decode(adapter.sample(prompts, seed=seed, sampling=options)).images
    assert images is not None
    return images


def score_images(prompts: Sequence[Metadata], images: Tensor) -> dict[str, object]:
    """Score images [N, 3, H, W] of prompts of all six kinds with the exact detector.

    Returns:
        `score` (mean of the six kinds), `strict` (correct and no further object) and the score of each kind.
    """
    loose: dict[str, list[float]] = {kind: [] for kind in KINDS}
    strict: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for entry, detections in zip(prompts, SceneDetector().detect(images), strict=True):
        correct = is_correct(entry, detections)
        wanted = sum(clause["count"] for clause in entry["include"])  # type: ignore[attr-defined]
        loose[str(entry["tag"])].append(correct)
        strict[str(entry["tag"])].append(correct and sum(map(len, detections.values())) == wanted)
    means = {kind: sum(values) / len(values) for kind, values in loose.items()}
    strict_mean = sum(sum(values) / len(values) for values in strict.values()) / len(KINDS)
    rounded = {kind: round(value, 3) for kind, value in means.items()}
    return {"score": round(sum(means.values()) / len(KINDS), 4), "strict": round(strict_mean, 4), **rounded}


def is_correct(metadata: Metadata, detections: Mapping[str, Sequence[Detection]]) -> bool:
    """Apply GenEval's official rule to the detections of one image.

    Args:
        metadata: GenEval metadata of the prompt.
        detections: class name -> detections, best first.
    """
    threshold = 0.9 if metadata["tag"] == "counting" else 0.3
    matched: list[list[Detection]] = []
    for clause in metadata["include"]:  # type: ignore[attr-defined]
        boxes = [item for item in detections.get(clause["class"], ()) if item.score > threshold][:16]
        kept = boxes[: clause["count"]]
        if len(kept) < clause["count"]:
            return False
        if "color" in clause and sum(item.color == clause["color"] for item in kept) < clause["count"]:
            return False
        if "position" in clause:
            relation, target = clause["position"]
            if any(relation not in relations(item.box, other.box) for item in kept for other in matched[target]):
                return False
        matched.append(kept)
    for clause in metadata.get("exclude", ()):  # type: ignore[attr-defined]
        if sum(item.score > threshold for item in detections.get(clause["class"], ())) >= clause["count"]:
            return False
    return True
