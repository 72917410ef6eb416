"""Held-out evaluation of a policy: fixed prompts, fixed noises, every sample's scores kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visual_grpo.data import PromptRow, evaluation_batch, share_of
from visual_grpo.distributed import Ranks
from visual_grpo.diversity import group_diversity
from visual_grpo.policy import Policy
from visual_grpo.registry import load_object
from visual_grpo.reward import RewardRequest
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardBatch, RewardStatus, RolloutBatch

DIVERSITY = "diversity"
"""A detail of the first sample of each prompt that has several pictures side by side (`eval.group_size`)."""


@dataclass(kw_only=True)
class Evaluation:
    """Scores of `n` held-out samples."""

    rows: list[dict[str, Any]]
    """one a sample: index, sample, prompt, tag, values, details, text."""
    metrics: dict[str, float]
    """means: `NAME`, `NAME/detail`, `diversity` where prompts have several pictures; `NAME/by_tag` (unweighted mean of the tags)
    where the prompts have tags; `NAME/task/TASK` (of the samples of a task, by tag where they have tags) where there are several
    tasks."""
    by_tag: dict[str, dict[str, float]]
    images: Tensor | None = None
    """[g, 3, H, W], the first samples, for the grid."""


def reward_request(rollouts: RolloutBatch) -> RewardRequest:
    """What rewards see of a rollout batch: text lengths are in sampled tokens."""
    extra: dict[str, Any] = {}
    if rollouts.texts is not None:
        extra["lengths"] = rollouts.unit_mask.sum(1).cpu()
        if "completion_ids" in rollouts.data:
            kept = rollouts.unit_mask.cpu()
            extra["completion_ids"] = [
                row[m].tolist() for row, m in zip(rollouts.data["completion_ids"].cpu(), kept, strict=True)
            ]
        if rollouts.truncated is not None:
            extra["truncated"] = rollouts.truncated.tolist()
    return RewardRequest.build(
        rollouts.prompts.prompts,
        images=rollouts.images,
        texts=rollouts.texts,
        metadata=rollouts.prompts.metadata,
        group_ids=rollouts.group_ids,
        **extra,
    )


def evaluate_policy(
    policy: Policy,
    suite: RewardSuite,
    prompts: Sequence[PromptRow],
    *,
    samples: int,
    batch: int,
    sampling: Any,
    seed: int,
    ranks: Ranks,
    keep_images: int = 0,
    group_size: int = 1,
    features: str = "pixels",
) -> Evaluation:
    """Sample and score `samples` held-out rows, split over the processes.

    Row i has the same prompt and the same noise at every call, whatever `samples`, the batch or the number of processes.
    With a `group_size` above 1 pictures also have a `diversity`, from the image `features` of `eval diversity`.
    """
    mine = share_of(ranks, evaluation_batch(prompts, samples, group_size))
    rows: list[dict[str, Any]] = []
    seen: list[tuple[int, Tensor]] = []
    kept: list[Tensor] = []
    described = _image_features(features) if group_size > 1 else None
    for index in torch.arange(len(mine)).split(batch) if len(mine) else ():
        rollouts = policy.sample(mine.select(index), seed=seed, sampling=sampling)
        scores = suite.score(reward_request(rollouts), evaluation=True)
        rows += [_row(rollouts, scores, i) for i in range(len(index))]
        if described is not None and rollouts.images is not None:
            seen += zip(rollouts.prompts.row_ids.tolist(), described(rollouts.images), strict=True)
        if rollouts.images is not None and ranks.main:
            kept.append(rollouts.images[: max(0, keep_images - sum(map(len, kept)))])
    rows = sorted(ranks.gather_objects(rows), key=lambda r: r["row"])
    seen = sorted(ranks.gather_objects(seen), key=lambda pair: pair[0])
    if seen:
        groups = torch.tensor([row // group_size for row, _ in seen])
        for row, value in group_diversity(torch.stack([one for _, one in seen]), groups).items():
            rows[row]["details"][DIVERSITY] = value
    metrics, by_tag = summarise(rows)
    return Evaluation(rows=rows, metrics=metrics, by_tag=by_tag, images=torch.cat(kept) if kept else None)


def _image_features(name: str) -> Callable[[Tensor], Tensor]:
    """Images [n, 3, H, W] to features [n, D] on the CPU.

    Raises:
        UserError: there are none of this name.
    """
    extract = load_object("visual_grpo.eval.features:load_features")(name)
    return partial(load_object("visual_grpo.eval.features:feature_rows"), extract)


def _row(rollouts: RolloutBatch, scores: RewardBatch, i: int) -> dict[str, Any]:
    prompts = rollouts.prompts
    ok = (scores.status[i] == RewardStatus.OK).tolist()
    row = {
        "row": int(prompts.row_ids[i]),
        "index": int(prompts.tags["index"][i]),
        "sample": int(prompts.tags["sample"][i]),
        "prompt": prompts.prompts[i],
        "tag": None if (tag := prompts.metadata[i].get("tag")) is None else str(tag),
        "values": {n: float(scores.values[i, k]) if ok[k] else None for k, n in enumerate(scores.names)},
        "details": {k: _number(v[i]) for k, v in scores.details.items()},
    }
    if "task" in prompts.tags:
        row["task"] = str(prompts.metadata[i]["task"])
    if rollouts.texts is not None:
        row["text"] = rollouts.texts[i]
    return row


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def summarise(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """(means over all samples and unweighted means over tags, means by tag) of every value and detail."""
    flat = [(str(r["tag"]), {**r["values"], **r["details"]}) for r in rows]
    overall: dict[str, list[float]] = defaultdict(list)
    tagged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tag, figures in flat:
        for name, value in figures.items():
            if value is not None:
                overall[name].append(value)
                tagged[tag][name].append(value)
    metrics = {name: math.fsum(v) / len(v) for name, v in overall.items()}
    by_tag = {tag: {n: math.fsum(v) / len(v) for n, v in figures.items()} for tag, figures in sorted(tagged.items())}
    if any(r["tag"] is not None for r in rows):
        for name in list(metrics):
            means = [figures[name] for figures in by_tag.values() if name in figures]
            metrics[f"{name}/by_tag"] = math.fsum(means) / len(means)
    else:
        by_tag = {}
    tasks = dict.fromkeys(r["task"] for r in rows if "task" in r)
    for task in tasks if len(tasks) > 1 else ():
        own, _ = summarise([r for r in rows if r["task"] == task])
        metrics |= {
            f"{name.removesuffix('/by_tag')}/task/{task}": value
            for name, value in own.items()
            if f"{name}/by_tag" not in own
        }
    return metrics, by_tag


def main_figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """The figures to show first: of each task apart where there are several, else means of tags where prompts have tags, else
    means of samples without their parts.
    """
    tasks = {k: v for k, v in metrics.items() if "/task/" in k}
    tagged = {k.removesuffix("/by_tag"): v for k, v in metrics.items() if k.endswith("/by_tag")}
    return tasks or tagged or {k: v for k, v in metrics.items() if "/" not in k}
