"""Worked values of the card mixgrpo_dancegrpo: Dance step, windows, advantages, selection, the short tail (float64)."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import decoupled_sums, group_advantages
from visual_grpo.groups import extreme_rows
from visual_grpo.pipelines.flow.mixgrpo import MixGrpoConfig, moved, stay, window_steps
from visual_grpo.schedules import linear_shift_sigmas, shortened_tail
from visual_grpo.transitions import dance_sde_step, multistep_step, ode_step, transition_log_prob, x0_from_velocity

SIGMAS = [1, 0.8576923, 0.6021505, 0.0089286, 0]
DANCE = [
    (0.113171, (0.454106, -0.113335, 0.070898, 0.809108), (0.567277, -0.169920, 0.099191, 0.639351), 0.814604),
    (0.151653, (0.416061, -0.042849, 0.047169, 0.815019), (0.567715, -0.118675, 0.085083, 0.587539), 0.521906),
    (0.231063, (0.294576, 0.175382, -0.026605, 0.825620), (0.525638, 0.059851, 0.031160, 0.479026), 0.100815),
]
WITHOUT_CONSTANTS = -0.445312


def latents(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 2, 2)


X, VELOCITY, NOISE = latents(0.5, -0.2, 0.1, 0.8), latents(0.3, -0.6, 0.2, -0.1), latents(1, -0.5, 0.25, -1.5)


def close(found: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64).reshape(found.shape)
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_dance_step_with_and_without_its_constants(step: int) -> None:
    scale, mean, x_next, log_prob = DANCE[step]
    transition = dance_sde_step(X, VELOCITY, SIGMAS[step], SIGMAS[step + 1], noise_scale=0.3)
    close(transition.std, scale)
    close(transition.mean, mean)
    sampled = transition.sample(NOISE)
    close(sampled, x_next)
    value = transition_log_prob(transition, sampled)
    close(value, log_prob)
    close(value + transition.std.log() + math.log(math.sqrt(2 * math.pi)), WITHOUT_CONSTANTS)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_dance_step_is_the_published_form_by_the_score(step: int) -> None:
    sigma, dt = SIGMAS[step], SIGMAS[step + 1] - SIGMAS[step]
    score = -(X - (1 - sigma) * (X - sigma * VELOCITY)) / sigma**2
    close(score, -(X + (1 - sigma) * VELOCITY) / sigma, 1e-12)
    mean = X + VELOCITY * dt - 0.5 * 0.3**2 * score * dt
    close(dance_sde_step(X, VELOCITY, sigma, SIGMAS[step + 1], noise_scale=0.3).mean, mean, 1e-12)


def test_the_schedule_has_no_end_point_at_a_thousandth() -> None:
    close(linear_shift_sigmas(4, 3.0, dtype=torch.float64), [1, 0.9, 0.75, 0.5, 0])


def windows(config: MixGrpoConfig, high: int, iterations: int) -> list[list[int]]:
    start = count = 0
    found = []
    for _ in range(iterations):
        found.append(list(window_steps(start, config.window, high, shrink=config.shrink)))
        start, count = moved(start, count, high, config)
    return found


def test_windows_with_roll_back() -> None:
    config = MixGrpoConfig(window=2, shift_every=2, roll_back=True, shrink=True)
    expected = [[0, 1], [1, 2], [2, 3], [3], [], [0, 1]]
    assert windows(config, high=4, iterations=12) == [w for w in expected for _ in range(2)]


def test_windows_that_keep_their_size_are_never_empty() -> None:
    config = MixGrpoConfig(window=2, shift_every=2)
    assert windows(config, high=4, iterations=14) == [[0, 1]] * 2 + [[1, 2]] * 2 + [[2, 3]] * 10
    assert windows(MixGrpoConfig(window=9, shift_every=1), high=4, iterations=3) == [[0, 1, 2, 3]] * 3


def test_without_roll_back_the_shrinking_window_stays_empty() -> None:
    config = MixGrpoConfig(window=2, shift_every=1, stride=3, shrink=True)
    assert windows(config, high=4, iterations=5) == [[0, 1], [3], [], [], []]


def test_twenty_five_steps_and_three_hundred_iterations_reach_start_eleven() -> None:
    config = MixGrpoConfig()
    starts = [w[0] for w in windows(config, high=25 - 2, iterations=300)]
    assert max(starts) == 11
    assert starts.count(0) == 25


def test_a_frozen_window() -> None:
    assert windows(MixGrpoConfig(window=4, stride=0, shift_every=3), high=23, iterations=50) == [[0, 1, 2, 3]] * 50


def test_exponential_decay_of_the_stay() -> None:
    config = MixGrpoConfig(order="exp_decay", shift_every=20)
    assert [stay(start, 23, config) for start in (0, 13, 14, 16, 20, 23)] == [20, 20, 19, 15, 10, 8]


def test_linear_decay_of_the_stay() -> None:
    """From shift_every at step 0 to a quarter of it at the end of the range: int(20 (1 - l/20) + 5 l/20)."""
    config = MixGrpoConfig(order="decay", shift_every=20)
    assert [stay(start, 20, config) for start in (0, 1, 10, 20)] == [20, 19, 12, 5]
    assert stay(20, 20, MixGrpoConfig(order="decay", shift_every=2)) == 1


HPS = torch.tensor([0.30, 0.28, 0.33, 0.31], dtype=torch.float64)
IMAGE_REWARD = torch.tensor([1, -0.5, 0.2, 0.9], dtype=torch.float64)
GROUP = torch.zeros(4, dtype=torch.int64)


def test_advantages() -> None:
    close(group_advantages(HPS, GROUP, eps=1e-8), [-0.240192, -1.200961, 1.200961, 0.240192])
    close(group_advantages(IMAGE_REWARD, GROUP, eps=1e-8), [0.860073, -1.290110, -0.286691, 0.716728])
    both = torch.stack([HPS, IMAGE_REWARD], dim=1)
    added = decoupled_sums(both, None, torch.ones(2, dtype=torch.float64), GROUP, eps=1e-8)
    close(added, [0.619881, -2.491070, 0.914269, 0.956920])
    close(group_advantages(both.sum(1), GROUP, eps=1e-8), [0.842778, -1.310202, -0.247876, 0.715299])


def test_equal_rewards_leave_no_residue() -> None:
    """float32 residues over a std of the same size would be advantages of order one."""
    equal = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float32)
    assert group_advantages(equal, GROUP, eps=1e-8).tolist() == [0, 0, 0, 0]


def test_best_and_worst() -> None:
    scores = torch.tensor([0.1, -1.2, 0.7, 1.5, -0.3, -0.9, 0.4, -0.2])
    assert torch.nonzero(extreme_rows(scores, torch.zeros(8, dtype=torch.int64), 4)).flatten().tolist() == [1, 2, 3, 5]


def test_best_and_worst_with_ties_missing_scores_and_small_groups() -> None:
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    nan = float("nan")
    scores = torch.tensor([0.5, 0.5, 0.5, 0.5, nan, 0.1, nan, nan])
    assert extreme_rows(scores, ids, 2).tolist() == [True, False, False, True, False, True, False, False]
    with pytest.raises(ValueError, match="even"):
        extreme_rows(scores, ids, 3)


def test_the_tail_of_flash() -> None:
    """T = 25, window 0..3, ratio 0.4: n = 22, m = 8, so 4 + 7 = 11 steps."""
    tail = shortened_tail(25, 4, 0.4, 3.0, dtype=torch.float64)
    assert len(tail) == 8
    u = torch.linspace(21 / 25, 0, 8, dtype=torch.float64)
    close(tail, 3 * u / (1 + 2 * u), 1e-12)
    whole = linear_shift_sigmas(25, 3.0, dtype=torch.float64)
    close(tail[0], whole[4], 1e-12)
    close(shortened_tail(25, 4, 1.0, 3.0, dtype=torch.float64), whole[4:], 1e-12)


def test_a_tail_always_ends_at_the_image() -> None:
    assert shortened_tail(25, 24, 0.2).tolist()[-1] == 0
    assert len(shortened_tail(25, 24, 0.2)) == 2


def gaussian_velocity(x: Tensor, sigma: float, mean: float = 0.7, std: float = 0.5) -> Tensor:
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    offset = x - (1 - sigma) * mean
    return sigma / variance * offset - (mean + (1 - sigma) * std**2 / variance * offset)


def solver_error(steps: int, solver: str) -> float:
    """Error at level 0.1 of a path from 0.9, data N(.7, .5^2) with its exact velocity; levels even in log((1 - s) / s)."""
    high, low = math.log(0.1 / 0.9), math.log(0.9 / 0.1)
    levels = [1 / (1 + math.exp(high + (low - high) * i / steps)) for i in range(steps + 1)]
    mean, spread = 0.7, lambda s: math.sqrt((1 - s) ** 2 * 0.25 + s**2)
    x = torch.tensor([[(1 - 0.9) * mean + spread(0.9)]], dtype=torch.float64)
    before = None
    for sigma, sigma_next in pairwise(levels):
        velocity = gaussian_velocity(x, sigma)
        if solver == "euler":
            x = ode_step(x, velocity, sigma, sigma_next).mean
        else:
            clean = x0_from_velocity(x, velocity, sigma)
            x, before = multistep_step(x, clean, sigma, sigma_next, before=before), (clean, sigma)
    return abs(float(x) - (1 - 0.1) * mean - spread(0.1))


def test_the_solver_is_of_second_order() -> None:
    assert solver_error(8, "multistep") < solver_error(32, "euler")
    for steps in (16, 32, 64):
        assert solver_error(steps, "multistep") / solver_error(2 * steps, "multistep") == pytest.approx(4, abs=0.8)
        assert solver_error(steps, "euler") / solver_error(2 * steps, "euler") == pytest.approx(2, abs=0.2)


def test_the_solver_is_that_of_diffusers() -> None:
    import diffusers

    levels = shortened_tail(25, 4, 0.4, 3.0, dtype=torch.float64)
    scheduler = diffusers.DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint", prediction_type="flow_prediction",
        use_flow_sigmas=True, lower_order_final=True,
    )  # fmt: skip
    scheduler.set_timesteps(len(levels) - 1)
    scheduler.sigmas = levels
    x = y = X
    before = None
    for i, timestep in enumerate(scheduler.timesteps):
        velocity = gaussian_velocity(x, float(levels[i]))
        clean = x0_from_velocity(x, velocity, levels[i])
        theirs = scheduler.step(gaussian_velocity(y, float(levels[i])), timestep, y).prev_sample
        x, before = multistep_step(x, clean, levels[i], levels[i + 1], before=before), (clean, levels[i])
        y = theirs
        close(x, y, 1e-6)


def test_without_a_step_before_it_is_an_euler_step() -> None:
    clean = x0_from_velocity(X, VELOCITY, 0.6)
    close(multistep_step(X, clean, 0.6, 0.4), ode_step(X, VELOCITY, 0.6, 0.4).mean, 1e-12)
    close(multistep_step(X, clean, 0.6, 0.0, before=(X, 0.8)), clean, 1e-12)
