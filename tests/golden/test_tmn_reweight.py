"""Worked example of TMN-Reweight, float64, and its degenerate prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.pipelines.text.tmn_reweight import TmnReweight, TmnReweightConfig, task_advantages

NAN = float("nan")
REWARDS = torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0.9, 0.5, 0.7, 0.3, 0.2, 0.2, 0.4, 0.2], dtype=torch.float64)
PROMPTS = torch.arange(16) // 4
TASKS = torch.arange(16) // 8
A, B = [0.925818, -0.925818, -0.925818, 0.925818], [-0.462909, -0.462909, -0.462909, 1.388728]
C, D = [1.532254, -0.510751, 0.510751, -1.532254], [-0.255376, -0.255376, 0.766127, -0.255376]


def close(actual: Tensor, expected: list[float] | Tensor) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_without_the_factor() -> None:
    close(task_advantages(REWARDS, PROMPTS, TASKS, gamma=None), A + B + C + D)
    assert torch.equal(
        task_advantages(REWARDS, PROMPTS, TASKS, gamma=0.0), task_advantages(REWARDS, PROMPTS, TASKS, gamma=None)
    )


def test_the_scales_of_the_tasks() -> None:
    """sigma = (r - mean) / A: 0.540062 for exact match and 0.195789 for F1."""
    found = task_advantages(REWARDS, PROMPTS, TASKS, gamma=None)
    close((0.5 / found[0] - 1e-6).reshape(1), [0.540062])
    close((0.3 / found[8] - 1e-6).reshape(1), [0.195789])


def test_with_the_factor() -> None:
    hard = [-0.360514, -0.360514, -0.360514, 1.783162]
    close(task_advantages(REWARDS, PROMPTS, TASKS), A + hard + C + [-0.198887, -0.198887, 0.983726, -0.198887])


def test_the_example_through_the_hook() -> None:
    """Tasks by the name in a column, prompts numbered with gaps and the rows in another order."""
    order = torch.randperm(16, generator=torch.Generator().manual_seed(4))
    metadata = [{"kind": "exact match" if task == 0 else "F1"} for task in TASKS[order].tolist()]
    rollouts = rollouts_of(mask_of([1] * 16), (3 * PROMPTS[order] + 5).tolist(), metadata=metadata)
    hard = [-0.360514, -0.360514, -0.360514, 1.783162]
    factor = A + hard + C + [-0.198887, -0.198887, 0.983726, -0.198887]
    for options, expected in (({}, factor), ({"difficulty_reweight": False}, A + B + C + D)):
        method = TmnReweight(TmnReweightConfig(task_key="kind", **options))
        found = method.advantages(scored(REWARDS[order]), rollouts, state_of(**method.defaults))
        close(found, torch.tensor(expected).double()[order])


def test_a_prompt_of_one_row() -> None:
    rewards, prompts = torch.tensor([0.7, 1, 0, 0, 1], dtype=torch.float64), torch.tensor([0, 1, 1, 1, 1])
    tasks = torch.zeros(5, dtype=torch.int64)
    reference = task_advantages(rewards, prompts, tasks, single_row="reference")
    close(reference, [0.519991, 0.612372, -0.612372, -0.612372, 0.612372])
    close(task_advantages(rewards, prompts, tasks), [0, 0.866024, -0.866024, -0.866024, 0.866024])


def test_the_threshold_lies_between_the_prompt_s_mean_and_the_task_s() -> None:
    """Means .69 and .01, the task's .35: thresholds .622 and .078, passed by two rewards and by none; an own mean by one."""
    rewards = torch.tensor([0.6, 0.62, 0.64, 0.9, 0, 0, 0, 0.04], dtype=torch.float64)
    prompts, task = torch.arange(8) // 4, torch.zeros(8, dtype=torch.int64)
    plain = task_advantages(rewards, prompts, task, gamma=None)
    close(plain[:1] * 0.100665, [-0.09])
    up, half = 1.648721, 0.5
    both = torch.tensor([1, 1, 1, 1, 1 / up, 1 / up, 1 / up, up], dtype=torch.float64)
    close(task_advantages(rewards, prompts, task) / plain, both)
    own = torch.tensor([-1, -1, -1, 1, -1, -1, -1, 1], dtype=torch.float64)
    close(task_advantages(rewards, prompts, task, smoothing=1.0) / plain, (own * (half - 0.25)).exp())


