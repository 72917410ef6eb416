"""Supervised fine-tuning: the data set's own answers, and their negative log-likelihood; the cold start of a pipeline.

What differs from GRPO: nothing is sampled in training. The rollout of a prompt is what its column `completion` holds, and the
loss of a token is its negative log-probability at temperature 1, averaged over the tokens of the step (`loss.aggregation`). Where
the column holds several answers, the rows of a group take them in turn: with `train.group_size` 2, a brief and a long answer to
every prompt, as Thinkless (arXiv 2505.13379) warms up. Rewards score held-out samples; those of the data set's answers are
logged, and nothing else reads them. Advantages are 1, and methods that weigh units (`unit_weights`) or add a KL stack with it;
those that read rewards or change advantages are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.data import PromptRow
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.objectives import Metrics
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.stack import fills, method_class, named_methods
from visual_grpo.types import MicroBatch, PromptBatch, RewardBatch, RolloutBatch

NOT_READ = ("shape_rewards", "after_score", "filter_groups", "adjust_advantages", "kl_scale")
IDLE = (
    *(f"advantage.{key}" for key in ("scope", "std", "eps", "single_group", "drop_flat", "clip", "soft_clip")),
    *(f"ratio.{key}" for key in ("clip_low", "clip_high", "old")),
    *(f"loss.{key}" for key in ("mask_truncated", "off_policy_max")),
    "kl.importance",
)
"""Core options of sampled answers: nobody sampled these."""


class SftConfig(MethodConfig):
    """Options of supervised fine-tuning."""

    column: str = Field("completion", description="column of the prompt set with the answer, or a list of answers")


class Sft(Method[SftConfig]):
    """The data set's answers in place of samples."""

    Config: ClassVar[type[MethodConfig]] = SftConfig
    needs: ClassVar[Needs] = Needs(
        unit_kinds=frozenset({"token"}), single_samples=True, given_rows=True, compares_rewards=False
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "loss": {"aggregation": "token_mean"},
        "kl": {"beta": 0.0},
        "alarms": {"flat_groups": "off"},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse methods that would learn from the rewards of given answers."""
        for name, _ in named_methods(run.method):
            hook = next((h for h in NOT_READ if fills(method_class(name), h)), None)
            if hook is not None:
                raise UserError(
                    f"methods 'sft' and {name!r} cannot be stacked: the answers of sft are given and not compared by their "
                    f"rewards, which {name}'s {hook} is about; remove one"
                )

    def unread(self, run: RunConfig) -> Sequence[str]:
        """What is about samples and their rewards."""
        return IDLE

    def check_prompts(self, rows: Sequence[PromptRow]) -> None:
        """Refuse prompts without an answer."""
        for row in rows:
            given_answer(row.prompt, row.metadata, self.config.column, 0)

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Rows of the data set."""
        places = prompts.row_ids % state.config.train.group_size
        texts = [
            given_answer(prompt, row, self.config.column, place)
            for prompt, row, place in zip(prompts.prompts, prompts.metadata, places.tolist(), strict=True)
        ]
        plain = state.sampling.model_copy(update={"temperature": 1.0})
        adapter = state.policy.adapter
        return adapter.decode(adapter.rows_from_texts(prompts, texts, plain))

    def advantages(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Every answer counts."""
        return torch.ones(len(rollouts))

    def surrogate(self, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
        """Negative log-likelihood of each token."""
        loss = -micro.log_prob.value * micro.advantages
        return loss, {"nll": ((-micro.log_prob.value.detach() * micro.mask).sum(), micro.mask.sum())}


def given_answer(prompt: str, row: Mapping[str, Any], column: str, place: int) -> str:
    """The answer that row `place` of a group takes from `column`: the text, or one of a list in turn.

    Raises:
        UserError: the column is missing, empty or holds something else.

    Example:
        >>> [given_answer("7+2", {"completion": ["9", "7+2=9 9"]}, "completion", place) for place in range(3)]
        ['9', '7+2=9 9', '9']
    """
    found = row.get(column)
    answers = found if isinstance(found, list) else [found]
    texts = [answer for answer in answers if isinstance(answer, str) and answer]
    if not texts or len(texts) < len(answers):
        raise UserError(
            f"method.sft.column is {column!r}, and prompt {prompt[:80]!r} holds {found!r} there; it needs a text or a list of "
            f"texts. The prompt has the columns {', '.join(map(str, row)) or 'none'}"
        )
    return texts[place % len(texts)]


def sft_text_tiny() -> RunConfig:
    """The tiny LM learns two modes of answering, a brief and a long answer to every prompt: stage 1 of `thinkless_tiny`."""
    return arithmetic(
        "sft_text_tiny",
        "sft",
        "Fine-tuning of the tiny LM on brief and long answers, each after its control token",
        data=DataConfig(source="testbed/arithmetic_modes", balance="tag"),
        rewards={"exact_match": RewardConfig(params={"extraction": "hashes"})},
        sampling={"max_new_tokens": 40, "temperature": 1.0},
        train=TrainConfig(
            steps=160, prompts_per_step=20, group_size=2, micro_batch=40, optimizer=OptimizerConfig(lr=1e-3)
        ),
        eval=EvalConfig(every=80, samples=200, final_samples=400, batch=400),
    )


def sft_thinkless_1_5b() -> RunConfig:
    """Stage 1 of Thinkless on DeepSeek-R1-Distill-Qwen-1.5B: pairs of a brief and a long answer in one column.

    The paper's settings of this stage were not found: these are our choice.
    """
    return RunConfig(
        name="sft_thinkless_1_5b",
        summary="Warm-up of Thinkless on R1-Distill-Qwen-1.5B: brief and long answers, each after its control token",
        model=ModelConfig(
            adapter="text_lm",
            path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        method=["sft"],
        data=DataConfig(source="data/thinkless_pairs.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 16384, "temperature": 0.6},
        train=TrainConfig(
            steps=1000,
            prompts_per_step=64,
            group_size=2,
            micro_batch=2,
            optimizer=OptimizerConfig(lr=1e-5, warmup_steps=100, schedule="cosine"),
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=500, samples=500, final_samples=500, batch=64),
    )
