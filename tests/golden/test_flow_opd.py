"""Worked example of Flow-OPD: the KL of a step in its forms, per-sample losses, merged factors, and the simulation (float64)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from visual_grpo.divergences import gaussian_kl
from visual_grpo.exports import merge_exports
from visual_grpo.objectives import clipped_surrogate
from visual_grpo.pipelines.flow.flow_opd import action_reward, through_reward, z_score
from visual_grpo.transitions import Transition, flow_sde_step

SIGMAS = [1, 0.8576923, 0.6021505, 0.0089286, 0]
SIZE = 4


def latents(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(1, 1, 2, 2)


X = latents(0.5, -0.2, 0.1, 0.8)
VELOCITY = latents(0.3, -0.6, 0.2, -0.1)
TEACHER = VELOCITY + latents(0.2, -0.1, 0.05, 0.3)
ANCHOR = VELOCITY + latents(-0.1, 0.1, 0, 0.1)


def step(index: int, velocity: Tensor) -> Transition:
    return flow_sde_step(X, velocity, SIGMAS[index], SIGMAS[index + 1], noise_scale=0.7, sigma_max=SIGMAS[1])


def noise_std(move: Transition) -> Tensor:
    """The std without sqrt(dt)."""
    return move.std / move.kl_factor.sqrt()


@pytest.mark.parametrize(
    ("index", "std", "weight", "kl", "code_kl", "anchor", "code_anchor"),
    [
        (1, 1.718500, 0.067061, 0.009556, 0.000611, 0.002012, 0.000129),
        (2, 0.861174, 0.619931, 0.088340, 0.013101, 0.018598, 0.002758),
    ],
)
def test_the_kl_of_a_step(
    index: int, std: float, weight: float, kl: float, code_kl: float, anchor: float, code_anchor: float
) -> None:
    student, teacher, aesthetic = (step(index, velocity) for velocity in (VELOCITY, TEACHER, ANCHOR))
    t, dt = SIGMAS[index], SIGMAS[index] - SIGMAS[index + 1]
    spread = noise_std(student)
    assert float(spread) == pytest.approx(std, abs=1e-6)
    factor = dt / 2 * (spread * (1 - t) / (2 * t) + 1 / spread) ** 2
    assert float(factor) == pytest.approx(weight, abs=1e-6)
    exact = SIZE * gaussian_kl(student.mean, teacher.mean, student.std)
    assert float(exact) == pytest.approx(kl, abs=1e-6)
    assert float(exact) == pytest.approx(float(factor * (TEACHER - VELOCITY).square().sum()), abs=1e-12)
    assert float(gaussian_kl(student.mean, teacher.mean, spread)) == pytest.approx(code_kl, abs=1e-6)
    assert float(gaussian_kl(student.mean, teacher.mean, spread)) == pytest.approx(float(exact) * dt / SIZE, abs=1e-12)
    assert float(SIZE * gaussian_kl(student.mean, aesthetic.mean, student.std)) == pytest.approx(anchor, abs=1e-6)
    assert float(gaussian_kl(student.mean, aesthetic.mean, spread)) == pytest.approx(code_anchor, abs=1e-6)


KL = torch.tensor([[0.02], [0.05], [0.01]], dtype=torch.float64)
RATIO = torch.tensor([[1.0002], [0.9999], [1.00005]], dtype=torch.float64)


def test_each_ratio_meets_its_own_reward() -> None:
    old, mask = torch.zeros_like(RATIO), torch.ones(3, 1)
    loss, _ = clipped_surrogate(RATIO.log(), old, -KL, mask, clip_low=1e-4, clip_high=1e-4)
    torch.testing.assert_close(loss[:, 0], torch.tensor([0.020004, 0.049995, 0.010001]).double(), rtol=0, atol=6e-7)
    assert float(loss.mean()) == pytest.approx(0.026667, abs=6e-7)
    crossed = torch.maximum(KL * RATIO.T, KL * RATIO.T.clamp(1 - 1e-4, 1 + 1e-4))  # [N, 1] against [N], as published
    assert float(crossed.mean()) == pytest.approx(0.026668, abs=6e-7)
    assert abs(float(loss.mean()) - float(crossed.mean())) > 1e-6


def test_normalised_rewards() -> None:
    expected = torch.tensor([[-0.318725], [1.115538], [-0.796813]]).double()
    torch.testing.assert_close(z_score(KL), expected, rtol=0, atol=1e-6)
    assert torch.equal(z_score(KL[:1]), torch.zeros(1, 1, dtype=torch.float64))


def test_the_gradient_through_the_reward() -> None:
    """Of `mean max(-A rho, -A clip(rho))` with A = -kl and the gradient of both, by autograd."""
    kl, log_ratio = KL.clone().requires_grad_(), RATIO.log().requires_grad_()
    whole = torch.maximum(kl * log_ratio.exp(), kl * log_ratio.exp().clamp(1 - 1e-4, 1 + 1e-4))
    expected = torch.autograd.grad(whole.sum(), [kl, log_ratio])
    part, _ = clipped_surrogate(log_ratio, torch.zeros_like(kl), -kl, torch.ones(3, 1), clip_low=1e-4, clip_high=1e-4)
    loss = through_reward(part, -kl, log_ratio, 1e-4, 1e-4)
    torch.testing.assert_close(loss, whole)
    for found, wanted in zip(torch.autograd.grad(loss.sum(), [kl, log_ratio]), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_averaged_factors(tmp_path: Path) -> None:
    """The product of the averaged factors is not the average of the products."""
    pairs = {"a": ([[1.0, 2.0]], [[1.0], [0.0]]), "b": ([[0.0, 2.0]], [[3.0], [1.0]])}
    for name, (a, b) in pairs.items():
        (tmp_path / name).mkdir()
        factors = {"lora_A": torch.tensor(a, dtype=torch.float64), "lora_B": torch.tensor(b, dtype=torch.float64)}
        save_file(factors, tmp_path / name / "adapter_model.safetensors")
    merge_exports({"a": 1, "b": 1}, tmp_path / "out", {name: tmp_path / name for name in pairs})
    mean = load_file(tmp_path / "out/adapter_model.safetensors")
    assert torch.equal(mean["lora_B"] @ mean["lora_A"], torch.tensor([[1.0, 4.0], [0.25, 1.0]], dtype=torch.float64))
    products = (torch.tensor(pairs["a"][1]) @ torch.tensor(pairs["a"][0])) / 2
    products += (torch.tensor(pairs["b"][1]) @ torch.tensor(pairs["b"][0])) / 2
    assert torch.equal(products, torch.tensor([[0.5, 4.0], [0.0, 1.0]]))


def test_only_the_sampled_action_has_the_gradient_of_the_kl() -> None:
    """400,000 draws at i = 2, gradients of the sum of the log-prob by the velocity, within 4 standard errors."""
    velocity = VELOCITY.clone().requires_grad_()
    student, teacher = step(2, velocity), step(2, TEACHER)
    kl = SIZE * gaussian_kl(student.mean, teacher.mean, student.std)
    (slope,) = torch.autograd.grad(kl.sum(), velocity, retain_graph=True)
    wanted = -slope.flatten()
    torch.testing.assert_close(wanted, torch.tensor([0.24797, -0.12399, 0.06199, 0.37196]).double(), rtol=0, atol=5e-6)
    (shift,) = torch.autograd.grad(student.mean.sum(), velocity)  # the mean moves each dimension by itself
    draws, dt = 400_000, SIGMAS[2] - SIGMAS[3]
    noise = torch.randn(draws, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    following = student.mean.detach() + student.std.view(1, 1, 1, 1) * noise
    score = (noise / student.std.view(1, 1, 1, 1) * shift).flatten(1)  # of the sum of log-probs, [draws, d]
    means = (student.mean.detach()[:, None].expand(draws, 1, 1, 2, 2), teacher.mean[:, None].expand(draws, 1, 1, 2, 2))
    sampled = action_reward(following[:, None], *means, noise_std(student).expand(draws, 1)) / dt
    for reward, expected in ((sampled, wanted), (-kl.detach().expand(draws, 1), torch.zeros(4).double())):
        products = reward * score
        error = products.std(0) / draws**0.5
        assert bool(((products.mean(0) - expected).abs() < 4 * error).all()), (products.mean(0), error)
        assert float(error.max()) < 0.005
