"""TRL's loss and gradient on our rollouts, for the losses that both have; a part of the benchmark text_step_vs_trl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.eval.benchmarks.text_step_sides import (
    AGGREGATIONS,
    Shape,
    run_config,
    trl_trainer,
)

END_TOKENS = range(2, 34)
"""Tokens that end a row here: with 32 of the 1,024 a random model's rows have many lengths."""


def side_losses(work: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """{loss_type: {"ours", "trl", "difference", "gradient difference"}}; the last is relative to the gradient's norm.

    The old log-probs are the sampler's plus noise, so that ratios lie on both sides of the clip range.
    """
    from visual_grpo.aggregation import Totals
    from visual_grpo.api import plan
    from visual_grpo.distributed import Ranks
    from visual_grpo.loss import LossInputs, passes
    from visual_grpo.method import LoopState
    from visual_grpo.policy import Policy

    made = plan(run_config(work, shape, seed), {"sampling.stop_on_eos": True})
    adapter = made.adapter_class.load(made.config.model, device=torch.device("cpu"), sampling=made.sampling)
    adapter.eos_ids = list(END_TOKENS)
    policy = Policy(adapter, made.config.model)
    rollouts = policy.sample(_prompts(work, shape), seed=seed, sampling=made.sampling)
    generator = torch.Generator().manual_seed(seed)
    assert rollouts.old_log_prob is not None
    rollouts.old_log_prob = rollouts.old_log_prob + 0.3 * torch.randn(rollouts.unit_mask.shape, generator=generator)
    advantages = torch.randn(shape.rows, generator=generator)
    rows = LossInputs(rollouts=rollouts, advantages=advantages, weights=torch.ones(rollouts.unit_mask.shape))
    trainer = trl_trainer(work, shape, seed)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = _trl_inputs(rollouts, advantages)
    found: dict[str, Any] = {}
    with Ranks() as ranks:
        for loss_type, aggregation in AGGREGATIONS.items():
            config = plan(
                run_config(work, shape, seed), {"loss.aggregation": aggregation, "ratio.old": "sampler"}
            ).config
            state = LoopState(config=config, policy=policy, ranks=ranks, sampling=made.sampling, on_policy=False)
            ((ours, _),) = passes(made.stack, rows, Totals.of_mask(rollouts.unit_mask), state)
            trainer.loss_type = loss_type
            theirs = trainer._compute_loss(trainer.model, inputs)
            found[loss_type] = {
                "ours": ours.item(),
                "trl": theirs.item(),
                "difference": abs(ours.item() - theirs.item()),
                "gradient difference": _gradient_difference(ours, policy.module, theirs, trainer.model),
            }
    return found


def _prompts(work: Path, shape: Shape) -> Any:
    """One batch of prompts, of different lengths: padding must not enter the loss."""
    from visual_grpo.config import DataConfig
    from visual_grpo.data import load_prompts, prompt_batch

    rows = load_prompts(DataConfig(source=str(work / "train.txt"), limit=shape.prompts))
    batch = prompt_batch(rows, shape.group)
    batch.prompts = [
        " ".join(text.split()[: shape.prompt_tokens - 5 * (i // shape.group)]) for i, text in enumerate(batch.prompts)
    ]
    return batch


def _trl_inputs(rollouts: Any, advantages: Tensor) -> dict[str, Tensor]:
    """Our rollouts in TRL's layout: prompts padded on the left, completions on the right."""
    prompts = rollouts.data["prompt_ids"]
    width = max(len(ids) for ids in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": rollouts.data["completion_ids"],
        "completion_mask": rollouts.unit_mask.long(),
        "old_per_token_logps": rollouts.old_log_prob,
        "advantages": advantages,
        "num_items_in_batch": rollouts.unit_mask.sum(),
    }


def _gradient_difference(ours: Tensor, our_model: nn.Module, theirs: Tensor, their_model: nn.Module) -> float:
    """Norm of the difference of both gradients over the norm of theirs."""
    first = torch.autograd.grad(ours, list(our_model.parameters()))
    second = torch.autograd.grad(theirs, list(their_model.parameters()))
    difference = nn.utils.get_total_norm([a - b for a, b in zip(first, second, strict=True)])
    return float(difference / nn.utils.get_total_norm(list(second)))
