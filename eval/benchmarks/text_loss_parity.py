"""TRL's losses and gradients on our rollouts, for every loss that both have; a part of the benchmark text_step_vs_trl."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.eval.benchmarks.text_step_sides import Shape, run_config, trl_trainer

END_SHARE = 32
"""One token of so many ends a row here, so that a random model's rows have many lengths."""
CISPO_CAP, DELTA, BETA = 1.3, 1.5, 0.04


@dataclass(frozen=True)
class Loss:
    """One loss in both dialects: overrides of our config, attributes of TRL's trainer (`args.X` of its arguments)."""

    ours: Mapping[str, Any]
    trl: Mapping[str, Any]


def _loss(loss_type: str, aggregation: str, ours: Mapping[str, Any] = {}, trl: Mapping[str, Any] = {}) -> Loss:
    return Loss({"loss.aggregation": aggregation, **ours}, {"loss_type": loss_type, **trl})


_SEQUENCE = {"ratio.level": "sequence"}, {"importance_sampling_level": "sequence"}
LOSSES = {
    "grpo": _loss("grpo", "sequence_mean_token_mean"),
    "dapo": _loss("dapo", "token_mean"),
    "dr_grpo": _loss("dr_grpo", "fixed_length"),
    "bnpo": _loss("bnpo", "micro_batch_token_mean"),
    "cispo": _loss(
        "cispo", "token_mean", {"loss.surrogate": "cispo", "ratio.clip_high": CISPO_CAP}, {"epsilon_high": CISPO_CAP}
    ),
    "sapo": _loss("sapo", "sequence_mean_token_mean", {"loss.surrogate": "sapo"}),
    "vespo": _loss("vespo", "token_mean", {"loss.surrogate": "vespo"}),
    "luspo": _loss("luspo", "sequence_mean_token_sum", *_SEQUENCE),
    "grpo, ratio of the sequence (GSPO)": _loss("grpo", "sequence_mean_token_mean", *_SEQUENCE),
    "grpo, two-sided clip": _loss("grpo", "sequence_mean_token_mean", {"ratio.delta": DELTA}, {"args.delta": DELTA}),
    "dapo, KL": _loss("dapo", "token_mean", {"kl.beta": BETA}, {"beta": BETA, "args.use_bias_correction_kl": False}),
    "dapo, KL times the ratio": _loss("dapo", "token_mean", {"kl.beta": BETA, "kl.importance": True}, {"beta": BETA}),
}
"""Every `loss_type` of TRL 1.16, and the options of its ratio and KL."""


def side_losses(work: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """{loss: {"ours", "trl", "difference", "gradient difference"}}; the last is relative to the gradient's norm.

    The old log-probs are the sampler's plus noise, so that ratios lie on both sides of the clip range; the weights have moved
    from the reference. The larger model gets fewer and shorter rows.
    """
    from visual_grpo.aggregation import Totals
    from visual_grpo.api import plan
    from visual_grpo.distributed import Ranks
    from visual_grpo.loss import LossInputs, passes
    from visual_grpo.method import LoopState
    from visual_grpo.policy import Policy

    if shape.rival_rows is not None:
        shape = replace(shape, group=shape.rival_rows, rival_rows=None, prompt_tokens=96, new_tokens=32)
    made = plan(run_config(work, shape, seed), {"sampling.stop_on_eos": True})
    adapter = made.adapter_class.load(made.config.model, device=torch.device("cpu"), sampling=made.sampling)
    size = adapter.trainable_module.config.vocab_size
    adapter.eos_ids = list(range(2, 2 + size // END_SHARE))
    policy = Policy(adapter, made.config.model)
    policy.keep_reference()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    rollouts = policy.sample(_prompts(work, shape), seed=seed, sampling=made.sampling)
    assert rollouts.old_log_prob is not None
    rollouts.old_log_prob = rollouts.old_log_prob + 0.3 * torch.randn(rollouts.unit_mask.shape, generator=generator)
    advantages = torch.randn(shape.rows, generator=generator)
    rows = LossInputs(rollouts=rollouts, advantages=advantages, weights=torch.ones(rollouts.unit_mask.shape))
    trainer = trl_trainer(work, shape, seed)
    trainer.model.load_state_dict(policy.module.state_dict())
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = _trl_inputs(rollouts, advantages)
    with torch.no_grad(), policy.reference():
        inputs["ref_per_token_logps"] = policy.log_prob(rollouts, torch.arange(rollouts.num_units)).value
    found: dict[str, Any] = {}
    with Ranks() as ranks:
        for name, loss in LOSSES.items():
            config = plan(run_config(work, shape, seed), {**loss.ours, "ratio.old": "sampler"}).config
            state = LoopState(config=config, policy=policy, ranks=ranks, sampling=made.sampling, on_policy=False)
            ((ours, _),) = passes(made.stack, rows, Totals.of_mask(rollouts.unit_mask), state)
            with _changed(trainer, loss.trl):
                theirs = trainer._compute_loss(trainer.model, inputs)
            found[name] = {
                "ours": ours.item(),
                "trl": theirs.item(),
                "difference": abs(ours.item() - theirs.item()),
                "gradient difference": _gradient_difference(ours, policy.module, theirs, trainer.model),
            }
    return found


@contextmanager
def _changed(trainer: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, other values of the trainer's attributes."""
    places = [(trainer.args if "." in name else trainer, name.rpartition(".")[2], name) for name in attributes]
    before = [getattr(owner, attribute) for owner, attribute, _ in places]
    try:
        for owner, attribute, name in places:
            setattr(owner, attribute, attributes[name])
        yield
    finally:
        for (owner, attribute, _), value in zip(places, before, strict=True):
            setattr(owner, attribute, value)


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
