"""Denoising transitions: limits, latent ranks, dtypes, log-prob and KL from one mean and std."""

import doctest
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from visual_grpo import transitions
from visual_grpo.transitions import (
    REDUCTIONS,
    Transition,
    cps_step,
    dance_sde_step,
    flow_sde_step,
    interpolate,
    ode_step,
    reduce_dimensions,
    transition_kl,
    transition_log_prob,
    x0_from_velocity,
)

SHAPES = [(2, 4, 6, 6), (2, 9, 16), (2, 4, 3, 6, 6)]
STEPS: dict[str, Callable[..., Transition]] = {
    "flow": lambda *a: flow_sde_step(*a, noise_scale=0.7, sigma_max=0.9),
    "dance": lambda *a: dance_sde_step(*a, noise_scale=0.3),
    "cps": lambda *a: cps_step(*a, noise_scale=0.8),
}


def inputs(shape: tuple[int, ...] = (2, 4, 6, 6), dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, velocity, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return x.to(dtype), velocity.to(dtype), noise.to(dtype)


def test_docstring_examples() -> None:
    result = doctest.testmod(transitions)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_latent_rank_gives_the_flattened_result(step: str, shape: tuple[int, ...]) -> None:
    x, velocity, noise = inputs(shape)
    transition = STEPS[step](x, velocity, 0.6, 0.4)
    flat = STEPS[step](x.flatten(1), velocity.flatten(1), 0.6, 0.4)
    assert transition.mean.shape == shape
    assert transition.std.shape == (2,)
    torch.testing.assert_close(transition.mean.flatten(1), flat.mean)
    sampled = transition.sample(noise)
    torch.testing.assert_close(transition_log_prob(transition, sampled), transition_log_prob(flat, sampled.flatten(1)))


@pytest.mark.parametrize("step", STEPS)
def test_levels_may_differ_by_row(step: str) -> None:
    x, velocity, _ = inputs()
    both = STEPS[step](x, velocity, torch.tensor([0.9, 0.5]), torch.tensor([0.7, 0.2]))
    for row, (sigma, sigma_next) in enumerate([(0.9, 0.7), (0.5, 0.2)]):
        one = STEPS[step](x[row : row + 1], velocity[row : row + 1], sigma, sigma_next)
        torch.testing.assert_close(both.mean[row : row + 1], one.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(both.std[row : row + 1], one.std, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_computing_in_float32_or_wider(step: str, dtype: torch.dtype) -> None:
    x, velocity, noise = inputs(dtype=dtype)
    transition = STEPS[step](x, velocity, 1.0, 0.9)
    sampled = transition.sample(noise)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert transition.mean.dtype == transition.std.dtype == sampled.dtype == wide
    log_prob = transition_log_prob(transition, sampled)
    assert bool(log_prob.isfinite().all())
    again = transition_log_prob(STEPS[step](x, velocity, 1.0, 0.9), sampled)
    assert torch.equal(log_prob, again)


def test_first_step_uses_the_next_level_in_the_denominator_only() -> None:
    x, velocity, _ = inputs()
    transition = flow_sde_step(x, velocity, 1.0, 0.9, noise_scale=0.7, sigma_max=0.9)
    noise_std = 0.7 * math.sqrt(1 / (1 - 0.9))
    torch.testing.assert_close(transition.std, torch.full((2,), noise_std * math.sqrt(0.1), dtype=torch.float64))
    torch.testing.assert_close(transition.mean, x * (1 - noise_std**2 / 2 * 0.1) + velocity * -0.1)
    later = flow_sde_step(x, velocity, 0.9, 0.8, noise_scale=0.7, sigma_max=0.5)
    torch.testing.assert_close(later.std, torch.full((2,), 0.7 * 3 * math.sqrt(0.1), dtype=torch.float64))


def test_zero_noise_is_the_ode_step() -> None:
    x, velocity, noise = inputs()
    expected = ode_step(x, velocity, 0.6, 0.4)
    torch.testing.assert_close(expected.mean, x - 0.2 * velocity)
    torch.testing.assert_close(expected.sample(noise), expected.mean)
    for transition in (
        flow_sde_step(x, velocity, 0.6, 0.4, noise_scale=0.0, sigma_max=0.9),
        dance_sde_step(x, velocity, 0.6, 0.4, noise_scale=0.0),
        cps_step(x, velocity, 0.6, 0.4, noise_scale=0.0),
    ):
        torch.testing.assert_close(transition.mean, expected.mean)
        assert not bool(transition.std.any())


def test_last_cps_step_is_the_predicted_image() -> None:
    x, velocity, _ = inputs()
    transition = cps_step(x, velocity, 0.4, 0.0, noise_scale=0.8)
    torch.testing.assert_close(transition.mean, x0_from_velocity(x, velocity, 0.4))
    assert not bool(transition.std.any())


def test_deterministic_steps_have_no_log_prob_and_no_kl() -> None:
    x, velocity, noise = inputs()
    for transition in (ode_step(x, velocity, 0.6, 0.4), cps_step(x, velocity, 0.4, 0.0, noise_scale=0.8)):
        with pytest.raises(ValueError, match=r"deterministic step \(std 0\) has no log-prob"):
            transition_log_prob(transition, noise)
        with pytest.raises(ValueError, match="deterministic step"):
            transition_kl(transition, transition)


def test_dance_step_is_the_published_form() -> None:
    x, velocity, _ = inputs()
    sigma, sigma_next, eta = 0.6, 0.4, 0.3
    x0 = x - sigma * velocity
    score = -(x - (1 - sigma) * x0) / sigma**2
    expected = x + velocity * (sigma_next - sigma) - 0.5 * eta**2 * score * (sigma_next - sigma)
    torch.testing.assert_close(dance_sde_step(x, velocity, sigma, sigma_next, noise_scale=eta).mean, expected)


@pytest.mark.parametrize("step", ["flow", "dance"])
def test_log_prob_is_the_normal_density(step: str) -> None:
    x, velocity, noise = inputs()
    transition = STEPS[step](x, velocity, 0.6, 0.4)
    sampled = transition.sample(noise)
    normal = torch.distributions.Normal(transition.mean, transition.std[:, None, None, None])
    density = normal.log_prob(sampled)
    torch.testing.assert_close(transition_log_prob(transition, sampled, "none"), density)
    torch.testing.assert_close(transition_log_prob(transition, sampled, "sum"), density.flatten(1).sum(dim=1))
    torch.testing.assert_close(transition_log_prob(transition, sampled), density.flatten(1).mean(dim=1))
    torch.testing.assert_close(transition_log_prob(transition, sampled, "channel_sum"), density.sum(dim=1))
    assert transition_log_prob(transition, sampled, "channel_mean").shape == (2, 6, 6)


def test_cps_log_prob_drops_variance_and_constants() -> None:
    x, velocity, noise = inputs()
    transition = cps_step(x, velocity, 0.6, 0.4, noise_scale=0.8)
    sampled = transition.sample(noise)
    expected = -(transition.std[0] * noise).square()
    torch.testing.assert_close(transition_log_prob(transition, sampled, "none"), expected)


def test_a_schedule_that_begins_just_below_one_has_a_first_step_like_one_that_begins_at_one() -> None:
    """SANA's begins at 0.9997: noise scale 0.7 is the first step's std, and latents shrink by 0.7^2 / 2."""
    x = inputs()[0]
    for first in (1.0, 0.99966645, 0.9999):
        step = flow_sde_step(x, torch.zeros_like(x), first, 0.9639411, noise_scale=0.7, sigma_max=0.9639411)
        torch.testing.assert_close(step.std, torch.full_like(step.std, 0.7), rtol=2e-4, atol=0)
        torch.testing.assert_close(step.mean, 0.755 * x, rtol=2e-4, atol=0)
    # A first level that leaves as much room as the step is long (UNets begin near 0.93) is no exception.
    step = flow_sde_step(x, torch.zeros_like(x), 0.93, 0.9, noise_scale=0.7, sigma_max=0.9)
    torch.testing.assert_close(step.std, torch.full_like(step.std, 0.7 * (0.93 / 0.07 * 0.03) ** 0.5))


def test_kl_exact_sum_is_the_kl_and_the_code_form_drops_dt() -> None:
    x, velocity, _ = inputs()
    new, ref = STEPS["flow"](x, velocity, 0.6, 0.4), STEPS["flow"](x, velocity + 0.1, 0.6, 0.4)
    std = new.std[:, None, None, None]
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(new.mean, std), torch.distributions.Normal(ref.mean, std)
    )
    torch.testing.assert_close(transition_kl(new, ref, "none", exact=True), expected)
    torch.testing.assert_close(transition_kl(new, ref), expected.flatten(1).mean(dim=1) * 0.2)
    assert transition_kl(new, ref, "channel_mean").shape == (2, 6, 6)
    cps, cps_ref = STEPS["cps"](x, velocity, 0.6, 0.4), STEPS["cps"](x, velocity + 0.1, 0.6, 0.4)
    torch.testing.assert_close(transition_kl(cps, cps_ref), transition_kl(cps, cps_ref, exact=True))
    assert not bool(transition_kl(new, new).any())


@pytest.mark.parametrize("step", STEPS)
def test_gradient_reaches_the_velocity_and_nothing_else(step: str) -> None:
    x, velocity, noise = inputs((2, 3))
    sampled = STEPS[step](x, velocity, 0.6, 0.4).sample(noise).requires_grad_()
    velocity.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: transition_log_prob(STEPS[step](x, v, 0.6, 0.4), sampled), (velocity,))
    ref_velocity = (velocity.detach() + 0.1).requires_grad_()
    divergence = transition_kl(STEPS[step](x, velocity, 0.6, 0.4), STEPS[step](x, ref_velocity, 0.6, 0.4))
    (divergence.sum() + transition_log_prob(STEPS[step](x, velocity, 0.6, 0.4), sampled).sum()).backward()
    assert ref_velocity.grad is None
    assert sampled.grad is None
    assert bool(velocity.grad.any())


def test_interpolation_and_its_inverse() -> None:
    x0, noise, _ = inputs()
    level = torch.tensor([0.3, 0.8], dtype=torch.float64)
    x = interpolate(x0, noise, level)
    torch.testing.assert_close(x[1], 0.2 * x0[1] + 0.8 * noise[1])
    torch.testing.assert_close(x0_from_velocity(x, noise - x0, level), x0)


def test_reductions_of_packed_latents() -> None:
    values = torch.arange(12.0).reshape(1, 3, 4)
    assert reduce_dimensions(values, "channel_mean", -1).tolist() == [[1.5, 5.5, 9.5]]
    assert reduce_dimensions(values, "channel_sum", channel_dim=-1).shape == (1, 3)
    assert {reduction: reduce_dimensions(values, reduction).dim() for reduction in REDUCTIONS} == {
        "mean": 1, "sum": 1, "channel_mean": 2, "channel_sum": 2, "none": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match="reduction must be one of"):
        reduce_dimensions(values, "median")
    with pytest.raises(ValueError, match="is the batch dimension"):
        reduce_dimensions(values, "channel_mean", 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, v: ode_step(x, v[:1], 0.6, 0.4), "must share a shape"),
        (lambda x, v: ode_step(x, v, 0.4, 0.6), "0 <= sigma_next < sigma <= 1"),
        (lambda x, v: ode_step(x, v, 600.0, 400.0), "0 <= sigma_next < sigma <= 1"),
        (lambda x, v: ode_step(x, v, torch.ones(3), 0.4), r"sigma must be a number or one per row \[2\]"),
        (lambda x, v: flow_sde_step(x, v, 1.0, 0.4, noise_scale=0.7, sigma_max=1.0), "sigma_max must be below 1"),
        (lambda x, v: flow_sde_step(x, v, 1.0, 0.4, noise_scale=-0.7, sigma_max=0.9), "noise_scale must be >= 0"),
        (lambda x, v: dance_sde_step(x, v, 1.0, 0.4, noise_scale=-0.7), "noise_scale must be >= 0"),
        (lambda x, v: cps_step(x, v, 1.0, 0.4, noise_scale=1.2), r"CPS step must be in \[0, 1\], got 1.2"),
        (lambda x, v: STEPS["flow"](x, v, 0.6, 0.4).sample(v[:1]), "noise must have the shape"),
        (lambda x, v: transition_log_prob(STEPS["flow"](x, v, 0.6, 0.4), v[:1]), "must have the shape of mean"),
        (lambda x, v: transition_kl(STEPS["flow"](x, v, 0.6, 0.4), STEPS["flow"](x, v, 0.6, 0.3)), "one std"),
        (lambda x, v: transition_kl(STEPS["flow"](x, v, 0.6, 0.4), STEPS["flow"](x[:1], v[:1], 0.6, 0.4)), "reference"),
    ],
)
def test_bad_input_is_refused(call: Callable, message: str) -> None:
    x, velocity, _ = inputs()
    with pytest.raises(ValueError, match=message):
        call(x, velocity)
