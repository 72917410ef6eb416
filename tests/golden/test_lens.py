"""Worked example of LENS, float64, and its degenerate groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.errors import RunError
from visual_grpo.pipelines.text.lens import (
    Lens,
    LensConfig,
    answer_confidence,
    calibrated_advantages,
    calibrated_rewards,
    check_binary,
)
from visual_grpo.stack import MethodStack

SUMS = torch.tensor([-2.0, -0.8, -6.0, -3.0], dtype=torch.float64)
LENGTHS = torch.tensor([10, 8, 12, 10])
ONE = torch.zeros(4, dtype=torch.int64)
CONFIG = state_of(**Lens.defaults).config


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-7)


def both(right: Tensor, confidence: Tensor, ids: Tensor, weight: float = 0.25) -> tuple[Tensor, Tensor]:
    """Calibrated rewards and advantages."""
    rewards = calibrated_rewards(right, confidence, ids)
    return rewards, calibrated_advantages(rewards, right, ids, CONFIG, negative_weight=weight)


def test_confidence() -> None:
    close(answer_confidence(SUMS, LENGTHS), [0.818731, 0.904837, 0.606531, 0.740818])


def test_a_group_with_a_right_answer() -> None:
    right = torch.tensor([1.0, 0, 0, 0]).double()
    rewards, advantages = both(right, answer_confidence(SUMS, LENGTHS), ONE)
    close(rewards, [1, -0.095444, -0.056825, -0.073085])
    close(advantages, [1.499071, -0.537478, -0.465683, -0.495911])


def test_a_group_without_one() -> None:
    rewards, advantages = both(torch.zeros(4).double(), answer_confidence(SUMS, LENGTHS), ONE)
    close(rewards, [-0.206553, -0.250000, -0.126030, -0.173274])
    close(advantages, [-0.004397, -0.015259, 0.015733, 0.003923])
    _, whole = both(torch.zeros(4).double(), answer_confidence(SUMS, LENGTHS), ONE, weight=1.0)
    close(whole, [-0.017589, -0.061036, 0.062934, 0.015691])


@pytest.mark.parametrize(
    ("right", "rewards", "advantages"),
    [
        ([1.0, 0, 0, 0], [1, -0.095444, -0.056825, -0.073085], [1.499071, -0.537478, -0.465683, -0.495911]),
        ([0.0, 0, 0, 0], [-0.206553, -0.25, -0.126030, -0.173274], [-0.004397, -0.015259, 0.015733, 0.003923]),
        ([1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]),
    ],
    ids=["mixed", "negative", "all right"],
)
def test_the_example_through_the_hooks(right: list[float], rewards: list[float], advantages: list[float]) -> None:
    """From token log-probs of the sampler, with something else behind the end of each answer."""
    mask = mask_of(LENGTHS.tolist())
    tokens = torch.where(mask, (SUMS / LENGTHS)[:, None], -77.0)
    rollouts = rollouts_of(mask, [5] * 4, old_log_prob=tokens)
    stack, state = MethodStack({"lens": Lens(LensConfig())}), state_of(**Lens.defaults)
    shaped = stack.shaped(scored(right), rollouts, state)
    close(shaped.total().double(), rewards)
    close(stack.advantages(shaped, rollouts, state), advantages)


@pytest.mark.parametrize(("right", "difficulty"), [([1.0, 0, 0, 0], 3.274923), ([0.0, 0, 0, 0], 1.809675)])
def test_difficulty(right: list[float], difficulty: float) -> None:
    """D solved from each wrong answer's penalty, `c / (G (D - c))`."""
    confidence = answer_confidence(SUMS, LENGTHS)
    rewards = calibrated_rewards(torch.tensor(right).double(), confidence, ONE)
    wrong = torch.tensor(right) == 0
    found = confidence[wrong] * (1 - 1 / (4 * rewards[wrong]))
    close(found, [difficulty] * int(wrong.sum()))


def test_a_group_that_is_all_right() -> None:
    rewards, advantages = both(torch.ones(4).double(), answer_confidence(SUMS, LENGTHS), ONE)
    assert rewards.tolist() == [1.0] * 4
    assert advantages.tolist() == [0.0] * 4


def test_groups_do_not_mix() -> None:
    """Two groups in one batch, rows interleaved, give what each gives alone."""
    confidence = answer_confidence(SUMS, LENGTHS)
    ids = torch.tensor([0, 1] * 4)
    right = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]).double()
    rewards, advantages = both(right, confidence.repeat_interleave(2), ids)
    for group, alone in ((0, right[::2]), (1, right[1::2])):
        wanted = both(alone, confidence, ONE)
        torch.testing.assert_close(rewards[ids == group], wanted[0])
        torch.testing.assert_close(advantages[ids == group], wanted[1])


