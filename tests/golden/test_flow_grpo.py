"""Worked example of Flow-GRPO: advantages, SDE, CPS and Dance steps, KL, and a sampler with a known answer (float64)."""

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import group_advantages
from visual_grpo.divergences import gaussian_kl, gaussian_kl_of_velocity
from visual_grpo.groups import segment_std
from visual_grpo.objectives import clipped_surrogate
from visual_grpo.schedules import flow_match_sigmas, linear_shift_sigmas
from visual_grpo.transitions import (
    Transition,
    cps_step,
    dance_sde_step,
    flow_sde_step,
    ode_step,
    transition_kl,
    transition_log_prob,
)

SIGMAS = [1, 0.8576923, 0.6021505, 0.0089286, 0]


def latents(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 2, 2)


X = latents(0.5, -0.2, 0.1, 0.8)
VELOCITY = latents(0.3, -0.6, 0.2, -0.1)
NOISE = latents(1, -0.5, 0.25, -1.5)
NEW_VELOCITY = VELOCITY + latents(0.02, -0.01, 0, 0.03)
REF_VELOCITY = VELOCITY - 0.05

# noise std, mean, x_next, old log-prob, new log-prob, ratio, loss at A = 1.2, loss at A = -1.2, KL
SDE_TABLE = [
    (1.855598, (0.334808, -0.065615, 0.047038, 0.618231), (1.034808, -0.415615, 0.222038, -0.431769),
     -1.007576, -1.006567, 1.001010, -1.200120, 1.201212, 0.000011),
    (1.718500, (0.184582, 0.078879, -0.007625, 0.479858), (1.053304, -0.355482, 0.209556, -0.823224),
     -1.223518, -1.221711, 1.001809, -1.200120, 1.202171, 0.000066),
    (0.861174, (0.095775, 0.316199, -0.084243, 0.581606), (0.759060, -0.015443, 0.081578, -0.413320),
     -0.953700, -0.948349, 1.005365, -1.200120, 1.206438, 0.001416),
]  # fmt: skip
DANCE_TABLE = [
    (0.113171, (0.454106, -0.113335, 0.070898, 0.809108), (0.567277, -0.169920, 0.099191, 0.639351), 0.814604),
    (0.151653, (0.416061, -0.042849, 0.047169, 0.815019), (0.567715, -0.118675, 0.085083, 0.587539), 0.521906),
    (0.231063, (0.294576, 0.175382, -0.026605, 0.825620), (0.525638, 0.059851, 0.031160, 0.479026), 0.100815),
]


def close(actual: Tensor, expected: object, tolerance: float = 6e-7) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)


def sde(step: int, velocity: Tensor) -> Transition:
    return flow_sde_step(X, velocity, SIGMAS[step], SIGMAS[step + 1], noise_scale=0.7, sigma_max=SIGMAS[1])


@pytest.mark.parametrize(
    ("prompt_a", "scope", "expected_a", "expected_b"),
    [
        ((1, 0, 0.5, 0.5), "batch", (1.689737, -1.689737, 0, 0), (-1.013842, 1.013842, -0.337947, 0.337947)),
        ((1, 0, 0.5, 0.5), "group", (1.413814, -1.413814, 0, 0), (-1.341041, 1.341041, -0.447014, 0.447014)),
        ((0.5, 0.5, 0.5, 0.5), "batch", (0, 0, 0, 0), (-1.896167, 1.896167, -0.632056, 0.632056)),
    ],
)
def test_advantages(prompt_a: tuple, scope: str, expected_a: tuple, expected_b: tuple) -> None:
    rewards = torch.tensor([*prompt_a, 0.2, 0.8, 0.4, 0.6], dtype=torch.float64)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    advantages = group_advantages(rewards, ids, scope=scope, std="population")
    close(advantages, [*expected_a, *expected_b])
    if len(set(prompt_a)) == 1:
        assert advantages[:4].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_sde_step(step: int) -> None:
    noise_std, mean, x_next, old, new, ratio, loss, loss_negative, kl = SDE_TABLE[step]
    transition = sde(step, VELOCITY)
    close(transition.std / transition.kl_factor.sqrt(), noise_std)
    close(transition.mean, mean)
    sampled = transition.sample(NOISE)
    close(sampled, x_next)
    old_log_prob = transition_log_prob(transition, sampled)
    new_log_prob = transition_log_prob(sde(step, NEW_VELOCITY), sampled)
    close(old_log_prob, old)
    close(new_log_prob, new)
    close((new_log_prob - old_log_prob).exp(), ratio, 1e-6)
    for advantage, expected in ((1.2, loss), (-1.2, loss_negative)):
        unit_loss, _ = clipped_surrogate(
            new_log_prob.unsqueeze(1), old_log_prob.unsqueeze(1), torch.tensor([advantage], dtype=torch.float64),
            torch.ones(1, 1), clip_low=1e-4, clip_high=1e-4,
        )  # fmt: skip
        close(unit_loss, expected, 1e-6)
    reference = sde(step, REF_VELOCITY)
    close(transition_kl(sde(step, NEW_VELOCITY), reference), kl)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_three_forms_of_the_kl_agree(step: int) -> None:
    new, reference = sde(step, NEW_VELOCITY), sde(step, REF_VELOCITY)
    noise_std = new.std / new.kl_factor.sqrt()
    expected = transition_kl(new, reference)
    close(gaussian_kl(new.mean, reference.mean, noise_std), expected, 1e-12)
    by_velocity = gaussian_kl_of_velocity(NEW_VELOCITY, REF_VELOCITY, SIGMAS[step], SIGMAS[step + 1], noise_std)
    close(by_velocity, expected, 1e-12)
    step_length = SIGMAS[step] - SIGMAS[step + 1]
    exact_sum = transition_kl(new, reference, "sum", exact=True)
    close(exact_sum * step_length / 4, expected, 1e-12)


