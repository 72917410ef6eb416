"""Several rewards become one number a row, or one advantage a row: the choices of `combine.how`.

- By row (`sum`, `gate`, `product`, `module:function`): `RewardBatch.total` is that number, and the default advantages follow.
- By group (`sum_of_advantages`, `gdpo`, `rank`): each reward is compared inside its group first; `RewardBatch.total` stays the
  weighted sum, for logs. Statistics are those of the complete groups of all processes.

A part that does not apply to a row changes nothing there: it adds 0 to a sum of advantages and multiplies by 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from visual_grpo.advantages import constant_groups, decoupled_advantages, decoupled_sums, flat_groups, group_advantages
from visual_grpo.config import RunConfig
from visual_grpo.config_rewards import CombineConfig
from visual_grpo.errors import RunError, UserError, did_you_mean
from visual_grpo.groups import segment_count, segment_mean
from visual_grpo.registry import load_object
from visual_grpo.types import RewardBatch, RewardStatus

if TYPE_CHECKING:
    from visual_grpo.distributed import Ranks

__all__ = [
    "BY_GROUP",
    "BY_ROW",
    "check_combination",
    "combined_advantages",
    "group_ranks",
    "judged",
    "on_all_processes",
    "product_total",
    "row_combination",
    "signal",
    "token_whitened",
    "with_part",
]

BY_ROW = ("sum", "product", "gate")
BY_GROUP = ("sum_of_advantages", "gdpo", "rank")
WHITENING_EPS = 1e-8
"""Under the root of the token whitening (verl)."""

RowCombination = Callable[[RewardBatch], Tensor]


# -- one number a row -------------------------------------------------------------------------------------------------------


def product_total(rewards: RewardBatch) -> Tensor:
    """Multiply the parts that apply, each to the power of its weight: [N] float32.

    Raises:
        RunError: a value is negative (two bad scores would make a good one).
    """
    ok = (rewards.status == RewardStatus.OK) & rewards.usable[:, None]
    negative = ok & (rewards.values < 0)
    if bool(negative.any()):
        row, column = negative.nonzero()[0].tolist()
        name = rewards.names[column]
        raise RunError(
            f"combine.how=product needs rewards of 0 or more, but {name!r} is {float(rewards.values[row, column]):g} on row "
            f"{row}; set rewards.{name}.normalise to min_max or clip, or use combine.how=sum"
        )
    total = torch.where(ok, rewards.values.clamp(min=0) ** rewards.weights, 1.0).prod(dim=1)
    if not bool(torch.isfinite(total).all()):
        row = int((~torch.isfinite(total)).nonzero()[0])
        raise RunError(
            f"combine.how=product is beyond float32 on row {row}, where the rewards are {rewards.values[row].tolist()}; bring "
            "them to a smaller scale with rewards.NAME.normalise, or use combine.how=sum"
        )
    return total


def function_total(rewards: RewardBatch, function: Callable[..., Tensor], name: str) -> Tensor:
    """Call a user's `function(values, weights)`: {name: Tensor [N]}, NaN where a part does not apply, and {name: float}.

    Raises:
        RunError: the result is not [N] numbers, finite on every usable row.
    """
    values = {n: rewards.values[:, k].clone() for k, n in enumerate(rewards.names)}
    weights = dict(zip(rewards.names, rewards.weights.tolist(), strict=True))
    try:
        total = function(values, weights)
    except Exception as error:  # foreign code
        raise RunError(f"combine.how={name} raised {type(error).__name__}: {error}") from error
    if not isinstance(total, Tensor) or total.shape != (len(rewards),):
        given = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise RunError(
            f"combine.how={name} returned {given}; it must return a tensor [{len(rewards)}], one number a row"
        )
    total = total.detach().to(rewards.values)
    broken = rewards.usable & ~torch.isfinite(total)
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        seen = {n: float(v[row]) for n, v in values.items()}
        raise RunError(
            f"combine.how={name} returned {float(total[row])} for row {row}, where the rewards are {seen}; a part that does "
            "not apply is NaN there: leave it out, for example with torch.nan_to_num"
        )
    return total


def row_combination(combine: CombineConfig) -> RowCombination | None:
    """The function behind `RewardBatch.total`; None for the weighted sum.

    Raises:
        UserError: a function that cannot be imported.
    """
    if combine.how == "product":
        return product_total
    if ":" in combine.how:
        function = load_object(combine.how, "combination of rewards")
        if not callable(function):
            raise UserError(f"combine.how: {combine.how!r} is {type(function).__name__}, which cannot be called.")
        signature = None
        with suppress(ValueError):  # a builtin tells none
            signature = inspect.signature(function)
        try:
            if signature is not None:
                signature.bind({}, {}, **combine.params)
        except TypeError as error:
            raise UserError(
                f"combine.how: {combine.how!r} is called with (values, weights) and combine.params {combine.params}, which it "
                f"does not take: {error}."
            ) from None
        return partial(function_total, function=partial(function, **combine.params), name=combine.how)
    return None


def with_part(rewards: RewardBatch, name: str, values: Tensor) -> RewardBatch:
    """Add `values` [N] to the total, as a part called `name`; rows that nothing scored stay without a reward.

    Where rewards are multiplied or given to a function, it is added to what comes out; where each is compared by itself in its
    group, so is the new part.
    """
    scored = rewards.usable
    status = torch.where(scored, int(RewardStatus.OK), int(RewardStatus.NOT_APPLICABLE)).to(rewards.status)
    column = torch.where(scored, values.to(rewards.values), torch.nan)
    return replace(
        rewards,
        names=(*rewards.names, name),
        values=torch.cat([rewards.values, column[:, None]], dim=1),
        status=torch.cat([rewards.status, status[:, None]], dim=1),
        weights=torch.cat([rewards.weights, torch.ones(1)]),
        combine=None if rewards.combine is None else partial(_plus_last, combine=rewards.combine),
    )


def _plus_last(rewards: RewardBatch, combine: RowCombination) -> Tensor:
    """`combine` of all parts but the last, plus the last."""
    others = replace(
        rewards,
        names=rewards.names[:-1],
        values=rewards.values[:, :-1],
        status=rewards.status[:, :-1],
        weights=rewards.weights[:-1],
        combine=combine,
    )
    return combine(others) + rewards.values[:, -1]


# -- by group ---------------------------------------------------------------------------------------------------------------


def group_ranks(values: Tensor, group_ids: Tensor, usable: Tensor | None = None, flat_tol: float = 1e-8) -> Tensor:
    """Rank each value among the usable rows of its group, centred: `(rank - (n - 1) / 2) / n` with rank 0 for the lowest.

    Ties share their mean rank, so equal values get equal numbers and a group of equal values gets exactly 0. Without ties this
    is Flow-Factory's double argsort over the group size, less its mean.

    Args:
        values: [N]; NaN counts as not usable.
        group_ids: [N] int64.
        usable: [N] bool, or `None` for every row that is not NaN.
        flat_tol: range up to which a group counts as equal.

    Returns:
        [N] in (-0.5, 0.5), in the dtype of `values`; rows that are not usable get 0.

    Example:
        >>> group_ranks(torch.tensor([0.1, 9.0, 0.2, 0.2]), torch.tensor([0, 0, 0, 0]))
        tensor([-0.3750,  0.3750,  0.0000,  0.0000])
    """
    kept = ~values.isnan() if usable is None else ~values.isnan() & (usable != 0)
    out = torch.zeros_like(values)
    rows = torch.nonzero(kept).flatten()
    if len(rows) == 0:
        return out
    rows = rows[torch.argsort(values[rows], stable=True)]
    rows = rows[torch.argsort(group_ids[rows], stable=True)]
    v, g = values[rows], group_ids[rows].long()
    new_run = torch.ones(len(rows), dtype=torch.bool, device=values.device)
    new_run[1:] = (v[1:] != v[:-1]) | (g[1:] != g[:-1])
    run = new_run.long().cumsum(0) - 1
    place = segment_mean(torch.arange(len(rows), device=values.device).double(), run)[run]
    count = segment_count(g)
    first = count.cumsum(0) - count
    rank = (place - first[g] - (count[g] - 1) / 2) / count[g]
    flat = flat_groups(values, group_ids, kept, flat_tol)[g]
    out[rows] = torch.where(flat, torch.zeros_like(rank), rank).to(out.dtype)
    return out


def token_whitened(sums: Tensor, counts: Tensor, usable: Tensor) -> Tensor:
    """Whiten row sums as if each stood on every token of its row (GDPO's verl fork).

    `m = sum(S n) / M`, `v = sum((S - m)^2 n) / (M - 1)`, `A = (S - m) / sqrt(v + 1e-8)` with n tokens a row and M in all.

    Args:
        sums: [N].
        counts: [N] trained tokens of each row.
        usable: [N] bool; other rows get 0 and count nowhere.

    Returns:
        [N]; all 0 where fewer than two tokens are left.
    """
    weight = torch.where(usable, counts.to(sums.dtype), 0.0)
    total = weight.sum()
    if float(total) <= 1:
        return torch.zeros_like(sums)
    centred = sums - (sums * weight).sum() / total
    variance = (centred.square() * weight).sum() / (total - 1)
    return torch.where(usable, centred * (variance + WHITENING_EPS).rsqrt(), 0.0)


def _parts(rewards: RewardBatch) -> tuple[Tensor, Tensor]:
    """(values, which count) [N, R] in float64: none of a row that is not usable."""
    return rewards.values.double(), (rewards.status == RewardStatus.OK) & rewards.usable[:, None]


def signal(rewards: RewardBatch, group_ids: Tensor, config: RunConfig) -> Tensor:
    """The number whose differences inside a group are learned: [N] float64, NaN on rows that are not usable.

    A group in which it is constant is flat. Call it on whole groups.
    """
    if config.combine.how not in BY_GROUP:
        return rewards.total().double()
    values, kept = _parts(rewards)
    weights = rewards.weights.double()
    if config.combine.how == "rank":
        sums = torch.zeros_like(values[:, 0])
        for column, weight in enumerate(weights):
            sums = sums + weight * group_ranks(values[:, column], group_ids, kept[:, column])
    else:
        options = config.advantage
        sums = decoupled_sums(
            values,
            kept,
            weights,
            group_ids,
            scope=options.scope,
            std=options.std,
            eps=options.eps,
            single_group=options.single_group,
        )
    return torch.where(rewards.usable, sums, torch.nan)


def combined_advantages(rewards: RewardBatch, group_ids: Tensor, counts: Tensor, config: RunConfig) -> Tensor:
    """Advantages [N] float64 of the complete groups of all processes, by `combine` and `advantage`.

    Args:
        rewards: N rows.
        group_ids: [N] int64.
        counts: [N] trained units of each row, for `combine.level=tokens`.
        config: of the run.
    """
    combine, options = config.combine, config.advantage
    plain = partial(
        group_advantages, scope=options.scope, std=options.std, eps=options.eps, single_group=options.single_group
    )
    if combine.how == "sum_of_advantages":
        return torch.nan_to_num(signal(rewards, group_ids, config))
    if combine.how != "gdpo":
        return plain(signal(rewards, group_ids, config), group_ids)
    values, kept = _parts(rewards)
    if combine.level == "rows" or values.shape[1] == 1:
        return decoupled_advantages(
            values,
            kept,
            rewards.weights.double(),
            group_ids,
            scope=options.scope,
            std=options.std,
            eps=options.eps,
            single_group=options.single_group,
            batch_step=combine.batch_step,
        )
    sums = torch.nan_to_num(signal(rewards, group_ids, config))
    whitened = token_whitened(sums, counts, rewards.usable)
    constant = constant_groups(values, kept, group_ids, options.single_group)[group_ids.long()]
    return torch.where(constant & combine.zero_flat, 0.0, whitened)


def judged(rewards: RewardBatch) -> RewardBatch:
    """The scores by which groups count as flat: the clean ones where the shaped ones hold noise."""
    return rewards.clean if rewards.noisy and rewards.clean is not None else rewards


def on_all_processes(rewards: RewardBatch, ranks: Ranks) -> RewardBatch:
    """The values and states of the rows of all processes, in rank order, without details."""
    if ranks.world == 1:
        return rewards
    return replace(
        rewards,
        values=ranks.gather(rewards.values),
        status=ranks.gather(rewards.status),
        details={},
        clean=None,
    )


# -- checks -----------------------------------------------------------------------------------------------------------------


def check_combination(config: RunConfig, advantages_by: str | None) -> None:
    """Refuse a combination that cannot work, before anything is loaded.

    Args:
        config: of the run.
        advantages_by: the method of the stack that makes the advantages itself, if one does.

    Raises:
        UserError: what does not fit, and what to change.
    """
    combine = config.combine
    trained = {name: reward for name, reward in config.rewards.items() if not reward.eval_only}
    if ":" not in combine.how and combine.how not in BY_ROW + BY_GROUP:
        raise UserError(
            f"combine.how is {combine.how!r}.{did_you_mean(combine.how, BY_ROW + BY_GROUP)} Known: "
            f"{', '.join(BY_ROW + BY_GROUP)}, or a function of your own as package.module:function."
        )
    if combine.params and ":" not in combine.how:
        raise UserError(f"combine.params are arguments of a function of your own; combine.how={combine.how} takes none")
    if advantages_by is not None and combine.how in BY_GROUP:
        raise UserError(
            f"combine.how={combine.how} makes the advantages, and so does method {advantages_by!r}; remove the method, or use "
            f"combine.how={' or '.join(BY_ROW)}"
        )
    if combine.how == "product" and any(reward.weight < 0 for reward in trained.values()):
        name = next(name for name, reward in trained.items() if reward.weight < 0)
        raise UserError(
            f"combine.how=product takes weights as powers: rewards.{name}.weight ({trained[name].weight}) must be 0 or more"
        )
    if combine.level == "tokens" and combine.how != "gdpo":
        raise UserError(f"combine.level=tokens belongs to combine.how=gdpo, not to {combine.how}")
    if not combine.batch_step and combine.how != "gdpo":
        raise UserError(
            f"combine.batch_step is the second step of combine.how=gdpo; {combine.how} has none: leave it out"
        )
    if not combine.zero_flat and (combine.how, combine.level) != ("gdpo", "tokens"):
        raise UserError(
            "combine.zero_flat=false is read with combine.how=gdpo combine.level=tokens alone, where flat groups are not 0 "
            "anyway: leave it out"
        )
    if combine.closed and not combine.gate:
        raise UserError("combine.closed is the value behind a closed gate, and combine.gate names none: leave it out")
    _check_gate(combine, trained)
    row_combination(combine)


def _check_gate(combine: CombineConfig, trained: Mapping[str, object]) -> None:
    if combine.how == "gate" and not combine.gate:
        raise UserError(
            "combine.how=gate needs combine.gate, the rewards that open it and their least values, such as "
            f"combine.gate={{{next(iter(trained), 'format')}: 1.0}}"
        )
    for name in combine.gate:
        if name not in trained:
            raise UserError(
                f"combine.gate names {name!r}, which is no reward that is trained on.{did_you_mean(name, trained)} "
                f"Known: {', '.join(trained)}."
            )
    if combine.gate and set(combine.gate) == set(trained):
        raise UserError("combine.gate names every reward, so there is none left to compute behind it; add a reward")
