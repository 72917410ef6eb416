"""Unit losses -> one number. Every aggregation is linear, so it is a tensor of coefficients and a sum.

`loss = sum(unit_loss * unit_weights * coefficients)`. The divisors (`Totals`) are those of the WHOLE optimizer step
(all ranks, all micro-batches): the sum of the micro-batch losses is then the loss of the step, whatever the split.
DDP and FSDP average gradients over ranks; multiply the loss by the number of ranks to undo it. Unit weights multiply
the loss and never enter a divisor. Letters: `n` rows of a micro-batch, `T` units, `*map` empty or spatial.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

AggregationMode = Literal[
    "sequence_mean_token_mean",
    "token_mean",
    "fixed_length",
    "sequence_mean_token_sum",
    "token_sum_over_length",
    "micro_batch_token_mean",
]
AGGREGATION_MODES: tuple[AggregationMode, ...] = (
    "sequence_mean_token_mean",
    "token_mean",
    "fixed_length",
    "sequence_mean_token_sum",
    "token_sum_over_length",
    "micro_batch_token_mean",
)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Denominators of one optimizer step, summed over all ranks and micro-batches."""

    rows: float | Tensor
    """Rows of the step; a row without a kept unit counts."""
    units: float | Tensor
    """Kept units of the step, i.e. the sum of all unit masks."""
    micro_batches: float | Tensor = 1
    """Micro-batches of the step over all ranks; read by "micro_batch_token_mean" only."""
    groups: float | Tensor = 0
    """Groups of the step, also those without a signal."""
    live_rows: float | Tensor = 0
    """Rows of the step whose advantage is not 0 everywhere."""
    spans: tuple[float, ...] = ()
    """Kept units of the step by their tag `span` (`types.Span`); empty where nothing is tagged."""

    def __post_init__(self) -> None:
        for name in ("rows", "units", "micro_batches", "groups", "live_rows"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and value < 0:
                raise ValueError(f"Totals.{name} must be >= 0, got {value}")

    @classmethod
    def of_mask(cls, mask: Tensor, *, micro_batches: int = 1) -> "Totals":
        """Count the totals of a step from its complete unit mask [N, T] (one process)."""
        return cls(rows=mask.shape[0], units=(mask != 0).sum(), micro_batches=micro_batches)


def expand_units(values: Tensor, like: Tensor, name: str = "values") -> Tensor:
    """View `values` [N], [N, T] or [N, T, *map] so that it broadcasts against `like` [N, T, *map].

    Raises:
        ValueError: `values` does not agree with the leading dimensions of `like` (1 is allowed after the first).
    """
    if not 1 <= values.dim() <= like.dim() or values.shape[0] != like.shape[0]:
        raise ValueError(f"{name} has shape {list(values.shape)}, expected a leading part of {list(like.shape)}")
    if any(given not in (1, wanted) for given, wanted in zip(values.shape[1:], like.shape[1:], strict=False)):
        raise ValueError(f"{name} has shape {list(values.shape)}, expected a leading part of {list(like.shape)}")
    return values.reshape(*values.shape, *([1] * (like.dim() - values.dim())))


def reduce_map(unit_loss: Tensor) -> Tensor:
    """Average a unit loss [N, T, *map] over its map dimensions: [N, T]. Without a map it is returned unchanged."""
    if unit_loss.dim() < 2:
        raise ValueError(f"unit_loss must have shape [N, T, *map], got {list(unit_loss.shape)}")
    return unit_loss if unit_loss.dim() == 2 else unit_loss.flatten(2).mean(dim=2)


def _check_mask(mask: Tensor) -> Tensor:
    if mask.dim() != 2:
        raise ValueError(f"mask must have shape [n, T], got {list(mask.shape)}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask may hold only 0 and 1; multiply the unit loss by the unit weights instead")
    return mask != 0


def _check_mode(mode: str, max_length: int | None) -> None:
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATION_MODES)}, got {mode!r}")
    if mode in ("fixed_length", "token_sum_over_length") and (max_length is None or max_length < 1):
        raise ValueError(f"aggregation {mode!r} needs max_length >= 1, got {max_length}")


def _check_rows(totals: Totals, rows: int) -> None:
    # A tensor is not read: the comparison would make the device wait.
    if not isinstance(totals.rows, Tensor) and totals.rows < rows:
        raise ValueError(
            f"totals.rows ({totals.rows}) is smaller than this micro-batch ({rows} rows); "
            "totals must count the whole optimizer step"
        )


