"""REAL: "Rewards as Labels: Revisiting RLVR from a Classification Perspective", arXiv 2602.05630.

What differs from GRPO: there is no advantage, ratio clip or KL. Right answers of a prompt are one class, wrong ones the
other; the logit is a row's mean log-ratio to the policy that sampled, and a log-sum-exp loss with an anchor at 0 pulls right
answers above it and wrong ones below, so that every row's gradient is bounded by 1 / temperature. `form` has the reference's
variants.

The labels travel to the loss as advantages of 1, -1 or 0 (neither); `advantage.*`, the bounds of `ratio` and what `loss` has
but `mask_truncated` are not read, and refused.
Departures: an answer without tokens, or one that is masked as truncated, has no label; a KL that is asked for (`kl.beta`) is a
token mean of its own, as in ms-swift.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

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
from visual_grpo.objectives import Metrics
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.stack import fills, method_class, named_methods
from visual_grpo.types import MicroBatch, RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)

Form = Literal["anchored", "bce", "product"]
NOT_READ = ("shape_rewards", "adjust_advantages", "unit_weights", "live_weights")


class RealConfig(MethodConfig):
    """Options of REAL."""

    temperature: float = Field(0.5, gt=0, description="divides the logits; a row's gradient is at most its inverse")
    form: Form = Field("anchored", description="the paper's loss, or one of the variants of its repository")


class Real(Method[RealConfig]):
    """Rewards as class labels."""

    Config: ClassVar[type[MethodConfig]] = RealConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}), whole_groups=True, couples_units=True)
    defaults: ClassVar[Mapping[str, Any]] = {"kl": {"beta": 0.0}}

    def __init__(self, config: RealConfig) -> None:
        super().__init__(config)
        self._sizes: Counter[int] = Counter()  # rows of each group of this step
        self._warned = False

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse what would be ignored: other methods' rewards, advantages and weights, and groups dropped from the mean."""
        for name, _ in named_methods(run.method):
            hook = next((h for h in NOT_READ if fills(method_class(name), h)), None)
            if hook is not None:
                raise UserError(
                    f"methods 'real' and {name!r} cannot be stacked: real learns from the clean labels alone and would ignore "
                    f"{name}'s {hook}; remove one"
                )
        if run.advantage.drop_flat:
            raise UserError(
                "method real averages over all prompts, also those whose answers are all right or all wrong; set "
                "advantage.drop_flat=false"
            )

        trained = {name: reward.weight for name, reward in run.rewards.items() if not reward.eval_only}
        if len(trained) == 1 and set(trained.values()) != {1.0}:
            name, weight = next(iter(trained.items()))
            raise UserError(
                f"method real reads a score of 1 as right, and rewards.{name}.weight is {weight:g}, so none would be: set it to 1"
            )

    def unread(self, run: RunConfig) -> Sequence[str]:
        """A row's loss is a share of its prompt's, so what picks rows or tokens of it would change the others too."""
        advantage = ("scope", "std", "eps", "single_group", "clip", "soft_clip")
        loss = ("aggregation", "top_entropy", "off_policy_max")
        return (
            *(f"advantage.{key}" for key in advantage),
            *(f"loss.{key}" for key in loss),
            "ratio.clip_low",
            "ratio.clip_high",
        )

    def advantages(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Labels [N] float64: 1 right, -1 wrong, 0 where the row or its group says nothing."""
        clean = rewards if rewards.clean is None else rewards.clean
        self._sizes = Counter(rollouts.group_ids.tolist())
        scores = clean.total()
        self._warn_of_graded(scores)
        answered = rollouts.unit_mask.any(1).cpu()
        if state.config.loss.mask_truncated and rollouts.truncated is not None:
            answered = answered & ~rollouts.truncated.cpu()  # they will have no unit in the loss
        labels = class_labels(scores, rollouts.group_ids, answered)
        state.figure("real/labelled", (labels != 0).double())
        return labels

    def _warn_of_graded(self, scores: Tensor) -> None:
        """Once a run."""
        graded = scores[~scores.isnan() & (scores != 0) & (scores != 1)]
        if len(graded) and not self._warned:
            self._warned = True
            logger.warning(
                "real: %d of %d answers have a score other than 0 and 1 (%g) and are in neither class; use one reward of 0 and 1 "
                "with weight 1",
                len(graded),
                len(scores),
                float(graded[0]),
            )

    def surrogate(self, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
        """A loss for each row [n, 1], whose sum over a group is the prompt's loss."""
        ids = micro.rollouts.group_ids
        for group, rows in Counter(ids.tolist()).items():
            if rows != self._sizes.get(group, rows):
                raise ValueError(f"group {group} has {self._sizes[group]} rows, {rows} of them in this loss call")
        kept = micro.mask != 0
        change = torch.where(kept, micro.log_prob.value - micro.old_log_prob, 0.0)
        logits = change.sum(1) / kept.sum(1).clamp(min=1)
        labels = micro.advantages[:, 0].sign()
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self._losses(leaf, labels, ids).sum(), leaf)
        right, wrong = labels > 0, labels < 0
        fixed = logits.detach()
        return self._losses(logits, labels, ids)[:, None], {
            "logit_right": (fixed[right].sum(), right.sum()),
            "logit_wrong": (fixed[wrong].sum(), wrong.sum()),
            "row_weight_max": (slope.abs().max(), torch.tensor(1.0)),
        }

    def _losses(self, logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        return row_losses(logits, labels, ids, temperature=self.config.temperature, form=self.config.form)

    def aggregate(self, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """One over the prompts of the step, or for `bce` over its labelled rows, shared by a row's units."""
        divisor = totals.live_rows if self.config.form == "bce" else totals.groups
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / safe_divisor(divisor)

    def regulariser_coefficients(
        self, coefficients: Tensor, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """The KL is a token mean over all answers."""
        return aggregation_coefficients(mask, totals, mode="token_mean")


def class_labels(scores: Tensor, group_ids: Tensor, answered: Tensor) -> Tensor:
    """Labels [N] float64: 1 for score 1, -1 for score 0; 0 for any other score and where the group lacks one of the two.

    Args:
        scores: clean, [N]; NaN where nothing scored the row.
        group_ids: [N] int64, whole groups.
        answered: [N] bool, rows with at least one unit.

    Raises:
        RunError: there are scores, but not one of them is 0 or 1.
    """
    labels = torch.where(scores == 1, 1.0, torch.where(scores == 0, -1.0, 0.0)).double()
    scored = ~scores.isnan()
    if bool(scored.any()) and not bool((labels != 0).any()):
        raise RunError(
            f"real needs rewards of 0 and 1 as labels; this step's are graded, from {float(scores[scored].min()):g} to "
            f"{float(scores[scored].max()):g}: use one such reward with weight 1"
        )
    labels = torch.where(answered, labels, 0.0)
    for group in torch.unique(group_ids):
        rows = group_ids == group
        if not (bool((labels[rows] > 0).any()) and bool((labels[rows] < 0).any())):
            labels[rows] = 0.0
    return labels


def row_losses(logits: Tensor, labels: Tensor, group_ids: Tensor, *, temperature: float, form: Form) -> Tensor:
    """Classification losses whose sum over a group is the prompt's loss (for `bce`: one loss a row).

    With right answers P, wrong ones M and logits s: "anchored" is `log(1 + sum_P exp(-s / tau)) + log(1 + sum_M exp(s / tau))`,
    "product" `softplus(logsumexp_M(s / tau) + logsumexp_P(-s / tau))`, "bce" binary cross-entropy of s / tau.

    Args:
        logits: mean log-ratio of each row, [n], with gradient.
        labels: [n], 1, -1 or 0, see `class_labels`.
        group_ids: [n] int64, whole groups.
        temperature: tau.
        form: see above.

    Returns:
        [n], attached to `logits`; rows without a label give 0.

    Example:
        >>> logits, ids = torch.tensor([0.0, 0.0]), torch.tensor([0, 0])
        >>> row_losses(logits, torch.tensor([1.0, -1.0]), ids, temperature=0.5, form="anchored").sum()
        tensor(1.3863)
    """
    scaled = -labels * logits / temperature  # large where a row stands on the wrong side
    if form == "bce":
        return torch.where(labels != 0, functional.softplus(scaled), scaled * 0)
    losses = scaled * 0
    for group in torch.unique(group_ids).tolist():
        member = (group_ids == group).to(labels.device) & (labels != 0)
        right, wrong = scaled[member & (labels > 0)], scaled[member & (labels < 0)]
        if len(right) == 0 or len(wrong) == 0:
            continue
        if form == "product":
            loss = functional.softplus(right.logsumexp(0) + wrong.logsumexp(0))
        else:
            anchor = scaled.new_zeros(1)
            loss = torch.cat([anchor, right]).logsumexp(0) + torch.cat([anchor, wrong]).logsumexp(0)
        losses = torch.where(member, loss / (len(right) + len(wrong)), losses)
    return losses


def real_text_tiny() -> RunConfig:
    """REAL on the tiny LM's arithmetic, four updates a rollout."""
    return arithmetic(
        "real_text_tiny",
        "real",
        "REAL on the tiny LM's arithmetic: rewards as class labels, four updates a rollout",
        train=TrainConfig(
            steps=60,
            prompts_per_step=16,
            group_size=16,
            updates_per_step=4,
            micro_batch=64,
            optimizer=OptimizerConfig(lr=1e-4),
        ),
    )


def real_r1_distill_qwen_1_5b() -> RunConfig:
    """REAL on DeepSeek-R1-Distill-Qwen-1.5B: 128 prompts x 8, four updates a rollout, 30 passes over DeepScaleR's 40,315."""
    return RunConfig(
        name="real_r1_distill_qwen_1_5b",
        summary="REAL on R1-Distill-Qwen-1.5B, the reference's settings",
        model=ModelConfig(
            adapter="text_lm",
            path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        method=[{"real": {"temperature": 0.5}}],
        data=DataConfig(source="data/deepscaler.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 8192, "temperature": 0.6},
        train=TrainConfig(
            steps=9450,
            prompts_per_step=128,
            group_size=8,
            updates_per_step=4,
            micro_batch=8,
            optimizer=OptimizerConfig(lr=2e-6),
        ),
        eval=EvalConfig(source="data/aime24.jsonl", every=50, samples=480, final_samples=480, batch=64),
    )
