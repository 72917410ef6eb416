"""Worked example of DiffusionNFT: probabilities, the loss of both mixtures with its gradient, decay, and the solver (float64)."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import group_advantages
from visual_grpo.divergences import velocity_mse
from visual_grpo.objectives import elbo_pair_loss
from visual_grpo.pipelines.flow.diffusion_nft import branch_advantages, good_probability, nft_loss, old_decay
from visual_grpo.schedules import flow_match_sigmas
from visual_grpo.transitions import interpolate, multistep_step, ode_step, x0_from_velocity

LEVEL, LIMIT, PULL = 0.6, 5.0, 1e-4


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


X0, EPS = row(0.5, -0.2, 0.1, 0.8), row(1, -0.5, 0.25, -1.5)
V_OLD, V_NEW, V_REF = row(0.4, -0.2, 0.1, -2), row(0.45, -0.25, 0.12, -2.1), row(0.38, -0.2, 0.1, -1.9)
NOISED = interpolate(X0, EPS, LEVEL)

# strength, probability, w+, w-, l+, l-, mixture over strength, L, dL/dv
TABLE = [
    (1.0, 0.668974, 0.0495, 0.1155, 0.083455, 0.163558, 0.109971, 0.549856, (-0.221241, 0.221242, -0.184334, 1.400853)),
    (1.0, 0.331026, 0.0495, 0.1155, 0.083455, 0.163558, 0.137042, 0.685211, (0.480988, -0.480987, 0.184336, -0.881393)),
    (0.1, 0.668974, 0.0792, 0.0858, 0.118698, 0.126770, 1.213698, 6.068493, (-0.357593, 0.357594, -0.184334, 1.128150)),
    (0.1, 0.331026, 0.0792, 0.0858, 0.118698, 0.126770, 1.240978, 6.204892, (0.379453, -0.379452, 0.184336, -1.084464)),
]  # fmt: skip


def close(actual: Tensor, expected: object, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual.detach(), wanted, rtol=0, atol=tolerance)


def advantages() -> Tensor:
    rewards = torch.tensor([1, 0, 0.5, 0.5, 0.2, 0.8, 0.4, 0.6], dtype=torch.float64)
    return group_advantages(rewards, torch.tensor([0] * 4 + [1] * 4), scope="batch", std="population", eps=1e-4)


def clean(velocity: Tensor) -> Tensor:
    return x0_from_velocity(NOISED, velocity, LEVEL).unsqueeze(1)


def loss_of(velocity: Tensor, old: Tensor, good: float, strength: float) -> tuple[Tensor, Tensor, Tensor]:
    return nft_loss(
        clean(velocity), clean(old), X0, torch.tensor([[good]], dtype=torch.float64), strength=strength, limit=LIMIT
    )


def test_probabilities() -> None:
    close(advantages(), [1.689737, -1.689737, 0, 0, -1.013842, 1.013842, -0.337947, 0.337947])
    good = good_probability(advantages(), LIMIT)
    close(good, [0.668974, 0.331026, 0.5, 0.5, 0.398616, 0.601384, 0.466205, 0.533795])
    assert good[2:4].tolist() == [0.5, 0.5]


def test_inputs_of_the_loss() -> None:
    close(NOISED, [0.8, -0.38, 0.19, -0.58], 1e-12)
    close(EPS - X0, [0.5, -0.3, 0.15, -2.3], 1e-12)
    close(velocity_mse(V_NEW, V_REF), 0.011950, 1e-9)


@pytest.mark.parametrize("case", range(4))
def test_loss_and_gradient(case: int) -> None:
    strength, good, w_good, w_bad, l_good, l_bad, mixture, total, slope = TABLE[case]
    velocity = V_NEW.clone().requires_grad_()
    loss, better, worse = loss_of(velocity, V_OLD, good, strength)
    close(better, l_good)
    close(worse, l_bad)
    for sign, part, divisor in ((1, better, w_good), (-1, worse, w_bad)):
        error = clean(V_OLD + sign * strength * (V_NEW - V_OLD)).squeeze(1) - X0
        close(error.abs().mean(), divisor)
        close(error.square().mean() / part, divisor)
    close(loss / LIMIT, mixture)
    whole = loss.mean() + PULL * velocity_mse(velocity, V_REF).mean()
    close(whole, total)
    whole.backward()
    close(velocity.grad, slope)


@pytest.mark.parametrize("strength", [1.0, 0.1, 0.3])
def test_equal_rewards_cancel_exactly_and_the_first_gradient_has_no_strength_in_it(strength: float) -> None:
    """At v = v_old: probability 1/2 gives a zero gradient; else that of A times the flow-matching loss."""
    for good in (0.5, 0.7):
        velocity, direct = (V_OLD.clone().requires_grad_() for _ in range(2))
        loss_of(velocity, V_OLD, good, strength)[0].sum().backward()
        (LIMIT * (2 * good - 1) * elbo_pair_loss(clean(direct), X0)).sum().backward()
        close(velocity.grad, direct.grad, 1e-14)
        assert (float(velocity.grad.abs().max()) < 1e-14) == (good == 0.5)


def test_equal_rewards_act_away_from_the_sampler() -> None:
    """Probability 1/2 lies half way between the table's two rows; because the divisors differ it is no plain pull to v_old."""
    velocity = V_NEW.clone().requires_grad_()
    loss_of(velocity, V_OLD, 0.5, 1.0)[0].sum().backward()
    half = (torch.tensor(TABLE[0][-1]) + torch.tensor(TABLE[1][-1])).double() / 2
    close(velocity.grad, half - PULL * (V_NEW - V_REF)[0] / 2, 2e-6)


