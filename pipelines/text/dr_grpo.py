"""Dr. GRPO: "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783.

What differs from GRPO: the advantage is centred and not divided by the group's std, and the loss is divided by a constant
length, so that neither easy prompts nor short wrong answers weigh more. No KL. Departure: the paper drops the length division,
the code divides by the maximum length, which only rescales the learning rate; this is the code's form.
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


class DrGrpo(Method[MethodConfig]):
    """Settings of the core; fills no hook."""

    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "none"},
        "loss": {"aggregation": "fixed_length"},
        "kl": {"beta": 0.0},
    }


def dr_grpo_text_tiny() -> RunConfig:
    """Dr. GRPO on the tiny LM's arithmetic."""
    return arithmetic("dr_grpo_text_tiny", "dr_grpo", "Dr. GRPO on the tiny LM's arithmetic: no std, constant length")


def dr_grpo_qwen2_5_math_7b() -> RunConfig:
    """Dr. GRPO on Qwen2.5-Math-7B: 128 prompts x 8, lr 1e-6, at most 3,000 tokens."""
    return RunConfig(
        name="dr_grpo_qwen2_5_math_7b",
        summary="Dr. GRPO on Qwen2.5-Math-7B, the paper's settings",
        model=ModelConfig(
            adapter="text_lm", path="Qwen/Qwen2.5-Math-7B", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=["dr_grpo"],
        data=DataConfig(source="data/math_lvl3to5_8k.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 3000, "temperature": 1.0},
        train=TrainConfig(
            steps=500, prompts_per_step=128, group_size=8, micro_batch=8, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=20, samples=500, final_samples=500, batch=64),
    )