def test_without_smoothing_the_threshold_is_the_task_s_mean() -> None:
    """.425 in the second task: three of the first prompt's rewards pass, and none of the second's."""
    plain = task_advantages(REWARDS[8:], PROMPTS[:8], TASKS[:8], gamma=None)
    found = task_advantages(REWARDS[8:], PROMPTS[:8], TASKS[:8], smoothing=0.0)
    rates = torch.tensor([0.75] * 4 + [0.0] * 4, dtype=torch.float64)
    close(found / plain, (plain.sign() * (0.5 - rates)).exp())


@pytest.mark.parametrize(("reward", "factor"), [(0.7, 0.606531), (0.2, 1.648721)])
def test_a_single_row_is_judged_by_the_task_s_mean(reward: float, factor: float) -> None:
    """As the authors do: mean 0, variance 1, so scale .816497 and threshold .25; both ends of the factor."""
    rewards, prompts = torch.tensor([reward, 1, 0, 0, 1], dtype=torch.float64), torch.tensor([0, 1, 1, 1, 1])
    found = task_advantages(rewards, prompts, torch.zeros(5, dtype=torch.int64), single_row="reference")
    close(found[:2], [reward / 0.816497 * factor, 0.5 / 0.816497])


def test_flat_prompts() -> None:
    """Exactly 0 with float residues, and the scale of the task is lowered; a task of flat prompts alone gives 0."""
    rewards = torch.tensor([1, 0, 0, 1, *[0.1 + 0.2] * 2, 0.3, 0.3], dtype=torch.float64)
    one = torch.zeros(8, dtype=torch.int64)
    found = task_advantages(rewards, torch.arange(8) // 4, one)
    assert found[4:].tolist() == [0.0] * 4
    alone = task_advantages(rewards[:4], one[:4], one[:4])
    close(found[:4], alone * 2**0.5)
    both = task_advantages(rewards, torch.arange(8) // 4, torch.arange(8) // 4)
    close(both, [*alone.tolist(), 0, 0, 0, 0])
    assert both[4:].tolist() == [0.0] * 4


def test_unscored_rows_count_nowhere() -> None:
    rewards = torch.cat([REWARDS[:4], torch.tensor([NAN]), REWARDS[4:], torch.tensor([NAN, NAN])])
    prompts = torch.cat([PROMPTS[:4], torch.tensor([0]), PROMPTS[4:], torch.tensor([4, 4])])
    tasks = torch.cat([TASKS[:4], torch.tensor([0]), TASKS[4:], torch.tensor([1, 1])])
    found = task_advantages(rewards, prompts, tasks)
    assert found[[4, 17, 18]].tolist() == [0.0] * 3
    kept = torch.ones(19, dtype=torch.bool)
    kept[[4, 17, 18]] = False
    close(found[kept], task_advantages(REWARDS, PROMPTS, TASKS))


def test_one_scored_row_left_in_a_prompt() -> None:
    rewards = torch.cat([REWARDS[:4], torch.tensor([1.0, NAN])])
    prompts, tasks = torch.tensor([0, 0, 0, 0, 1, 1]), torch.zeros(6, dtype=torch.int64)
    close(task_advantages(rewards, prompts, tasks), [0.866024, -0.866024, -0.866024, 0.866024, 0, 0])


@pytest.mark.parametrize(("factor", "shift"), [(100.0, 0.0), (1.0, 3.0)])
def test_the_scale_and_the_zero_of_a_task_do_not_matter(factor: float, shift: float) -> None:
    other = torch.where(TASKS == 1, REWARDS * factor + shift, REWARDS)
    found, plain = task_advantages(other, PROMPTS, TASKS), task_advantages(REWARDS, PROMPTS, TASKS)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


def test_the_order_of_rows_does_not_matter() -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    found = task_advantages(REWARDS[order], PROMPTS[order], TASKS[order])
    torch.testing.assert_close(found, task_advantages(REWARDS, PROMPTS, TASKS)[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("given", [[0.0, 1.0, 0.5], [0.1, 0.3, 0.2], [0.5, 0.9, 0.7], [0.6, 0.8, 0.7]])
def test_a_tie_with_the_threshold_is_no_pass(given: list[float]) -> None:
    """One task, one prompt: the threshold is the mean, exactly, a bit above or a bit below; the reward that equals it fails."""
    rewards, one = torch.tensor(given, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    plain = task_advantages(rewards, one, one, gamma=None)
    rate = 1 / 3
    factor = torch.tensor([rate - 0.5, 0.5 - rate, rate - 0.5], dtype=torch.float64).exp()
    close(task_advantages(rewards, one, one), plain * factor)


def test_no_row_at_all() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert task_advantages(torch.zeros(0), none, none).shape == (0,)
