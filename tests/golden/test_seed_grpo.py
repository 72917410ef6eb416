"""Worked example of SEED-GRPO, float64, and its degenerate groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.advantages import group_advantages
from visual_grpo.errors import UserError
from visual_grpo.pipelines.text.seed_grpo import SeedGrpo, SeedGrpoConfig, modulation, semantic_entropy

NAN = float("nan")
EIGHT = ["7"] * 5 + ["1", "2", "3"]
FOUR = ["9", "4", "4", "5"]


def labels(*sizes: int) -> list[str]:
    return [str(k) for k, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((5, 1, 1, 1), 1.677082),
        ((1, 2, 1), 1.155245),
        ((4, 4), 0.693147),
        ((3, 3, 2), 1.115984),
        ((8,), 0.0),
        ((1,) * 8, 2.079442),
    ],
)
def test_entropy(sizes: tuple[int, ...], expected: float) -> None:
    assert semantic_entropy(labels(*sizes)) == pytest.approx(expected, abs=1e-6)


def test_shannon() -> None:
    assert semantic_entropy(labels(5, 1, 1, 1), shannon=True) == pytest.approx(1.073543, abs=1e-6)


def test_probability_mass() -> None:
    """Above log 4, so the ratio is clamped to 1."""
    entropy = semantic_entropy(["a", "a", "b", "c"], torch.tensor([-1, -2, -1.5, -3], dtype=torch.float64))
    assert entropy == pytest.approx(1.475480, abs=1e-6)
    assert modulation(entropy, 4, strength=1.0) == 0.0
    assert modulation(entropy, 4, strength=0.02) == pytest.approx(0.98, abs=1e-12)


def test_ratio_and_factors() -> None:
    entropy = semantic_entropy(EIGHT)
    assert 1 - modulation(entropy, 8, strength=1.0) == pytest.approx(0.806506, abs=1e-6)
    assert modulation(entropy, 8, strength=0.02) == pytest.approx(0.983870, abs=1e-6)
    four = semantic_entropy(FOUR)
    assert modulation(four, 4, strength=1.0, form="exponential") == pytest.approx(0.434598, abs=1e-6)
    assert modulation(four, 4, strength=1.0, form="focal") == pytest.approx(0.027778, abs=1e-6)


def adjusted(answers: list[str], rewards: list[float], groups: list[int] | None = None, **options: Any) -> torch.Tensor:
    """Advantages of Dr. GRPO through the method."""
    ids = groups or [0] * len(answers)
    rollouts = rollouts_of(mask_of([1] * len(answers)), ids, texts=answers)
    values = scored(rewards)
    plain = group_advantages(values.total(), torch.tensor(ids), std="none")
    return SeedGrpo(SeedGrpoConfig(**options)).adjust_advantages(plain, values, rollouts, state_of())


@pytest.mark.parametrize(("strength", "right", "wrong"), [(0.02, 0.368951, -0.614919), (0.5, 0.223780, -0.372967)])
def test_advantages_of_eight(strength: float, right: float, wrong: float) -> None:
    found = adjusted([f"#### {a}" for a in EIGHT], [1, 1, 1, 1, 1, 0, 0, 0], strength=strength)
    torch.testing.assert_close(found, torch.tensor([right] * 5 + [wrong] * 3).double(), rtol=0, atol=1e-6)
    assert float(found.sum()) == pytest.approx(0, abs=1e-12)


def test_advantages_of_four() -> None:
    found = adjusted([rf"\boxed{{{a}}}" for a in FOUR], [1, 0, 0, 0])
    expected = torch.tensor([0.7375, *[-0.245833] * 3]).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["linear", "exponential", "focal"])
def test_without_strength_nothing_changes_bit_for_bit(form: str) -> None:
    rewards = [0.1, 0.7, 0.2, 0.9]
    plain = group_advantages(scored(rewards).total(), torch.zeros(4).long(), std="none")
    assert torch.equal(adjusted(FOUR, rewards, strength=0.0, form=form), plain)


@pytest.mark.parametrize("form", ["linear", "exponential", "focal"])
def test_the_factor_stays_between_zero_and_one(form: str) -> None:
    factors = [
        modulation(entropy, 8, strength=strength, form=form)
        for strength in (0, 0.3, 1, 7)
        for entropy in (0.0, 1.0, 9.0)
    ]
    assert all(0 <= f <= 1 for f in factors)
    assert factors[0] == 1
    falling = [modulation(entropy, 8, strength=0.5, form=form) for entropy in (0.0, 0.5, 1.0, 2.0)]
    assert falling == sorted(falling, reverse=True)


def test_degenerate_groups() -> None:
    """Flat, one cluster, one row, all apart; groups of unequal size by their own log."""
    answers = ["1", "2", "3", "3", "5", "6", "7"]
    rewards = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    groups = [0, 0, 1, 1, 2, 2, 3]
    found = adjusted(answers, rewards, groups, strength=1.0)
    assert found.tolist() == [0.0, 0.0, 0.5, -0.5, 0.0, 0.0, 0.0]
    assert semantic_entropy([]) == 0.0
    assert modulation(0.0, 1, strength=1.0) == 1.0


def test_equal_numbers_are_one_cluster_and_unreadable_answers_are_each_their_own() -> None:
    same = adjusted(["#### 1,000", "#### 1000.0"], [1, 0], strength=1.0)
    assert same.tolist() == [0.5, -0.5]
    assert adjusted(["no idea", "no idea"], [1, 0], strength=1.0).tolist() == [0.0, 0.0]


def test_an_unscored_row_counts_for_the_entropy_alone() -> None:
    found = adjusted(["1", "1", "2"], [1.0, 0.0, NAN], strength=0.5)
    share = semantic_entropy(["1", "1", "2"])
    factor = modulation(share, 3, strength=0.5)
    assert factor < 1
    torch.testing.assert_close(found, factor * torch.tensor([0.5, -0.5, 0]).double())


def test_advantages_by_token_and_the_sampler_s_probabilities() -> None:
    mask = mask_of([2, 2, 1, 2])
    log_prob = torch.tensor([[-0.5, -0.5], [-1, -1], [-1.5, -99], [-1, -2]], dtype=torch.float64)  # the third is short
    rollouts = rollouts_of(mask, [0] * 4, texts=["1", "1", "2", "3"], old_log_prob=log_prob)
    method = SeedGrpo(SeedGrpoConfig(mass="probability", strength=0.5, shannon=True))
    found = method.adjust_advantages(torch.ones(4, 2).double(), scored([1.0, 0, 0, 0]), rollouts, state_of())
    entropy = semantic_entropy(["1", "1", "2", "3"], torch.tensor([-1.0, -2, -1.5, -3]), shannon=True)
    assert found.tolist() == [[pytest.approx(modulation(entropy, 4, strength=0.5))] * 2] * 4


def test_what_it_cannot_read_is_refused() -> None:
    plain = torch.zeros(2)
    with pytest.raises(UserError, match="adapter 'toy' makes none"):
        SeedGrpo(SeedGrpoConfig()).adjust_advantages(
            plain, scored([1, 0]), rollouts_of(mask_of([1, 1]), [0, 0]), state_of()
        )
    bare = rollouts_of(mask_of([1, 1]), [0, 0], texts=["1", "2"])
    with pytest.raises(UserError, match="use mass=count"):
        SeedGrpo(SeedGrpoConfig(mass="probability")).adjust_advantages(plain, scored([1, 0]), bare, state_of())