@pytest.mark.parametrize("seed", range(5))
def test_penalties_stay_in_their_range(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(64, generator=generator, dtype=torch.float64)
    ids = torch.arange(64) // 8
    right = (torch.rand(64, generator=generator) < 0.1).double()
    rewards, advantages = both(right, confidence, ids)
    wrong = right == 0
    assert bool((rewards[wrong] <= 0).all())
    assert bool((rewards[wrong] >= -1 / 8 - 1e-12).all())
    for group in range(8):
        rows = ids == group
        if right[rows].sum() == 0:
            order = confidence[rows].argsort()
            assert bool((advantages[rows][order].diff() < 0).all()), "a confident mistake is pushed down more"
        elif right[rows].sum() == 1:
            assert bool((advantages[rows & wrong] < 0).all()), "every wrong answer stays below the mean"


def test_equal_confidences_and_a_group_of_one() -> None:
    _, advantages = both(torch.zeros(4).double(), torch.full((4,), 0.5).double(), ONE)
    assert advantages.tolist() == [0.0] * 4
    _, alone = both(torch.zeros(1).double(), torch.tensor([0.5]).double(), torch.zeros(1, dtype=torch.int64))
    assert alone.tolist() == [0.0]


def test_negative_weight_zero() -> None:
    _, advantages = both(torch.zeros(4).double(), answer_confidence(SUMS, LENGTHS), ONE, weight=0.0)
    assert bool((advantages == 0).all())


def test_an_empty_answer_and_one_that_was_not_scored() -> None:
    """Neither moves the others: the first is penalised by nothing, the second counts nowhere."""
    right = torch.tensor([0.0, 0, 0, torch.nan]).double()
    confidence = answer_confidence(torch.tensor([-2.0, -3, 0, 0]).double(), torch.tensor([4, 4, 0, 1]))
    assert confidence.tolist()[2:] == [0.0, 1.0]
    rewards, advantages = both(right, confidence, ONE)
    three = both(right[:3], confidence[:3], ONE[:3])
    torch.testing.assert_close(rewards[:3], three[0])
    torch.testing.assert_close(advantages[:3], three[1])
    assert float(rewards[2]) == 0.0
    assert bool(rewards[3].isnan())
    assert float(advantages[3]) == 0.0


def test_an_empty_answer_beside_a_right_one() -> None:
    """Confidence 0: no penalty for it when it is wrong; when it is right, twice the largest confidence is the difficulty."""
    confidence = answer_confidence(torch.tensor([-2.0, -3, 0, -1]).double(), torch.tensor([4, 4, 0, 4]))
    wrong, advantages = both(torch.tensor([1.0, 0, 0, 0]).double(), confidence, ONE)
    implied = 4 * float(confidence[0])
    close(wrong, [1, *(-float(c) / (4 * (implied - float(c))) for c in confidence[1:])])
    assert torch.isfinite(advantages).all()
    right, _ = both(torch.tensor([0.0, 0, 1, 0]).double(), confidence, ONE)
    double = 2 * float(confidence[3])
    close(right, [-float(c) / (4 * (double - float(c))) if i != 2 else 1.0 for i, c in enumerate(confidence)])


def test_what_others_add_does_not_make_a_group_negative() -> None:
    """A right answer at half its reward (a penalty for its length, say) is still a right answer."""
    right = torch.tensor([1.0, 0, 0, 0]).double()
    shaped = torch.tensor([0.5, -0.1, -0.05, -0.07]).double()
    found = calibrated_advantages(shaped, right, ONE, CONFIG, negative_weight=0.25)
    torch.testing.assert_close(found, (shaped - shaped.mean()) / (shaped.std() + 1e-4))
    stack, state = MethodStack({"lens": Lens(LensConfig())}), state_of(**Lens.defaults)
    rewards = scored(torch.stack([right, torch.tensor([-0.5, 0, 0, 0]).double()], dim=1), ("right", "length"))
    rewards.clean = scored(right)
    rollouts = rollouts_of(mask_of(LENGTHS.tolist()), [0] * 4)
    expected = calibrated_advantages(rewards.total().double(), right, ONE, CONFIG, negative_weight=0.25)
    torch.testing.assert_close(stack.advantages(rewards, rollouts, state), expected)
    assert float(expected.abs().max()) > 1


@pytest.mark.parametrize("right", [[0.0, 0, 0, 0], [1.0, 0, 0, 0]])
def test_confidences_that_vanish_and_that_are_certain(right: list[float]) -> None:
    scores = torch.tensor(right).double()
    rewards, advantages = both(scores, answer_confidence(torch.full((4,), -1e4).double(), torch.tensor(1)), ONE)
    assert rewards.tolist() == right
    assert torch.isfinite(advantages).all()
    assert bool((advantages == 0).all()) == (sum(right) == 0)
    certain, _ = both(scores, torch.ones(4).double(), ONE)
    assert bool((certain >= -0.25).all())
    one_certain, _ = both(scores, torch.tensor([1e-300, 1.0, 0.5, 1e-9]).double(), ONE)
    assert torch.isfinite(one_certain).all()


def test_only_one_kind_of_groups() -> None:
    confidence, negative = answer_confidence(SUMS, LENGTHS), torch.zeros(4).double()
    mixed = torch.tensor([1.0, 0, 0, 0]).double()
    assert calibrated_rewards(negative, confidence, ONE, groups="mixed").tolist() == [0.0] * 4
    assert calibrated_rewards(mixed, confidence, ONE, groups="negative").tolist() == mixed.tolist()
    for scores, groups in ((mixed, "mixed"), (negative, "negative")):
        kept: Any = groups
        torch.testing.assert_close(
            calibrated_rewards(scores, confidence, ONE, groups=kept), calibrated_rewards(scores, confidence, ONE)
        )


def test_graded_rewards_are_refused() -> None:
    check_binary(torch.tensor([0.0, 1, torch.nan]))
    with pytest.raises(RunError, match=r"lens needs rewards of 0 or 1, but one is 0\.5"):
        check_binary(torch.tensor([0.0, 0.5]))
