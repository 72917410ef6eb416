"""Surrogate losses: new log-probs, old log-probs and advantages -> a loss per unit, to be minimised.

Letters: `N` rows, `T` units, `*map` empty or spatial (`h, w`). Only `log_prob` carries gradient; the rest is detached.
Units outside the mask give loss 0 and gradient 0 whatever they hold (also -inf or NaN), yet the loss stays attached to
`log_prob`, so that backward runs on a batch without a kept unit. Every surrogate returns the loss [N, T, *map] and
metrics as `(sum, count)` pairs, which add up over micro-batches and ranks and are divided once, late.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.aggregation import expand_units

RatioLevel = Literal["token", "sequence", "sequence_token"]
Metrics = dict[str, tuple[Tensor, Tensor]]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before `exp` (verl's value); beyond it the value is finite and the gradient 0."""


def _kept(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dim() != 2 or like.dim() < 2 or mask.shape != like.shape[:2]:
        raise ValueError(f"mask must be [N, T] for log_prob [N, T, *map], got {list(mask.shape)}, {list(like.shape)}")
    return expand_units(mask != 0, like, "mask").expand_as(like)


def _zero_outside(values: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, values, torch.zeros_like(values))


def _row_mean(values: Tensor, kept: Tensor) -> Tensor:
    dims = tuple(range(1, values.dim()))
    count = kept.sum(dim=dims, keepdim=True).clamp(min=1)
    return _zero_outside(values, kept).sum(dim=dims, keepdim=True) / count


def importance_log_ratio(
    log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, *, level: RatioLevel = "token"
) -> Tensor:
    """Log of the importance ratio `pi_new / pi_old`, clamped to +-`LOG_RATIO_LIMIT`.

    Args:
        log_prob: of the trained policy, [N, T, *map], with gradient.
        old_log_prob: of the policy that sampled, same shape, detached here.
        mask: kept units [N, T].
        level: "token": one ratio a unit. "sequence" (GSPO, arXiv 2507.18071): the mean over the row's kept units (and
            over the map), with gradient through the mean. "sequence_token" (GSPO-token): the value of "sequence", but
            each unit's gradient is that of its own log-prob; for advantages that vary by unit.

    Returns:
        [N, T, *map] in float32 or wider; for "sequence" [N, 1, *ones]. 0 outside the mask and on rows without a kept unit.

    Raises:
        ValueError: shapes disagree or `level` is unknown.

    Example:
        >>> new, old = torch.tensor([[0.1, 0.3]]), torch.zeros(1, 2)
        >>> importance_log_ratio(new, old, torch.ones(1, 2), level="sequence")
        tensor([[0.2000]])
    """
    if log_prob.shape != old_log_prob.shape:
        raise ValueError(f"old_log_prob {list(old_log_prob.shape)} must have log_prob's shape {list(log_prob.shape)}")
    kept = _kept(mask, log_prob)
    # exp(LOG_RATIO_LIMIT) overflows float16, and bfloat16 has too few digits for a clip range of 1e-4.
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    difference = _zero_outside(log_prob.to(dtype) - old_log_prob.detach().to(dtype), kept)
    if level == "token":
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level not in ("sequence", "sequence_token"):
        raise ValueError(f"ratio level must be 'token', 'sequence' or 'sequence_token', got {level!r}")
    # The mean is clamped, not its terms: one far token must not lose its gradient while the row is in range.
    row = _row_mean(difference, kept)
    if level == "sequence":
        return row.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    per_unit = row.detach() + difference - difference.detach()
    return _zero_outside(per_unit.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), kept)


