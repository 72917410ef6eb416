"""Rows of a loss made by hand, and a state of the loop without a model: for tests of single hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visual_grpo.config import RunConfig, resolve
from visual_grpo.distributed import Ranks
from visual_grpo.loss import LossInputs
from visual_grpo.method import LoopState
from visual_grpo.types import LogProb, MicroBatch, PromptBatch, RewardBatch, RewardStatus, RolloutBatch


def state_of(step: int = 0, **sections: Any) -> LoopState:
    """Of a run with these sections."""
    base = {"model": {"adapter": "toy", "path": "toy"}, "data": {"source": "none.txt"}, "rewards": {"exact_match": 1.0}}
    config: RunConfig = resolve({**base, **sections})
    return LoopState(config=config, policy=None, ranks=Ranks(), sampling=None, step=step)  # type: ignore[arg-type]


def mask_of(lengths: list[int], width: int | None = None) -> Tensor:
    """[N, T] bool, the first units of each row."""
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def rollouts_of(mask: Tensor, groups: list[int], **fields: Any) -> RolloutBatch:
    """Token rows; `fields` of `RolloutBatch`, and `metadata` and `tags` of their prompts."""
    count = len(groups)
    prompts = PromptBatch(
        prompts=[f"say {g}" for g in groups],
        metadata=fields.pop("metadata", [{} for _ in groups]),
        group_ids=torch.tensor(groups, dtype=torch.int64),
        row_ids=torch.arange(count),
        tags=fields.pop("tags", {}),
    )
    return RolloutBatch(prompts=prompts, unit_kind="token", unit_mask=mask, **fields)


def inputs_of(mask: Tensor, advantages: Tensor, groups: list[int], **fields: Any) -> LossInputs:
    """Rows with unit weights 1."""
    ones = torch.ones(mask.shape, dtype=torch.float64)
    return LossInputs(rollouts=rollouts_of(mask, groups, **fields), advantages=advantages, weights=ones)


def scored(values: list[float] | Tensor, names: tuple[str, ...] = ("exact_match",)) -> RewardBatch:
    """Scores in float64, [N] or [N, R]; NaN does not apply."""
    table = torch.as_tensor(values, dtype=torch.float64).reshape(-1, len(names))
    status = torch.where(table.isnan(), int(RewardStatus.NOT_APPLICABLE), int(RewardStatus.OK)).to(torch.int8)
    return RewardBatch(names=names, values=table, status=status, weights=torch.ones(len(names), dtype=torch.float64))


def micro_of(rows: LossInputs, log_prob: Tensor, reference: Tensor | None = None) -> MicroBatch:
    """All units of `rows`, sampled under log-probs of 0."""
    return MicroBatch(
        rollouts=rows.rollouts,
        units=torch.arange(rows.rollouts.num_units),
        advantages=rows.advantages[:, None],
        mask=rows.rollouts.unit_mask.to(log_prob),
        log_prob=LogProb(value=log_prob),
        old_log_prob=torch.zeros_like(log_prob),
        reference=None if reference is None else LogProb(value=reference),
    )
