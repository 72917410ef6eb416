"""A DDIM step with noise, in the units of a variance-preserving model: numbers worked out by hand from equation 12 of 2010.02502.

alpha 0.25 to 0.64, x = [.5, -.2, .1, .8], predicted noise [.3, -.6, .2, -.1], drawn noise [1, -.5, .25, -1.5].
"""

from __future__ import annotations

import math

import pytest
import torch

from visual_grpo.transitions import ddim_step, ode_step, transition_kl, transition_log_prob

X, NOISE, DRAWN = (
    torch.tensor([row], dtype=torch.float64)
    for row in ([0.5, -0.2, 0.1, 0.8], [0.3, -0.6, 0.2, -0.1], [1.0, -0.5, 0.25, -1.5])
)
C, C_NEXT = 0.5 + math.sqrt(0.75), 0.8 + 0.6
SIGMA, SIGMA_NEXT = math.sqrt(0.75) / C, 0.6 / C_NEXT
VELOCITY = NOISE - (X - math.sqrt(0.75) * NOISE) / 0.5


def close(value: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=0)


@pytest.mark.parametrize(
    ("eta", "std", "mean", "following", "log_prob"),
    [
        (
            0.5,
            0.270416346,
            [0.544989946, 0.190020108, -0.010006703, 1.365003351],
            [0.815406291, 0.054811936, 0.057597384, 0.959378833],
            -0.056458546,
        ),
        (
            1.0,
            0.540832691,
            [0.462250093, 0.355499815, -0.065166605, 1.392583302],
            [1.003082784, 0.085083469, 0.070041568, 0.581334266],
            -0.749605727,
        ),
    ],
)
def test_numbers(eta: float, std: float, mean: list[float], following: list[float], log_prob: float) -> None:
    step = ddim_step(X / C, VELOCITY, SIGMA, SIGMA_NEXT, eta=eta)
    close(step.std * C_NEXT, [std])
    close(step.mean[0] * C_NEXT, mean)
    drawn = step.sample(DRAWN)
    close(drawn[0] * C_NEXT, following)
    close(transition_log_prob(step, drawn) - math.log(C_NEXT), [log_prob])
    other = ddim_step(X / C, VELOCITY + 0.1, SIGMA, SIGMA_NEXT, eta=eta)
    expected = ((step.mean - other.mean) ** 2 / (2 * step.std**2)).sum()
    assert transition_kl(step, other, "sum", exact=True).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("sigma_next", [0.0, SIGMA_NEXT])
def test_without_noise_it_is_the_ode_step(sigma_next: float) -> None:
    step, euler = ddim_step(X, VELOCITY, SIGMA, sigma_next, eta=0.0), ode_step(X, VELOCITY, SIGMA, sigma_next)
    torch.testing.assert_close(step.mean, euler.mean, atol=1e-12, rtol=0)
    assert step.std.item() == 0
    with pytest.raises(ValueError, match="no log-prob"):
        transition_log_prob(step, X)


def test_ends_and_refusals() -> None:
    last = ddim_step(X, VELOCITY, SIGMA, 0.0, eta=1.0)
    assert last.std.item() == 0
    first = ddim_step(X, VELOCITY, 1.0, 0.5, eta=1.0)  # from pure noise everything is drawn anew
    assert first.std.item() == 0.5
    torch.testing.assert_close(first.mean, 0.5 * (X - VELOCITY), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=r"eta of a DDIM step must be in \[0, 1\]"):
        ddim_step(X, VELOCITY, SIGMA, 0.0, eta=1.5)
