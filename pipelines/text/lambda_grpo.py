"""lambda-GRPO: "GRPO is Secretly a Process Reward Model", arXiv 2509.21154 (not 2510.06870, which has the same name).

What differs from GRPO: the term of a token, KL included, is divided by the number of answers of its group that share the token
and all tokens before it, so that a beginning that k answers share is pushed once and not k times. Divisors keep counting plain
tokens. Without a shared beginning it is GRPO, bit for bit. Default aggregation: the paper's token mean; the authors' code takes
`loss.aggregation=sequence_mean_token_mean`.
Departures: answers whose reward failed are dropped by the loop before the tree is built (rows that no reward applies to stay in
it); answers go on after their box has closed, where the script cuts them; tokens that are drawn together (a unit tag `scale`) are
shared where all earlier scales and the token itself are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RolloutBatch


def sharing_counts(ids: Tensor, lengths: Tensor, group_ids: Tensor, scale: Tensor | None = None) -> Tensor:
    """How many answers of the group share each token and everything before it, the answer itself included.

    Args:
        ids: token ids [N, T].
        lengths: tokens of each answer [N]; what lies beyond is no token.
        group_ids: [N] int64; the rows of a group have one prompt.
        scale: [N, T] int64, rising along a row: tokens of equal scale were drawn together and do not follow one another.

    Returns:
        [N, T] int64, 1 or more; 1 beyond the end.

    Example:
        >>> sharing_counts(torch.tensor([[1, 2], [1, 3], [1, 0]]), torch.tensor([2, 2, 1]), torch.zeros(3).long())
        tensor([[3, 1],
                [3, 1],
                [3, 1]])
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    counts = torch.ones_like(ids, dtype=torch.int64)
    for group in torch.unique(group_ids).tolist():
        rows = torch.nonzero(group_ids == group).flatten()
        words, inside = ids[rows], places < lengths[rows, None]
        equal = (words[:, None] == words[None]) & inside[:, None] & inside[None]  # [G, G, T]
        different = (~equal).long().cumsum(-1)
        if scale is None:
            same = different == 0
        else:
            # Differences before the token's own scale, which begins at the first place that holds it.
            layout = scale[rows].cummax(-1).values  # padding at the end may hold a lower one
            before = torch.searchsorted(layout, layout)
            padded = torch.cat([torch.zeros_like(different[..., :1]), different], -1)
            earlier = padded.gather(-1, before[:, None].expand_as(different))
            same = equal & (earlier == 0)
        counts[rows] = same.sum(1).clamp(min=1)
    return counts


class LambdaGrpo(Method[MethodConfig]):
    """Token weights 1 / (answers that share the token)."""

    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {"loss": {"aggregation": "token_mean"}, "kl": {"weighted": True}}

    def unit_weights(self, weights: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Divide by the sharing counts of the complete groups."""
        if "completion_ids" not in rollouts.data:
            raise UserError(
                f"lambda_grpo compares token ids, and adapter {state.config.model.adapter!r} keeps none (completion_ids); "
                "remove the method"
            )
        mask = rollouts.unit_mask.cpu()
        ids = rollouts.data["completion_ids"].cpu()
        # Up to the last trained token: one that is not trained in between is part of the beginning all the same.
        lengths = torch.where(mask, torch.arange(1, mask.shape[1] + 1), 0).amax(1) if mask.numel() else mask.sum(1)
        scale = rollouts.unit_tags.get("scale")
        counts = sharing_counts(ids, lengths, rollouts.group_ids, None if scale is None else scale.cpu())
        shares = torch.where(mask, 1 / counts.double(), 1.0)
        state.log({"lambda_grpo/weight": (shares[mask].sum(), mask.sum())})
        return weights * shares


def lambda_grpo_text_tiny() -> RunConfig:
    """lambda-GRPO on the tiny LM's arithmetic at the paper's temperature, where answers share their beginnings."""
    return arithmetic(
        "lambda_grpo_text_tiny",
        "lambda_grpo",
        "lambda-GRPO on the tiny LM's arithmetic: shared beginnings count once",
        sampling={"max_new_tokens": 32, "temperature": 0.75},
    )


def lambda_grpo_qwen2_5_3b() -> RunConfig:
    """lambda-GRPO on Qwen2.5-3B-Instruct, the reference script's settings: 4 prompts x 6, LoRA, mean over answers, T 0.75.

    The prompts are our choice: the paper's sets were not found.
    """
    return RunConfig(
        name="lambda_grpo_qwen2_5_3b",
        summary="lambda-GRPO on Qwen2.5-3B-Instruct, the reference script's settings",
        model=ModelConfig(
            adapter="text_lm",
            path="Qwen/Qwen2.5-3B-Instruct",
            dtype="bfloat16",
            gradient_checkpointing=True,
            lora=LoraConfig(
                rank=64,
                alpha=128,
                dropout=0.05,
                targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            ),
        ),
        method=["lambda_grpo"],
        data=DataConfig(source="data/math_train.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 1200, "temperature": 0.75},
        loss=LossConfig(aggregation="sequence_mean_token_mean"),
        train=TrainConfig(
            steps=1000, prompts_per_step=4, group_size=6, micro_batch=6, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=100, samples=500, final_samples=500, batch=64),
    )
