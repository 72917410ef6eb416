"""Worked example of text and VLM GRPO as TRL 1.16 computes it: every loss type, gradients, advantages (float64)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import inputs_of, micro_of, scored, state_of

from visual_grpo.advantages import decoupled_advantages, group_advantages
from visual_grpo.aggregation import AggregationMode, Totals, aggregate
from visual_grpo.combination import combined_advantages
from visual_grpo.divergences import kl_estimate
from visual_grpo.loss import regularisers, surrogate_loss
from visual_grpo.objectives import (
    cispo_surrogate,
    clipped_surrogate,
    off_policy_sequence_mask,
    sapo_surrogate,
    top_entropy_mask,
    vespo_surrogate,
)
from visual_grpo.stack import MethodStack

# A whole row that is masked out: nothing it holds may reach the loss, so it holds NaN.
ABSENT = [float("nan")] * 6


def padded(*rows: list[float]) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (6 - len(row))] for row in rows], dtype=torch.float64)


OLD = padded([-0.5, -1, -0.2, -2, -0.1, -0.7], [-1.5, -0.3, -0.9, -0.4], [-0.8, -0.6, -1.1], ABSENT)
NEW = OLD + padded([0, 0.3, -0.3, 0.1, 0.4, -0.05], [0.25, -0.1, 0, -0.45], [0.35, -0.35, 0.05], ABSENT)
REF = NEW + padded([0.05, -0.1, 0.2, 0, -0.3, 0.1], [0, 0.15, -0.2, 0.1], [-0.1, 0.3, 0], ABSENT)
ENTROPY = padded([0.9, 0.1, 1.7, 0.3, 2.2, 0.4], [1.1, 0.2, 0.6, 1.9], [0.5, 1.4, 0.7], ABSENT)
MASK = padded([1] * 6, [1] * 4, [1] * 3, [0] * 6)
ADVANTAGES = torch.tensor([1, -0.5, -1.25, 0.75], dtype=torch.float64)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}

ROW_MEAN: AggregationMode = "sequence_mean_token_mean"
STEP_MEAN: AggregationMode = "token_mean"
ROW_SUM: AggregationMode = "sequence_mean_token_sum"


def close(actual: Tensor, expected: object, tolerance: float = 6e-7) -> None:
    torch.testing.assert_close(actual.detach(), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def loss_of(
    log_prob: Tensor, surrogate: Callable, mode: AggregationMode, weights: Tensor | None = None,
    beta: float = 0.0, totals: Totals | None = None, **options: object,
) -> Tensor:  # fmt: skip
    totals = totals or Totals.of_mask(MASK)
    unit_loss, _ = surrogate(log_prob, OLD, ADVANTAGES, MASK, **options)
    loss = aggregate(unit_loss, MASK, totals, mode=mode, max_length=6, weights=weights)
    if beta:
        divergence = kl_estimate("k3", log_prob, REF, mask=MASK)
        loss = loss + beta * aggregate(divergence, MASK, totals, mode=mode, max_length=6)
    return loss


CASES = [
    ("grpo", clipped_surrogate, ROW_MEAN, CLIP, 0.200428),
    ("bnpo", clipped_surrogate, "micro_batch_token_mean", CLIP, -0.021143),
    ("dr_grpo", clipped_surrogate, "fixed_length", CLIP, -0.011453),
    ("dapo", clipped_surrogate, STEP_MEAN, CLIP, -0.021143),
    ("cispo", cispo_surrogate, STEP_MEAN, {"ratio_cap": 5.0}, -0.041408),
    ("sapo", sapo_surrogate, ROW_MEAN, {}, 0.319640),
    ("luspo sequence", clipped_surrogate, ROW_SUM, {**CLIP, "level": "sequence"}, -0.199699),
    ("grpo sequence", clipped_surrogate, ROW_MEAN, {**CLIP, "level": "sequence"}, 0.164249),
    ("grpo sequence_token", clipped_surrogate, ROW_MEAN, {**CLIP, "level": "sequence_token"}, 0.164249),
    ("vespo", vespo_surrogate, STEP_MEAN, {}, -0.197014),
    ("dapo beta", clipped_surrogate, STEP_MEAN, {**CLIP, "beta": 0.04}, -0.020639),
    ("grpo beta", clipped_surrogate, ROW_MEAN, {**CLIP, "beta": 0.04}, 0.200822),
    ("dapo delta", clipped_surrogate, STEP_MEAN, {**CLIP, "delta": 1.3}, -0.032592),
]


@pytest.mark.parametrize(
    ("surrogate", "mode", "options", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_loss_table(surrogate: Callable, mode: AggregationMode, options: dict, expected: float) -> None:
    log_prob = NEW.clone().requires_grad_()
    loss = loss_of(log_prob, surrogate, mode, **options)
    close(loss, expected)
    loss.backward()
    assert bool(log_prob.grad.isfinite().all())
    assert not bool(log_prob.grad[MASK == 0].any())


SETTINGS: list[tuple[str, dict[str, Any], float]] = [
    ("grpo", {}, 0.200428),
    ("bnpo", {"loss": {"aggregation": "micro_batch_token_mean"}}, -0.021143),
    ("dr_grpo", {"loss": {"aggregation": "fixed_length", "max_length": 6}}, -0.011453),
    ("dapo", {"loss": {"aggregation": STEP_MEAN}}, -0.021143),
    ("cispo", {"loss": {"aggregation": STEP_MEAN, "surrogate": "cispo"}, "ratio": {"clip_high": 5.0}}, -0.041408),
    ("sapo", {"loss": {"surrogate": "sapo"}}, 0.319640),
    ("luspo", {"loss": {"aggregation": ROW_SUM}, "ratio": {**CLIP, "level": "sequence"}}, -0.199699),
    ("gspo", {"ratio": {**CLIP, "level": "sequence"}}, 0.164249),
    ("vespo", {"loss": {"aggregation": STEP_MEAN, "surrogate": "vespo"}}, -0.197014),
    ("dapo beta", {"loss": {"aggregation": STEP_MEAN}, "kl": {"beta": 0.04}}, -0.020639),
    ("grpo beta", {"kl": {"beta": 0.04}}, 0.200822),
    ("dapo delta", {"loss": {"aggregation": STEP_MEAN}, "ratio": {**CLIP, "delta": 1.3}}, -0.032592),
    ("off-policy", {"loss": {"aggregation": STEP_MEAN, "off_policy_max": 0.05}}, -0.174561),
    ("off-policy beta", {"loss": {"aggregation": STEP_MEAN, "off_policy_max": 0.05}, "kl": {"beta": 1.0}}, -0.161951),
]


@pytest.mark.parametrize(("sections", "expected"), [s[1:] for s in SETTINGS], ids=[s[0] for s in SETTINGS])
def test_loss_table_by_the_settings_of_a_run(sections: dict[str, Any], expected: float) -> None:
    """The empty stack and the loop's own loss, from a config; the last two tell that no mask touches the KL."""
    stack, state = MethodStack({}), state_of(**{"ratio": CLIP, **sections})
    rows = inputs_of(MASK.bool(), ADVANTAGES, [0] * 4)
    micro = replace(micro_of(rows, NEW, reference=REF), old_log_prob=OLD)
    coefficients = stack.aggregate(MASK, Totals.of_mask(MASK), rows.rollouts, state)
    loss, _ = surrogate_loss(stack, micro, rows, coefficients, state)
    close(loss + regularisers(stack, micro, rows, coefficients, state)[0], expected)


