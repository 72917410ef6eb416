"""Aggregation: values, empty rows, and the same loss for every split into micro-batches and ranks."""

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from visual_grpo import aggregation
from visual_grpo.aggregation import (
    AGGREGATION_MODES,
    AggregationMode,
    Totals,
    aggregate,
    aggregation_coefficients,
    expand_units,
    reduce_map,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
LOSS = torch.arange(12, dtype=torch.float64).reshape(3, 4)
SPLIT_INVARIANT = [mode for mode in AGGREGATION_MODES if mode != "micro_batch_token_mean"]


def test_docstring_examples() -> None:
    result = doctest.testmod(aggregation)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean_token_mean", ((0 + 1 + 2) / 3 + 4) / 3),
        ("token_mean", (0 + 1 + 2 + 4) / 4),
        ("fixed_length", (0 + 1 + 2 + 4) / (3 * 5)),
        ("sequence_mean_token_sum", (0 + 1 + 2 + 4) / 3),
        ("token_sum_over_length", (0 + 1 + 2 + 4) / 5),
        ("micro_batch_token_mean", (0 + 1 + 2 + 4) / 4),
    ],
)
def test_values_count_the_empty_row(mode: AggregationMode, expected: float) -> None:
    loss = aggregate(LOSS, MASK, Totals.of_mask(MASK), mode=mode, max_length=5)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("counted", [True, False])
def test_no_kept_unit_gives_zero_and_backward_runs(mode: AggregationMode, counted: bool) -> None:
    loss = torch.full((2, 3), float("nan")).requires_grad_()
    mask = torch.zeros(2, 3)
    totals = Totals.of_mask(mask) if counted else Totals(rows=2, units=0, micro_batches=0)
    total = aggregate(loss, mask, totals, mode=mode, max_length=3)
    total.backward()
    assert total == 0
    assert torch.equal(loss.grad, torch.zeros(2, 3))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("mode", SPLIT_INVARIANT)
def test_any_split_gives_the_same_coefficients(mode: AggregationMode, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 8))
    bits = data.draw(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=rows, max_size=rows))
    mask = torch.tensor(bits)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=3)) | {rows})
    totals = Totals.of_mask(mask, micro_batches=len(cuts))
    whole = aggregation_coefficients(mask, totals, mode=mode, max_length=4, dtype=torch.float64)
    pieces, start = [], 0
    for cut in cuts:
        part = mask[order[start:cut]]
        pieces.append(aggregation_coefficients(part, totals, mode=mode, max_length=4, dtype=torch.float64))
        start = cut
    torch.testing.assert_close(torch.cat(pieces), whole[order], rtol=0, atol=1e-15)


def test_micro_batch_token_mean_depends_on_the_split() -> None:
    mode: AggregationMode = "micro_batch_token_mean"
    totals = Totals(rows=3, units=4, micro_batches=2)
    parts = [aggregate(LOSS[rows], MASK[rows], totals, mode=mode) for rows in (slice(0, 1), slice(1, 3))]
    torch.testing.assert_close(sum(parts), torch.tensor((1.0 + 4.0) / 2, dtype=torch.float64))
    assert sum(parts) != aggregate(LOSS, MASK, Totals.of_mask(MASK), mode=mode)


def test_totals_may_be_tensors() -> None:
    totals = Totals(rows=torch.tensor(3), units=torch.tensor(4), micro_batches=torch.tensor(1))
    for mode in AGGREGATION_MODES:
        plain = aggregation_coefficients(MASK, Totals.of_mask(MASK), mode=mode, max_length=5)
        torch.testing.assert_close(aggregation_coefficients(MASK, totals, mode=mode, max_length=5), plain)


def test_weights_multiply_the_loss_and_not_the_divisor() -> None:
    halved = aggregate(LOSS, MASK, Totals.of_mask(MASK), mode="token_mean", weights=torch.full((3,), 0.5))
    torch.testing.assert_close(halved, aggregate(LOSS, MASK, Totals.of_mask(MASK), mode="token_mean") / 2)


def test_map_is_averaged() -> None:
    maps = torch.stack([LOSS - 1, LOSS + 1], dim=2).unsqueeze(3)
    torch.testing.assert_close(reduce_map(maps), LOSS)
    assert reduce_map(LOSS) is LOSS
    weights = torch.ones_like(maps)
    totals = Totals.of_mask(MASK)
    torch.testing.assert_close(
        aggregate(maps, MASK, totals, mode="token_mean", weights=weights),
        aggregate(LOSS, MASK, totals, mode="token_mean"),
    )


def test_dtype_follows_the_request() -> None:
    totals = Totals.of_mask(MASK)
    assert aggregation_coefficients(MASK != 0, totals, mode="token_mean").dtype == torch.float32
    assert aggregation_coefficients(MASK, totals, mode="token_mean").dtype == torch.float64
    assert aggregation_coefficients(MASK != 0, totals, mode="token_mean", dtype=torch.float64).dtype == torch.float64


def test_expand_units() -> None:
    like = torch.zeros(2, 3, 4, 5)
    assert expand_units(torch.ones(2), like).shape == (2, 1, 1, 1)
    assert expand_units(torch.ones(2, 3), like).shape == (2, 3, 1, 1)
    assert expand_units(torch.ones(2, 1, 4, 5), like).shape == (2, 1, 4, 5)
    for shape in ((3,), (2, 4), (1, 3), (2, 3, 4, 5, 1)):
        with pytest.raises(ValueError, match=r"expected a leading part of \[2, 3, 4, 5\]"):
            expand_units(torch.ones(shape), like)


@pytest.mark.parametrize(
    ("mask", "totals", "options", "message"),
    [
        (MASK, Totals(rows=3, units=4), {"mode": "mean"}, "aggregation must be one of sequence_mean_token_mean"),
        (MASK, Totals(rows=3, units=4), {"mode": "fixed_length"}, "needs max_length >= 1, got None"),
        (MASK, Totals(rows=3, units=4), {"mode": "token_sum_over_length", "max_length": 0}, "needs max_length"),
        (MASK, Totals(rows=2, units=4), {"mode": "token_mean"}, r"totals.rows \(2\) is smaller"),
        (MASK / 2, Totals(rows=3, units=4), {"mode": "token_mean"}, "only 0 and 1"),
        (MASK[0], Totals(rows=3, units=4), {"mode": "token_mean"}, r"\[n, T\]"),
    ],
)
def test_bad_input_is_refused(mask: Tensor, totals: Totals, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregation_coefficients(mask, totals, **options)


def test_bad_totals_and_losses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Totals.units must be >= 0, got -1"):
        Totals(rows=1, units=-1)
    with pytest.raises(ValueError, match=r"\[N, T, \*map\]"):
        reduce_map(torch.zeros(3))
    with pytest.raises(ValueError, match="disagree"):
        aggregate(LOSS[:, :2], MASK, Totals.of_mask(MASK), mode="token_mean")