def clip_is_active(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Tell where the clipped objective has no gradient: (A < 0, ratio < 1 - low) or (A > 0, ratio > 1 + high)."""
    return ((advantages < 0) & (ratio < 1 - clip_low)) | ((advantages > 0) & (ratio > 1 + clip_high))


def _share(flags: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return (flags & kept).sum().detach(), kept.sum().detach()


def _ratio_metrics(log_ratio: Tensor, kept: Tensor) -> Metrics:
    log_ratio, count = log_ratio.detach().expand_as(kept), kept.sum()
    ratio = log_ratio.exp()
    return {
        "ratio": (_zero_outside(ratio, kept).sum(), count),
        "approx_kl": (_zero_outside(ratio - 1 - log_ratio, kept).sum(), count),
    }


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"the ratio is clipped to [1 - clip_low, 1 + clip_high]; clip_low must be in [0, 1] and clip_high >= 0, "
            f"got {clip_low} and {clip_high}"
        )


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped loss `-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` of GRPO, DAPO and GSPO.

    Args:
        log_prob: [N, T, *map], with gradient.
        old_log_prob: same shape.
        advantages: [N], [N, T] or [N, T, *map].
        mask: kept units [N, T].
        level: see `importance_log_ratio`; the loss of a "sequence" ratio is repeated on every kept unit of the row.
        clip_low: the ratio is clipped from below at `1 - clip_low`.
        clip_high: and from above at `1 + clip_high`.
        dual_clip: c > 1 bounds the loss by `-c A` where A < 0 (verl uses 3); `None` for no bound.
        delta: upper bound > 1 of the unclipped ratio (TRL's two-sided clip); `None` for no bound.

    Returns:
        loss [N, T, *map], and metrics `clip_fraction`, `clip_fraction_low`, `clip_fraction_high`, `ratio`, `approx_kl`.

    Raises:
        ValueError: shapes disagree or a bound is out of its range.

    Example:
        >>> new = torch.tensor([[0.1, 0.3]])
        >>> loss, metrics = clipped_surrogate(new, torch.zeros(1, 2), torch.tensor([1.2]), torch.ones(1, 2))
        >>> loss
        tensor([[-1.3262, -1.4400]])
    """
    _check_clip(clip_low, clip_high)
    for name, bound in (("dual_clip", dual_clip), ("delta", delta)):
        if bound is not None and bound <= 1:
            raise ValueError(f"{name} bounds the ratio from above and must be > 1, got {bound}")
    kept = _kept(mask, log_prob)
    log_ratio = importance_log_ratio(log_prob, old_log_prob, mask, level=level)
    weight = expand_units(advantages.detach(), log_prob, "advantages").to(log_ratio.dtype)
    ratio = log_ratio.exp()
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(bounded * weight, ratio.clamp(1 - clip_low, 1 + clip_high) * weight)
    if dual_clip is not None:
        loss = torch.where(weight < 0, torch.minimum(loss, -dual_clip * weight), loss)
    fixed = ratio.detach()
    low, high = (weight < 0) & (fixed < 1 - clip_low), (weight > 0) & (fixed > 1 + clip_high)
    metrics = {
        "clip_fraction": _share(low | high, kept),
        "clip_fraction_low": _share(low, kept),
        "clip_fraction_high": _share(high, kept),
        **_ratio_metrics(log_ratio, kept),
    }
    return _zero_outside(loss.expand_as(kept), kept), metrics


def cispo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel = "token",
    ratio_cap: float = 5.0,
    ratio_floor: float | None = None,
) -> tuple[Tensor, Metrics]:
    """CISPO: `-sg(min(ratio, cap)) A log_prob`; a far unit is weighted down and keeps its gradient.

    Arguments, shapes and errors are those of `clipped_surrogate`, except that the bounds are on the ratio ITSELF:
    TRL's `epsilon_high` is `ratio_cap` (no floor), verl's range is `ratio_floor = 1 - low, ratio_cap = 1 + high`.
    Metrics: `clip_fraction` (share of units outside the bounds), `ratio`, `approx_kl`.
    """
    if ratio_cap <= 0 or (ratio_floor is not None and not 0 <= ratio_floor <= ratio_cap):
        raise ValueError(f"cispo needs 0 <= ratio_floor <= ratio_cap, got {ratio_floor} and {ratio_cap}")
    kept = _kept(mask, log_prob)
    log_ratio = importance_log_ratio(log_prob, old_log_prob, mask, level=level).detach()
    ratio = log_ratio.exp()
    weight = expand_units(advantages.detach(), log_prob, "advantages").to(log_ratio.dtype)
    loss = -ratio.clamp(min=ratio_floor or 0.0, max=ratio_cap) * weight * _zero_outside(log_prob, kept)
    outside = (ratio > ratio_cap) | (ratio < (ratio_floor or 0.0))
    return _zero_outside(loss, kept), {"clip_fraction": _share(outside, kept), **_ratio_metrics(log_ratio, kept)}


