"""RLOO: "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs", arXiv 2402.14740.

What differs from GRPO: an answer is compared with the mean of the others of its group, without its own reward in it and without a
division by the std, and the loss of an answer is the sum over its tokens: on the policy that sampled, the gradient is that of
REINFORCE with a baseline that leaves it unbiased. No KL. Departures: the paper adds the KL to the reward, here `kl.beta` adds it
to the loss; the paper takes one update a rollout, further ones have the core's clipped ratio. It trains units of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from visual_grpo.advantages import leave_one_out_advantages
from visual_grpo.combination import on_all_processes, signal
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RolloutBatch


class Rloo(Method[MethodConfig]):
    """Advantages against the other answers of the group."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "none"},
        "loss": {"aggregation": "sequence_mean_token_sum"},
        "kl": {"beta": 0.0},
    }

    def unread(self, run: RunConfig) -> Sequence[str]:
        """Nothing divides."""
        return ("advantage.scope", "advantage.std", "advantage.eps")

    def advantages(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """[N], over the groups of all processes."""
        ranks = state.ranks
        ids = ranks.gather(rollouts.group_ids)
        everywhere = leave_one_out_advantages(
            signal(on_all_processes(rewards, ranks), ids, state.config),
            ids,
            single_group=state.config.advantage.single_group,
        )
        return ranks.mine(everywhere, len(rewards))


def rloo_text_tiny() -> RunConfig:
    """RLOO on the tiny LM's arithmetic."""
    return arithmetic("rloo_text_tiny", "rloo", "RLOO on the tiny LM's arithmetic: the mean of the other answers")


def rloo_qwen2_5_7b() -> RunConfig:
    """RLOO with the paper's four answers a prompt, on Qwen2.5-7B-Instruct and GSM8K.

    The paper trains on learned rewards of summaries and dialogues; model, task and all other settings are our choice.
    """
    return RunConfig(
        name="rloo_qwen2_5_7b",
        summary="RLOO on Qwen2.5-7B-Instruct and GSM8K, four answers a prompt",
        model=ModelConfig(
            adapter="text_lm", path="Qwen/Qwen2.5-7B-Instruct", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=["rloo"],
        data=DataConfig(source="data/gsm8k_train.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 512, "temperature": 1.0},
        train=TrainConfig(
            steps=500, prompts_per_step=128, group_size=4, micro_batch=16, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/gsm8k_test.jsonl", every=50, samples=500, final_samples=500, batch=64),
    )
