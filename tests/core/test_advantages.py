"""Advantages: degenerate groups, missing rewards, choices, invariances."""

import doctest

import pytest
import torch
from torch import Tensor

from visual_grpo import advantages
from visual_grpo.advantages import (
    decoupled_advantages,
    flat_groups,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    soft_clip,
)

NAN = float("nan")
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.3, 0.9, 0.2], dtype=torch.float64)
IDS = torch.tensor([0, 0, 0, 1, 1, 2])
FUNCTIONS = [
    group_advantages,
    lambda rewards, ids, **options: group_advantages(rewards, ids, scope="batch", std="population", **options),
    lambda rewards, ids, **options: group_advantages(rewards, ids, scope="none", **options),
    leave_one_out_advantages,
]


def close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=1e-12)


def test_docstring_examples() -> None:
    result = doctest.testmod(advantages)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_group_is_exactly_zero(function, dtype: torch.dtype) -> None:
    # 0.1 + 0.2 differs from 0.3 in the last bit: centring leaves a residue that eps = 1e-8 would blow up.
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 1.0, 0.0], dtype=dtype)
    result = function(rewards, torch.tensor([0, 0, 0, 1, 1]))
    assert result[:3].tolist() == [0, 0, 0]
    assert result[3] > 0
    tiny = group_advantages(torch.tensor([0.3, 0.3 + 5e-9], dtype=torch.float64), torch.tensor([0, 0]), eps=1e-8)
    assert tiny.tolist() == [0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_group_of_one(function) -> None:
    assert function(REWARDS, IDS)[5] == 0
    close(function(REWARDS, IDS, single_group="raw")[5], 0.2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_reward_is_left_out_and_gets_zero(function) -> None:
    rewards = torch.tensor([1.0, NAN, 0.0, 0.5, 0.7, 0.1], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    result = function(rewards, ids)
    kept = torch.tensor([0, 2, 3, 4, 5])
    close(result[kept], function(rewards[kept], ids[kept]))
    assert result[1] == 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_usable_flag_acts_like_nan(function) -> None:
    usable = torch.tensor([True, False, True, True, True, True])
    marked = torch.where(usable, REWARDS, torch.full_like(REWARDS, NAN))
    close(function(REWARDS, IDS, usable=usable), function(marked, IDS))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_scorable_row_or_none(function) -> None:
    rewards = torch.tensor([0.4, NAN, NAN, NAN, NAN], dtype=torch.float64)
    assert function(rewards, torch.tensor([0, 0, 0, 1, 1])).tolist() == [0] * 5
    assert function(torch.full((2,), NAN), torch.tensor([0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_row_order_does_not_matter(function) -> None:
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    close(function(REWARDS[order], IDS[order]), function(REWARDS, IDS)[order])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mean_of_every_group_is_zero_and_no_gradient_flows(function) -> None:
    result = function(REWARDS.clone().requires_grad_(), IDS)
    assert not result.requires_grad
    for group in range(3):
        assert abs(float(result[group == IDS].sum())) < 1e-12


def test_scope_says_whose_std_divides() -> None:
    centred = group_advantages(REWARDS, IDS, scope="none")
    batch = group_advantages(REWARDS, IDS, scope="batch", std="population", eps=0.5)
    close(batch, centred / (REWARDS.std(correction=0) + 0.5))
    close(group_advantages(REWARDS, IDS, std="none"), centred)
    group = group_advantages(REWARDS, IDS, eps=0.5)
    close(group[:3], centred[:3] / (REWARDS[:3].std() + 0.5))


def test_batch_scope_counts_flat_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    result = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), scope="batch", std="population", eps=0.0)
    close(result[0], 0.5 / rewards.std(correction=0))


def test_half_precision_rewards_are_widened() -> None:
    assert group_advantages(REWARDS.to(torch.bfloat16), IDS).dtype == torch.float32


def test_flat_groups() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.5, 0.4, NAN, 0.1])
    assert flat_groups(rewards, IDS).tolist() == [False, True, True]
    usable = torch.tensor([True, True, False, True, True, True])
    assert flat_groups(rewards, IDS, usable).tolist() == [True, True, True]
    assert flat_groups(rewards, IDS, tol=0.6).tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "prompt"}, "scope must be one of 'group', 'batch', 'none', got 'prompt'"),
        ({"std": "sample"}, "std must be one of"),
        ({"single_group": "one"}, "single_group must be one of"),
        ({"eps": -1.0}, "must be >= 0"),
        ({"usable": torch.ones(2)}, "usable must have the shape"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(REWARDS, IDS, **options)


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 is inf"):
        group_advantages(torch.tensor([0.0, float("inf")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"shape \[N\]"):
        group_advantages(torch.ones(2, 2), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="must hold integers"):
        group_advantages(REWARDS, IDS.float())


# --- per-reward normalisation --------------------------------------------------------------------------------------

VALUES = torch.tensor([[1, 0.2], [0, 0.9], [1, 0.4], [0, 0.1], [0.3, 0.5], [0.2, 0.7]], dtype=torch.float64)
PAIR_IDS = torch.tensor([0, 0, 0, 0, 1, 1])
WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)


def test_one_reward_is_plain_grpo() -> None:
    close(
        decoupled_advantages(VALUES[:, :1], None, WEIGHTS[1:], PAIR_IDS), group_advantages(VALUES[:, 0] / 2, PAIR_IDS)
    )


def test_scale_of_a_reward_cancels() -> None:
    scaled = VALUES * torch.tensor([100.0, 1.0], dtype=torch.float64)
    first = decoupled_advantages(VALUES, None, WEIGHTS, PAIR_IDS, eps=0.0)
    close(decoupled_advantages(scaled, None, WEIGHTS, PAIR_IDS, eps=0.0), first)


def test_constant_reward_contributes_nothing_and_constant_batch_is_zero() -> None:
    constant = torch.cat([VALUES[:, :1], torch.full((6, 1), 0.3, dtype=torch.float64)], dim=1)
    sums = decoupled_advantages(constant, None, WEIGHTS, PAIR_IDS, batch_step=False)
    close(sums, group_advantages(VALUES[:, 0], PAIR_IDS))
    flat = torch.full((6, 2), 0.1 + 0.2, dtype=torch.float64)
    assert decoupled_advantages(flat, None, WEIGHTS, PAIR_IDS).tolist() == [0] * 6


def test_missing_entries() -> None:
    values = VALUES.clone()
    values[1, 0] = NAN
    values[2] = NAN
    result = decoupled_advantages(values, None, WEIGHTS, PAIR_IDS)
    assert bool(result.isfinite().all())
    assert result[2] == 0
    kept = torch.tensor([0, 1, 3, 4, 5])
    close(result[kept], decoupled_advantages(values[kept], None, WEIGHTS, PAIR_IDS[kept]))
    usable = torch.ones(6, 2, dtype=torch.bool)
    usable[1, 0] = usable[2, 0] = usable[2, 1] = False
    close(decoupled_advantages(VALUES, usable, WEIGHTS, PAIR_IDS), result)


def test_decoupled_group_of_one_and_row_order() -> None:
    ids = torch.tensor([0, 0, 0, 0, 0, 1])
    result = decoupled_advantages(VALUES, None, WEIGHTS, ids)
    assert result[5] == 0
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    close(decoupled_advantages(VALUES[order], None, WEIGHTS, ids[order]), result[order])
    raw = decoupled_advantages(VALUES, None, WEIGHTS, ids, single_group="raw", batch_step=False)
    close(raw[5], 0.2 + 0.5 * 0.7)


@pytest.mark.parametrize(
    ("values", "usable", "weights", "message"),
    [
        (VALUES[:, 0], None, WEIGHTS, r"\[N, R\]"),
        (VALUES, None, WEIGHTS[:1], "one entry per reward"),
        (VALUES, torch.ones(6), WEIGHTS, "usable must have the shape"),
    ],
)
def test_decoupled_refuses_bad_shapes(values: Tensor, usable: Tensor | None, weights: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoupled_advantages(values, usable, weights, PAIR_IDS)


# --- shaping ---------------------------------------------------------------------------------------------------------


def test_soft_clip_is_odd_bounded_and_flat_near_zero() -> None:
    values = torch.linspace(-50, 50, 101, dtype=torch.float64)
    clipped = soft_clip(values, 3.0)
    assert float(clipped.abs().max()) <= 3.0
    close(clipped, -clipped.flip(0))
    close(soft_clip(torch.tensor([1e-5], dtype=torch.float64), 3.0), [1e-5])
    with pytest.raises(ValueError, match="limit must be > 0"):
        soft_clip(values, 0.0)


def test_overlong_penalty_edges() -> None:
    assert overlong_penalty(torch.tensor([0, 8, 9, 10, 11]), 10, 2).tolist() == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(torch.tensor([10, 11]), 10, 0).tolist() == [0, -1]
    with pytest.raises(ValueError, match=r"cache \(11\) must be between 0 and max_length \(10\)"):
        overlong_penalty(torch.tensor([1]), 10, 11)