def sapo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: RatioLevel = "token",
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """SAPO: `-(4 / tau) sigmoid(tau (ratio - 1)) A`, a smooth gate in place of the clip.

    `tau` is `temperature_positive` where A > 0 and `temperature_negative` elsewhere. The gate has slope 1 at ratio 1.
    Arguments, shapes and errors are those of `clipped_surrogate`; metrics `ratio`, `approx_kl`.
    """
    if min(temperature_positive, temperature_negative) <= 0:
        raise ValueError(f"sapo temperatures must be > 0, got {temperature_positive} and {temperature_negative}")
    kept = _kept(mask, log_prob)
    log_ratio = importance_log_ratio(log_prob, old_log_prob, mask, level=level)
    weight = expand_units(advantages.detach(), log_prob, "advantages").to(log_ratio.dtype)
    positive = torch.full_like(weight, temperature_positive)
    tau = torch.where(weight > 0, positive, torch.full_like(weight, temperature_negative))
    loss = -(4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1)) * weight
    return _zero_outside(loss.expand_as(kept), kept), _ratio_metrics(log_ratio, kept)


def vespo_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sampler_log_ratio: Tensor | None = None,
    shape_positive: tuple[float, float] = (2.0, 3.0),
    shape_negative: tuple[float, float] = (3.0, 2.0),
) -> tuple[Tensor, Metrics]:
    """VESPO: `-sg(phi) A log_prob` with `phi = exp(lam + k S - lam exp(S))`, S the SUMMED log-ratio of the row.

    Args:
        log_prob: [N, T, *map], with gradient. Over a map the log-ratio is averaged before the sum over units.
        old_log_prob: same shape.
        advantages: [N], [N, T] or [N, T, *map].
        mask: kept units [N, T].
        sampler_log_ratio: log-ratio of the old policy to a separate sampling engine, summed over the row, [N].
        shape_positive: (k, lam) where A >= 0.
        shape_negative: (k, lam) where A < 0.

    Returns:
        loss [N, T, *map], and metrics `phi`, `ratio`, `approx_kl`. Each unit's log-ratio is clamped to +-20 and S to
        [ln 1e-8, 20].

    Raises:
        ValueError: shapes disagree.
    """
    kept = _kept(mask, log_prob)
    log_ratio = importance_log_ratio(log_prob, old_log_prob, mask).detach()
    per_unit = log_ratio if log_ratio.dim() == 2 else log_ratio.flatten(2).mean(dim=2)
    total = per_unit.sum(dim=1)
    if sampler_log_ratio is not None:
        if sampler_log_ratio.shape != total.shape:
            raise ValueError(f"sampler_log_ratio must have shape [N], got {list(sampler_log_ratio.shape)}")
        total = total + sampler_log_ratio.detach().to(total.dtype)
    total = expand_units(total.clamp(math.log(1e-8), LOG_RATIO_LIMIT), log_prob)
    weight = expand_units(advantages.detach(), log_prob, "advantages").to(log_ratio.dtype)

    def gate(shape: tuple[float, float]) -> Tensor:
        k, lam = shape
        return torch.exp(lam + k * total - lam * total.exp())

    phi = torch.where(weight >= 0, gate(shape_positive), gate(shape_negative))
    loss = -phi * weight * _zero_outside(log_prob, kept)
    phi_sum = _zero_outside(phi.expand_as(kept), kept).sum()
    return _zero_outside(loss, kept), {"phi": (phi_sum, kept.sum()), **_ratio_metrics(log_ratio, kept)}


