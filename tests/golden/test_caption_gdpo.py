"""Worked values of the cards caption_gdpo (section 8) and peer_reward_recipes (sections 2 and 8): how rewards are combined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import decoupled_advantages, decoupled_sums, group_advantages
from visual_grpo.combination import combined_advantages, group_ranks, signal, token_whitened
from visual_grpo.config import RunConfig
from visual_grpo.config_rewards import RewardConfig
from visual_grpo.normalise import Normalisers
from visual_grpo.types import RewardBatch

NAN = float("nan")


def batch(*columns: list[float], weights: list[float] | None = None) -> RewardBatch:
    """A NaN does not apply."""
    values = torch.tensor(columns, dtype=torch.float64).T
    return RewardBatch(
        names=tuple("abcdef"[: len(columns)]),
        values=values,
        status=values.isnan().to(torch.int8),
        weights=torch.tensor(weights or [1.0] * len(columns), dtype=torch.float64),
    )


def config(combine: Any, **advantage: Any) -> RunConfig:
    return RunConfig(
        model={"adapter": "toy", "path": "toy"},
        data={"source": "x.txt"},
        rewards=["a"],
        combine=combine,
        advantage=advantage,
    )


def close(found: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


IDS = torch.tensor([0] * 4 + [1] * 4)
P = [0.8, 0.6, 0.7, 0.9, 0.5, 0.5, 0.75, 1.0]
C = [0.4, 0.6, 0.5, 0.3, 0.2, 0.4, 0.6, 0.3]
Q = [0.9, 0.9, 0.6, 1.0, 0.8, 0.8, 0.7, 0.9]
RHO = [1.0, 1.4, 2.3, 0.4, 0.5, 2.0, 1.2, 0.9]
QC = [q if 0.5 <= r <= 2 else 0.0 for q, r in zip(Q, RHO, strict=True)]
COUNTS = torch.tensor([2, 3, 1, 2, 4, 1, 2, 3])
R1, R2 = [3.0, -1, 3, 1, 1, 1, 1, 1], [0.0, 1, 1, 0, 1, 0, 1, 1]


def test_the_length_condition_is_closed_at_both_ends() -> None:
    assert QC == [0.9, 0.9, 0, 0, 0.8, 0.8, 0.7, 0.9]


def test_caption_rewards_one_by_one() -> None:
    expected = {
        0: [0.386999, -1.160996, -0.386999, 1.160996, -0.783022, -0.783022, 0.261007, 1.305037],
        1: [-0.386999, 1.160996, 0.386999, -1.160996, -1.024095, 0.146299, 1.316694, -0.438898],
        2: [0.865859, 0.865859, -0.865859, -0.865859, 0, 0, -1.223247, 1.223247],
    }
    for column, values in expected.items():
        close(group_advantages(batch(P, C, QC).values[:, column], IDS), values)


def test_caption_sum_of_advantages_and_gdpo_and_plain_grpo() -> None:
    rewards = batch(P, C, QC)
    sums = [0.865859, 0.865859, -0.865859, -0.865859, -1.807118, -0.636723, 0.354455, 2.089386]
    close(combined_advantages(rewards, IDS, COUNTS, config("sum_of_advantages")), sums)
    close(signal(rewards, IDS, config("gdpo")), sums)
    close(
        combined_advantages(rewards, IDS, COUNTS, config("gdpo")),
        [0.685659, 0.685659, -0.685659, -0.685659, -1.431026, -0.504210, 0.280687, 1.654549],
    )
    close(combined_advantages(rewards, IDS, COUNTS, config({"how": "gdpo", "batch_step": False})), sums)
    close(
        combined_advantages(rewards, IDS, COUNTS, config("sum")),
        [0.865859, 0.865859, -0.865859, -0.865859, -1.133058, -0.507923, 0.586064, 1.054916],
    )


def test_token_whitening_of_the_verl_fork() -> None:
    rewards = batch(R1, R2)
    first = [0.783349, -1.305582, 0.783349, -0.261116, 0, 0, 0, 0]
    second = [-0.866024, 0.866024, 0.866024, -0.866024, 0.499999, -1.499997, 0.499999, 0.499999]
    for column, values in enumerate((first, second)):
        close(group_advantages(rewards.values[:, column], IDS, eps=1e-6), values)
    tokens = config({"how": "gdpo", "level": "tokens"}, eps=1e-6)
    close(
        combined_advantages(rewards, IDS, COUNTS, tokens),
        [-0.171168, -0.629471, 2.053098, -1.512453, 0.577092, -1.991269, 0.577092, 0.577092],
    )
    close(
        combined_advantages(rewards, IDS, COUNTS, config("gdpo")),
        [-0.081467, -0.433785, 1.627224, -1.111972, 0.493244, -1.479731, 0.493244, 0.493244],
    )
    close(
        combined_advantages(rewards, IDS, COUNTS, config("sum")),
        [0.547693, -1.095385, 1.095385, -0.547693, 0.4999, -1.4997, 0.4999, 0.4999],
    )


PEER_IDS = torch.zeros(4, dtype=torch.int64)
PEER = ([0.20, 0.25, 0.30, 0.27], [1.2, -0.4, 0.3, 0.9], [0.21, 0.22, 0.23, 0.20])


def test_three_rewards_of_the_peers() -> None:
    rewards = batch(*PEER)
    found = combined_advantages(rewards, PEER_IDS, torch.ones(4), config("sum_of_advantages", eps=1e-8))
    close(found, [-0.705883, -1.004452, 1.949671, -0.239336])
    found = combined_advantages(rewards, PEER_IDS, torch.ones(4), config("gdpo", eps=1e-8))
    close(found, [-0.527814, -0.751064, 1.457837, -0.178960])
    found = combined_advantages(rewards, PEER_IDS, torch.ones(4), config("sum", eps=1e-8))
    close(found, [0.937132, -1.317842, -0.204998, 0.585707])


def test_flow_grpo_global_and_group_std() -> None:
    rewards = batch([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])
    for scope, size in (("batch", 1.013842), ("group", 1.341041)):
        found = combined_advantages(rewards, IDS, COUNTS, config("sum", scope=scope, std="population"))
        close(found, [-size, -size / 3, size / 3, size, 0, 0, 0, 0])


def test_ranks_are_the_double_argsort_over_the_group_size() -> None:
    """Flow-Factory's `pickscore_rank`, less its mean; equal values share a rank."""
    values = torch.tensor([0.20, 0.25, 0.30, 0.27, 5.0, 4.0], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    double = values[:4].argsort().argsort() / 4
    close(group_ranks(values, ids)[:4], (double - double.mean()).tolist())
    close(group_ranks(values, ids)[4:], [0.25, -0.25])
    close(group_ranks(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 0, 0])), [0, 0, 0])


