"""Worked example of the GRPO family (GRPO, DAPO, Dr. GRPO, GSPO), float64."""

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import decoupled_advantages, group_advantages, leave_one_out_advantages, overlong_penalty
from visual_grpo.aggregation import AggregationMode, Totals, aggregate
from visual_grpo.divergences import k3
from visual_grpo.objectives import clipped_surrogate, importance_log_ratio

REWARDS = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
ADVANTAGES = torch.tensor([1.2, -0.6, -0.6], dtype=torch.float64)
LOG_RATIO = torch.tensor([[0.1, 0.3, 0, 0], [-0.05, 0.2, -0.4, 0], [0.15, -0.25, 0.05, 0.35]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.float64)


def close(actual: Tensor, expected: list[float] | Tensor, digits: float = 6e-7) -> None:
    wanted = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=digits)


def token_losses(clip_high: float = 0.2) -> Tensor:
    old = torch.zeros_like(LOG_RATIO)
    return clipped_surrogate(LOG_RATIO, old, ADVANTAGES, MASK, clip_low=0.2, clip_high=clip_high)[0]


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"eps": 1e-4}, 0.865875, (-0.499900, 1.499700)),
        ({"eps": 1e-6}, 0.866024, (-0.499999, 1.499997)),
        ({"std": "population"}, 0.999800, (-0.577217, 1.731651)),
        ({"scope": "none"}, 0.5, (-0.25, 0.75)),
        ({"scope": "batch"}, 0.965905, (-0.482953, 1.448858)),
    ],
)
def test_advantages(options: dict, first: float, second: tuple[float, float]) -> None:
    low, high = second
    close(group_advantages(REWARDS, GROUPS, **options), [first, -first, -first, first, low, low, low, high])


def test_leave_one_out() -> None:
    third = 2 / 3
    expected = [third, -third, -third, third, -third / 2, -third / 2, -third / 2, 1.0]
    close(leave_one_out_advantages(REWARDS, GROUPS), expected)


def test_token_losses() -> None:
    expected = [[-1.326205, -1.44, 0, 0], [0.570738, 0.732842, 0.48, 0], [0.697101, 0.48, 0.630763, 0.851441]]
    close(token_losses(), torch.tensor(expected))
    close(token_losses(clip_high=0.28)[0, 1], -1.536)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean_token_mean", -0.041250),
        ("token_mean", 0.186298),
        ("fixed_length", 0.139723),
        ("sequence_mean_token_sum", 0.558893),
        ("token_sum_over_length", 0.558893 * 3 / 4),
        ("micro_batch_token_mean", 0.186298),
    ],
)
def test_aggregation(mode: AggregationMode, expected: float) -> None:
    loss = aggregate(token_losses(), MASK, Totals.of_mask(MASK), mode=mode, max_length=4)
    close(loss, expected, 1e-6)


def test_clip_fraction() -> None:
    _, metrics = clipped_surrogate(LOG_RATIO, torch.zeros_like(LOG_RATIO), ADVANTAGES, MASK)
    assert [int(value) for value in metrics["clip_fraction"]] == [3, 9]


def test_dual_clip() -> None:
    log_prob = torch.tensor([[1.1, 4.0, 0.5]], dtype=torch.float64).log()
    arguments = (log_prob, torch.zeros_like(log_prob), torch.tensor([-1.0]), torch.ones(1, 3))
    close(clipped_surrogate(*arguments, dual_clip=3.0)[0], [[1.1, 3.0, 0.8]])
    close(clipped_surrogate(*arguments)[0], [[1.1, 4.0, 0.8]])


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_sequence_ratio(level: str) -> None:
    old = torch.zeros_like(LOG_RATIO)
    ratio = importance_log_ratio(LOG_RATIO, old, MASK, level=level).exp()
    close(ratio[:, 0], [1.221403, 0.920044, 1.077884])
    loss, _ = clipped_surrogate(LOG_RATIO, old, ADVANTAGES, MASK, level=level, clip_low=3e-4, clip_high=4e-4)
    close(loss[:, 0], [-1.200480, 0.599820, 0.646730])
    mean = aggregate(loss, MASK, Totals.of_mask(MASK), mode="sequence_mean_token_mean")
    close(mean, 0.015357)


def test_k3() -> None:
    difference = torch.tensor([0.2, -0.1, 0.0], dtype=torch.float64)
    close(k3(-difference, torch.zeros_like(difference)), [0.021403, 0.004837, 0.0])


def test_overlong_penalty() -> None:
    lengths = torch.tensor([16384, 18432, 20480, 20481])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0, -0.5, -1, -1]


def test_decoupled_advantages_of_two_rewards() -> None:
    """GDPO, sequence mode, two groups of four (the caption example B)."""

    first = torch.tensor([3, -1, 3, 1, 1, 1, 1, 1], dtype=torch.float64)
    second = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.float64)
    values, weights = torch.stack([first, second], dim=1), torch.ones(2)
    expected = [-0.081467, -0.433785, 1.627224, -1.111972, 0.493244, -1.479731, 0.493244, 0.493244]
    close(decoupled_advantages(values, None, weights, GROUPS), expected)
    plain = [0.547693, -1.095385, 1.095385, -0.547693, 0.4999, -1.4997, 0.4999, 0.4999]
    close(group_advantages(values.sum(dim=1), GROUPS), plain)


def test_decoupled_advantages_of_three_rewards() -> None:
    """GDPO on the caption example A, with and without the batch step."""

    columns = [
        [0.8, 0.6, 0.7, 0.9, 0.5, 0.5, 0.75, 1.0],
        [0.4, 0.6, 0.5, 0.3, 0.2, 0.4, 0.6, 0.3],
        [0.9, 0.9, 0.0, 0.0, 0.8, 0.8, 0.7, 0.9],
    ]
    values = torch.tensor(columns, dtype=torch.float64).T
    sums = decoupled_advantages(values, None, torch.ones(3), GROUPS, batch_step=False)
    close(sums, [0.865859, 0.865859, -0.865859, -0.865859, -1.807118, -0.636723, 0.354455, 2.089386])
    final = decoupled_advantages(values, None, torch.ones(3), GROUPS)
    close(final, [0.685659, 0.685659, -0.685659, -0.685659, -1.431026, -0.504210, 0.280687, 1.654549])