def entropy_threshold(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Entropy [scalar] above which the `share` most uncertain kept units lie (linear quantile `1 - share`).

    Call it on the units of ALL ranks. Without a kept unit it is +inf.

    Raises:
        ValueError: `share` is outside (0, 1] or the shapes disagree.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share of kept units must be in (0, 1], got {share}")
    # Not torch.quantile: it refuses inputs above 16 million elements.
    ordered = entropy.detach()[_kept(mask, entropy)].sort().values
    if ordered.numel() == 0:
        return torch.full((), torch.inf, dtype=entropy.dtype, device=entropy.device)
    position = (1 - share) * (ordered.numel() - 1)
    below = math.floor(position)
    above = min(below + 1, ordered.numel() - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def top_entropy_mask(entropy: Tensor, mask: Tensor, share: float, *, threshold: Tensor | None = None) -> Tensor:
    """Keep the `share` of kept units with the highest entropy: bool, shape of `entropy` [N, T, *map].

    Args:
        entropy: nats, [N, T, *map].
        mask: kept units [N, T].
        share: in (0, 1].
        threshold: of `entropy_threshold` over all ranks; `None` computes it from this batch.
    """
    limit = entropy_threshold(entropy, mask, share) if threshold is None else threshold
    return (entropy.detach() >= limit) & _kept(mask, entropy)


def off_policy_sequence_mask(
    log_prob: Tensor, sampler_log_prob: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Drop rows that the policy has moved away from and that would be pushed down (DeepSeek-V3.2).

    A row goes when A < 0 and the mean over its kept units of `sampler_log_prob - log_prob` exceeds `threshold` (nats).
    A NaN sampler log-prob counts as no difference.

    Args:
        log_prob: [N, T, *map], detached here.
        sampler_log_prob: of the policy or engine that sampled, same shape.
        advantages: [N], [N, T] or [N, T, *map].
        mask: kept units [N, T].
        threshold: largest allowed mean difference.

    Returns:
        bool, same shape as `log_prob`; True = stays. Multiply it into the unit weights, not into the mask, so that
        the divisors of the aggregation do not change.
    """
    kept = _kept(mask, log_prob)
    difference = torch.where(sampler_log_prob.isnan(), 0.0, sampler_log_prob.detach() - log_prob.detach())
    far = _row_mean(difference, kept) > threshold
    weight = expand_units(advantages.detach(), log_prob, "advantages")
    return (~((weight < 0) & far)).expand_as(log_prob)


def elbo_pair_loss(x0_prediction: Tensor, x0: Tensor, *, self_normalize: bool = True, floor: float = 1e-5) -> Tensor:
    """Denoising loss of a finished sample, whose negative stands for its log-prob (V-GRPO, arXiv 2604.23380, Eq. 14).

    `mean_d (x0_prediction - x0)^2 / sg(max(mean_d |x0_prediction - x0|, floor))`, mean (not sum) over the latent
    dimensions; sg = stop gradient.

    Args:
        x0_prediction: clean latents predicted from M noised copies, [N, M, *latent], or from one, [N, *latent].
        x0: the finished latents [N, *latent], detached here.
        self_normalize: divide by the detached mean absolute error; `False` leaves the mean squared error.
        floor: smallest divisor, so that an exact prediction stays finite.

    Returns:
        [N, M], or [N]; computed in float32 or wider.

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> elbo_pair_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
        tensor([1.6667])
    """
    pairs = x0_prediction.dim() == x0.dim() + 1
    expected = x0_prediction.shape[:1] + x0_prediction.shape[2:] if pairs else x0_prediction.shape
    if x0.dim() < 2 or x0.shape != expected:
        raise ValueError(
            f"x0 must be [N, *latent] and x0_prediction [N, M, *latent] or [N, *latent], "
            f"got {list(x0.shape)} and {list(x0_prediction.shape)}"
        )
    if floor <= 0:
        raise ValueError(f"floor must be > 0, got {floor}")
    dtype = torch.promote_types(x0_prediction.dtype, torch.float32)
    target = x0.detach().to(dtype)
    error = (x0_prediction.to(dtype) - (target.unsqueeze(1) if pairs else target)).flatten(2 if pairs else 1)
    squared = error.square().mean(dim=-1)
    if not self_normalize:
        return squared
    return squared / error.detach().abs().mean(dim=-1).clamp(min=floor)
