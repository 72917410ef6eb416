"""Worked example of S-GRPO, float64, and its degenerate groups."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.advantages import group_advantages
from visual_grpo.api import plan
from visual_grpo.combination import combined_advantages
from visual_grpo.errors import RunError, UserError
from visual_grpo.pipelines.text.s_grpo import SGrpo, SGrpoConfig, noise_weights, right_answers

IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
WEIGHTS = {
    0.10: [0.420883, 0.721110, 0.784857, 0.8, 0.784857, 0.721110, 0.420883],
    0.15: [0.0, 0.565685, 0.675278, 0.7, 0.675278, 0.565685, 0.0],
    0.20: [0.0, 0.382971, 0.563323, 0.6, 0.563323, 0.382971, 0.0],
}


def weighted(rewards: torch.Tensor, ids: torch.Tensor, flip: float) -> torch.Tensor:
    """Through the loop's default advantages under the method's own settings, and its hook."""
    state, batch = state_of(**SGrpo.defaults), scored(rewards.double())
    plain = combined_advantages(batch, ids, torch.ones(len(ids)), state.config)
    rollouts = rollouts_of(mask_of([1] * len(ids)), ids.tolist())
    return SGrpo(SGrpoConfig(flip_probability=flip)).adjust_advantages(plain, batch, rollouts, state)


@pytest.mark.parametrize("flip", WEIGHTS)
def test_weights_of_groups_of_eight(flip: float) -> None:
    found = noise_weights(torch.arange(1, 8), torch.tensor(8), flip)
    torch.testing.assert_close(found, torch.tensor(WEIGHTS[flip]).double(), rtol=0, atol=6e-7)
    torch.testing.assert_close(found, found.flip(0))


def test_advantages() -> None:
    rewards = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
    expected = [0.692820, -0.692820, -0.692820, 0.692820, -0.360555, -0.360555, -0.360555, 1.081665]
    found = weighted(rewards, IDS, 0.1)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=0, atol=6e-7)


def test_without_noise_it_is_plain_normalisation() -> None:
    rewards = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
    found, plain = weighted(rewards, IDS, 0.0), group_advantages(rewards, IDS, eps=1e-8)
    torch.testing.assert_close(found, plain, rtol=2e-7, atol=0)


def test_more_noise_leaves_less() -> None:
    count = torch.tensor(8)
    levels = [float(noise_weights(torch.tensor(3), count, flip)) for flip in (0.0, 0.1, 0.2, 0.3, 0.374)]
    assert levels == sorted(levels, reverse=True)
    assert len(set(levels)) == len(levels)
    assert all(value <= 1 - 2 * flip for value, flip in zip(levels, (0.0, 0.1, 0.2, 0.3, 0.374), strict=True))


@pytest.mark.parametrize("correct", [0, 1, 7, 8])
def test_groups_without_a_signal_get_nothing(correct: int) -> None:
    """Flat groups, and a rate of exactly the flip probability."""
    assert float(noise_weights(torch.tensor(correct), torch.tensor(8), 0.125)) == pytest.approx(0.0, abs=1e-12)


def test_a_group_of_one_and_a_row_without_a_score() -> None:
    rewards = torch.tensor([1.0, 1, 0, 0, torch.nan]).double()
    found = weighted(rewards, torch.tensor([0, 1, 1, 1, 1]), 0.1)
    expected = weighted(torch.tensor([1.0, 0, 0]).double(), torch.zeros(3, dtype=torch.int64), 0.1)
    assert bool((expected != 0).all())
    torch.testing.assert_close(found, torch.cat([torch.zeros(1), expected, torch.zeros(1)]))


def test_a_flat_group_in_single_precision() -> None:
    rewards, ids = torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)
    assert bool((group_advantages(rewards, ids, eps=1e-8) == 0).all())
    assert bool((weighted(rewards, ids, 0.1) == 0).all())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"flip_probability must be in \[0, 0.5\), got 0.5"):
        noise_weights(torch.tensor(1), torch.tensor(2), 0.5)
    with pytest.raises(UserError, match=r"method\.s_grpo\.flip_probability"):
        plan("s_grpo_text_tiny", {"method.s_grpo.flip_probability": 0.5})
    with pytest.raises(RunError, match=r"the rewards are graded \(0\.5 and 1 in one step\)"):
        right_answers(torch.tensor([0.5, 1.0, 0.0]))
    assert right_answers(torch.tensor([-1.0, 2.0, torch.nan])).tolist() == [False, True, False]


def test_a_noise_level_that_drops_lopsided_groups_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan("s_grpo_text_tiny", {"method.s_grpo.flip_probability": 0.12})
        assert not caplog.records
        plan("s_grpo_text_tiny", {"method.s_grpo.flip_probability": 0.125})
    assert "groups with one right or one wrong answer get weight 0" in caplog.text
