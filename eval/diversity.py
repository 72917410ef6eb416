"""Diversity of the images of a prompt, of a folder or a model: `visual_grpo.diversity` on image features of your choice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from visual_grpo.diversity import mean_pairwise_distance
from visual_grpo.errors import UserError
from visual_grpo.eval.features import feature_rows, load_features, pack, unpack
from visual_grpo.eval.images import ImageSample, find_samples
from visual_grpo.eval.protocol import figure, finish, score_samples

__all__ = ["evaluate", "mean_pairwise_distance"]


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    features: Any = "pixels",
    batch_size: int = 32,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Measure a folder with several images a prompt.

    Args:
        images, prompts: see `find_samples`.
        out: result folder.
        features: "pixels" (no weights), "clip", "dino", "package.module:Name" or an object; see `load_features`.
        batch_size: images at a time.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        diversity: mean over prompts; features; table, with a row for each tag where the prompts have tags.

    Raises:
        UserError: no prompt has two images.
    """
    if images is None:
        raise UserError("diversity needs a folder of images (--images DIR) or a model (--model PATH).")
    extract = load_features(features)

    def score(samples: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
        rows = feature_rows(extract, pictures)
        return [_line(sample, row) for sample, row in zip(samples, rows, strict=True)]

    name = features if isinstance(features, str) else type(features).__name__
    found = find_samples(images, prompts)
    lines = score_samples(found, score, name="diversity", out=out, settings={"features": name}, batch_size=batch_size)
    groups = _groups(lines)
    if any(math.isnan(group["diversity"]) for group in groups):
        raise UserError(f"diversity: the features {name!r} of an image are not finite; look at the images.")
    if not groups:
        raise UserError("diversity needs at least two images of a prompt; sample more (samples=4).")
    rows = [figure("diversity (1 - cosine)", groups, "diversity")]
    tags = list(dict.fromkeys(group["tag"] for group in groups if group["tag"] is not None))
    rows += [figure(str(tag), [g for g in groups if g["tag"] == tag], "diversity", group="tag") for tag in tags]
    summary = {"diversity": rows[0]["value"], "features": name, "prompts": len(groups), "table": rows}
    finish(summary, lines, out=out)
    return summary


def _line(sample: ImageSample, row: Tensor) -> dict[str, Any]:
    prompt, tag = str(sample.metadata.get("prompt", "")), sample.metadata.get("tag")
    return {"prompt": prompt, "tag": tag, "features": pack(row)}


def _groups(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a prompt with at least two images; each image's line gets its prompt's figure, for comparisons."""
    members: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        members[line["index"]].append(line)
    groups = []
    for group in members.values():
        value = None
        if len(group) > 1:
            value = mean_pairwise_distance(unpack(group))
            groups.append({"prompt": group[0]["prompt"], "tag": group[0]["tag"], "diversity": value})
        for line in group:
            line["diversity"] = value
    return groups
