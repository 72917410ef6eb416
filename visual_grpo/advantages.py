"""Rewards -> advantages: group normalisation, leave-one-out, per-reward (decoupled) normalisation, soft clip.

Letters: `N` rows, `R` rewards, `S` groups. Nothing here carries a gradient. The mean is always the group's mean; only
whose spread divides it is a choice. The degenerate rules hold in every function: a group whose usable rewards are all
equal gives exactly 0, a NaN reward is left out of the statistics and its row gets 0.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.groups import num_segments_of, segment_count, segment_mean, segment_range, segment_std

Scope = Literal["group", "batch", "none"]
AdvantageStd = Literal["bessel", "population", "none"]
SingleGroup = Literal["zero", "raw"]


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _rewards_and_usable(rewards: Tensor, usable: Tensor | None) -> tuple[Tensor, Tensor]:
    if rewards.dim() != 1:
        raise ValueError(f"rewards must have shape [N], got {list(rewards.shape)}; combine several rewards first")
    wide = rewards.detach()
    wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
    if usable is not None and usable.shape != rewards.shape:
        raise ValueError(f"usable must have the shape of rewards {list(rewards.shape)}, got {list(usable.shape)}")
    kept = ~wide.isnan() if usable is None else ~wide.isnan() & (usable != 0)
    infinite = kept & wide.isinf()
    if bool(infinite.any()):
        row = int(infinite.nonzero()[0])
        raise ValueError(f"reward of row {row} is {float(wide[row])}; a reward that failed must be NaN, not infinite")
    return torch.where(kept, wide, torch.zeros_like(wide)), kept


def flat_groups(rewards: Tensor, group_ids: Tensor, usable: Tensor | None = None, tol: float = 1e-8) -> Tensor:
    """Tell which groups carry no signal.

    The test is `max - min <= tol` over the usable rewards, not a zero standard deviation: the subtraction of the mean
    leaves rounding residues, and residue / (residue + eps) can be of order one.

    Args:
        rewards: [N]; NaN counts as not usable.
        group_ids: [N] int64.
        usable: [N] bool; `None` means every row.
        tol: largest range that still counts as flat, in units of the reward.

    Returns:
        [S] bool; groups with fewer than two usable rows are flat.

    Example:
        >>> flat_groups(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 1]))
        tensor([False,  True])
    """
    values, kept = _rewards_and_usable(rewards, usable)
    return segment_range(values, group_ids, mask=kept) <= tol


def _spread(values: Tensor, kept: Tensor, group_ids: Tensor, scope: Scope, std: AdvantageStd) -> Tensor | None:
    if scope == "none" or std == "none":
        return None
    ids = group_ids.long() if scope == "group" else torch.zeros_like(group_ids, dtype=torch.int64)
    return segment_std(values, ids, mask=kept, kind=std)[ids]


def _apply_degenerate_rules(
    advantages: Tensor, values: Tensor, kept: Tensor, group_ids: Tensor, single_group: SingleGroup, flat_tol: float
) -> Tensor:
    ids = group_ids.long()
    zeros = torch.zeros_like(advantages)
    flat = segment_range(values, ids, mask=kept) <= flat_tol
    result = torch.where(flat[ids], zeros, advantages)
    if single_group == "raw":
        single = segment_count(ids, mask=kept) == 1
        result = torch.where(single[ids], values, result)
    return torch.where(kept, result, zeros)


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scope: Scope = "group",
    std: AdvantageStd = "bessel",
    eps: float = 1e-4,
    usable: Tensor | None = None,
    single_group: SingleGroup = "zero",
    flat_tol: float = 1e-8,
) -> Tensor:
    """Normalise rewards inside their groups: `(r - mean_group) / (spread + eps)`.

    GRPO (arXiv 2402.03300) with `scope="group"`; Dr. GRPO (arXiv 2503.20783) with `scope="none"`; Flow-GRPO
    (arXiv 2505.05470) with `scope="batch", std="population"`. Call it on the complete groups of all ranks.

    Args:
        rewards: [N]; NaN means that nothing could score the row.
        group_ids: [N] int64, groups of any size.
        scope: whose standard deviation divides: the row's group, the whole batch, or nobody's ("none").
        std: "bessel" (n - 1), "population" (n), or "none" (no division, the same as `scope="none"`).
        eps: added to the standard deviation, outside the root; not used without a division.
        usable: [N] bool, rows whose reward counts; `None` means all that are not NaN.
        single_group: advantage of a group with one usable row: "zero", or "raw" for the reward itself (verl).
        flat_tol: a group whose usable rewards differ by at most this gets exactly 0.

    Returns:
        [N] float32 or wider, no gradient. Rows that are not usable get 0.

    Raises:
        ValueError: wrong shapes, float or text ids, an unknown choice, a negative eps, an infinite reward.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]), std="population")
        tensor([ 0.9998, -0.9998, -0.9998,  0.9998])
    """
    _check_choice("scope", scope, ("group", "batch", "none"))
    _check_choice("std", std, ("bessel", "population", "none"))
    _check_choice("single_group", single_group, ("zero", "raw"))
    if eps < 0:
        raise ValueError(f"eps is added to a standard deviation and must be >= 0, got {eps}")
    values, kept = _rewards_and_usable(rewards, usable)
    centred = values - segment_mean(values, group_ids, mask=kept)[group_ids.long()]
    spread = _spread(values, kept, group_ids, scope, std)
    advantages = centred if spread is None else centred / (spread + eps)
    return _apply_degenerate_rules(advantages, values, kept, group_ids, single_group, flat_tol)


def leave_one_out_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    usable: Tensor | None = None,
    single_group: SingleGroup = "zero",
    flat_tol: float = 1e-8,
) -> Tensor:
    """Compare each reward with the mean of the OTHER usable rows of its group (RLOO).

    Equal to `n / (n - 1) * (r - mean_group)` with n the usable rows of that group. Arguments, degenerate rules and
    errors are those of `group_advantages`; returns [N] without gradient.

    Example:
        >>> leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
        tensor([ 1.0000, -0.5000, -0.5000])
    """
    _check_choice("single_group", single_group, ("zero", "raw"))
    values, kept = _rewards_and_usable(rewards, usable)
    ids = group_ids.long()
    count = segment_count(group_ids, mask=kept).to(values.dtype)
    factor = count / (count - 1).clamp(min=1)
    advantages = factor[ids] * (values - segment_mean(values, group_ids, mask=kept)[ids])
    return _apply_degenerate_rules(advantages, values, kept, group_ids, single_group, flat_tol)


def _check_matrix(values: Tensor, usable: Tensor | None, weights: Tensor) -> None:
    if values.dim() != 2:
        raise ValueError(f"values must have shape [N, R], got {list(values.shape)}")
    if weights.shape != (values.shape[1],):
        raise ValueError(f"weights must have one entry per reward [{values.shape[1]}], got {list(weights.shape)}")
    if usable is not None and usable.shape != values.shape:
        raise ValueError(f"usable must have the shape of values {list(values.shape)}, got {list(usable.shape)}")


def constant_groups(
    values: Tensor, kept: Tensor, group_ids: Tensor, single_group: SingleGroup = "zero", flat_tol: float = 1e-8
) -> Tensor:
    """Tell in which groups every reward of `values` [N, R] is constant over its `kept` [N, R] entries: [S] bool."""
    constant = torch.ones(num_segments_of(group_ids), dtype=torch.bool, device=values.device)
    for column in range(values.shape[1]):
        constant &= flat_groups(values[:, column], group_ids, kept[:, column], flat_tol)
        if single_group == "raw":
            constant &= segment_count(group_ids, mask=kept[:, column]) != 1
    return constant


def decoupled_sums(
    values: Tensor,
    usable: Tensor | None,
    weights: Tensor,
    group_ids: Tensor,
    *,
    scope: Scope = "group",
    std: AdvantageStd = "bessel",
    eps: float = 1e-4,
    single_group: SingleGroup = "zero",
    flat_tol: float = 1e-8,
) -> Tensor:
    """Add the weighted advantages that each reward has by itself: `S_i = sum_k w_k A_ik` (MixGRPO, arXiv 2507.21802).

    Args:
        values: rewards [N, R]; NaN means that this reward does not apply to this row, which adds 0.
        usable: [N, R] bool, or `None` for every entry that is not NaN.
        weights: [R].
        group_ids: [N] int64.
        scope, std, eps, single_group, flat_tol: of every reward's advantage, see `group_advantages`.

    Returns:
        [N] without gradient. A reward that is constant in its group adds exactly 0.

    Raises:
        ValueError: wrong shapes, or as in `group_advantages`.
    """
    _check_matrix(values, usable, weights)
    wide, kept = _wide_and_kept(values, usable)
    sums = torch.zeros_like(wide[:, 0])
    for column, weight in enumerate(weights.to(wide)):
        part = group_advantages(
            wide[:, column],
            group_ids,
            scope=scope,
            std=std,
            eps=eps,
            usable=kept[:, column],
            single_group=single_group,
            flat_tol=flat_tol,
        )
        sums = sums + weight * part
    return sums


def _wide_and_kept(values: Tensor, usable: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    return wide, ~wide.isnan() if usable is None else ~wide.isnan() & (usable != 0)


def decoupled_advantages(
    values: Tensor,
    usable: Tensor | None,
    weights: Tensor,
    group_ids: Tensor,
    *,
    scope: Scope = "group",
    std: AdvantageStd = "bessel",
    eps: float = 1e-4,
    single_group: SingleGroup = "zero",
    flat_tol: float = 1e-8,
    batch_step: bool = True,
) -> Tensor:
    """Normalise every reward inside its group before adding (GDPO, arXiv 2601.05242; TRL `normalize_then_sum`).

    `z_ik = (r_ik - mean_group_k) / (std_group_k + eps)`, `S_i = sum_k w_k z_ik`, and with `batch_step`
    `A_i = (S_i - mean_all S) / (std_all S + eps)`. With `batch_step` one reward is plain GRPO on `w r`, without the second step.

    Args:
        values: rewards [N, R]; NaN means that this reward does not apply to this row.
        usable: [N, R] bool, or `None` for every entry that is not NaN.
        weights: [R].
        group_ids: [N] int64.
        scope: whose standard deviation divides a reward, see `group_advantages`.
        std: convention of both standard deviations; "none" leaves both steps centred and undivided.
        eps: added to both standard deviations, outside the root.
        single_group: z of a reward that only one row of its group has: "zero", or "raw" for the reward itself.
        flat_tol: range up to which a reward counts as constant in its group and contributes exactly 0.
        batch_step: normalise the sums over the whole batch (all groups and ranks).

    Returns:
        [N] without gradient. A row without any usable reward is left out of the batch statistics and gets 0, and so
        does every row of a group in which all rewards are constant.

    Raises:
        ValueError: wrong shapes, or as in `group_advantages`.
    """
    _check_matrix(values, usable, weights)
    wide, kept = _wide_and_kept(values, usable)
    normalise = partial(group_advantages, std=std, eps=eps, flat_tol=flat_tol)
    if batch_step and values.shape[1] == 1:
        total = wide[:, 0] * weights.to(wide)
        return normalise(total, group_ids, scope=scope, usable=kept[:, 0], single_group=single_group)
    sums = decoupled_sums(
        wide, kept, weights, group_ids, scope=scope, std=std, eps=eps, single_group=single_group, flat_tol=flat_tol
    )
    if not batch_step:
        return sums
    advantages = normalise(sums, torch.zeros_like(group_ids, dtype=torch.int64), usable=kept.any(dim=1))
    # The batch mean of the sums is 0 up to rounding, so without this line a flat group gets about 1e-17 and not 0.
    constant = constant_groups(wide, kept, group_ids, single_group, flat_tol)
    return torch.where(constant[group_ids.long()], torch.zeros_like(advantages), advantages)


def soft_clip(advantages: Tensor, limit: float) -> Tensor:
    """Squash advantages (any shape) smoothly into (-limit, limit): `limit * tanh(a / limit)` (V-GRPO, control A).

    Example:
        >>> soft_clip(torch.tensor([0.0, 30.0]), 3.0)
        tensor([0., 3.])
    """
    if limit <= 0:
        raise ValueError(f"limit must be > 0, got {limit}; leave soft_clip unset to switch it off")
    return limit * torch.tanh(advantages / limit)


def overlong_penalty(length: Tensor, max_length: int, cache: int) -> Tensor:
    """Soft penalty of DAPO (arXiv 2503.14476, Eq. 13) for answers that come near the length limit.

    0 up to `max_length - cache`, then falling linearly to -1 at `max_length`, and -1 beyond.

    Args:
        length: answer lengths [N], in units (tokens).
        max_length: the configured limit.
        cache: width of the falling part; 0 leaves only the step at `max_length`.

    Returns:
        [N] in [-1, 0], to be added to the reward.

    Raises:
        ValueError: `cache` is outside 0..max_length.

    Example:
        >>> overlong_penalty(torch.tensor([16384, 18432, 20480, 20481]), 20480, 4096)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 0 <= cache <= max_length:
        raise ValueError(f"cache ({cache}) must be between 0 and max_length ({max_length})")
    lengths = length if length.is_floating_point() else length.to(torch.get_default_dtype())
    free = max_length - cache
    falling = (free - lengths) / max(cache, 1)
    penalty = torch.where(lengths <= free, torch.zeros_like(lengths), falling)
    return torch.where(lengths > max_length, -torch.ones_like(lengths), penalty)
