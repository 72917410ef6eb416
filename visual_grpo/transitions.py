"""One denoising step of a flow-matching sampler as a Gaussian transition, its log-prob and its KL.

Time runs from sigma = 1 (noise) to 0 (image): `x_sigma = (1 - sigma) x0 + sigma noise`; the network predicts
`velocity = noise - x0`. The step functions are elementwise, so latents have any rank: [N, C, H, W], packed [N, L, C],
video [N, C, F, H, W]. They compute in float32 or wider whatever the input (bf16 overflows); store `x_next` in that
dtype, or the ratio of the first update is not 1. `log_prob` and KL come from one `(mean, std)` and from nothing else.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.divergences import per_row

Reduction = Literal["mean", "sum", "channel_mean", "channel_sum", "none"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "channel_mean", "channel_sum", "none")
LogProbForm = Literal["gaussian", "squared_error"]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Gaussian of the next latents given the present ones: `N(mean, std^2)`, the same std in every dimension."""

    mean: Tensor
    """[N, ...] float32 or wider, with the gradient of the velocity."""
    std: Tensor
    """[N] standard deviation of `x_next`; it INCLUDES sqrt(-dt). 0 for a deterministic (ODE) step."""
    kl_factor: Tensor
    """[N] turns the exact KL per dimension into Flow-GRPO's code form: -dt for an SDE step, 1 for a CPS step."""
    log_prob_form: LogProbForm = "gaussian"
    """"gaussian": the log-density; "squared_error": `-(x_next - mean)^2`, CPS without variance and constants."""

    def sample(self, noise: Tensor) -> Tensor:
        """Give `mean + std * noise` [N, ...]; `noise` is standard normal, and the caller owns its generator."""
        if noise.shape != self.mean.shape:
            raise ValueError(
                f"noise must have the shape of the latents {list(self.mean.shape)}, got {list(noise.shape)}"
            )
        return self.mean + per_row(self.std, self.mean, "std") * noise.to(self.mean.dtype)


