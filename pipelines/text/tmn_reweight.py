"""TMN-Reweight: "GoLongRL: Capability-Oriented Long Context Reinforcement Learning with Multitask Alignment", arXiv 2605.19577.

What differs from GRPO: the baseline is still the prompt's mean, but the divisor is one scale a task: the root of the mean
variance of the task's prompts in the whole step (all processes), so that rewards of different sizes weigh alike and near-
constant prompts are not blown up. A difficulty factor then raises rare successes on hard prompts and rare failures on easy
ones, and lowers their counterparts. The task of a prompt is one of its data-set columns (`task_key`).
Departures: a prompt with one scored row gets 0 and is left out of its task's statistics (`single_row=reference` keeps the
authors' rule); rewards count as above the threshold from 1e-9 on, so that ties of graded rewards do not turn on rounding; rows
without a score stay out of every mean. The launch script's bounds on the mismatch of sampler and trainer are not here: nothing
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.combination import on_all_processes
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RatioConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.data import PromptRow
from visual_grpo.errors import UserError
from visual_grpo.groups import group_index, segment_count, segment_mean, segment_range, segment_std
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RolloutBatch

SingleRow = Literal["zero", "reference"]
EPS = 1e-6
TIE = 1e-9
"""How far above the threshold a reward must lie to count as passed."""
FLAT = 1e-8
"""Range up to which a prompt's rewards are equal."""


def task_advantages(
    rewards: Tensor,
    prompt_ids: Tensor,
    task_ids: Tensor,
    *,
    smoothing: float = 0.8,
    gamma: float | None = 1.0,
    single_row: SingleRow = "zero",
) -> Tensor:
    """Centre by prompt, divide by the scale of the task, multiply by the difficulty factor.

    Args:
        rewards: [N] of the whole step; NaN where nothing scored the row.
        prompt_ids: [N] int64, dense.
        task_ids: [N] int64, dense; one task a prompt.
        smoothing: share of the prompt's own mean in the threshold of its pass rate; the rest is the task's mean.
        gamma: strength of the difficulty factor, None for none.
        single_row: a prompt with one scored row: "zero" leaves it out; "reference" gives it mean 0 and variance 1.

    Returns:
        [N] float64 without gradient; exactly 0 on unscored rows and on prompts of equal rewards.

    Example:
        >>> r = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
        >>> task_advantages(r, torch.arange(8) // 4, torch.zeros(8).long())[4:]
        tensor([-0.3605, -0.3605, -0.3605,  1.7832], dtype=torch.float64)
    """
    kept = ~rewards.isnan()
    values = torch.where(kept, rewards.detach().double(), 0.0)
    count = segment_count(prompt_ids, mask=kept)
    mean = segment_mean(values, prompt_ids, mask=kept)
    flat = (segment_range(values, prompt_ids, mask=kept) <= FLAT) & (count > 1)
    variance = torch.where(flat, 0.0, segment_std(values, prompt_ids, mask=kept).square())
    single = count == 1
    if single_row == "reference":
        mean, variance = torch.where(single, 0.0, mean), torch.where(single, 1.0, variance)
    counted = (count > 0) & ~(single if single_row == "zero" else torch.zeros_like(single))
    task = torch.zeros_like(prompt_ids[: len(count)]).index_copy(0, prompt_ids, task_ids)
    scale = segment_mean(variance, task, mask=counted).sqrt()
    advantages = (values - mean[prompt_ids]) / (scale[task_ids] + EPS)
    if gamma is not None:
        task_mean = segment_mean(mean, task, mask=counted)[task]
        threshold = torch.where(single, task_mean, smoothing * mean + (1 - smoothing) * task_mean)
        passed = (values > threshold[prompt_ids] + TIE).double()
        rate = segment_mean(passed, prompt_ids, mask=kept)[prompt_ids]
        sign = torch.where(values > mean[prompt_ids], 1.0, -1.0)
        advantages = advantages * torch.exp(gamma * sign * (0.5 - rate))
    live = kept & counted[prompt_ids] & ~flat[prompt_ids]
    return torch.where(live, advantages, 0.0)


class TmnReweightConfig(MethodConfig):
    """Options of TMN-Reweight."""

    task_key: str = Field("tag", description="column of the prompt set that names the task of a prompt")
    difficulty_reweight: bool = Field(True, description="the factor that raises rare successes and rare failures")
    smoothing: float = Field(
        0.8, ge=0, le=1, description="share of the prompt's own mean in the threshold of its pass rate"
    )
    gamma: float = Field(1.0, ge=0, description="strength of the factor: exp(gamma * 0.5) at most")
    single_row: SingleRow = Field("zero", description="a prompt with one scored row: left out, or as the authors do")


