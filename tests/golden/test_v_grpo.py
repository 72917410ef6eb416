"""Worked example of V-GRPO: surrogate, ratios, objective, gradients and the pair-by-pair backward (float64)."""

import pytest
import torch
from torch import Tensor

from visual_grpo.advantages import group_advantages, soft_clip
from visual_grpo.aggregation import Totals, aggregate, aggregation_coefficients
from visual_grpo.objectives import clip_is_active, clipped_surrogate, elbo_pair_loss, importance_log_ratio
from visual_grpo.pipelines.flow.v_grpo import VGrpo, VGrpoConfig
from visual_grpo.transitions import interpolate, x0_from_velocity
from visual_grpo.types import LogProb, MicroBatch, PromptBatch, RolloutBatch

OUTPUTS = torch.tensor([[0.5, -0.2, 0.1, 0.8], [-0.3, 0.4, 0, 0.6], [0.2, 0.2, -0.7, 0.1]], dtype=torch.float64)
EPS = torch.tensor([[1, -0.5, 0.25, -1.5], [-0.4, 0.9, 0.1, 0.3]], dtype=torch.float64)
LEVELS = [0.3, 0.8]
OLD, NEW = (0.9, 0.05), (0.88, 0.04)
MASK = torch.ones(3, 2)


def parameters(values: tuple[float, float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def x0_predictions(theta: Tensor) -> Tensor:
    """Predictions [3, 2, 4] of the toy model `velocity = w z + b`."""
    pairs = []
    for level, eps in zip(LEVELS, EPS, strict=True):
        z = interpolate(OUTPUTS, eps.expand_as(OUTPUTS), level)
        pairs.append(x0_from_velocity(z, theta[0] * z + theta[1], level))
    return torch.stack(pairs, dim=1)


def pair_losses(theta: Tensor) -> Tensor:
    return elbo_pair_loss(x0_predictions(theta), OUTPUTS)


def advantages() -> Tensor:
    rewards = torch.tensor([0.9, 0.2, 0.4], dtype=torch.float64)
    return group_advantages(rewards, torch.zeros(3, dtype=torch.int64), std="population", eps=1e-8)


def row_loss(theta: Tensor, old: Tensor, weight: Tensor, clip: float) -> Tensor:
    log_prob, old_log_prob = -pair_losses(theta), -pair_losses(old).detach()
    loss, _ = clipped_surrogate(log_prob, old_log_prob, weight, MASK, level="sequence", clip_low=clip, clip_high=clip)
    return aggregate(loss, MASK, Totals.of_mask(MASK), mode="sequence_mean_token_mean")


def close(actual: Tensor, expected: object, tolerance: float = 6e-7) -> None:
    torch.testing.assert_close(actual.detach(), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def test_pair_losses() -> None:
    old, new = pair_losses(parameters(OLD)), pair_losses(parameters(NEW))
    close(old, [[0.668542, 0.573231], [0.469536, 0.389999], [0.326974, 0.492747]])
    close(new, [[0.674190, 0.568128], [0.467020, 0.382650], [0.326017, 0.511137]])
    close(old.mean(dim=1), [0.620887, 0.429768, 0.409860])
    close(new.mean(dim=1), [0.621159, 0.424835, 0.418577])


def test_ratios_and_advantages() -> None:
    old, new = pair_losses(parameters(OLD)), pair_losses(parameters(NEW))
    ratio = importance_log_ratio(-new, -old, MASK, level="sequence").exp()
    close(ratio[:, 0], [0.999728, 1.004945, 0.991321])
    per_pair = importance_log_ratio(-new, -old, MASK, level="token").exp()
    close(per_pair, [[0.994368, 1.005117], [1.002519, 1.007377], [1.000957, 0.981777]])
    close(advantages(), [1.358732, -1.019049, -0.339683])
    close(soft_clip(advantages(), 3.0), [1.272866, -0.981583, -0.338239])


def test_clipped_objective_and_gradient() -> None:
    theta = parameters(NEW)
    loss = row_loss(theta, parameters(OLD), advantages(), 6e-3)
    loss.backward()
    close(loss, 0.001124)
    close(theta.grad, [-0.125388, 0.128904])


def kl_old(rows: list[int], beta: float) -> Tensor:
    """The method's own term on some rows of the example; it is a mean over them, their pairs and the dimensions."""
    prompts = PromptBatch(
        prompts=["p"] * len(rows), metadata=[{}] * len(rows), group_ids=torch.zeros(len(rows), dtype=torch.int64),
        row_ids=torch.arange(len(rows)),
    )  # fmt: skip
    mask, units = MASK[rows], torch.arange(2)
    prediction = x0_predictions(parameters(NEW))[rows]
    micro = MicroBatch(
        rollouts=RolloutBatch(
            prompts=prompts, unit_kind="noise_pair", unit_mask=mask > 0,
            data={"old_prediction": x0_predictions(parameters(OLD))[rows].detach()},
        ),
        units=units, advantages=torch.zeros_like(mask), mask=mask, old_log_prob=torch.zeros_like(mask),
        log_prob=LogProb(value=torch.zeros_like(mask), prediction=prediction),
    )  # fmt: skip
    coefficients = aggregation_coefficients(mask.double(), Totals.of_mask(mask), mode="sequence_mean_token_mean")
    terms = VGrpo(VGrpoConfig(pairs=2, kl_old_beta=beta)).regularise(micro, coefficients, mask, None)  # type: ignore[arg-type]
    return terms["kl_old"]


def test_kl_to_the_behaviour_policy() -> None:
    close(kl_old([0, 1, 2], 1.0), 0.000090)
    close(kl_old([0, 1, 2], 300.0), 300 * 9.039780e-05, 1e-7)
    for row, summed in enumerate([0.000377, 0.000379, 0.000329]):
        close(4 * kl_old([row], 1.0), summed)


@pytest.mark.parametrize(("point", "gradient"), [(NEW, (-0.116297, 0.136522)), (OLD, (-0.114527, 0.133550))])
def test_on_policy_gradient_is_advantage_weighted_flow_matching(
    point: tuple[float, float], gradient: tuple[float, float]
) -> None:
    weight = soft_clip(advantages(), 3.0)
    theta, direct = parameters(point), parameters(point)
    loss = row_loss(theta, parameters(point), weight, 6e-3)
    loss.backward()
    close(loss, -float(weight.mean()), 1e-12)
    close(theta.grad, gradient)
    (weight * pair_losses(direct).mean(dim=1)).mean().backward()
    close(theta.grad, direct.grad, 1e-12)


@pytest.mark.parametrize("clip", [1e-2, 6e-3, 1e-4])
def test_pair_by_pair_backward_equals_the_full_one(clip: float) -> None:
    weight = advantages()
    full = parameters(NEW)
    row_loss(full, parameters(OLD), weight, clip).backward()

    theta, pairs = parameters(NEW), len(LEVELS)
    with torch.no_grad():
        old, new = pair_losses(parameters(OLD)), pair_losses(theta)
        ratio = importance_log_ratio(-new, -old, MASK, level="sequence").exp()[:, 0]
        factor = torch.where(clip_is_active(ratio, weight, clip, clip), 0.0, weight * ratio) / pairs
    assert bool((factor == 0).any()) == (clip < 8e-3)
    for pair in range(pairs):
        prediction = x0_predictions(theta)[:, pair]
        (factor * elbo_pair_loss(prediction, OUTPUTS)).mean().backward()
    close(theta.grad, full.grad, 1e-12)


def test_same_weights_give_ratio_one_exactly() -> None:
    losses = pair_losses(parameters(NEW))
    assert importance_log_ratio(-losses, -losses, MASK, level="sequence").exp().tolist() == [[1], [1], [1]]


def test_exact_prediction_is_finite_with_zero_gradient() -> None:
    prediction = OUTPUTS.clone().requires_grad_()
    loss = elbo_pair_loss(prediction, OUTPUTS)
    loss.sum().backward()
    assert loss.tolist() == [0, 0, 0]
    assert torch.equal(prediction.grad, torch.zeros_like(OUTPUTS))


def test_divisor_carries_no_gradient_and_plain_form_is_the_mean_squared_error() -> None:
    prediction = x0_predictions(parameters(NEW)).detach().requires_grad_()
    elbo_pair_loss(prediction, OUTPUTS).sum().backward()
    error = prediction.detach() - OUTPUTS.unsqueeze(1)
    close(prediction.grad, 2 * error / 4 / error.abs().mean(dim=2, keepdim=True), 1e-12)
    plain = elbo_pair_loss(prediction, OUTPUTS, self_normalize=False)
    close(plain, error.square().mean(dim=2), 1e-12)
