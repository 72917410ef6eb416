"""Worked example of ReDit, float64; the noise, and what reads the clean rewards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.combination import combined_advantages, judged
from visual_grpo.pipelines.text.redit import Redit, ReditConfig, on_the_sum
from visual_grpo.stack import MethodStack

NAN = float("nan")
CLEAN = [1.0, 0, 0, 1, 0, 0, 0, 0]
GROUPS = torch.arange(8) // 4
NOISE = torch.tensor([0.03, -0.05, 0.01, 0.02, 0.04, -0.02, 0.06, -0.08], dtype=torch.float64)
COUNTS = torch.ones(8)


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_worked_example() -> None:
    noisy = on_the_sum(scored(CLEAN), NOISE)
    close(noisy.total(), [1.03, -0.05, 0.01, 1.02, 0.04, -0.02, 0.06, -0.08])
    config = state_of().config
    clean = combined_advantages(scored(CLEAN), GROUPS, COUNTS, config)
    close(clean, [0.865875, -0.865875, -0.865875, 0.865875, 0, 0, 0, 0])
    found = combined_advantages(noisy, GROUPS, COUNTS, config)
    close(found, [0.873428, -0.914823, -0.815476, 0.856871, 0.631457, -0.315729, 0.947186, -1.262914])
    plain = combined_advantages(noisy, GROUPS, COUNTS, state_of(advantage={"std": "none"}).config)
    close(plain, [0.5275, -0.5525, -0.4925, 0.5175, 0.04, -0.02, 0.06, -0.08])


def shaped(rewards: Any, *, row_ids: Tensor | None = None, step: int = 0, sections: Any = None, **options: Any) -> Any:
    """Through the stack, as the loop does it."""
    count = len(rewards)
    rollouts = rollouts_of(mask_of([1] * count), (torch.arange(count) // 4).tolist())
    rollouts.prompts.row_ids = torch.arange(count) if row_ids is None else row_ids
    stack, state = MethodStack({"redit": Redit(ReditConfig(**options))}), state_of(step, **(sections or {}))
    out = stack.shaped(rewards, rollouts, state)
    advantages = combined_advantages(out, rollouts.group_ids, torch.ones(count), state.config)
    return out, stack.chain("adjust_advantages", advantages, out, rollouts, state)


def test_without_noise_nothing_changes_bit_for_bit() -> None:
    clean = scored(CLEAN)
    out, advantages = shaped(clean, std=0.0)
    assert out is clean
    assert torch.equal(advantages, combined_advantages(clean, GROUPS, COUNTS, state_of().config))


def test_groups_of_equal_clean_rewards() -> None:
    """`dither` trains on their noise at full size, `zero` leaves them; the other group is the same under both."""
    out, dithered = shaped(scored(CLEAN))
    _, zeroed = shaped(scored(CLEAN), flat_groups="zero")
    assert float(dithered[4:].abs().max()) > 0.5
    assert zeroed[4:].tolist() == [0.0] * 4
    assert torch.equal(zeroed[:4], dithered[:4])
    assert float(dithered[4:].sum()) == pytest.approx(0, abs=1e-12)
    assert out.clean is not None
    assert judged(out) is out.clean
    assert out.clean.total().tolist() == CLEAN


def test_advantages_by_token_are_zeroed_too() -> None:
    rollouts = rollouts_of(mask_of([2] * 8), GROUPS.tolist())
    stack, state = MethodStack({"redit": Redit(ReditConfig(flat_groups="zero"))}), state_of()
    out = stack.shaped(scored(CLEAN), rollouts, state)
    found = stack.chain("adjust_advantages", torch.ones(8, 2), out, rollouts, state)
    assert found.tolist() == [[1.0, 1.0]] * 4 + [[0.0, 0.0]] * 4


def test_a_group_of_one_has_no_advantage() -> None:
    _, found = shaped(scored([*CLEAN, 1.0]))
    assert float(found[8]) == 0.0


def test_an_unscored_row_stays_unscored() -> None:
    out, found = shaped(scored([1.0, NAN, 0.0, 1.0]))
    assert out.total().isnan().tolist() == [False, True, False, False]
    assert not bool(out.usable[1])
    assert float(found[1]) == 0.0


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_moments(noise: str) -> None:
    """20,000 draws have mean 0 and std 0.05 within five standard errors."""
    method = Redit(ReditConfig(noise=noise))
    draws = 0.05 * method._unit_noise(torch.arange(20_000), 1, state_of())
    assert abs(float(draws.mean())) < 5 * 0.05 / 20_000**0.5
    assert float(draws.std()) == pytest.approx(0.05, rel=0.03)
    if noise == "uniform":
        assert float(draws.abs().max()) <= 0.05 * 3**0.5


def test_a_draw_belongs_to_its_seed_step_and_row() -> None:
    """Whatever rows come with it; another step, seed or row draws anew."""
    whole = shaped(scored(CLEAN))[0].total()
    part = shaped(scored(CLEAN[4:]), row_ids=torch.arange(4, 8))[0].total()
    assert torch.equal(part, whole[4:])
    assert not torch.equal(shaped(scored(CLEAN), step=1)[0].total(), whole)
    other = shaped(scored(CLEAN), sections={"train": {"seed": 7}})[0].total()
    assert not torch.equal(other, whole)
    assert len(set(whole.tolist())) == 8


def test_without_std_the_mean_over_draws_is_the_clean_advantage() -> None:
    """400 steps, within five standard errors."""
    rollouts = rollouts_of(mask_of([1] * 8), GROUPS.tolist())
    stack, state = MethodStack({"redit": Redit(ReditConfig())}), state_of(advantage={"std": "none"})
    total = torch.zeros(8, dtype=torch.float64)
    for step in range(400):
        state.step = step
        out = stack.shaped(scored(CLEAN), rollouts, state)
        total += combined_advantages(out, GROUPS, COUNTS, state.config) / 400
    clean = combined_advantages(scored(CLEAN), GROUPS, COUNTS, state.config)
    assert float((total - clean).abs().max()) < 5 * 0.05 / 400**0.5


@pytest.mark.parametrize(("schedule", "half"), [("linear", 0.5), ("cosine", 0.5), ("constant", 1.0)])
def test_the_noise_may_fall(schedule: str, half: float) -> None:
    sections = {"train": {"steps": 10}}
    plain, _ = shaped(scored(CLEAN), step=5, sections=sections)
    fallen, _ = shaped(scored(CLEAN), step=5, sections=sections, schedule=schedule)
    clean = scored(CLEAN).total()
    torch.testing.assert_close(fallen.total() - clean, half * (plain.total() - clean))


TWO = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, NAN], [1.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("how", ["gdpo", "rank", "sum_of_advantages"])
def test_rewards_that_are_compared_by_themselves_get_noise_of_their_own(how: str) -> None:
    out, _ = shaped(scored(TWO, ("a", "b")), sections={"combine": how})
    assert out.names == ("a", "b")
    noise = out.values - TWO
    assert noise.isnan().tolist() == TWO.isnan().tolist()
    assert len(set(noise[~noise.isnan()].tolist())) == 7
    assert out.noisy


def test_noise_is_added_to_a_combined_number_and_not_combined() -> None:
    def product(rewards: Any) -> Tensor:
        return rewards.values.prod(1)

    clean = scored(torch.tensor([[2.0, 3.0], [0.0, 5.0]]), ("a", "b"))
    clean.combine = product
    noisy = on_the_sum(clean, torch.tensor([0.1, -0.2]))
    close(noisy.total(), [6.1, -0.2])
    close(noisy.select(torch.tensor([1])).total(), [-0.2])