def test_an_exact_prediction_stays_finite() -> None:
    velocity = (EPS - X0).requires_grad_()
    loss, _, _ = loss_of(velocity, (EPS - X0).detach(), 0.9, 1.0)
    loss.sum().backward()
    close(loss, 0.0, 1e-12)
    assert bool(torch.isfinite(velocity.grad).all())


def test_the_slow_weights_get_no_gradient() -> None:
    old = V_OLD.clone().requires_grad_()
    loss_of(V_NEW.clone().requires_grad_(), old, 0.7, 1.0)[0].sum().backward()
    assert old.grad is None


def test_plain_loss_has_its_optimum_where_the_paper_says() -> None:
    """Unnormalised: v_old + (2 / strength) E[r (v - v_old)], where v_old is the mean velocity."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(5000, generator=generator, dtype=torch.float64)
    targets = targets - targets.mean()
    good, strength, old = torch.sigmoid(targets), 0.4, 0.0
    velocity = torch.zeros((), dtype=torch.float64, requires_grad=True)
    better, worse = strength * velocity + (1 - strength) * old, (1 + strength) * old - strength * velocity
    (good * (better - targets).square() + (1 - good) * (worse - targets).square()).mean().backward()
    # A quadratic with curvature 2 strength^2: one Newton step from 0 is the optimum.
    close(-velocity.grad / (2 * strength**2), 2 / strength * float((good * (targets - old)).mean()), 1e-12)


def test_decay_of_the_sampler() -> None:
    first = [old_decay(n, start=0, rate=0.001, maximum=0.5) for n in (0, 1, 100, 500, 1000)]
    assert first == pytest.approx([0, 0.001, 0.1, 0.5, 0.5], abs=1e-12)
    second = [old_decay(n, start=75, rate=0.0075, maximum=0.999) for n in (0, 74, 75, 100, 208, 209)]
    assert second == pytest.approx([0, 0, 0, 0.1875, 0.9975, 0.999], abs=1e-12)


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        ("all", [1.5, -0.5, 0.0]),
        ("positive_only", [1.5, 0.0, 0.0]),
        ("negative_only", [0.0, -0.5, 0.0]),
        ("binary", [1.0, -1.0, 0.0]),
        ("one_only", [1.0, 0.0, 0.0]),
    ],
)
def test_branches(branches: str, expected: list[float]) -> None:
    assert branch_advantages(torch.tensor([1.5, -0.5, 0.0]), branches).tolist() == expected


def gaussian_velocity(x: Tensor, sigma: float) -> Tensor:
    """Exact for data N(0.7, 0.5^2)."""
    variance = (1 - sigma) ** 2 * 0.25 + sigma**2
    offset = x - (1 - sigma) * 0.7
    return sigma / variance * offset - (0.7 + (1 - sigma) * 0.25 / variance * offset)


def integrate(x: Tensor, levels: list[float], *, second: bool) -> Tensor:
    before = None
    for sigma, sigma_next in pairwise(levels):
        velocity = gaussian_velocity(x, sigma)
        if not second:
            x = ode_step(x, velocity, sigma, sigma_next).mean
            continue
        x0 = x0_from_velocity(x, velocity, sigma)
        x = multistep_step(x, x0, sigma, sigma_next, before=before)
        before = x0, sigma
    return x


def test_solver_has_second_order() -> None:
    """Mean absolute error at level 0.1: it falls by 3 to 4 for each doubling, Euler's by 2."""
    start = torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = 0.9 * 0.7 + (0.9**2 * 0.25 + 0.1**2) ** 0.5 * start

    def error(steps: int, second: bool) -> float:
        levels = torch.linspace(1, 0.1, steps + 1, dtype=torch.float64).tolist()
        return float((integrate(start, levels, second=second) - exact).abs().mean())

    assert [error(n, True) for n in (20, 40, 80)] == pytest.approx([0.0021, 0.0006, 0.0002], abs=1.5e-4)
    assert [error(n, False) for n in (20, 40, 80)] == pytest.approx([0.020, 0.010, 0.005], abs=5e-4)


def test_the_long_last_but_one_step_of_the_diffusers_schedule_overshoots() -> None:
    start = torch.randn(50_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    levels = flow_match_sigmas(10, dtype=torch.float64).tolist()
    assert abs(float(integrate(start, levels, second=True).std()) - 0.70) < 0.015
    assert abs(float(integrate(start, levels, second=False).std()) - 0.36) < 0.01


def test_that_step_extrapolates_by_more_than_two_differences() -> None:
    """1 / (2 q) of the step .278 -> .0089: 2.3. Read from the step itself, which is linear in the prediction before."""
    now, after, before = (flow_match_sigmas(10, dtype=torch.float64)[i] for i in (8, 9, 7))
    zero = row(0.0)
    moved = multistep_step(zero, zero, now, after, before=(zero - 1, before))
    share = moved / (1 - after - (1 - now) * after / now)
    close(share, 2.308345)


def test_first_and_last_steps_are_euler_steps() -> None:
    x, x0 = row(0.8, -0.4), row(0.5, 0.1)
    for sigma, sigma_next, before in ((1.0, 0.9, None), (0.3, 0.0, (x0 + 1, 0.6)), (0.9, 0.5, (x0 + 1, 1.0))):
        euler = ode_step(x, (x - x0) / sigma, sigma, sigma_next).mean
        close(multistep_step(x, x0, sigma, sigma_next, before=before), euler, 1e-12)
    assert not torch.allclose(
        multistep_step(x, x0, 0.6, 0.3, before=(x0 + 1, 0.9)), ode_step(x, (x - x0) / 0.6, 0.6, 0.3).mean
    )
