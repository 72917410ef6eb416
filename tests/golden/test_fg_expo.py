"""Worked example of FG-ExPO, float64: the two controllers by themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.advantages import group_advantages
from visual_grpo.combination import combined_advantages
from visual_grpo.config import DataConfig
from visual_grpo.data import PromptRow, PromptSource
from visual_grpo.errors import RunError, UserError
from visual_grpo.method import LoopState
from visual_grpo.pipelines.text.fg_expo import FgExpo, FgExpoConfig, kl_factor, question_weights

NAN = float("nan")
REWARDS = [1.0, 0, 0, 1, 0, 0, 0, 1]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
KL = {"kl": {"beta": 0.02}}


def rollouts(questions: list[int], groups: list[int] = GROUPS) -> Any:
    """Groups in order, one question each."""
    index = torch.tensor([questions[g] for g in groups])
    return rollouts_of(mask_of([1] * len(groups)), groups, tags={"index": index})


def stepped(method: FgExpo, questions: list[int], rewards: list[float], state: LoopState) -> float:
    """One step of the loop's calls: the factor of the KL."""
    method.select_prompts(torch.ones(3, dtype=torch.float64), state)
    rows, batch = rollouts(questions), scored(rewards)
    assert method.shape_rewards(batch, rows, state) is batch
    scale = method.kl_scale(1.0, batch, rows, state)
    method.after_step({}, state)
    return scale


@pytest.mark.parametrize(("accuracy", "factor"), [(0.0, 0.5), (0.5, 0.731059), (1.0, 0.880797), (0.375, 0.679179)])
def test_factor_of_the_kl(accuracy: float, factor: float) -> None:
    assert kl_factor(accuracy) == pytest.approx(factor, abs=1e-6)


def test_a_step() -> None:
    method, state = FgExpo(FgExpoConfig()), state_of(**KL)
    scale = stepped(method, [0, 1], REWARDS, state)
    assert scale == pytest.approx(0.679179, abs=1e-6)
    assert 0.02 * scale == pytest.approx(0.01358357, abs=1e-8)
    assert method.state_dict()["rates"].tolist() == pytest.approx([0.5, 0.475, 0.5], abs=1e-12)


def test_advantages() -> None:
    state = state_of(**FgExpo.defaults)
    found = combined_advantages(scored(REWARDS), torch.tensor(GROUPS), torch.ones(8), state.config)
    one, low, high = 0.999998, -0.577349, 1.732047
    expected = torch.tensor([one, -one, -one, one, low, low, low, high]).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    plain = group_advantages(scored(REWARDS).total(), torch.tensor(GROUPS), std="population", eps=1e-6)
    assert torch.equal(found, plain)


def test_weights_of_questions() -> None:
    weights = question_weights(torch.tensor([0.5, 0.475, 0.9, 0.05, 1.0], dtype=torch.float64), 0.35)
    expected = torch.tensor([1, 0.997452, 0.520450, 0.437565, 0.360448]).double()
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    shares = torch.tensor([0.301576, 0.300808, 0.156955, 0.131959, 0.108702]).double()
    torch.testing.assert_close(weights / weights.sum(), shares, rtol=0, atol=1e-6)
    assert float(question_weights(torch.zeros(1), 0.35)) == pytest.approx(0.360448, abs=1e-6)


def test_draws_follow_the_weights() -> None:
    """10,000 draws of one question; the 99.9 % point of chi-square with four degrees of freedom is 18.47."""
    rates = torch.tensor([0.5, 0.475, 0.9, 0.05, 1.0], dtype=torch.float64)
    method, state = FgExpo(FgExpoConfig()), state_of(**KL)
    method.load_state_dict({"rates": rates})
    weights = method.select_prompts(torch.ones(5, dtype=torch.float64), state)
    source = PromptSource([PromptRow(prompt=str(i), metadata={}) for i in range(5)], DataConfig(source="x.txt"), 3)
    counts = torch.bincount(torch.tensor([source.draw(1, weights)[0] for _ in range(10_000)]), minlength=5).double()
    expected = 10_000 * weights / weights.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.47
    assert sorted(source.draw(5, weights)) == [0, 1, 2, 3, 4]


def test_a_batch_of_wrong_or_right_answers() -> None:
    """A flat group has no gradient, and moves its question's rate all the same."""
    method, state = FgExpo(FgExpoConfig()), state_of(**KL)
    assert stepped(method, [0, 1], [0.0] * 8, state) == 0.5
    assert method.state_dict()["rates"].tolist() == pytest.approx([0.45, 0.45, 0.5])
    assert stepped(method, [2, 1], [1.0] * 8, state) == pytest.approx(0.880797, abs=1e-6)
    assert method.state_dict()["rates"].tolist() == pytest.approx([0.45, 0.505, 0.55])


def test_unscored_rows_count_nowhere() -> None:
    method, state = FgExpo(FgExpoConfig()), state_of(**KL)
    scale = stepped(method, [0, 1], [1.0, 0.0, NAN, NAN, NAN, NAN, NAN, NAN], state)
    assert scale == kl_factor(0.5)
    assert method.state_dict()["rates"].tolist() == pytest.approx([0.5, 0.5, 0.5])
    assert stepped(method, [0, 1], [NAN] * 8, state) == 1.0


def test_switched_off_it_is_grpo_with_its_own_order() -> None:
    method, state = FgExpo(FgExpoConfig(adaptive_kl=False, sigma=None)), state_of(**KL)
    method.load_state_dict({"rates": torch.tensor([0.0, 0.5, 1.0])})
    weights = torch.tensor([1.0, 1, 1], dtype=torch.float64)
    assert method.select_prompts(weights, state) is weights
    assert stepped(method, [0, 1], REWARDS, state) == 1.0


def test_another_method_s_weights_stay() -> None:
    method = FgExpo(FgExpoConfig())
    method.load_state_dict({"rates": torch.tensor([0.0, 0.5, 1.0]).double()})
    found = method.select_prompts(torch.tensor([1.0, 0.0, 2.0]).double(), state_of(**KL))
    assert found.tolist() == pytest.approx([0.360448, 0.0, 0.720896], abs=1e-6)


def test_a_reward_that_says_what_is_right() -> None:
    """The sum of two rewards is no accuracy; one of them is."""
    names = ("format", "right")
    values = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, NAN]]).double()
    rows, batch = rollouts([0], [0, 0, 0, 0]), scored(values, names)
    with pytest.raises(RunError, match=r"row 0 has 2; set method\.fg_expo\.correct"):
        FgExpo(FgExpoConfig()).kl_scale(1.0, batch, rows, state_of(**KL))
    method = FgExpo(FgExpoConfig(correct="right"))
    assert method.kl_scale(1.0, batch, rows, state_of(**KL)) == kl_factor(1 / 3)


def test_what_does_not_fit_is_refused() -> None:
    state = state_of(kl={"beta": 0.0})
    with pytest.raises(UserError, match=r"kl\.beta is 0: set kl\.beta"):
        FgExpo(FgExpoConfig()).check(state.config, None)
    FgExpo(FgExpoConfig(adaptive_kl=False)).check(state.config, None)
    with pytest.raises(
        UserError, match=r"correct is 'geneval', which is no reward that is trained on; give one of exact_match"
    ):
        FgExpo(FgExpoConfig(correct="geneval")).check(state_of(**KL).config, None)
    method = FgExpo(FgExpoConfig())
    method.load_state_dict({"rates": torch.zeros(7)})
    with pytest.raises(UserError, match=r"pass rates of 7 questions, and data\.source has 3"):
        method.select_prompts(torch.ones(3), state_of(**KL))