@pytest.mark.parametrize(("advantage", "expected"), [(-1.0, 1.2), (1.0, -1.1)])
def test_delta_bounds_the_ratio_alone_and_not_the_clipped_one(advantage: float, expected: float) -> None:
    """Ratio 1.2 with delta 1.1 below the clip range's end: `-min(1.1 A, 1.2 A)`."""
    now = torch.tensor([[1.2]], dtype=torch.float64).log()
    given = (now, torch.zeros_like(now), torch.tensor([advantage]), torch.ones(1, 1))
    close(clipped_surrogate(*given, delta=1.1, **CLIP)[0], [[expected]])


def test_top_entropy() -> None:
    weights = top_entropy_mask(ENTROPY, MASK, 0.2)
    close(loss_of(NEW, clipped_surrogate, STEP_MEAN, weights=weights, **CLIP), -0.124678)


def test_off_policy_mask() -> None:
    weights = off_policy_sequence_mask(NEW, OLD, ADVANTAGES, MASK, threshold=0.05)
    close(loss_of(NEW, clipped_surrogate, STEP_MEAN, weights=weights, **CLIP), -0.174561)


def test_masks_do_not_touch_the_kl() -> None:
    weights = top_entropy_mask(ENTROPY, MASK, 0.2)
    with_kl = loss_of(NEW, clipped_surrogate, STEP_MEAN, weights=weights, beta=0.04, **CLIP)
    without = loss_of(NEW, clipped_surrogate, STEP_MEAN, weights=weights, **CLIP)
    close(with_kl - without, 0.04 * 0.012610, 3e-8)


