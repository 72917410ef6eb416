"""Weights of a loss whose samples came from an inference engine and not from the trained network.

Engine and network hold the same weights and still differ a little: other kernels, other precision, other batches. The loss of a
unit is multiplied by `network / engine`, its probability under the two, cut off where it leaves its bounds (truncated importance
sampling). Conventions are TRL 1.16's (card vlm_grpo_baseline). Letters: `N` rows, `T` units.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visual_grpo.types import MicroBatch

SAMPLER_LOG_PROB = "sampler_log_prob"
"""Entry of `RolloutBatch.data`: log-probs [N, T] that the engine gave; NaN where it sampled nothing (an edited unit)."""
CorrectionMode = Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"]
LOWEST_LOG_WEIGHT = -18.420680743952367  # ln 1e-8, VESPO's own bound


def sampler_difference(log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Log-prob of the network minus that of the engine, [N, T] float32 or wider; 0 outside the mask and where either is NaN.

    Args:
        log_prob: of the network with the weights that the engine had, [N, T].
        sampler_log_prob: of the engine, [N, T].
        mask: kept units [N, T].
    """
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    difference = log_prob.detach().to(dtype) - sampler_log_prob.to(dtype)
    return torch.where((mask != 0) & ~difference.isnan(), difference, 0.0)


def correction_weights(
    difference: Tensor, *, mode: CorrectionMode = "sequence_mask", upper: float = 3.0, lower: float | None = None
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights of `sampler_difference`.

    Args:
        difference: [N, T].
        mode: `token_*`: one weight a unit, `exp(d)`. `sequence_*`: one a row, `exp(sum d)`, a product and no mean. `*_truncate`
            clamps to [lower, upper]; `*_mask` puts 0 in place of a weight outside.
        upper, lower: bounds of the weight; `lower` None: there is none.

    Returns:
        (weights [N, T] or [N, 1], bool of the same shape: outside the bounds).

    Raises:
        ValueError: an unknown mode.

    Example:
        >>> correction_weights(torch.tensor([[1.0, 0.5]]), mode="token_truncate", upper=2.0)
        (tensor([[2.0000, 1.6487]]), tensor([[ True, False]]))
    """
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence") or action not in ("mask", "truncate"):
        raise ValueError(f"mode must be one of {', '.join(get_args(CorrectionMode))}, got {mode!r}")
    weights = (difference if level == "token" else difference.sum(1, keepdim=True)).exp()
    outside = weights > upper
    if lower is not None:
        outside = outside | (weights < lower)
    if action == "mask":
        return torch.where(outside, 0.0, weights), outside
    return weights.clamp(min=lower, max=upper), outside


def micro_difference(micro: MicroBatch) -> Tensor | None:
    """`sampler_difference` of a pass, [n, u]; None where the network itself sampled.

    None too for rows that are trained under another prompt than they were sampled with: there the two log-probs differ by the
    prompt and not by the engine.
    """
    sampler = micro.rollouts.data.get(SAMPLER_LOG_PROB)
    if sampler is None or "training" in micro.rollouts.prompts.contexts:
        return None
    return sampler_difference(micro.old_log_prob, sampler[:, micro.units], micro.mask)


def sampled_log_prob(micro: MicroBatch) -> Tensor:
    """Log-probs of what sampled, [n, u, *map]: those of the engine where there was one, else the old ones."""
    sampler = micro.rollouts.data.get(SAMPLER_LOG_PROB)
    return micro.old_log_prob if sampler is None else sampler[:, micro.units].to(micro.old_log_prob)


def summed_log_weight(
    difference: Tensor, *, mode: CorrectionMode, upper: float = 3.0, lower: float | None = None
) -> Tensor:
    """Log of a row's truncated weights, summed over its units, [N]: what VESPO adds to its own log-ratio."""
    weights, _ = correction_weights(difference, mode=mode, upper=upper, lower=lower)
    return weights.log().clamp(min=LOWEST_LOG_WEIGHT, max=20.0).sum(1)
