"""Worked example of Balanced Aggregation, float64, and its degenerate groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import inputs_of, mask_of, micro_of, scored, state_of

from visual_grpo.aggregation import Totals, aggregate, aggregation_coefficients
from visual_grpo.loss import regularisers, surrogate_loss
from visual_grpo.objectives import clipped_surrogate
from visual_grpo.pipelines.text.balanced_aggregation import (
    BalancedAggregation,
    BalancedAggregationConfig,
    balanced_weights,
)
from visual_grpo.stack import MethodStack

ADVANTAGES = torch.tensor([1.2, -0.6, -0.6], dtype=torch.float64)
LENGTHS = [2, 3, 4]
LOG_RATIO = torch.tensor([[0.1, 0.3, 0, 0], [-0.05, 0.2, -0.4, 0], [0.15, -0.25, 0.05, 0.35]], dtype=torch.float64)
MASK = mask_of(LENGTHS)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def close(actual: Tensor | float, expected: float | list[float]) -> None:
    given = torch.as_tensor(actual, dtype=torch.float64)
    torch.testing.assert_close(given, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def balanced(
    advantages: Tensor, lengths: list[int], groups: list[int], log_ratio: Tensor, rewards: Tensor | None = None
) -> float:
    """Loss of one step through the method's own hooks."""
    method, state = BalancedAggregation(BalancedAggregationConfig()), state_of(ratio=CLIP)
    rows = inputs_of(mask_of(lengths, log_ratio.shape[1]), advantages, groups)
    rows = method.before_updates(rows, scored(advantages if rewards is None else rewards), state)
    stack = MethodStack({"ba": method})
    mask = rows.rollouts.unit_mask
    coefficients = stack.aggregate(mask.double(), Totals.of_mask(mask), rows.rollouts, state)
    return float(surrogate_loss(stack, micro_of(rows, log_ratio), rows, coefficients, state)[0])


def test_token_losses() -> None:
    loss, _ = clipped_surrogate(LOG_RATIO, torch.zeros_like(LOG_RATIO), ADVANTAGES, MASK, **CLIP)
    close(loss[0, :2], [-1.326205, -1.536])
    close(loss[1, :3], [0.570738, 0.732842, 0.48])
    close(loss[2], [0.697101, 0.48, 0.630763, 0.851441])
    close(loss[0].sum() / 2, -1.431103)
    close(loss[1:].sum() / 7, 0.634698)
    totals = Totals.of_mask(MASK)
    close(aggregate(loss, MASK, totals, mode="sequence_mean_token_mean"), -0.057250)
    close(aggregate(loss, MASK, totals, mode="token_mean"), 0.175631)


def test_balanced_loss() -> None:
    close(balanced(ADVANTAGES, LENGTHS, [0, 0, 0], LOG_RATIO), -0.053902)


def test_a_flat_group_of_the_step_halves_it() -> None:
    """Groups weigh alike, whatever their size."""
    advantages = torch.cat([ADVANTAGES, torch.zeros(2, dtype=torch.float64)])
    log_ratio = torch.cat([LOG_RATIO, torch.zeros(2, 4, dtype=torch.float64)])
    close(balanced(advantages, [*LENGTHS, 4, 1], [3, 3, 3, 5, 5], log_ratio), -0.026951)


def test_at_ratio_one() -> None:
    """The signs balance with any lengths; the token mean does not."""
    zeros = torch.zeros_like(LOG_RATIO)
    close(balanced(ADVANTAGES, LENGTHS, [0, 0, 0], zeros), 0.0)
    loss, _ = clipped_surrogate(zeros, zeros, ADVANTAGES, MASK)
    close(aggregate(loss, MASK, Totals.of_mask(MASK), mode="sequence_mean_token_mean"), 0.0)
    close(aggregate(loss, MASK, Totals.of_mask(MASK), mode="token_mean"), 0.2)


def weights(
    advantages: list[float], counts: list[int], groups: list[int] | None = None, *, drop_zero: bool = False
) -> Tensor:
    a = torch.tensor(advantages, dtype=torch.float64)
    ids = torch.tensor(groups or [0] * len(a))
    return balanced_weights(a, torch.tensor(counts), ids, ~a.isnan(), drop_zero=drop_zero)


def test_token_weights() -> None:
    close(weights([1.2, -0.6, -0.6], LENGTHS), [0.166667, 0.095238, 0.095238])
    one = aggregation_coefficients(MASK, Totals.of_mask(MASK), mode="sequence_mean_token_mean", dtype=torch.float64)
    close(one[:, 0], [0.166667, 0.111111, 0.083333])
    close(aggregation_coefficients(MASK, Totals.of_mask(MASK), mode="token_mean", dtype=torch.float64)[0, 0], 0.111111)


@pytest.mark.parametrize(
    ("advantages", "counts", "expected"),
    [
        ([0.0, 0.0], [3, 5], [1 / 8, 1 / 8]),
        ([0.0], [3], [1 / 3]),
        ([1.0, 2.0], [1, 3], [1 / 4, 1 / 4]),
        ([1.0, -0.5, -0.5], [2, 0, 0], [1 / 6, 0, 0]),
        ([1.0, -0.5, -0.5], [0, 1, 3], [0, 1 / 6, 1 / 6]),
        ([1.0, float("nan"), -1.0], [2, 9, 5], [1 / 4, 0, 1 / 10]),
        ([1.0, 0.0, -1.0], [2, 2, 4], [1 / 6, 1 / 9, 1 / 9]),
    ],
    ids=["flat", "one row", "one side", "empty side", "empty positive", "NaN", "zero beside others"],
)
def test_degenerate_groups(advantages: list[float], counts: list[int], expected: list[float]) -> None:
    close(weights(advantages, counts), expected)


