"""S-GRPO (Stable GRPO): "Mitigating Think-Answer Mismatch in LLM Reasoning Through Noise-Aware Advantage Reweighting", arXiv
2508.05928.

What differs from GRPO: the labels are taken to be flipped with a known probability, and each group's advantage is multiplied
by the least-squares factor under that noise: balanced groups keep most of their signal, lopsided ones lose it. Std-normalised
advantages with Dr. GRPO's constant divisor, as in the code. Departures: a flat group gets exactly 0; truncated answers are
scored as they stand (the scripts give them 0).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.aggregation import expand_units
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import RunError
from visual_grpo.groups import segment_count
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)

EPS = 1e-8
"""Under both roots of the weight."""


class SGrpoConfig(MethodConfig):
    """Options of S-GRPO."""

    flip_probability: float = Field(0.1, ge=0, lt=0.5, description="how often a label is wrong, in either direction")


class SGrpo(Method[SGrpoConfig]):
    """Group weights that are optimal under label noise."""

    Config: ClassVar[type[MethodConfig]] = SGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "bessel", "eps": 1e-8},
        "loss": {"aggregation": "fixed_length"},
        "kl": {"beta": 0.0},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Warn where the noise level drops every group with a single odd label."""
        flip, size = self.config.flip_probability, run.train.group_size
        if flip >= 1 / size:
            logger.warning(
                "method.s_grpo.flip_probability (%g) is at least 1/train.group_size (1/%d): groups with one right or one wrong "
                "answer get weight 0, and with small groups all of them; lower it or raise train.group_size",
                flip,
                size,
            )

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """One factor a group, from the clean labels; groups are whole on their process."""
        clean = rewards if rewards.clean is None else rewards.clean
        right = right_answers(clean.total())
        _, ids = torch.unique(rollouts.group_ids, return_inverse=True)
        count, correct = segment_count(ids, mask=clean.usable), segment_count(ids, mask=right)
        weights = noise_weights(correct, count, self.config.flip_probability)
        mixed = (correct > 0) & (correct < count)
        state.figure("s_grpo/dropped", (mixed & (weights < 1e-6)).double())
        state.figure("s_grpo/weight", weights, mixed)
        return advantages * expand_units(weights[ids], advantages, "weights").to(advantages)


def noise_weights(correct: Tensor, count: Tensor, flip_probability: float) -> Tensor:
    """Weight of a group's standardised advantages when labels flip with probability p (S-GRPO's w*).

    `(1 - 2p) t (1 - t) / (sqrt(q (1 - q) + 1e-8) sqrt(t (1 - t) + 1e-8))` with the observed rate q = correct / count and the
    denoised rate t = clip((q - p) / (1 - 2p), 0, 1): covariance of observed and true label over both spreads.

    Args:
        correct: right answers of each group, [S].
        count: scored answers of each group, [S].
        flip_probability: p in [0, 0.5).

    Returns:
        [S] float64 in [0, 1 - 2p]; 0 for a group without scored answers.

    Raises:
        ValueError: p is out of its range.

    Example:
        >>> noise_weights(torch.tensor([1, 2]), torch.tensor([4, 4]), 0.1)
        tensor([0.7211, 0.8000], dtype=torch.float64)
    """
    if not 0 <= flip_probability < 0.5:
        raise ValueError(f"flip_probability must be in [0, 0.5), got {flip_probability}")
    observed = correct.double() / count.clamp(min=1)
    kept = 1 - 2 * flip_probability
    true = ((observed - flip_probability) / kept).clamp(0, 1)
    variance = true * (1 - true)
    return kept * variance / ((observed * (1 - observed) + EPS).sqrt() * (variance + EPS).sqrt())


def right_answers(scores: Tensor) -> Tensor:
    """[N] bool, scores above 0 (NaN is not).

    Raises:
        RunError: the scores are graded: right answers, or wrong ones, differ among themselves.
    """
    usable = ~scores.isnan()
    right = usable & (scores > 0)
    for kind in (scores[right], scores[usable & ~right]):
        if len(kind) and float(kind.max() - kind.min()) > 1e-6:
            raise RunError(
                f"s_grpo counts right and wrong answers, but the rewards are graded ({float(kind.min()):g} and "
                f"{float(kind.max()):g} in one step): use one reward of two values, above 0 for right"
            )
    return right


def s_grpo_text_tiny() -> RunConfig:
    """S-GRPO on the tiny LM's arithmetic: groups of 8, four updates a rollout."""
    return arithmetic(
        "s_grpo_text_tiny",
        "s_grpo",
        "S-GRPO on the tiny LM's arithmetic: advantages weighted for noisy labels",
        train=TrainConfig(
            steps=60,
            prompts_per_step=32,
            group_size=8,
            updates_per_step=4,
            micro_batch=64,
            optimizer=OptimizerConfig(lr=1e-4),
        ),
    )


def s_grpo_llama3_2_3b() -> RunConfig:
    """S-GRPO on Llama-3.2-3B: flip probability 0.15, 128 prompts x 8, eight updates a rollout, 20 passes over 8,000 problems.

    Qwen2.5-Math-1.5B-Instruct has the same flip probability, Qwen2.5-Math-7B 0.10.
    """
    return RunConfig(
        name="s_grpo_llama3_2_3b",
        summary="S-GRPO on Llama-3.2-3B, the reference's settings",
        model=ModelConfig(
            adapter="text_lm", path="meta-llama/Llama-3.2-3B", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=[{"s_grpo": {"flip_probability": 0.15}}],
        data=DataConfig(
            source="data/math_lvl3to5_8k.jsonl",
            answer_column="answer",
            system_prompt="Reason between <think> and </think>, then give the final answer in \\boxed{}.",
        ),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 4096, "temperature": 1.0, "top_p": 0.95},
        train=TrainConfig(
            steps=1250,
            prompts_per_step=128,
            group_size=8,
            updates_per_step=8,
            micro_batch=8,
            optimizer=OptimizerConfig(lr=1e-6),
        ),
        eval=EvalConfig(
            source="data/math500.jsonl",
            every=16,
            samples=500,
            final_samples=500,
            batch=64,
            sampling={"temperature": 0.0},
        ),
    )