@pytest.mark.parametrize(
    ("surrogate", "options", "expected"),
    [
        (clipped_surrogate, CLIP, [-0.076923, 0, -0.056986, -0.085013, 0, -0.073171]),
        (cispo_surrogate, {"ratio_cap": 5.0}, [-0.076923, -0.103835, -0.056986, -0.085013, -0.114756, -0.073171]),
    ],
)
def test_gradient_of_the_first_row(surrogate: Callable, options: dict, expected: list[float]) -> None:
    log_prob = NEW.clone().requires_grad_()
    loss_of(log_prob, surrogate, STEP_MEAN, **options).backward()
    close(log_prob.grad[0], expected)


def test_mean_kl() -> None:
    divergence = kl_estimate("k3", NEW, REF, mask=MASK)
    close(aggregate(divergence, MASK, Totals.of_mask(MASK), mode=STEP_MEAN), 0.012610)


def test_divisor_counts_the_optimizer_step_not_the_rollout_batch() -> None:
    """TRL 1.16: 26 tokens in two steps, one step each, give the same loss as 13 tokens in one."""
    per_step = Totals(rows=4, units=26 / 2)
    close(loss_of(NEW, clipped_surrogate, STEP_MEAN, totals=per_step, **CLIP), -0.021143)
    whole_batch = Totals(rows=8, units=26)
    close(loss_of(NEW, clipped_surrogate, STEP_MEAN, totals=whole_batch, **CLIP), -0.010572)


VALUES = torch.tensor([[1, 0.2], [0, 0.9], [1, 0.4], [0, 0.1], *[[1, 0.5]] * 4], dtype=torch.float64)
WEIGHTS = torch.tensor([1, 0.5], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("group", [0.732200, -0.457625, 0.915250, -1.189825]),
        ("batch", [0.863912, -0.539945, 1.079890, -1.403857]),
        ("none", [0.4, -0.25, 0.5, -0.65]),
    ],
)
def test_sum_then_normalise(scope: str, expected: list[float]) -> None:
    advantages = group_advantages(VALUES @ WEIGHTS, GROUPS, scope=scope)
    close(advantages[:4], expected)
    assert advantages[4:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [0.732200, -0.457625, 0.915250, -1.189825]),
        ({"advantage": {"scope": "batch"}}, [0.863912, -0.539945, 1.079890, -1.403857]),
        ({"advantage": {"scope": "none"}}, [0.4, -0.25, 0.5, -0.65]),
        ({"combine": {"how": "gdpo"}}, [0.928833, -0.259818, 1.374842, -2.043857]),
    ],
)
def test_advantages_by_the_settings_of_a_run(sections: dict[str, Any], expected: list[float]) -> None:
    rewards = scored(VALUES, ("first", "second"))
    rewards.weights = WEIGHTS
    found = combined_advantages(rewards, GROUPS, torch.ones(8), state_of(**sections).config)
    close(found, [*expected, 0, 0, 0, 0])


def test_normalise_then_sum() -> None:
    advantages = decoupled_advantages(VALUES, None, WEIGHTS, GROUPS)
    close(advantages[:4], [0.928833, -0.259818, 1.374842, -2.043857])
    assert advantages[4:].tolist() == [0, 0, 0, 0]
