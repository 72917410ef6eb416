"""How far an engine and the trained network lie apart, and which of two sets of weights an engine holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_grpo.types import PromptBatch, RolloutBatch

if TYPE_CHECKING:
    from visual_grpo.policy import Policy

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest mean |difference| of a token's log-probs, in nats, by `model.dtype`."""
SIGNAL = 20.0
"""The weights are moved until the network's own log-probs have changed by so many times the difference to the engine."""
GROWTH, TRIES = 4.0, 5
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """|engine - network| in nats over the tokens that an engine sampled."""

    mean: float
    largest: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Following:
    """What happened to an engine's log-probs when the weights were moved; means over its tokens, in nats."""

    moved: float
    """|network with the moved weights - network with those before|."""
    to_moved: float
    """|engine - network with the moved weights|."""
    to_before: float
    """|engine - network with the weights before|."""


def full_distribution(sampling: Any) -> Any:
    """`sampling` without top-k and top-p, whose log-probs an engine gives for what is left of the distribution."""
    return sampling.model_copy(update={"top_p": 1.0, "top_k": None})


def measure(policy: Policy, prompts: PromptBatch, sampling: Any, *, seed: int = 7) -> Agreement:
    """Sample a few rows with the engine and replay them under the same weights."""
    few = prompts.select(torch.arange(min(ROWS, len(prompts))))
    rows = policy.sample(few, seed=seed, sampling=full_distribution(sampling))
    apart = _apart(rows, _replay(policy, rows))
    return Agreement(mean=float(apart.mean()), largest=float(apart.max()), tokens=len(apart))


def follows(
    policy: Policy, prompts: PromptBatch, sampling: Any, *, noise: float, step: float, seed: int = 7
) -> Following:
    """Move the trained weights along the sign of their gradient, sample with the engine, and put them back.

    Args:
        policy: with gradients.
        prompts: a few of them are sampled.
        sampling: of the run.
        noise: mean |difference| at the present weights.
        step: size of the first try.
        seed: of the samples.
    """
    few = prompts.select(torch.arange(min(ROWS, len(prompts))))
    kept = {name: p.data.clone() for name, p in policy.trainable.items()}
    found = Following(moved=0.0, to_moved=0.0, to_before=0.0)
    for attempt in range(TRIES):
        _move(policy, kept, step * GROWTH**attempt)
        try:
            rows = policy.sample(few, seed=seed, sampling=full_distribution(sampling))
            moved = _replay(policy, rows)
        finally:
            _move(policy, kept, 0.0)
        before = _replay(policy, rows)
        mask = rows.unit_mask
        found = Following(
            moved=float((moved - before)[mask].abs().mean()),
            to_moved=float(_apart(rows, moved).mean()),
            to_before=float(_apart(rows, before).mean()),
        )
        if found.moved > SIGNAL * max(noise, 1e-5):
            break
    return found


@torch.no_grad()
def _move(policy: Policy, kept: dict[str, Tensor], size: float) -> None:
    for name, parameter in policy.trainable.items():
        parameter.copy_(kept[name])
        if parameter.grad is not None:
            parameter.sub_(size * parameter.grad.sign())


@torch.no_grad()
def _replay(policy: Policy, rows: RolloutBatch) -> Tensor:
    rows = rows.to(policy.device)
    return policy.log_prob(rows, torch.arange(rows.num_units)).value.double()


def _apart(rows: RolloutBatch, log_prob: Tensor) -> Tensor:
    assert rows.old_log_prob is not None
    return (rows.old_log_prob.to(log_prob) - log_prob).abs()[rows.unit_mask.to(log_prob.device)]
