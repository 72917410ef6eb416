"""Divergences between two policies: sampled KL estimators, the KL of two Gaussians, and the velocity distance.

Letters: `N` rows, `T` units, `*map` empty or spatial. Gradient flows through the first policy only; the reference is
detached.
"""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "abs", "k2", "k3", "k3_k2_gradient"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "abs", "k2", "k3", "k3_k2_gradient")


def k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Give `log_prob - ref_log_prob`: unbiased, may be negative. Any shape."""
    return log_prob - ref_log_prob.detach()


def k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Give `(log_prob - ref_log_prob)^2 / 2`: its gradient is that of the true KL on on-policy samples. Any shape."""
    return k1(log_prob, ref_log_prob).square() / 2


def k3(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    *,
    clamp_difference: float | None = 20.0,
    clamp_value: float | None = None,
) -> Tensor:
    """Give `exp(d) - d - 1` with `d = ref_log_prob - log_prob`: unbiased and never negative. Any shape.

    Args:
        log_prob: of the trained policy, with gradient.
        ref_log_prob: of the reference, detached here.
        clamp_difference: d is clamped to +- this (verl: 20), where the gradient ends; `None` never clamps.
        clamp_value: the result is clamped to +- this (verl: 10); `None` never clamps.

    Example:
        >>> k3(torch.tensor([-0.2, 0.1]), torch.zeros(2))
        tensor([0.0214, 0.0048])
    """
    difference = ref_log_prob.detach() - log_prob
    if clamp_difference is not None:
        difference = difference.clamp(-clamp_difference, clamp_difference)
    # expm1 keeps the digits that exp(d) - 1 loses for the small d of a policy that has hardly moved.
    value = torch.expm1(difference) - difference
    return value if clamp_value is None else value.clamp(-clamp_value, clamp_value)


def kl_estimate(
    name: KlEstimator,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    *,
    mask: Tensor | None = None,
    clamp_difference: float | None = 20.0,
    clamp_value: float | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per unit from sampled log-probs.

    Args:
        name: "k1"; "abs" = |k1|; "k2"; "k3" (GRPO, arXiv 2402.03300); "k3_k2_gradient", the value of k3 with the
            gradient of k2 (verl's "+" form), because the gradient of k3 is not that of the KL.
        log_prob: [N, T, *map], with gradient.
        ref_log_prob: same shape, detached here.
        mask: kept units [N, T]; others give 0 whatever they hold. `None` keeps all.
        clamp_difference: see `k3`.
        clamp_value: see `k3`.

    Returns:
        [N, T, *map].

    Raises:
        ValueError: unknown estimator, or the shapes disagree.
    """
    if name not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator must be one of {', '.join(KL_ESTIMATORS)}, got {name!r}")
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(f"ref_log_prob {list(ref_log_prob.shape)} must have log_prob's shape {list(log_prob.shape)}")
    if mask is not None:
        if mask.shape != log_prob.shape[: mask.dim()]:
            raise ValueError(f"mask {list(mask.shape)} must be a leading part of {list(log_prob.shape)}")
        kept = (mask != 0).reshape(*mask.shape, *([1] * (log_prob.dim() - mask.dim())))
        log_prob = torch.where(kept, log_prob, torch.zeros_like(log_prob))
        ref_log_prob = torch.where(kept, ref_log_prob, torch.zeros_like(ref_log_prob))
    if name == "k1":
        return k1(log_prob, ref_log_prob)
    if name == "abs":
        return k1(log_prob, ref_log_prob).abs()
    if name == "k2":
        return k2(log_prob, ref_log_prob)
    value = k3(log_prob, ref_log_prob, clamp_difference=clamp_difference, clamp_value=clamp_value)
    if name == "k3":
        return value
    straight = k2(log_prob, ref_log_prob)
    return straight - straight.detach() + value.detach()


def per_row(values: Tensor | float, like: Tensor, name: str = "values") -> Tensor:
    """Shape a scalar or [N] tensor so that it broadcasts against `like` [N, ...], in the dtype of `like`."""
    tensor = torch.as_tensor(values, dtype=like.dtype, device=like.device)
    if tensor.dim() == 0:
        return tensor
    if tensor.shape != like.shape[:1]:
        raise ValueError(f"{name} must be a number or one per row [{like.shape[0]}], got shape {list(tensor.shape)}")
    return tensor.reshape(-1, *([1] * (like.dim() - 1)))


def _mean_over_row(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1) if values.dim() > 1 else values


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor | float) -> Tensor:
    """KL of two Gaussians with one std, averaged over the dimensions of a row: `mean_d (mean - ref)^2 / (2 std^2)`.

    Flow-GRPO's code (arXiv 2505.05470) passes the noise std WITHOUT `sqrt(-dt)`, and its `kl_beta` belongs to that
    form; `transitions.transition_kl` does so. With the std of the transition it is the exact KL per dimension.

    Args:
        mean: [N, ...], with gradient.
        ref_mean: same shape, detached here.
        std: number or [N], > 0.

    Returns:
        [N] in float32 or wider.

    Raises:
        ValueError: shapes disagree.

    Example:
        >>> gaussian_kl(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]]), 2.0)
        tensor([0.6250])
    """
    if mean.shape != ref_mean.shape:
        raise ValueError(f"ref_mean {list(ref_mean.shape)} must have the shape of mean {list(mean.shape)}")
    wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
    difference = (wide - ref_mean.detach().to(wide.dtype)) / per_row(std, wide, "std")
    return _mean_over_row(difference.square()) / 2


def gaussian_kl_of_velocity(
    velocity: Tensor,
    ref_velocity: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    noise_std: Tensor | float,
) -> Tensor:
    """Give Flow-GRPO's KL of one SDE step from two velocities, without the means.

    `dt^2 / 2 * (std (1 - sigma) / (2 sigma) + 1 / std)^2 * mean_d (velocity - ref)^2`, equal to `gaussian_kl` on the
    means of `flow_sde_step` with the noise std WITHOUT `sqrt(-dt)`.

    Args:
        velocity: [N, ...], with gradient.
        ref_velocity: same shape, detached here.
        sigma: noise level of the step, number or [N].
        sigma_next: next noise level, number or [N].
        noise_std: std of the SDE's noise without `sqrt(-dt)`, number or [N], > 0.

    Returns:
        [N] in float32 or wider.
    """
    distance = velocity_mse(velocity, ref_velocity)
    level, step = per_row(sigma, distance, "sigma"), per_row(sigma_next, distance, "sigma_next")
    std = per_row(noise_std, distance, "noise_std")
    factor = std * (1 - level) / (2 * level) + 1 / std
    return (step - level).square() / 2 * factor.square() * distance


def velocity_mse(velocity: Tensor, ref_velocity: Tensor) -> Tensor:
    """Mean squared difference of two velocities (or any two predictions) over all but the first dimension.

    Args:
        velocity: [N, ...], with gradient.
        ref_velocity: same shape, detached here.

    Returns:
        [N] in float32 or wider.
    """
    if velocity.shape != ref_velocity.shape:
        raise ValueError(f"ref_velocity {list(ref_velocity.shape)} must have the shape {list(velocity.shape)}")
    wide = velocity.to(torch.promote_types(velocity.dtype, torch.float32))
    return _mean_over_row((wide - ref_velocity.detach().to(wide.dtype)).square())
