"""DAPO: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476.

What differs from GRPO: a higher upper clip bound (0.2 / 0.28), dynamic sampling (prompts whose answers are all right or all
wrong are replaced by new ones until the batch is full), the token mean over the whole step, a soft penalty for overlong answers
(or masking them), no KL. Departures: none; flatness is judged on the clean scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.advantages import flat_groups, overlong_penalty
from visual_grpo.combination import signal, with_part
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RewardStatus, RolloutBatch


class DapoConfig(MethodConfig):
    """Options of DAPO."""

    dynamic_sampling: bool = True
    max_tries: int = Field(4, ge=1, description="rollout batches a step may use to fill the batch with live groups")
    overlong_cache: int | None = Field(
        None, ge=1, description="tokens before the limit over which the penalty grows; null = none"
    )
    overlong_weight: float = Field(
        1.0,
        ge=0,
        description="factor of the penalty, in units of the reward; the paper's 1 belongs to rewards of -1 and 1",
    )


class Dapo(Method[DapoConfig]):
    """Clip-higher, dynamic sampling, token mean, overlong penalty."""

    Config: ClassVar[type[MethodConfig]] = DapoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "ratio": {"clip_low": 0.2, "clip_high": 0.28},
        "loss": {"aggregation": "token_mean"},
        "kl": {"beta": 0.0},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """The cache must lie within the answer; refuse what would not be read."""
        cache = self.config.overlong_cache
        if cache is None:
            self.config.refuse_idle("dapo", ["overlong_weight"], "overlong_cache")
        if not self.config.dynamic_sampling:
            self.config.refuse_idle("dapo", ["max_tries"], "dynamic_sampling=true")
        if cache is not None and cache > sampling.max_new_tokens:
            raise UserError(
                f"method.dapo.overlong_cache ({cache}) must be at most sampling.max_new_tokens ({sampling.max_new_tokens})"
            )

    def shape_rewards(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """Add the soft overlong penalty (Eq. 13) as a part of its own, on rows that some reward scored."""
        cache = self.config.overlong_cache
        if cache is None:
            return rewards
        limit: int = state.sampling.max_new_tokens  # type: ignore[attr-defined]
        length = rollouts.unit_mask.sum(1).cpu()
        # A truncated answer would have gone on: it counts as beyond the limit.
        length = torch.where(rollouts.truncated.cpu(), limit + 1, length) if rollouts.truncated is not None else length
        penalty = self.config.overlong_weight * overlong_penalty(length, limit, cache)
        return with_part(rewards, "overlong", penalty)

    def after_score(
        self, rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState
    ) -> tuple[RolloutBatch, RewardBatch]:
        """Keep live groups, and draw new prompts until `prompts_per_step` groups are live or the tries are used up."""
        if not self.config.dynamic_sampling:
            return rollouts, rewards
        wanted = state.config.train.prompts_per_step
        kept_rollouts, kept_rewards = _live(rollouts, rewards, state)
        for _ in range(self.config.max_tries - 1):
            if len(_groups(kept_rollouts, state)) >= wanted:
                break
            fresh = state.generate(state.draw())
            live_rollouts, live_rewards = _live(fresh, state.score(fresh), state)
            kept_rollouts = RolloutBatch.concat([kept_rollouts, live_rollouts])
            kept_rewards = RewardBatch.concat([kept_rewards, live_rewards])
        first = _groups(kept_rollouts, state)[:wanted]
        rows = torch.nonzero(torch.isin(kept_rollouts.group_ids, first)).flatten()
        return kept_rollouts.select(rows), kept_rewards.select(rows)


def _groups(rollouts: RolloutBatch, state: LoopState) -> Tensor:
    """Ids of the groups of all processes, ascending: the order in which they were drawn."""
    return torch.unique(state.ranks.gather(rollouts.group_ids))


def _live(rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState) -> tuple[RolloutBatch, RewardBatch]:
    """Rows of groups whose clean scores differ; groups are whole on their process."""
    clean = rewards if rewards.clean is None else rewards.clean
    failed = (rewards.status == RewardStatus.FAILED).any(1)
    _, dense = torch.unique(rollouts.group_ids, return_inverse=True)
    flat = flat_groups(torch.where(failed, torch.nan, signal(clean, dense, state.config)), dense)
    rows = torch.nonzero(~flat[dense]).flatten()
    return rollouts.select(rows), rewards.select(rows)


def dapo_text_tiny() -> RunConfig:
    """DAPO on the tiny LM's arithmetic."""
    return arithmetic(
        "dapo_text_tiny", "dapo", "DAPO on the tiny LM's arithmetic: clip-higher, dynamic sampling, token mean"
    )


def dapo_qwen2_5_7b() -> RunConfig:
    """DAPO on Qwen2.5-7B: the paper's settings (512 prompts x 16, lr 1e-6, 16,384 + 4,096 tokens, 16 updates a rollout).

    The paper trains Qwen2.5-32B. It scores answers -1 or 1, `math_verify` 0 or 1: half the penalty gives the same advantages.
    Its warm-up lasts 20 rollout batches, here counted in optimizer steps.
    """
    return RunConfig(
        name="dapo_qwen2_5_7b",
        summary="DAPO on Qwen2.5-7B, the paper's settings",
        model=ModelConfig(adapter="text_lm", path="Qwen/Qwen2.5-7B", dtype="bfloat16", gradient_checkpointing=True),
        method=[{"dapo": {"overlong_cache": 4096, "overlong_weight": 0.5, "max_tries": 10}}],
        data=DataConfig(source="data/dapo_math_17k.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 20480, "temperature": 1.0},
        loss=LossConfig(aggregation="token_mean"),
        train=TrainConfig(
            steps=600,
            prompts_per_step=512,
            group_size=16,
            updates_per_step=16,
            micro_batch=4,
            optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.1, warmup_steps=20 * 16),
        ),
        eval=EvalConfig(source="data/aime24.jsonl", every=20, samples=960, final_samples=960, batch=64),
    )
