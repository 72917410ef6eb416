"""Any rewards over the images of a prompt file: the multi-metric table of Flow-GRPO and DiffusionNFT on DrawBench.

Protocol of the published table: 200 DrawBench prompts, 512 x 512, 40 first-order ODE steps, guidance 4.5 (1.0 for models trained
without). Its columns have other scales than the rewards: PickScore x 26, UnifiedReward and DeQA x 5 (1 to 5). Flow-GRPO's and
DiffusionNFT's own tables are separate measurements; figures of the two never stand in one column. Report them together, with
the diversity: a task score that rises while all others fall is the sign of a hacked reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.eval.images import ImageSample, find_samples
from visual_grpo.eval.protocol import figure, finish, score_samples
from visual_grpo.reward import RewardRequest
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

__all__ = ["DRAWBENCH_SCALE", "SAMPLES", "evaluate", "table_scale"]

SAMPLES = 1
DRAWBENCH_SCALE = {"pickscore": 26.0, "unified_reward": 5.0, "deqa": 5.0}
"""From flow_grpo's reward to the table's scale."""


def table_scale(name: str, reward: Any) -> float:
    """Factor from a reward's values to the published table's; the reward's own `divisor` where it has one.

    >>> table_scale("deqa", None), table_scale("aesthetic", None)
    (5.0, 1.0)
    """
    divisor = getattr(reward, "divisor", None)
    return float(divisor) if isinstance(divisor, int | float) else DRAWBENCH_SCALE.get(name, 1.0)


def _config(rewards: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(rewards, Mapping):
        given = dict(rewards)
    else:
        names = rewards.split(",") if isinstance(rewards, str) else list(rewards)
        given = {name.strip(): {} for name in names if name.strip()}
    config = {}
    for name, spec in given.items():
        fields = dict(spec) if isinstance(spec, Mapping) else {} if isinstance(spec, int | float) else {"reward": spec}
        config[name] = {"timeout_s": None, "on_failed": "drop", **fields}
    return config


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    rewards: str | Sequence[str] | Mapping[str, Any] = "pickscore",
    scale: str = "drawbench",
    device: str | None = None,
    batch_size: int = 32,
    grid: int = 24,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Score a folder of images with rewards.

    Args:
        images, prompts: see `find_samples`.
        out: result folder (see `visual_grpo.eval.protocol`).
        rewards: names ("pickscore,hps_v2"), or {name: settings as in a run's config}.
        scale: "drawbench" (the published table's) or "reward" (what training sees).
        device: for rewards that are models; None: CUDA if there is one, else the CPU.
        batch_size: images at a time.
        grid: pictures of each grid: best and worst by the first reward.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        means: reward -> mean in the chosen scale; failed, not_applicable: reward -> images; table, with a row for each reward and
        tag where the prompts have tags.

    Raises:
        UserError: no images, an unknown reward or scale.
        RewardError: a reward failed on every image.
    """
    if images is None:
        raise UserError("preference needs a folder of images (--images DIR) or a model (--model PATH).")
    if scale not in ("drawbench", "reward"):
        raise UserError(f"preference: scale is {scale!r}; give drawbench or reward.")
    config = _config(rewards)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with RewardSuite(config, device=where) as suite:
        names = suite.names(evaluation=True)
        compared = [runner.spec.name for runner in suite._runners if runner.reward.whole_groups]
        if compared:
            raise UserError(
                f"preference scores images one by one, and {compared[0]} compares those of a prompt; use visual-grpo score."
            )

        def score(samples: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
            texts = [str(s.metadata.get("prompt", "")) for s in samples]
            groups = torch.tensor([s.index for s in samples])
            request = RewardRequest.build(
                texts, images=pictures, metadata=[s.metadata for s in samples], group_ids=groups
            )
            found = suite.score(request, evaluation=True)
            return [_line(text, s, names, found, i) for i, (text, s) in enumerate(zip(texts, samples, strict=True))]

        settings = {"rewards": config}
        samples = find_samples(images, prompts)
        lines = score_samples(
            samples, score, name="preference", out=out, settings=settings, batch_size=batch_size,
            lasts=lambda line: "failed" not in line["status"].values(),
        )  # fmt: skip
        scales = {
            spec.name: table_scale(spec.name, runner.reward) if scale == "drawbench" else 1.0
            for spec, runner in zip(suite.specs, suite._runners, strict=True)
        }
    rows = [figure(name, lines, name, scale=scales[name]) for name in names]
    summary = {
        "means": {row["figure"]: row["value"] for row in rows},
        "scale": scale,
        "images": len(lines),
        "failed": {name: sum(line["status"][name] == "failed" for line in lines) for name in names},
        "not_applicable": {name: sum(line["status"][name] == "not_applicable" for line in lines) for name in names},
        "table": rows + _by_tag(lines, scales),
    }
    return finish(summary, lines, out=out, verdict=_best_and_worst(lines, names), grid=grid)


def _by_tag(lines: Sequence[Mapping[str, Any]], scales: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each reward and tag of the prompts, such as the four styles of the HPS benchmark."""
    tags = dict.fromkeys(line["tag"] for line in lines if "tag" in line)
    return [
        figure(str(tag), [line for line in lines if line.get("tag") == tag], name, scale=scale, group=name)
        for name, scale in scales.items()
        for tag in tags
    ]


def _line(prompt: str, sample: ImageSample, names: Sequence[str], found: Any, row: int) -> dict[str, Any]:
    states = {name: RewardStatus(int(found.status[row, k])) for k, name in enumerate(names)}
    values = {
        name: float(found.values[row, k]) if states[name] == RewardStatus.OK else None for k, name in enumerate(names)
    }
    tag = {"tag": sample.metadata["tag"]} if "tag" in sample.metadata else {}
    return {"prompt": prompt, **tag, **values, "status": {name: state.name.lower() for name, state in states.items()}}


def _best_and_worst(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """Best quarter by the first reward as successes, worst quarter as failures."""
    first = names[0]
    known = sorted(line[first] for line in lines if line[first] is not None)
    low, high = (known[len(known) // 4], known[-1 - len(known) // 4]) if known else (math.nan, math.nan)

    def verdict(line: Mapping[str, Any]) -> tuple[bool | None, float | None, str]:
        value = line[first]
        text = ", ".join(f"{n} {line[n]:.4g}" if line[n] is not None else f"{n} {line['status'][n]}" for n in names)
        if value is None or low == high:
            return None, value, text
        return (True if value >= high else False if value <= low else None), value, text

    return verdict
