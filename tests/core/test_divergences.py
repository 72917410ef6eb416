"""KL estimators, Gaussian KL, velocity distance."""

import doctest

import pytest
import torch
from torch import Tensor

from visual_grpo import divergences
from visual_grpo.divergences import (
    KL_ESTIMATORS,
    KlEstimator,
    gaussian_kl,
    gaussian_kl_of_velocity,
    k1,
    k2,
    k3,
    kl_estimate,
    velocity_mse,
)


def policies(spread: float = 0.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return (ref + spread * torch.randn(3, 4, generator=generator, dtype=torch.float64)).requires_grad_(), ref


def test_docstring_examples() -> None:
    result = doctest.testmod(divergences)
    assert result.failed == 0
    assert result.attempted > 0


def test_estimators_agree_with_their_formulas() -> None:
    new, ref = policies()
    difference = ref - new
    torch.testing.assert_close(k1(new, ref), -difference)
    torch.testing.assert_close(k2(new, ref), difference**2 / 2)
    torch.testing.assert_close(k3(new, ref), difference.exp() - difference - 1)
    torch.testing.assert_close(kl_estimate("abs", new, ref), difference.abs())


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equal_policies_give_zero(name: KlEstimator) -> None:
    _, ref = policies()
    new = ref.clone().requires_grad_()
    value = kl_estimate(name, new, ref)
    value.sum().backward()
    assert not bool(value.any())
    assert bool(new.grad.isfinite().all())


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradient_against_finite_differences(name: KlEstimator) -> None:
    new, ref = policies()
    assert torch.autograd.gradcheck(lambda value: kl_estimate(name, value, ref), (new,))


def test_straight_through_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    new, ref = policies()
    value = kl_estimate("k3_k2_gradient", new, ref)
    torch.testing.assert_close(value, k3(new, ref))
    value.sum().backward()
    torch.testing.assert_close(new.grad, (new - ref).detach())


def test_k3_estimates_the_kl_of_two_categoricals() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    sampled = torch.multinomial(policy, 200_000, replacement=True, generator=generator)
    expected = (policy * (policy / reference).log()).sum()
    for estimator in (k1, k3):
        estimate = estimator(policy[sampled].log(), reference[sampled].log()).mean()
        torch.testing.assert_close(estimate, expected, rtol=0, atol=5e-3)


def test_clamps() -> None:
    new, ref = torch.tensor([-1000.0, 1000.0, 3.0], requires_grad=True), torch.zeros(3)
    value = k3(new, ref)
    value.sum().backward()
    assert bool(value.isfinite().all())
    assert bool(new.grad.isfinite().all())
    assert kl_estimate("k3", new, ref, clamp_value=10.0).detach().max() == 10
    assert float(k3(torch.tensor(-30.0), torch.tensor(0.0), clamp_difference=None)) > 1e12


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 2, 2)])
def test_masked_units_are_zero_whatever_they_hold(name: KlEstimator, shape: tuple[int, ...]) -> None:
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    new = torch.full(shape, -0.5)
    new[mask == 0] = float("-inf")
    new.requires_grad_()
    ref = torch.full(shape, -0.7)
    ref[mask == 0] = float("nan")
    value = kl_estimate(name, new, ref, mask=mask)
    value.sum().backward()
    assert not bool(value[mask == 0].any())
    assert bool((value[mask != 0] != 0).all())
    assert bool(new.grad.isfinite().all())


def test_gaussian_kl_equals_torch_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, ref = torch.randn(2, 3, 4, 4, generator=generator), torch.randn(2, 3, 4, 4, generator=generator)
    std = torch.tensor([0.3, 2.0])
    wide = std[:, None, None, None]
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, wide), torch.distributions.Normal(ref, wide)
    ).flatten(1)
    torch.testing.assert_close(gaussian_kl(mean, ref, std), expected.mean(dim=1))
    torch.testing.assert_close(gaussian_kl(mean[:1], ref[:1], 0.3), expected.mean(dim=1)[:1])


def test_only_the_policy_gets_a_gradient_and_halves_are_widened() -> None:
    mean = torch.randn(2, 4, dtype=torch.bfloat16).requires_grad_()
    ref = torch.randn(2, 4, dtype=torch.bfloat16).requires_grad_()
    for value in (gaussian_kl(mean, ref, 1.0), velocity_mse(mean, ref)):
        assert value.dtype == torch.float32
        value.sum().backward()
    assert ref.grad is None
    assert mean.grad is not None


def test_velocity_forms() -> None:
    velocity, ref = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
    assert velocity_mse(velocity, ref).tolist() == [5, 0]
    at_one = gaussian_kl_of_velocity(velocity, ref, 1.0, 0.5, torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(at_one, torch.tensor([0.25 / 2 / 4 * 5, 0.0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: kl_estimate("k4", a, b), "KL estimator must be one of k1, abs, k2, k3"),
        (lambda a, b: kl_estimate("k3", a, b[:1]), "must have log_prob's shape"),
        (lambda a, b: kl_estimate("k3", a, b, mask=torch.ones(2, 2)), "leading part"),
        (lambda a, b: gaussian_kl(a, b[:1], 1.0), "must have the shape of mean"),
        (lambda a, b: gaussian_kl(a, b, torch.ones(2)), r"one per row \[3\]"),
        (lambda a, b: velocity_mse(a, b[:1]), "must have the shape"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 4), torch.zeros(3, 4))