def test_the_peers_scales_of_pickscore() -> None:
    """Section 2: Flow-GRPO s / 26, MixGRPO (s - 18) / 8, DanceGRPO the cosine, of s = 100 cosine."""
    scaled = torch.tensor([18.0, 22.0, 26.0], dtype=torch.float64)
    close(scaled / 26, [0.692308, 0.846154, 1.0])
    undivided = {"reward": "pickscore", "params": {"divisor": 1}}
    for how, expected in (({"low": 18, "high": 26}, [0, 0.5, 1]), ({"low": 0, "high": 100}, [0.18, 0.22, 0.26])):
        reward = RewardConfig(**undivided, normalise={"kind": "min_max", **how})
        close(Normalisers({"a": reward})(batch(scaled.tolist())).values[:, 0], expected)


@pytest.mark.parametrize("level", ["rows", "tokens"])
def test_scale_of_one_reward_cancels_in_gdpo_and_not_in_the_sum(level: str) -> None:
    small, large = batch(P, C, QC), batch([100 * p for p in P], C, QC)
    gdpo, total = config({"how": "gdpo", "level": level}, eps=1e-8), config("sum", eps=1e-8)
    one, two = (combined_advantages(r, IDS, COUNTS, gdpo) for r in (small, large))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    one, two = (combined_advantages(r, IDS, COUNTS, total) for r in (small, large))
    assert float((one - two).abs().max()) > 0.1


def test_a_group_without_signal_under_token_whitening() -> None:
    """It would get a common value that is not 0; `zero_flat` decides."""
    rewards = batch([3.0, -1, 3, 1, 1, 1, 1, 1], [0.0, 1, 1, 0, 1, 1, 1, 1])
    zero = combined_advantages(rewards, IDS, COUNTS, config({"how": "gdpo", "level": "tokens"}, eps=1e-6))
    assert zero[4:].tolist() == [0] * 4
    kept = combined_advantages(
        rewards, IDS, COUNTS, config({"how": "gdpo", "level": "tokens", "zero_flat": False}, eps=1e-6)
    )
    assert len(set(kept[4:].tolist())) == 1
    assert float(kept[4]) != 0
    assert torch.equal(zero[:4], kept[:4])
    assert token_whitened(torch.tensor([1.0]), torch.tensor([1]), torch.tensor([True])).tolist() == [0]


def test_one_reward_is_plain_grpo_under_gdpo_and_keeps_its_weight_under_the_sum_of_advantages() -> None:
    rewards = batch(P, weights=[0.5])
    plain = combined_advantages(rewards, IDS, COUNTS, config("sum"))
    close(combined_advantages(rewards, IDS, COUNTS, config("gdpo")), plain.tolist(), 1e-12)
    each = group_advantages(rewards.values[:, 0], IDS)
    close(combined_advantages(rewards, IDS, COUNTS, config("sum_of_advantages")), (0.5 * each).tolist(), 1e-12)
    close(decoupled_sums(rewards.values, None, rewards.weights, IDS), (0.5 * each).tolist(), 1e-12)
    assert (
        decoupled_advantages(rewards.values, None, rewards.weights, IDS, batch_step=False).tolist()
        == (0.5 * each).tolist()
    )