def test_cps_step() -> None:
    transition = cps_step(X, VELOCITY, SIGMAS[1], SIGMAS[2], noise_scale=0.8)
    close(transition.std, 0.572679)
    close(transition.mean, (0.197536, 0.072067, -0.004558, 0.498615))
    close(transition_log_prob(transition, transition.sample(NOISE)), -0.292091)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_dance_step(step: int) -> None:
    scale, mean, x_next, log_prob = DANCE_TABLE[step]
    transition = dance_sde_step(X, VELOCITY, SIGMAS[step], SIGMAS[step + 1], noise_scale=0.3)
    close(transition.std, scale)
    close(transition.mean, mean)
    sampled = transition.sample(NOISE)
    close(sampled, x_next, 1e-6)
    close(transition_log_prob(transition, sampled), log_prob)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (4, [1, 0.857692, 0.602151, 0.008929, 0]),
        (10, [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]),
    ],
)
def test_sigmas(steps: int, expected: list[float]) -> None:
    tolerance = 6e-7 if steps == 4 else 6e-5
    close(flow_match_sigmas(steps, dtype=torch.float64), expected, tolerance)


def test_the_lowest_level_before_the_second_shift_and_the_std_of_all_rewards() -> None:
    close(linear_shift_sigmas(1000, dtype=torch.float64)[999], 0.002994)
    rewards = torch.tensor([1, 0, 0.5, 0.5, 0.2, 0.8, 0.4, 0.6], dtype=torch.float64)
    close(segment_std(rewards, torch.zeros(8, dtype=torch.int64), kind="population")[0], 0.295804)


def gaussian_velocity(x: Tensor, sigma: float, mean: float = 0.7, std: float = 0.5) -> Tensor:
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    offset = x - (1 - sigma) * mean
    return sigma / variance * offset - (mean + (1 - sigma) * std**2 / variance * offset)


def sample_gaussian(kind: str, steps: int, rows: int = 100_000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sigmas = flow_match_sigmas(steps, dtype=torch.float64).tolist()
    x = torch.randn(rows, 1, generator=generator)
    for i in range(steps):
        velocity = gaussian_velocity(x, sigmas[i])
        if kind == "ode" or i == steps - 1:
            transition = ode_step(x, velocity, sigmas[i], sigmas[i + 1])
        elif kind == "sde":
            transition = flow_sde_step(x, velocity, sigmas[i], sigmas[i + 1], noise_scale=0.7, sigma_max=sigmas[1])
        else:
            transition = dance_sde_step(x, velocity, sigmas[i], sigmas[i + 1], noise_scale=0.3)
        x = transition.sample(torch.randn(rows, 1, generator=generator))
    return x


@pytest.mark.parametrize("kind", ["sde", "ode", "dance"])
def test_sampler_reaches_the_data_distribution(kind: str) -> None:
    x = sample_gaussian(kind, steps=400)
    assert abs(float(x.mean()) - 0.7) < 0.01
    assert abs(float(x.std()) - 0.5) < 0.01


@pytest.mark.parametrize(("kind", "std"), [("sde", 0.42), ("ode", 0.36)])
def test_ten_steps_are_too_narrow_by_a_known_amount(kind: str, std: float) -> None:
    assert abs(float(sample_gaussian(kind, steps=10).std()) - std) < 0.01
