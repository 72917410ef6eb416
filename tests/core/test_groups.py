"""Group ids and segment statistics."""

import doctest

import pytest
import torch

from visual_grpo import groups
from visual_grpo.groups import (
    group_index,
    num_segments_of,
    segment_count,
    segment_mean,
    segment_range,
    segment_std,
    segment_sum,
)

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 5.0], dtype=torch.float64)
IDS = torch.tensor([0, 1, 0, 1, 2])
NAN = float("nan")


def test_docstring_examples() -> None:
    result = doctest.testmod(groups)
    assert result.failed == 0
    assert result.attempted > 0


def test_group_index_numbers_distinct_tuples() -> None:
    prompt, turn = torch.tensor([5, 5, 2, 5]), torch.tensor([0, 1, 0, 0])
    ids = group_index(prompt, turn)
    assert ids.tolist() == [1, 2, 0, 1]
    assert ids.dtype == torch.int64
    assert num_segments_of(ids) == 3


def test_group_index_does_not_depend_on_row_order() -> None:
    tags = torch.randint(0, 4, (20,), generator=torch.Generator().manual_seed(0))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(group_index(tags[order]), group_index(tags)[order])


def test_group_index_of_no_row_is_empty() -> None:
    assert group_index(torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert num_segments_of(torch.zeros(0, dtype=torch.int64)) == 0


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ((), "at least one tag"),
        ((torch.tensor([0.0, 1.0]),), "must hold integers"),
        ((["a cat", "a dog"],), "got list"),
        ((torch.zeros(2, 2, dtype=torch.int64),), r"shape \[N\]"),
        ((torch.tensor([0, 1]), torch.tensor([0])), "1 entries for 2 rows"),
    ],
)
def test_group_index_refuses_bad_tags(tags: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_index(*tags)


def test_segment_statistics() -> None:
    assert segment_sum(VALUES, IDS).tolist() == [5, 10, 5]
    assert segment_count(IDS).tolist() == [2, 2, 1]
    assert segment_mean(VALUES, IDS).tolist() == [2.5, 5, 5]
    assert segment_range(VALUES, IDS).tolist() == [3, 6, 0]
    torch.testing.assert_close(segment_std(VALUES, IDS)[:2], torch.tensor([4.5, 18.0], dtype=torch.float64).sqrt())
    assert segment_std(VALUES, IDS, kind="population").tolist() == [1.5, 3, 0]


def test_mask_excludes_rows_even_when_they_are_nan() -> None:
    values = torch.tensor([1.0, NAN, 3.0, NAN])
    ids, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([True, False, True, False])
    assert segment_sum(values, ids, mask=mask).tolist() == [4, 0]
    assert segment_mean(values, ids, mask=mask).tolist() == [2, 0]
    assert segment_std(values, ids, mask=mask, kind="population").tolist() == [1, 0]
    assert segment_range(values, ids, mask=mask).tolist() == [2, 0]
    assert segment_count(ids, mask=mask).tolist() == [2, 0]


def test_an_id_without_rows_is_an_empty_segment() -> None:
    ids = torch.tensor([0, 2])
    assert segment_sum(torch.ones(2), ids).tolist() == [1, 0, 1]
    assert segment_std(torch.ones(2), ids).tolist() == [0, 0, 0]
    assert segment_range(torch.ones(2), ids).tolist() == [0, 0, 0]


def test_no_row_at_all() -> None:
    values, ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert segment_sum(values, ids).shape == (0,)
    assert segment_std(values, ids).shape == (0,)


def test_integer_and_half_values_are_widened() -> None:
    assert segment_mean(torch.tensor([1, 2]), torch.tensor([0, 0])).tolist() == [1.5]
    assert segment_mean(torch.tensor([1, 2], dtype=torch.bfloat16), torch.tensor([0, 0])).dtype == torch.float32


def test_statistics_carry_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: segment_std(v, IDS), (values,))
    flat = torch.ones(3, requires_grad=True)
    segment_std(flat, torch.tensor([0, 0, 1])).sum().backward()
    assert flat.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("values", "ids", "mask", "message"),
    [
        (torch.ones(2), torch.tensor([0.0, 1.0]), None, "must hold integers"),
        (torch.ones(2), ["a", "b"], None, "got list"),
        (torch.ones(2), torch.tensor([0]), None, "1 entries for 2 rows"),
        (torch.ones(2), torch.tensor([0, -1]), None, "0-based"),
        (torch.ones(2, 2), torch.tensor([0, 1]), None, "once per column"),
        (torch.ones(2), torch.tensor([0, 1]), torch.ones(3), "mask must have the shape"),
    ],
)
def test_bad_input_is_refused(values: torch.Tensor, ids: object, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_sum(values, ids, mask=mask)


def test_unknown_std_is_refused() -> None:
    with pytest.raises(ValueError, match="'bessel' or 'population'"):
        segment_std(VALUES, IDS, kind="sample")
