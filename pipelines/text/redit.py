"""ReDit: "ReDit: Reward Dithering for Improved LLM Policy Optimization", arXiv 2506.18631.

What differs from GRPO: zero-mean noise is added to every reward before the advantage, drawn once an answer and step; coarse
rewards then give a smoother gradient. Metrics, filters, curricula and the start-up check read the clean rewards
(`RewardBatch.noisy`), and evaluations have no noise. Works on any unit kind and stacks with any method.
Departures: the noise goes to the sum of the rewards, and to each reward by itself where each is normalised by itself
(`combine.how` gdpo, sum_of_advantages, rank); `std` is the noise's standard deviation for both shapes (the uniform amplitude 0.05
that others report is std 0.029). With division by the std a group of equal rewards becomes an update of full size in a random
direction; that is the paper's rule, and `flat_groups=zero` leaves such groups at 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.advantages import flat_groups
from visual_grpo.combination import BY_GROUP, judged, signal, with_part
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.groups import group_index
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.schedules import lr_multiplier
from visual_grpo.types import RewardBatch, RolloutBatch

PART = "dither"
"""Name of the reward part that holds the noise of the sum."""
KEY = 29
"""Of this method's draws."""


def on_the_sum(rewards: RewardBatch, noise: Tensor) -> RewardBatch:
    """Add noise [N] to the total, as a part of its own; rows that nothing scored stay without a reward."""
    return replace(with_part(rewards, PART, noise), noisy=True)


class ReditConfig(MethodConfig):
    """Options of ReDit."""

    noise: Literal["gaussian", "uniform"] = "gaussian"
    std: float = Field(0.05, ge=0, description="standard deviation of the noise, in units of the reward; 0 = none")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the std, down to 0 at the last step"
    )
    flat_groups: Literal["dither", "zero"] = Field(
        "dither", description="groups of equal clean rewards: trained on their noise (paper), or left at advantage 0"
    )


class Redit(Method[ReditConfig]):
    """Noise on the rewards."""

    Config: ClassVar[type[MethodConfig]] = ReditConfig

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse what would not be read."""
        if self.config.std == 0:
            self.config.refuse_idle("redit", ["noise", "schedule", "flat_groups"], "std above 0")

    def shape_rewards(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """Add one draw a row to the sum, or one a row and reward where each is compared by itself."""
        fall = lr_multiplier(self.config.schedule, state.step, total_steps=state.config.train.steps)
        std = self.config.std * fall
        if std == 0:
            return rewards
        by_group = state.config.combine.how in BY_GROUP
        noise = std * self._unit_noise(rollouts.prompts.row_ids, len(rewards.names) if by_group else 1, state)
        if by_group:
            return replace(rewards, values=rewards.values + noise.to(rewards.values), noisy=True)  # NaN stays NaN
        return on_the_sum(rewards, noise[:, 0])

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """With `flat_groups=zero`: 0 where a group's clean rewards are equal."""
        if not rewards.noisy:
            return advantages
        ids = group_index(rollouts.group_ids)
        flat = flat_groups(signal(judged(rewards), ids, state.config), ids)
        state.log({"redit/noise_only_groups": (flat.sum(), torch.tensor(len(flat)))})
        if self.config.flat_groups == "dither":
            return advantages
        rows = flat[ids].to(advantages.device).reshape(-1, *([1] * (advantages.ndim - 1)))
        return torch.where(rows, torch.zeros_like(advantages), advantages)

    def _unit_noise(self, row_ids: Tensor, columns: int, state: LoopState) -> Tensor:
        """[N, columns] float64 of mean 0 and std 1, by (seed, step, row)."""
        rows = []
        for row in row_ids.tolist():
            generator = state.generator(KEY, row)
            if self.config.noise == "gaussian":
                rows.append(torch.randn(columns, generator=generator, dtype=torch.float64))
            else:
                rows.append((2 * torch.rand(columns, generator=generator, dtype=torch.float64) - 1) * 3**0.5)
        return torch.stack(rows) if rows else torch.zeros(0, columns, dtype=torch.float64)


def redit_text_tiny() -> RunConfig:
    """ReDit on the tiny LM's arithmetic."""
    return arithmetic("redit_text_tiny", ["grpo", "redit"], "ReDit on the tiny LM's arithmetic: noise on the reward")


def redit_qwen2_5_7b() -> RunConfig:
    """ReDit on Qwen2.5-7B-Instruct and GSM8K. Gaussian noise of std 0.05; the paper's GRPO settings were not found: ours."""
    return RunConfig(
        name="redit_qwen2_5_7b",
        summary="ReDit on Qwen2.5-7B-Instruct, GSM8K",
        model=ModelConfig(
            adapter="text_lm", path="Qwen/Qwen2.5-7B-Instruct", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=["grpo", {"redit": {"noise": "gaussian", "std": 0.05}}],
        data=DataConfig(source="data/gsm8k_train.jsonl", answer_column="answer"),
        rewards={"exact_match": RewardConfig()},
        sampling={"max_new_tokens": 1024, "temperature": 1.0},
        train=TrainConfig(
            steps=1000, prompts_per_step=64, group_size=8, micro_batch=8, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/gsm8k_test.jsonl", every=50, samples=500, final_samples=500, batch=64),
    )