def _wide(x: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != velocity.shape or x.dim() < 2:
        raise ValueError(f"x and velocity must share a shape [N, ...], got {list(x.shape)} and {list(velocity.shape)}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, velocity.dtype), torch.float32)
    return x.to(dtype), velocity.to(dtype)


def _levels(x: Tensor, sigma: Tensor | float, sigma_next: Tensor | float) -> tuple[Tensor, Tensor]:
    level, next_level = (
        per_row(value, x, name).reshape(-1).expand(x.shape[0])
        for value, name in ((sigma, "sigma"), (sigma_next, "sigma_next"))
    )
    if not bool(((next_level >= 0) & (next_level < level) & (level <= 1)).all()):
        raise ValueError(
            f"noise levels must satisfy 0 <= sigma_next < sigma <= 1, got sigma {level.tolist()} and "
            f"sigma_next {next_level.tolist()}; time runs from 1 (noise) to 0 (image)"
        )
    return level, next_level


def interpolate(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """Noise clean latents [N, ...] to level sigma (number or [N]): `(1 - sigma) x0 + sigma noise`."""
    clean, eps = _wide(x0, noise)
    level = per_row(sigma, clean, "sigma")
    return (1 - level) * clean + level * eps


def x0_from_velocity(x: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """Predict the clean latents [N, ...] at level sigma (number or [N]): `x - sigma velocity`."""
    latents, flow = _wide(x, velocity)
    return latents - per_row(sigma, latents, "sigma") * flow


def ode_step(x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float) -> Transition:
    """Euler step of the probability-flow ODE, `x + velocity (sigma_next - sigma)`, as a transition with std 0.

    It has no log-prob: never store or train it. Arguments as in `flow_sde_step`.
    """
    latents, flow = _wide(x, velocity)
    level, next_level = _levels(latents, sigma, sigma_next)
    step = next_level - level
    mean = latents + flow * per_row(step, latents)
    return Transition(mean=mean, std=torch.zeros_like(level), kl_factor=-step)


def _sde_step(latents: Tensor, flow: Tensor, level: Tensor, next_level: Tensor, noise_std: Tensor) -> Transition:
    step = next_level - level
    half_variance = noise_std.square() / (2 * level)
    keep = per_row(1 + half_variance * step, latents)
    move = per_row((1 + half_variance * (1 - level)) * step, latents)
    return Transition(mean=latents * keep + flow * move, std=noise_std * (-step).sqrt(), kl_factor=-step)


def flow_sde_step(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    noise_scale: float,
    sigma_max: Tensor | float,
) -> Transition:
    """One reverse step of the Flow-GRPO SDE (arXiv 2505.05470): same marginals as the ODE, with noise.

    `s = noise_scale sqrt(sigma / (1 - sigma))`, `mean = x (1 + s^2 dt / (2 sigma)) + velocity (1 + s^2 (1 - sigma) /
    (2 sigma)) dt`, `std = s sqrt(-dt)`, `dt = sigma_next - sigma < 0`.

    Args:
        x: latents at `sigma`, [N, ...].
        velocity: model output `noise - x0` at (`x`, `sigma`), same shape; its gradient reaches `mean`.
        sigma: noise level, number or [N], in (0, 1].
        sigma_next: next noise level, number or [N], in [0, sigma).
        noise_scale: 0.7 in the paper; 0 gives the ODE step (std 0, no log-prob).
        sigma_max: the schedule's second level, `sigmas[1]`; stands for sigma in `1 - sigma` where sigma is exactly 1
            (only in s), which would divide by zero. In the first step of a schedule that begins nearer to 1 than that
            step is long (SANA's at 0.9997) `1 - sigma` is the step's length: its std would be 7 otherwise.

    Returns:
        `Transition`; `std` and `kl_factor` are [N].

    Raises:
        ValueError: shapes disagree, the levels are not ordered, sigma_max is not below 1, or noise_scale < 0.

    Example:
        >>> step = flow_sde_step(torch.ones(1, 4), torch.zeros(1, 4), 0.5, 0.25, noise_scale=1.0, sigma_max=0.9)
        >>> step.mean[0, 0], step.std
        (tensor(0.7500), tensor([0.5000]))
    """
    if noise_scale < 0:
        raise ValueError(f"noise_scale must be >= 0, got {noise_scale}")
    latents, flow = _wide(x, velocity)
    level, next_level = _levels(latents, sigma, sigma_next)
    largest = per_row(sigma_max, latents, "sigma_max").reshape(-1).expand_as(level)
    if not bool((largest < 1).all()):
        raise ValueError(f"sigma_max must be below 1 (pass sigmas[1], the level after the first), got {sigma_max}")
    near = (1 - level).maximum(torch.where(next_level >= largest, level - next_level, 0.0))
    rest = torch.where(level == 1, 1 - largest, near)
    return _sde_step(latents, flow, level, next_level, noise_scale * (level / rest).sqrt())


def dance_sde_step(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, *, noise_scale: float
) -> Transition:
    """One reverse step of the DanceGRPO SDE (arXiv 2505.07818): as `flow_sde_step` with the constant `s = noise_scale`.

    Their form, `x + velocity dt - noise_scale^2 score dt / 2` with `score = -(x + (1 - sigma) velocity) / sigma`, is
    the same expression. `noise_scale` is 0.3 for images; other arguments, result and errors as in `flow_sde_step`.
    """
    if noise_scale < 0:
        raise ValueError(f"noise_scale must be >= 0, got {noise_scale}")
    latents, flow = _wide(x, velocity)
    level, next_level = _levels(latents, sigma, sigma_next)
    return _sde_step(latents, flow, level, next_level, torch.full_like(level, noise_scale))


def cps_step(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, *, noise_scale: float
) -> Transition:
    """Coefficients-preserving step: predicted image and noise are mixed to exactly the next noise level.

    `std = sigma_next sin(noise_scale pi / 2)`, `mean = (1 - sigma_next) (x - sigma velocity) +
    sqrt(sigma_next^2 - std^2) (x + (1 - sigma) velocity)`. The noise does not shrink with dt, so many
    steps do not tend to the ODE's marginals. The last step (sigma_next = 0) has std 0 and is an ODE step.

    `noise_scale` is in [0, 1] (0.8 in the recipes). The log-prob is `-(x_next - mean)^2`: variance and constants are
    dropped as in the reference code. Other arguments, result and errors as in `flow_sde_step`.
    """
    if not 0 <= noise_scale <= 1:
        raise ValueError(f"noise_scale of a CPS step must be in [0, 1], got {noise_scale}")
    latents, flow = _wide(x, velocity)
    level, next_level = _levels(latents, sigma, sigma_next)
    angle = noise_scale * math.pi / 2
    return Transition(
        mean=_mixed(latents, flow, level, next_level, next_level * math.cos(angle)),
        std=next_level * math.sin(angle),
        kl_factor=torch.ones_like(level),
        log_prob_form="squared_error",
    )


def _mixed(latents: Tensor, flow: Tensor, level: Tensor, next_level: Tensor, noise_weight: Tensor) -> Tensor:
    """`(1 - next_level) x0 + noise_weight noise` with the image and the noise that the velocity predicts."""
    clean = latents - per_row(level, latents) * flow
    noise = latents + per_row(1 - level, latents) * flow
    return clean * per_row(1 - next_level, latents) + noise * per_row(noise_weight, latents)


def ddim_step(
    x: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float, *, eta: float
) -> Transition:
    """Step of DDIM (arXiv 2010.02502) with noise `eta`, as DDPO and DanceGRPO train it; 1 is ancestral (DDPM) sampling.

    `std = eta sigma_next sqrt(1 - snr / snr_next)` with `snr = ((1 - sigma) / sigma)^2`, `mean = (1 - sigma_next) x0 +
    sqrt(sigma_next^2 - std^2) noise`, with x0 and noise as predicted. It is DDIM's equation 12 in other units: latents
    `sqrt(alpha) x0 + sqrt(1 - alpha) noise` of a variance-preserving model, divided by `c = sqrt(alpha) + sqrt(1 - alpha)`, are
    ours at `sigma = sqrt(1 - alpha) / c`. The log-density per dimension is larger than in those units by `log c_next`, which no
    ratio and no gradient sees.

    `eta` is in [0, 1]; 0 is the ODE step (std 0, no log-prob), and so is a step to sigma_next = 0. Other arguments, result and
    errors as in `flow_sde_step`.

    Example:
        >>> step = ddim_step(torch.ones(1, 4), torch.zeros(1, 4), 0.5, 0.25, eta=0.6)
        >>> round(float(step.std), 6)  # 0.6 * 0.25 * sqrt(1 - 1 / 9)
        0.141421
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta of a DDIM step must be in [0, 1], got {eta}")
    latents, flow = _wide(x, velocity)
    level, next_level = _levels(latents, sigma, sigma_next)
    quotient = ((1 - level) * next_level / (level * (1 - next_level))).square()
    share = eta * (1 - quotient).clamp(min=0).sqrt()
    mean = _mixed(latents, flow, level, next_level, next_level * (1 - share.square()).clamp(min=0).sqrt())
    return Transition(mean=mean, std=next_level * share, kl_factor=torch.ones_like(level))


def multistep_step(
    x: Tensor,
    x0: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    *,
    before: tuple[Tensor, Tensor | float] | None = None,
) -> Tensor:
    """One deterministic step of DPM-Solver++(2M) (arXiv 2211.01095), midpoint form, for flow matching.

    With `lambda = log((1 - sigma) / sigma)`, `h` its growth over this step and `h_before` over the one before:
    `D = x0 + h / (2 h_before) (x0 - x0_before)` and
    `x_next = (sigma_next / sigma) x + (1 - sigma_next - (1 - sigma) sigma_next / sigma) D`. Without a step before, and to
    sigma_next = 0, `D = x0`: an Euler step of the ODE.

    Args:
        x: latents at `sigma`, [N, ...].
        x0: clean latents predicted there, same shape.
        sigma: noise level, number or [N], in (0, 1].
        sigma_next: next noise level, number or [N], in [0, sigma).
        before: `x0` and `sigma` of the step before.

    Returns:
        Latents at `sigma_next` in float32 or wider. It has no log-prob.

    Raises:
        ValueError: shapes disagree, or the levels are not ordered.
    """
    latents, clean = _wide(x, x0)
    level, next_level = _levels(latents, sigma, sigma_next)
    image = clean
    if before is not None and bool((next_level > 0).all()):
        clean_before, level_before = before[0].to(clean), per_row(before[1], latents, "sigma before")
        level_before, _ = _levels(latents, level_before, level)
        now, after, earlier = (((1 - s) / s).log() for s in (level, next_level, level_before))
        image = clean + per_row((after - now) / (2 * (now - earlier)), latents) * (clean - clean_before)
    shrink = next_level / level
    return latents * per_row(shrink, latents) + image * per_row(1 - next_level - (1 - level) * shrink, latents)


def reduce_dimensions(values: Tensor, reduction: Reduction, channel_dim: int = 1) -> Tensor:
    """Reduce [N, ...] over all latent dimensions ("mean", "sum": [N]), over the channels only, or not at all.

    Args:
        values: [N, ...].
        reduction: "channel_mean" and "channel_sum" leave the spatial map, e.g. [N, C, H, W] -> [N, H, W].
        channel_dim: where the channels are; 1, or -1 for packed latents [N, L, C].
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if reduction == "none":
        return values
    if reduction in ("channel_mean", "channel_sum"):
        if channel_dim % values.dim() == 0:
            raise ValueError(f"channel_dim ({channel_dim}) is the batch dimension; use 1, or -1 for packed latents")
        return values.mean(dim=channel_dim) if reduction == "channel_mean" else values.sum(dim=channel_dim)
    flat = values.flatten(1)
    return flat.mean(dim=1) if reduction == "mean" else flat.sum(dim=1)


def _positive_std(transition: Transition) -> Tensor:
    if not bool((transition.std > 0).all()):
        raise ValueError(
            "a deterministic step (std 0) has no log-prob and no KL; "
            "leave ODE steps and the last CPS step out of the trained units"
        )
    return per_row(transition.std, transition.mean, "std")


def transition_log_prob(
    transition: Transition, x_next: Tensor, reduction: Reduction = "mean", *, channel_dim: int = 1
) -> Tensor:
    """Log-prob of the latents that were sampled, under this transition.

    `-(x_next - mean)^2 / (2 std^2) - log std - log sqrt(2 pi)` per dimension; for CPS only `-(x_next - mean)^2`.
    Flow-GRPO takes the MEAN over the dimensions, not the density's sum: ratios stay within about 1e-3 of 1, hence its
    tiny clip range.

    Args:
        transition: of the policy, with gradient in `mean`.
        x_next: [N, ...] as sampled; detached here.
        reduction: see `reduce_dimensions`.
        channel_dim: see `reduce_dimensions`.

    Returns:
        [N], or a map for the channel reductions, or [N, ...] for "none"; float32 or wider.

    Raises:
        ValueError: a step is deterministic, or the shapes disagree.
    """
    if x_next.shape != transition.mean.shape:
        raise ValueError(f"x_next {list(x_next.shape)} must have the shape of mean {list(transition.mean.shape)}")
    std = _positive_std(transition)
    error = x_next.detach().to(transition.mean.dtype) - transition.mean
    if transition.log_prob_form == "squared_error":
        return reduce_dimensions(-error.square(), reduction, channel_dim)
    log_density = -(error / std).square() / 2 - std.log() - math.log(math.sqrt(2 * math.pi))
    return reduce_dimensions(log_density, reduction, channel_dim)


def transition_kl(
    transition: Transition,
    ref_transition: Transition,
    reduction: Reduction = "mean",
    *,
    exact: bool = False,
    channel_dim: int = 1,
) -> Tensor:
    """KL to the reference's transition of the same step, from the two means and the one std they share.

    Args:
        transition: of the policy, with gradient in `mean`.
        ref_transition: of the reference at the same latents and levels; its mean is detached here.
        reduction: "mean" is the form that Flow-GRPO's `kl_beta` belongs to; see `reduce_dimensions`.
        exact: `False` divides by the noise std without `sqrt(-dt)`, as Flow-GRPO's code does; `True` by the std of the
            transition (the KL itself, with `reduction="sum"`). Both are the same for a CPS step.
        channel_dim: see `reduce_dimensions`.

    Returns:
        [N], a map, or [N, ...], as in `transition_log_prob`.

    Raises:
        ValueError: a step is deterministic, or the two transitions differ in shape or std.
    """
    if ref_transition.mean.shape != transition.mean.shape:
        raise ValueError(
            f"the reference mean {list(ref_transition.mean.shape)} must have the shape {list(transition.mean.shape)}"
        )
    if not torch.equal(transition.std, ref_transition.std):
        raise ValueError("policy and reference transitions must have one std; build both from the same noise levels")
    std = _positive_std(transition)
    difference = (transition.mean - ref_transition.mean.detach()) / std
    divergence = difference.square() / 2
    if not exact:
        divergence = divergence * per_row(transition.kl_factor, transition.mean)
    return reduce_dimensions(divergence, reduction, channel_dim)
