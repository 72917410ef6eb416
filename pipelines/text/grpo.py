"""GRPO: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300.

This is the empty stack: the core's defaults are GRPO as the libraries run it (Bessel std, eps 1e-4, token ratio, clip 0.2, mean
of row means). Departures from the paper: the std is Bessel-corrected and has an eps; `kl.beta` is 0 unless set (paper: 0.04).
"""

from __future__ import annotations

from typing import Any, ClassVar

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    KlConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.method import Method, MethodConfig


class Grpo(Method[MethodConfig]):
    """Vanilla GRPO; fills no hook."""

    Config: ClassVar[type[MethodConfig]] = MethodConfig


def arithmetic(name: str, method: str | list[Any], summary: str, **sections: object) -> RunConfig:
    """The tiny LM on its arithmetic: minutes on two cores. Shared by the text methods' tiny recipes; `method` may be a stack."""
    settings: dict[str, object] = {
        "model": ModelConfig(adapter="text_lm", path="testbed/lm_tiny"),
        "data": DataConfig(source="testbed/arithmetic", balance="tag"),
        "rewards": {"exact_match": RewardConfig()},
        "sampling": {"max_new_tokens": 32, "temperature": 1.0},
        "train": TrainConfig(
            steps=60, prompts_per_step=16, group_size=16, micro_batch=128, optimizer=OptimizerConfig(lr=3e-4)
        ),
        "eval": EvalConfig(every=20, samples=240, final_samples=480, batch=480),
    }
    stack = method if isinstance(method, list) else [method]
    return RunConfig(name=name, summary=summary, method=stack, **{**settings, **sections})  # type: ignore[arg-type]


def grpo_text_tiny() -> RunConfig:
    """GRPO on the tiny LM's arithmetic, exact-match reward."""
    return arithmetic("grpo_text_tiny", "grpo", "GRPO on the tiny LM's arithmetic")


def grpo_deepseekmath_7b() -> RunConfig:
    """GRPO with DeepSeekMath's settings: 16 prompts x 64 answers, lr 1e-6, KL 0.04, at most 1,024 tokens."""
    return RunConfig(
        name="grpo_deepseekmath_7b",
        summary="GRPO on DeepSeekMath-Instruct 7B, the paper's settings",
        model=ModelConfig(
            adapter="text_lm",
            path="deepseek-ai/deepseek-math-7b-instruct",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        method=["grpo"],
        data=DataConfig(source="data/math_train.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 1024, "temperature": 1.0},
        kl=KlConfig(beta=0.04),
        train=TrainConfig(
            steps=1000, prompts_per_step=16, group_size=64, micro_batch=8, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/math_test.jsonl", every=50, samples=500, final_samples=500, batch=64),
    )
