"""DeGRPO: "Thinkless: LLM Learns When to Think", arXiv 2505.13379.

What differs from GRPO: the first token of an answer chooses the mode, brief or with long reasoning. Its loss is taken out of
the average over tokens and gets a weight of its own, so that the choice is learned alike for short and long answers. The
reward pays a right brief answer more than a right long one; advantages are centred only.

Departures: divisors are those of the whole optimizer step (`divisors=micro_batch` is the code's form); a mean over no token
is 0; no entropy bonus; a group of one gets advantage 0. The warm-up by supervised fine-tuning is a stage before this one.
Nothing published keeps a model from writing a long working behind the token for a brief answer, which the tiny LM learns to do
(docs/results.md); `mode_rewards.short_max` is our addition against that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.aggregation import Totals, aggregation_coefficients, safe_divisor
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import RunError, UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.stack import named_methods
from visual_grpo.types import RewardBatch, RewardStatus, RolloutBatch, Span

SHORT, THINK, NO_MODE = 0, 1, 2
"""Modes of an answer."""


class ModeRewards(MethodConfig):
    """Rewards by mode, in place of the score; an answer without a mode counts as wrong."""

    short_start: str = Field("<short>", description="how a brief answer's text starts")
    think_start: str = Field("<think>", description="how a long one starts; empty = every answer that is not brief")
    short_right: float = 1.0
    think_right: float = Field(0.5, description="0.7 to 0.8 makes the model think more")
    wrong: float = -1.0
    right_from: float = Field(1.0, description="least clean score of a right answer")
    short_max: int | None = Field(
        None,
        gt=0,
        description="units of the longest brief answer; a longer one has no mode. null = any length, as published",
    )


class DeGrpoConfig(MethodConfig):
    """Options of DeGRPO."""

    control_weight: float = Field(0.001, ge=0, description="of the control tokens' mean loss")
    control_tokens: int = Field(
        1, ge=0, description="units at the start of an answer that choose its mode; 0 = plain GRPO"
    )
    response: Literal["token_mean", "row_mean"] = Field(
        "token_mean", description="average of the other tokens: over the step (code), or within each row first (paper)"
    )
    divisors: Literal["step", "micro_batch"] = Field(
        "step", description="micro_batch: token means of each pass, averaged"
    )
    mode_rewards: ModeRewards | None = Field(None, description="null = the rewards are mode-aware already")


class DeGrpo(Method[DeGrpoConfig]):
    """Control tokens apart from the response."""

    Config: ClassVar[type[MethodConfig]] = DeGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "none"},
        "kl": {"beta": 0.001, "estimator": "k3"},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse what would delete the signal of the modes, and what would not be read."""
        for name, params in named_methods(run.method):
            if name == "dapo" and params.get("dynamic_sampling", True) and self.config.mode_rewards is not None:
                raise UserError(
                    "methods 'degrpo' and 'dapo' do not fit: dapo's dynamic sampling drops groups whose answers are all right, "
                    "in which degrpo's mode_rewards tell brief from long; set method.dapo.dynamic_sampling=false or remove one"
                )
        if self.config.control_tokens == 0:
            self.config.refuse_idle("degrpo", ["control_weight"], "control_tokens above 0")

    def unread(self, run: RunConfig) -> Sequence[str]:
        """It averages in its own way (`response`, `divisors`), the KL too."""
        return ("loss.aggregation",)

    def setup(self, state: LoopState) -> None:
        """Refuse starts of a mode that texts never show: special tokens are no part of them."""
        tokenizer: Any = getattr(state.policy.adapter, "tokenizer", None)
        table = self.config.mode_rewards
        for key in ("short_start", "think_start") if tokenizer is not None and table is not None else ():
            start = getattr(table, key).strip()
            ids = tokenizer(start, add_special_tokens=False)["input_ids"]
            if start not in tokenizer.decode(ids, skip_special_tokens=True):
                raise UserError(
                    f"method.degrpo.mode_rewards.{key} is {start!r}, a special token of this tokenizer, which the text of an "
                    "answer leaves out, so no answer would have this mode: make it an ordinary token ('special': false in "
                    "tokenizer.json and tokenizer_config.json), or name another start"
                )

    def passes_matter(self) -> bool:
        """Means of each pass."""
        return self.config.divisors == "micro_batch"

    def after_rollout(self, rollouts: RolloutBatch, state: LoopState) -> RolloutBatch:
        """Tag the control tokens."""
        if self.config.control_tokens == 0:
            return rollouts
        units = torch.zeros_like(rollouts.unit_mask, dtype=torch.int64)
        spans = rollouts.unit_tags.get("span", units).clone()
        spans[:, : self.config.control_tokens] = Span.CONTROL
        return replace(rollouts, unit_tags=rollouts.unit_tags | {"span": spans})

    def shape_rewards(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """Replace the score by the table of modes."""
        table = self.config.mode_rewards
        if table is None:
            return rewards
        assert rollouts.texts is not None
        lengths = rollouts.unit_mask.sum(1).cpu()
        modes = answer_modes(rollouts.texts, table.short_start, table.think_start)
        state.figure("degrpo/short_length", lengths.double(), modes == SHORT)
        if table.short_max is not None:
            modes[(modes == SHORT) & (lengths > table.short_max)] = NO_MODE
        clean = rewards if rewards.clean is None else rewards.clean
        usable, right = rewards.usable, clean.total() >= table.right_from
        # What other methods have added so far stays.
        values = mode_values(modes, right, table) + torch.nan_to_num(rewards.total() - clean.total())
        for name, mode in (("short", SHORT), ("think", THINK)):
            state.figure(f"degrpo/{name}", (modes == mode).double())
            state.figure(f"degrpo/{name}_right", right.double(), (modes == mode) & usable)
        status = torch.where(usable, int(RewardStatus.OK), int(RewardStatus.NOT_APPLICABLE)).to(rewards.status)
        failed = (rewards.status == RewardStatus.FAILED).any(1)
        return RewardBatch(
            names=("mode",),
            values=torch.where(usable, values, torch.nan).to(rewards.values)[:, None],
            status=torch.where(failed, int(RewardStatus.FAILED), status).to(rewards.status)[:, None],
            weights=torch.ones(1),
        )

    def aggregate(self, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """A weighted mean over the control tokens, and the response's own average."""
        control = torch.zeros_like(mask, dtype=torch.bool)
        if self.config.control_tokens > 0:
            if "span" not in rollouts.unit_tags or not totals.spans[Span.CONTROL]:
                raise RunError(
                    "degrpo finds no control token: no unit of the step has the tag span = control (types.Span.CONTROL); rows "
                    "that another method adds need it too"
                )
            control = rollouts.unit_tags["span"].to(mask.device) == Span.CONTROL
        return control_coefficients(mask, control, totals, self.config)

    def regulariser_coefficients(
        self, coefficients: Tensor, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """The KL is a token mean over all answers."""
        return aggregation_coefficients(mask, totals, mode="token_mean")


def control_coefficients(mask: Tensor, control: Tensor, totals: Totals, config: DeGrpoConfig) -> Tensor:
    """Coefficients of unit losses: `control_weight * mean over control units + average of the other units`.

    Args:
        mask: kept units of the micro-batch, [n, T] float.
        control: [n, T] bool.
        totals: of the optimizer step; `spans` counts its control units.
        config: of the method.

    Returns:
        [n, T].
    """
    kept = mask != 0
    choice, response = (kept & control).to(mask), (kept & ~control).to(mask)
    if config.divisors == "micro_batch":
        passes = safe_divisor(totals.micro_batches)
        of_choice, of_response = choice.sum().clamp(min=1) * passes, response.sum().clamp(min=1) * passes
        of_rows: Any = mask.shape[0] * passes
    else:
        controls = totals.spans[Span.CONTROL] if totals.spans else 0.0
        of_choice = torch.as_tensor(safe_divisor(controls)).to(mask)
        of_response = torch.as_tensor(safe_divisor(totals.units - controls)).to(mask)
        of_rows = safe_divisor(totals.rows)
    if config.response == "row_mean":
        return (
            config.control_weight * choice / of_rows + response / response.sum(1, keepdim=True).clamp(min=1) / of_rows
        )
    return config.control_weight * choice / of_choice + response / of_response


def answer_modes(texts: Sequence[str], short_start: str, think_start: str) -> Tensor:
    """Mode of each answer by how its text starts, [N] int64.

    Example:
        >>> answer_modes(["<short>7", "<think>3+4", "7"], "<short>", "<think>")
        tensor([0, 1, 2])
    """
    found = []
    for text in texts:
        start = text.lstrip()
        found.append(SHORT if start.startswith(short_start) else THINK if start.startswith(think_start) else NO_MODE)
    return torch.tensor(found, dtype=torch.int64)


def mode_values(modes: Tensor, right: Tensor, table: ModeRewards) -> Tensor:
    """Reward of each answer by mode and verdict: [N]."""
    values = torch.full(modes.shape, table.wrong)
    values[right & (modes == SHORT)] = table.short_right
    values[right & (modes == THINK)] = table.think_right
    return values


def degrpo_text_tiny() -> RunConfig:
    """DeGRPO on the tiny LM's arithmetic: answers that start with #### are brief, all others work it out."""
    return arithmetic(
        "degrpo_text_tiny",
        [{"degrpo": {"control_weight": 0.1, "mode_rewards": {"short_start": "####", "think_start": ""}}}],
        "DeGRPO on the tiny LM's arithmetic: when to answer at once and when to work it out",
    )


def degrpo_thinkless_1_5b() -> RunConfig:
    """DeGRPO on the warmed-up Thinkless-1.5B: 128 prompts x 8, two updates, 24,576 tokens; 300 steps of the reproduction.

    It goes on for 180 steps with `think_right` 0.8.
    """
    return RunConfig(
        name="degrpo_thinkless_1_5b",
        summary="DeGRPO on Thinkless-1.5B-Warmup, the reference's settings",
        model=ModelConfig(
            adapter="text_lm", path="Vinnnf/Thinkless-1.5B-Warmup", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=[{"degrpo": {"control_weight": 0.001, "mode_rewards": {"think_right": 0.5}}}],
        data=DataConfig(source="data/deepscaler.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 24576, "temperature": 0.6},
        train=TrainConfig(
            steps=300,
            prompts_per_step=128,
            group_size=8,
            updates_per_step=2,
            micro_batch=4,
            optimizer=OptimizerConfig(lr=1e-6, grad_norm=1.0),
        ),
        eval=EvalConfig(source="data/aime24.jsonl", every=20, samples=480, final_samples=480, batch=64),
    )