class TmnReweight(Method[TmnReweightConfig]):
    """Advantages by the statistics of tasks over the whole step."""

    Config: ClassVar[type[MethodConfig]] = TmnReweightConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "ratio": {"clip_low": 0.2, "clip_high": 0.28},
        "loss": {"aggregation": "token_mean"},
        "kl": {"beta": 0.0},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse what would not be read."""
        if not self.config.difficulty_reweight:
            self.config.refuse_idle("tmn_reweight", ["smoothing", "gamma"], "difficulty_reweight=true")

    def unread(self, run: RunConfig) -> Sequence[str]:
        """The scale is the task's."""
        return ("advantage.scope", "advantage.std", "advantage.eps", "advantage.single_group")

    def check_prompts(self, rows: Sequence[PromptRow]) -> None:
        """Refuse prompts without a task."""
        self._tasks([row.prompt for row in rows], [row.metadata for row in rows])

    def advantages(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Over the rows of all processes."""
        ranks, options = state.ranks, self.config
        names = ranks.gather_objects(self._tasks(rollouts.prompts.prompts, rollouts.prompts.metadata))
        number = {name: i for i, name in enumerate(sorted(set(names)))}
        tasks = torch.tensor([number[name] for name in names], dtype=torch.int64)
        everywhere = task_advantages(
            on_all_processes(rewards, ranks).total(),
            group_index(ranks.gather(rollouts.group_ids)),
            tasks,
            smoothing=options.smoothing,
            gamma=options.gamma if options.difficulty_reweight else None,
            single_row=options.single_row,
        )
        mine = ranks.mine(everywhere, len(rewards))
        if len(mine):
            state.log({"tmn_reweight/advantage_max": (mine.abs().max(), torch.tensor(1.0))})
        return mine

    def _tasks(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
        key = self.config.task_key
        missing = next((i for i, row in enumerate(metadata) if row.get(key) is None), None)
        if missing is not None:
            raise UserError(
                f"method.tmn_reweight.task_key is {key!r}, but prompt {prompts[missing]!r} has no such column; it has "
                f"{', '.join(map(str, metadata[missing])) or 'none'}. Name the column that holds the task"
            )
        return [str(row[key]) for row in metadata]


def tmn_reweight_text_tiny() -> RunConfig:
    """TMN-Reweight on the tiny LM's arithmetic: four kinds of problems are four tasks, one of them paid a tenth."""
    return arithmetic(
        "tmn_reweight_text_tiny",
        [{"dapo": {}}, "tmn_reweight"],
        "TMN-Reweight on the tiny LM's arithmetic: one scale a task, sums paid a tenth",
        rewards={
            "products": RewardConfig(reward="exact_match", applies={"tag": ["mul", "sub", "mixed"]}),
            "sums": RewardConfig(reward="exact_match", applies={"tag": "add"}, weight=0.1),
        },
    )


def tmn_reweight_qwen3_4b() -> RunConfig:
    """TMN-Reweight on Qwen3-4B, the launch script's settings: 128 prompts x 16, dynamic sampling, dual clip 3, lr 2e-6.

    The script draws 512 prompts at once to fill a batch of 128; here it is 128 at a time, at most 32 times.
    Prompts of up to 163,840 tokens, answers of 16,384. A row of the prompt set names its `task`; the paper maps 25 tasks to 9
    kinds of reward, of which these three stand for exact answers, mathematics and free text.
    """
    return RunConfig(
        name="tmn_reweight_qwen3_4b",
        summary="TMN-Reweight on Qwen3-4B, the launch script's settings",
        model=ModelConfig(adapter="text_lm", path="Qwen/Qwen3-4B", dtype="bfloat16", gradient_checkpointing=True),
        method=[{"dapo": {"max_tries": 32}}, {"tmn_reweight": {"task_key": "task"}}],
        data=DataConfig(source="data/golongrl.jsonl", answer_column="answer"),
        rewards={
            "exact_match": RewardConfig(applies={"task": ["exact", "choice"]}),
            "math_verify": RewardConfig(applies={"task": "math"}),
            "anls": RewardConfig(applies={"task": "qa"}),
        },
        sampling={"max_new_tokens": 16384, "temperature": 1.0},
        ratio=RatioConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        train=TrainConfig(
            steps=1800,
            prompts_per_step=128,
            group_size=16,
            micro_batch=1,
            optimizer=OptimizerConfig(lr=2e-6, weight_decay=0.1, warmup_steps=5),
        ),
        eval=EvalConfig(
            source="data/docmath.jsonl",
            every=50,
            samples=200,
            final_samples=200,
            batch=16,
            sampling={"temperature": 0.6, "top_p": 0.95},
        ),
    )
