"""Best-of-N selection of DanceGRPO (arXiv 2505.07818), for any method: train the best and the worst samples of each prompt.

What differs from GRPO: advantages are those of all samples of the prompt and are not computed again; then the `keep / 2` highest
and the `keep / 2` lowest samples stay and the others are dropped before the update. Stacks with every method, images or text:
`method: [dancegrpo, {best_of_n: {keep: 8}}]`. Samples are ordered by the number whose differences the advantages learn, before
any clamp: the combined reward, or the sum of its normalised parts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from visual_grpo.combination import on_all_processes, signal
from visual_grpo.config import RunConfig
from visual_grpo.errors import UserError
from visual_grpo.groups import extreme_rows
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.types import RewardBatch, RolloutBatch


class BestOfNConfig(MethodConfig):
    """Options of the selection."""

    keep: int = Field(
        8, ge=2, description="samples a prompt that are trained, even: half of them the best, half the worst"
    )

    @field_validator("keep")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"keep must be even, half best and half worst: use {value - 1} or {value + 1}")
        return value


class BestOfN(Method[BestOfNConfig]):
    """Drops the middle of each group after the advantages."""

    Config: ClassVar[type[MethodConfig]] = BestOfNConfig

    def check(self, run: RunConfig, sampling: Any) -> None:
        """There must be something to drop, and equal shares for the updates."""
        keep, train = self.config.keep, run.train
        if keep >= train.group_size:
            raise UserError(
                f"method.best_of_n.keep ({keep}) must be less than train.group_size ({train.group_size}), or nothing is dropped"
            )
        if keep % train.updates_per_step:
            raise UserError(
                f"train.updates_per_step ({train.updates_per_step}) must divide method.best_of_n.keep ({keep}), so that every "
                "update holds the same share of each prompt"
            )

    def filter_rows(
        self, keep: Tensor, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """The ends of every group, over the rows of all processes."""
        ids = state.ranks.gather(rollouts.group_ids)
        if len(ids) == 0:
            return keep
        _, dense = torch.unique(ids, return_inverse=True)
        order = signal(on_all_processes(rewards, state.ranks), dense, state.config)
        order = torch.where(state.ranks.gather(keep), order, torch.nan)
        return state.ranks.mine(extreme_rows(order, dense, self.config.keep), len(keep))