def safe_divisor(divisor: float | Tensor) -> float | Tensor:
    """`divisor`, or 1 where nothing was counted: the sum that it divides is 0 then."""
    return divisor.clamp(min=1) if isinstance(divisor, Tensor) else max(divisor, 1)


def aggregation_coefficients(
    mask: Tensor,
    totals: Totals,
    *,
    mode: AggregationMode,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Give the coefficient of every unit loss, so that `loss = sum(unit_loss * coefficients)`.

    | mode | coefficient of a kept unit of row i | also called |
    |---|---|---|
    | sequence_mean_token_mean | 1 / (units of row i * rows) | GRPO, GSPO; TRL `grpo` |
    | token_mean | 1 / units of the step | DAPO; TRL `dapo` |
    | fixed_length | 1 / (rows * max_length) | Dr. GRPO; TRL `dr_grpo` |
    | sequence_mean_token_sum | 1 / rows | TRL `luspo` |
    | token_sum_over_length | 1 / max_length | verl `seq-mean-token-sum-norm` |
    | micro_batch_token_mean | 1 / (units of THIS micro-batch * micro_batches) | TRL `bnpo` |

    The last one is the plain mean of the micro-batches' token means: every micro-batch weighs the same, also one with
    fewer kept units or none, so it is the only mode that depends on the split.

    Args:
        mask: kept units of the micro-batch, [n, T], bool or 0/1.
        totals: denominators of the whole optimizer step.
        mode: see the table.
        max_length: configured maximum length; required by "fixed_length" and "token_sum_over_length".
        dtype: of the result; `None` takes the mask's own floating dtype or torch's default. Pass that of the loss.

    Returns:
        [n, T], 0 on every unit that is not kept; finite also when nothing is kept.

    Raises:
        ValueError: unknown mode, missing max_length, or totals smaller than this micro-batch.

    Example:
        >>> aggregation_coefficients(torch.tensor([[1, 1], [1, 0]]), Totals(rows=2, units=3), mode="token_mean")
        tensor([[0.3333, 0.3333],
                [0.3333, 0.0000]])
    """
    kept = _check_mask(mask)
    _check_mode(mode, max_length)
    _check_rows(totals, mask.shape[0])
    if dtype is None:
        dtype = mask.dtype if mask.is_floating_point() else torch.get_default_dtype()
    ones = kept.to(dtype)
    row_units = ones.sum(dim=1, keepdim=True).clamp(min=1)
    if mode == "sequence_mean_token_mean":
        return ones / row_units / safe_divisor(totals.rows)
    if mode == "token_mean":
        return ones / safe_divisor(totals.units)
    if mode == "sequence_mean_token_sum":
        return ones / safe_divisor(totals.rows)
    if mode == "micro_batch_token_mean":
        return ones / ones.sum().clamp(min=1) / safe_divisor(totals.micro_batches)
    length = float(max_length or 1)
    return ones / length / safe_divisor(totals.rows) if mode == "fixed_length" else ones / length


def aggregate(
    unit_loss: Tensor,
    mask: Tensor,
    totals: Totals,
    *,
    mode: AggregationMode,
    max_length: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum a unit loss with the coefficients of `mode`.

    Args:
        unit_loss: [n, T, *map]; averaged over the map.
        mask: [n, T].
        totals: denominators of the whole optimizer step.
        mode: see `aggregation_coefficients`.
        max_length: see `aggregation_coefficients`.
        weights: unit weights that broadcast against the unit loss; `None` means 1.

    Returns:
        The micro-batch's share of the step's loss, a scalar. Without a kept unit it is 0 and its backward runs.
    """
    weighted = unit_loss if weights is None else unit_loss * expand_units(weights, unit_loss, "weights")
    flat = reduce_map(weighted)
    coefficients = aggregation_coefficients(mask, totals, mode=mode, max_length=max_length, dtype=flat.dtype)
    if flat.shape != coefficients.shape:
        raise ValueError(f"unit_loss {list(unit_loss.shape)} and mask {list(mask.shape)} disagree in [n, T]")
    # where, not a product: a unit outside the mask may be NaN, and NaN * 0 is NaN.
    return (torch.where(mask != 0, flat, torch.zeros_like(flat)) * coefficients).sum()