def test_rows_of_advantage_zero_may_be_left_out() -> None:
    close(weights([1.0, 0.0, -1.0], [2, 2, 4], drop_zero=True), [1 / 4, 0, 1 / 8])
    close(weights([0.0, 0.0], [2, 2], drop_zero=True), [0.0, 0.0])


def test_weights_of_a_group_with_both_sides_sum_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(12, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 9, (12,), generator=generator)
    ids = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    a[[0, 5, 9]], a[[1, 6, 10]] = 1.0, -1.0
    w = balanced_weights(a, counts, ids, torch.ones(12, dtype=torch.bool))
    close([float((w * counts)[ids == g].sum()) for g in range(3)], [1.0, 1.0, 1.0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_sign_only_is_the_token_mean(sign: float) -> None:
    a = sign * torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)
    loss, _ = clipped_surrogate(LOG_RATIO, torch.zeros_like(LOG_RATIO), a, MASK, **CLIP)
    plain = aggregate(loss, MASK, Totals.of_mask(MASK), mode="token_mean")
    assert balanced(a, LENGTHS, [0, 0, 0], LOG_RATIO) == pytest.approx(float(plain), abs=1e-12)


def test_equal_lengths_are_the_mean_over_answers() -> None:
    mask = torch.ones(3, 4)
    loss, _ = clipped_surrogate(LOG_RATIO, torch.zeros_like(LOG_RATIO), ADVANTAGES, mask, **CLIP)
    for mode in ("sequence_mean_token_mean", "token_mean"):
        plain = aggregate(loss, mask, Totals.of_mask(mask), mode=mode)
        assert balanced(ADVANTAGES, [4, 4, 4], [0, 0, 0], LOG_RATIO) == pytest.approx(float(plain), abs=1e-12)


def test_binary_rewards_balance_at_ratio_one_and_both_masses_are_logged() -> None:
    """k right answers of G: whatever the lengths, the two sides have one mass."""
    method, logged = BalancedAggregation(BalancedAggregationConfig()), {}
    state = state_of()
    state.log = logged.update
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0], dtype=torch.float64)
    advantages = torch.tensor([0.75, -0.25, -0.25, -0.25, 1 / 3, 1 / 3, -2 / 3], dtype=torch.float64)
    lengths = [1, 7, 2, 4, 3, 1, 6]
    rows = inputs_of(mask_of(lengths), advantages, [0, 0, 0, 0, 1, 1, 1])
    method.before_updates(rows, scored(rewards), state)
    figures = {k.removeprefix("balanced_aggregation/"): float(s) / float(n) for k, (s, n) in logged.items()}
    assert figures["mass_positive"] == pytest.approx(-figures["mass_negative"], abs=1e-12)
    assert figures["mass_positive"] > 0.1
    assert figures["tokens_negative_over_positive"] == pytest.approx(19 / 5)
    assert (figures["length_positive"], figures["length_negative"]) == pytest.approx((5 / 3, 19 / 4))
    assert balanced(advantages, lengths, [0, 0, 0, 0, 1, 1, 1], torch.zeros(7, 7).double()) == pytest.approx(
        0, abs=1e-12
    )


def test_an_advantage_that_varies_by_token_is_judged_by_its_sum() -> None:
    method, state = BalancedAggregation(BalancedAggregationConfig()), state_of()
    # The last units are padding; neither the first token nor the sum with the padding has the sign of the sum.
    by_token = torch.tensor([[-1.0, 2, -9], [-1, 0.5, 9], [-0.5, -3, -9]], dtype=torch.float64)
    mask, scores = mask_of([2, 2, 1], 3), scored([1.0, 0.0, 0.0])
    rows = method.before_updates(inputs_of(mask, by_token, [0, 0, 0]), scores, state)
    by_row = inputs_of(mask, torch.tensor([1.0, -0.5, -0.5]).double(), [0, 0, 0])
    same = method.before_updates(by_row, scores, state)
    close(same.rollouts.data["balanced_weights"][:, 0], [3 / 6, 3 * 2 / 9, 3 * 2 / 9])
    assert torch.equal(rows.rollouts.data["balanced_weights"], same.rollouts.data["balanced_weights"])


def test_the_kl_keeps_the_plain_token_mean() -> None:
    method = BalancedAggregation(BalancedAggregationConfig())
    stack, state = MethodStack({"ba": method}), state_of(kl={"beta": 0.5, "estimator": "k1"}, **method.defaults)
    rows = method.before_updates(inputs_of(MASK, ADVANTAGES, [0, 0, 0]), scored([1.0, 0, 0]), state)
    totals, now = Totals.of_mask(MASK), LOG_RATIO.clone()
    micro = micro_of(rows, now, reference=torch.zeros_like(now))
    coefficients = stack.aggregate(MASK.double(), totals, rows.rollouts, state)
    terms = stack.chain("regulariser_coefficients", coefficients, MASK.double(), totals, rows.rollouts, state)
    close(regularisers(stack, micro, rows, terms, state)[0], float(0.5 * LOG_RATIO[MASK].mean()))
