"""Batch geometry: derived numbers, checks with the nearest legal values, and the split of a rollout batch into updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_grpo.config import TrainConfig
from visual_grpo.errors import UserError
from visual_grpo.method import Needs
from visual_grpo.seeding import seeded_generator
from visual_grpo.types import RowTokens


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What follows from `train` and the number of processes."""

    rows_per_step: int
    rows_per_process: int
    rows_per_update: int
    micro_batches: int
    """forward and backward passes of a process in one update (before unit chunks)."""
    optimizer_steps: int

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) pairs to print."""
        return [
            ("rows a step", f"{self.rows_per_step}"),
            ("rows a process", f"{self.rows_per_process}"),
            ("rows an update", f"{self.rows_per_update}"),
            ("micro-batches an update and process", f"{self.micro_batches}"),
            ("optimizer steps in all", f"{self.optimizer_steps}"),
        ]


def _nearest(value: int, divisor: int) -> str:
    low = value // divisor * divisor
    return " or ".join(str(n) for n in (low, low + divisor) if n > 0)


def check_geometry(train: TrainConfig, world: int, needs: Needs) -> Geometry:
    """Derive the geometry.

    Raises:
        UserError: a group of one, or numbers that do not divide; names the nearest legal values.
    """
    if train.group_size == 1 and not needs.single_samples:
        raise UserError(
            "train.group_size is 1: a group-relative advantage needs at least 2 samples a prompt (every advantage would be 0). "
            "Use train.group_size=2 or more, or a method that needs no group."
        )
    if train.prompts_per_step % world:
        raise UserError(
            f"train.prompts_per_step ({train.prompts_per_step}) must be a multiple of the {world} processes, so that groups stay "
            f"whole; use {_nearest(train.prompts_per_step, world)}"
        )
    key, count = (
        ("prompts_per_step", train.prompts_per_step // world)
        if needs.whole_groups
        else ("group_size", train.group_size)
    )
    if count % train.updates_per_step:
        raise UserError(
            f"train.updates_per_step ({train.updates_per_step}) must divide train.{key} ({getattr(train, key)}), so that every "
            f"update holds the same share; use train.{key}={_nearest(count, train.updates_per_step)} or another updates_per_step"
        )
    rows = train.prompts_per_step * train.group_size
    per_update = rows // train.updates_per_step
    return Geometry(
        rows_per_step=rows,
        rows_per_process=rows // world,
        rows_per_update=per_update,
        micro_batches=math.ceil(per_update // world / train.micro_batch),
        optimizer_steps=train.steps * train.updates_per_step * train.epochs_per_step,
    )


def split_updates(group_ids: Tensor, updates: int, *, whole_groups: bool, key: tuple[int, ...]) -> list[Tensor]:
    """Row indices of each of `updates` optimizer steps, in shuffled order.

    Every update gets the same share of each group (or whole groups), chosen by a permutation that depends on `key` and the group
    id alone: the union over processes is the same for any number of them.

    Args:
        group_ids: [n] int64 of this process's rows.
        updates: optimizer steps.
        whole_groups: keep the rows of a group together.
        key: seed of the permutations.

    Returns:
        `updates` index tensors; some may be empty.
    """
    parts: list[list[Tensor]] = [[] for _ in range(updates)]
    for group in torch.unique(group_ids).tolist():
        rows = torch.nonzero(group_ids == group).flatten()
        generator = seeded_generator(*key, group)
        if whole_groups:
            parts[group % updates].append(rows)
            continue
        rows = rows[torch.randperm(len(rows), generator=generator)]
        for number, piece in enumerate(torch.tensor_split(rows, updates)):
            parts[number].append(piece)
    return [torch.cat(p) if p else torch.empty(0, dtype=torch.int64) for p in parts]


def micro_batches(group_ids: Tensor, size: int, whole_groups: bool, tokens: RowTokens | None = None) -> list[Tensor]:
    """Row indices of each forward and backward pass over rows with `group_ids` [n].

    With `whole_groups` a group is never cut, and a pass may hold more than `size` rows. With `tokens`, rows of like length share
    a pass, so that little is padding: of the given order, groups by their longest row and rows by length, the one that reads
    the fewest tokens. The loss of a step does not depend on it.
    """
    everything = torch.arange(len(group_ids))
    given = _cut(everything, group_ids, size, whole_groups)
    if tokens is None or len(given) < 2:
        return given
    _, dense = torch.unique(group_ids, return_inverse=True)
    longest = torch.zeros(int(dense.max()) + 1, dtype=torch.int64).scatter_reduce(0, dense, tokens.own, "amax")
    rows = torch.argsort(tokens.own, descending=True, stable=True)
    # Stable sorts, the last key first: groups by their longest row, their rows side by side, those by length.
    groups = rows[torch.argsort(dense[rows], stable=True)]
    groups = groups[torch.argsort(longest[dense[groups]], descending=True, stable=True)]
    orders = [given, *(_cut(order, group_ids, size, whole_groups) for order in (groups, rows))]
    return min(orders, key=lambda parts: sum(_tokens_read(part, dense, tokens) for part in parts))


def _tokens_read(part: Tensor, group_ids: Tensor, tokens: RowTokens) -> int:
    """With the padding to the longest row and the longest context of the pass."""
    groups = len(torch.unique(group_ids[part]))
    return groups * int(tokens.context[part].max()) + len(part) * int(tokens.own[part].max())


def _cut(order: Tensor, group_ids: Tensor, size: int, whole_groups: bool) -> list[Tensor]:
    if not whole_groups:
        return list(order.split(size)) if len(order) else []
    parts: list[Tensor] = []
    for group in dict.fromkeys(group_ids[order].tolist()):
        members = order[group_ids[order] == group]
        if parts and len(parts[-1]) + len(members) <= size:
            parts[-1] = torch.cat([parts[-1], members])
        else:
            parts.append(members)
    return parts
