"""GSPO: "Group Sequence Policy Optimization", arXiv 2507.18071.

What differs from GRPO: one importance ratio a sequence, the exponential of the mean token log-ratio, clipped in a narrow range
(3e-4 / 4e-4); the loss is the mean over rows. `ratio.level=sequence_token` is GSPO-token: the same value with a gradient per
token, for advantages that differ by token. Departures: none known; the paper's batch details were not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.method import Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic


class Gspo(Method[MethodConfig]):
    """Settings of the core; fills no hook."""

    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "ratio": {"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        "loss": {"aggregation": "sequence_mean_token_mean"},
        "kl": {"beta": 0.0},
    }


def gspo_text_tiny() -> RunConfig:
    """GSPO on the tiny LM's arithmetic, four updates a rollout batch."""
    return arithmetic(
        "gspo_text_tiny",
        "gspo",
        "GSPO on the tiny LM's arithmetic: one ratio a sequence, four updates a rollout",
        train=TrainConfig(
            steps=60,
            prompts_per_step=16,
            group_size=16,
            updates_per_step=4,
            micro_batch=64,
            optimizer=OptimizerConfig(lr=1e-4),
        ),
    )


def gspo_qwen3_8b() -> RunConfig:
    """GSPO on Qwen3-8B: clip 3e-4 / 4e-4, 4 updates a rollout; group and batch sizes and the learning rate are our choice."""
    return RunConfig(
        name="gspo_qwen3_8b",
        summary="GSPO on Qwen3-8B, the paper's clip range and four updates a rollout",
        model=ModelConfig(adapter="text_lm", path="Qwen/Qwen3-8B", dtype="bfloat16", gradient_checkpointing=True),
        method=["gspo"],
        data=DataConfig(source="data/math_train.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 8192, "temperature": 1.0},
        train=TrainConfig(
            steps=500,
            prompts_per_step=64,
            group_size=8,
            updates_per_step=4,
            micro_batch=4,
            optimizer=OptimizerConfig(lr=1e-6),
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=20, samples=500, final_samples=500, batch=64),
    )
