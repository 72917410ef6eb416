"""The vocabulary of the toolkit: every generator is a batch of rows of scored decisions ("units").

Letters: `B` prompts, `G` samples a prompt, `N = B * G` rows, `T` units a row (tokens, denoising transitions or noise pairs),
`R` rewards. `*map` is empty, or spatial (`h, w`) for pixel-level credit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import Tensor

UnitKind = Literal["token", "transition", "noise_pair"]


class RewardStatus(IntEnum):
    """State of one reward value: there is never a number in place of a missing score."""

    OK = 0
    NOT_APPLICABLE = 1
    FAILED = 2


class Span(IntEnum):
    """Parts of an answer, as the unit tag `span` gives them; a unit without a tag is an answer's."""

    ANSWER = 0
    THINK = 1
    TOOL = 2
    CONTROL = 3


def _select(value: Any, index: Tensor) -> Any:
    """Rows `index` of a tensor or list; anything else is shared by all rows and passes unchanged."""
    if isinstance(value, Tensor):
        return value[index.to(value.device)]
    if isinstance(value, list):
        return [value[i] for i in index.tolist()]
    return value


def _concat(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        values = [v.to(first.device) for v in values]
        if first.ndim > 1 and len({v.shape[1] for v in values}) > 1:
            width = max(v.shape[1] for v in values)
            values = [_pad_units(v, width) for v in values]
        return torch.cat(list(values))
    if isinstance(first, list):
        return [item for v in values for item in v]
    return first


def _pad_units(value: Tensor, width: int) -> Tensor:
    """Zero-pad dimension 1 to `width`."""
    missing = width - value.shape[1]
    if missing == 0:
        return value
    return torch.cat([value, value.new_zeros(value.shape[0], missing, *value.shape[2:])], dim=1)


@dataclass(kw_only=True)
class PromptBatch:
    """What is to be sampled: one entry a row, the `G` rows of a prompt side by side."""

    prompts: list[str]
    """[N] prompt texts."""
    metadata: list[dict[str, Any]]
    """[N] data-set columns of the row's prompt (GenEval clauses, the gold answer, ...)."""
    group_ids: Tensor
    """[N] int64, 0-based over all ranks: a row is compared with the rows of its group and with no other."""
    row_ids: Tensor
    """[N] int64, the row's index in the whole step over all ranks: seeds depend on it, never on batch or rank."""
    tags: dict[str, Tensor] = field(default_factory=dict)
    """further row tags, each [N] int64 (turn, agent, task, ...)."""
    contexts: dict[str, list[str]] = field(default_factory=dict)
    """other prompt texts of the same rows, each [N]: `behaviour` is sampled, `training` is trained; default `prompts`."""

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, index: Tensor) -> PromptBatch:
        """Rows `index` ([n] int64) as a new batch."""
        return PromptBatch(
            prompts=_select(self.prompts, index),
            metadata=_select(self.metadata, index),
            group_ids=self.group_ids[index],
            row_ids=self.row_ids[index],
            tags={k: v[index] for k, v in self.tags.items()},
            contexts={k: _select(v, index) for k, v in self.contexts.items()},
        )

    def context(self, name: str) -> list[str]:
        """Prompt texts [N] of context `name`; the plain prompts where the batch has no such context."""
        return self.contexts.get(name, self.prompts)


@dataclass(kw_only=True)
class RolloutBatch:
    """Samples and what is needed to score and to replay them.

    `data` holds an adapter's replay tensors with the row as first dimension (latents, token ids); `shared` holds what is the same
    for all rows (sigmas). Both are opaque to the core.
    """

    prompts: PromptBatch
    unit_kind: UnitKind
    unit_mask: Tensor
    """[N, T] bool, True on units that may be trained (a padded token, an ODE step is False)."""
    old_log_prob: Tensor | None = None
    """[N, T, *map] log-prob under the weights that sampled; None where the method has no ratio."""
    data: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    unit_tags: dict[str, Tensor] = field(default_factory=dict)
    """unit tags, each [N, T] int64 (scale, span, provenance, step_index)."""
    images: Tensor | None = None
    """[N, 3, H, W] float32 in [0, 1] after `decode`."""
    texts: list[str] | None = None
    """[N] completions after `decode`."""
    truncated: Tensor | None = None
    """[N] bool, True where the sample ran into its length limit."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def group_ids(self) -> Tensor:
        """[N] int64."""
        return self.prompts.group_ids

    @property
    def num_units(self) -> int:
        """T."""
        return int(self.unit_mask.shape[1])

    def select(self, index: Tensor) -> RolloutBatch:
        """Rows `index` ([n] int64) as a new batch."""
        return replace(
            self,
            prompts=self.prompts.select(index.cpu()),
            unit_mask=_select(self.unit_mask, index),
            old_log_prob=_select(self.old_log_prob, index),
            data={k: _select(v, index) for k, v in self.data.items()},
            unit_tags={k: _select(v, index) for k, v in self.unit_tags.items()},
            images=_select(self.images, index),
            texts=_select(self.texts, index),
            truncated=_select(self.truncated, index),
        )

    def select_units(self, index: Tensor, *data: str) -> RolloutBatch:
        """Keep the units `index` of each row as a new batch.

        Args:
            index: [N, u] int64, for each row units of its own.
            data: names of the replay tensors [N, T, ...] that have a unit dimension.
        """

        def gather(value: Tensor | None) -> Any:
            if value is None:
                return None
            return value[torch.arange(len(self), device=value.device)[:, None], index.to(value.device)]

        return replace(
            self,
            unit_mask=gather(self.unit_mask),
            old_log_prob=gather(self.old_log_prob),
            data={k: gather(v) if k in data else v for k, v in self.data.items()},
            unit_tags={k: gather(v) for k, v in self.unit_tags.items()},
        )

    @staticmethod
    def concat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Join batches of one kind; unit dimensions are zero-padded on the right to the longest (`unit_mask` False there).

        Raises:
            ValueError: no part, or parts of different unit kinds.
        """
        if not parts:
            raise ValueError("RolloutBatch.concat needs at least one batch")
        kinds = {p.unit_kind for p in parts}
        if len(kinds) > 1:
            raise ValueError(f"cannot join rollouts of different unit kinds {sorted(kinds)}")
        if len(parts) == 1:
            return parts[0]
        width = max(p.num_units for p in parts)

        def units(values: Sequence[Any]) -> Any:
            return None if values[0] is None else torch.cat([_pad_units(v, width) for v in values])

        first = parts[0]
        prompts = [p.prompts for p in parts]
        return RolloutBatch(
            prompts=PromptBatch(
                prompts=_concat([p.prompts for p in prompts]),
                metadata=_concat([p.metadata for p in prompts]),
                group_ids=_concat([p.group_ids for p in prompts]),
                row_ids=_concat([p.row_ids for p in prompts]),
                tags={k: _concat([p.tags[k] for p in prompts]) for k in prompts[0].tags},
                contexts={k: _concat([p.contexts[k] for p in prompts]) for k in prompts[0].contexts},
            ),
            unit_kind=first.unit_kind,
            unit_mask=units([p.unit_mask for p in parts]),
            old_log_prob=units([p.old_log_prob for p in parts]),
            data={k: _concat([p.data[k] for p in parts]) for k in first.data},
            shared=first.shared,
            unit_tags={k: units([p.unit_tags[k] for p in parts]) for k in first.unit_tags},
            images=_concat([p.images for p in parts]),
            texts=_concat([p.texts for p in parts]),
            truncated=_concat([p.truncated for p in parts]),
        )

    def to(self, device: torch.device | str) -> RolloutBatch:
        """All replay tensors on `device`; prompts, tags and media stay where they are."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return replace(
            self,
            unit_mask=move(self.unit_mask),
            old_log_prob=move(self.old_log_prob),
            data={k: move(v) for k, v in self.data.items()},
            shared={k: move(v) for k, v in self.shared.items()},
            unit_tags={k: move(v) for k, v in self.unit_tags.items()},
        )


@dataclass(frozen=True, kw_only=True)
class RowTokens:
    """What a replay reads for each of `n` rows."""

    own: Tensor
    """[n] int64 tokens, read for the row alone."""
    context: Tensor
    """[n] int64 tokens, read once a pass for all rows of the group in it."""


@dataclass(kw_only=True)
class RewardBatch:
    """Scores of `N` rows by `R` rewards."""

    names: tuple[str, ...]
    """[R] reward names."""
    values: Tensor
    """[N, R] float32, NaN where the status is not OK."""
    status: Tensor
    """[N, R] int8 of `RewardStatus`."""
    weights: Tensor
    """[R] float32."""
    details: dict[str, Tensor] = field(default_factory=dict)
    """further figures of single rewards, each [N], keyed `reward/figure`, for logs and evaluations."""
    clean: RewardBatch | None = None
    """the scores before `shape_rewards`; None where nothing was shaped."""
    combine: Callable[[RewardBatch], Tensor] | None = None
    """makes one number a row [N] of `values`, in place of the weighted sum (`combine.how`)."""
    noisy: bool = False
    """the values hold noise: whether a group is flat is then told by `clean`."""

    def __len__(self) -> int:
        return int(self.values.shape[0])

    @property
    def usable(self) -> Tensor:
        """[N] bool: at least one part applies and none failed."""
        return (self.status == RewardStatus.OK).any(1) & ~(self.status == RewardStatus.FAILED).any(1)

    def total(self) -> Tensor:
        """[N] float32: `combine`, or else the weighted sum of the parts that apply; NaN on rows that are not usable.

        Weights are not renormalised where a part does not apply.
        """
        if self.combine is not None:
            return torch.where(self.usable, self.combine(self), torch.nan)
        ok = self.status == RewardStatus.OK
        weighted = torch.where(ok, self.values, 0.0) * self.weights
        return torch.where(self.usable, weighted.sum(1), torch.nan)

    def select(self, index: Tensor) -> RewardBatch:
        """Rows `index` ([n] int64) as a new batch."""
        return replace(
            self,
            values=self.values[index],
            status=self.status[index],
            details={k: v[index] for k, v in self.details.items()},
            clean=None if self.clean is None else self.clean.select(index),
        )

    @staticmethod
    def concat(parts: Sequence[RewardBatch]) -> RewardBatch:
        """Join score batches of the same rewards; a detail that one part lacks is NaN there."""
        if not parts:
            raise ValueError("RewardBatch.concat needs at least one batch")
        keys = sorted({k for p in parts for k in p.details})
        details = {k: torch.cat([p.details.get(k, torch.full((len(p),), torch.nan)) for p in parts]) for k in keys}
        first = parts[0]
        return RewardBatch(
            names=first.names,
            values=torch.cat([p.values for p in parts]),
            status=torch.cat([p.status for p in parts]),
            weights=first.weights,
            details=details,
            combine=first.combine,
            noisy=any(p.noisy for p in parts),
            clean=None
            if any(p.clean is None for p in parts)
            else RewardBatch.concat([p.clean for p in parts if p.clean is not None]),
        )


@dataclass(kw_only=True)
class LogProb:
    """What one replay of `n` rows and `u` units under some weights gives."""

    value: Tensor
    """[n, u, *map] log-prob of each unit's decision; the only field every adapter must fill."""
    mean: Tensor | None = None
    """[n, u, ...] mean of a Gaussian transition."""
    std: Tensor | None = None
    """[n, u] its standard deviation (includes sqrt(dt))."""
    kl_std: Tensor | None = None
    """[n, u] the standard deviation that the published Gaussian KL divides by (without sqrt(dt))."""
    prediction: Tensor | None = None
    """[n, u, ...] the network's prediction (velocity of a transition, x0 of a noise pair)."""
    velocity: Tensor | None = None
    """[n, u, ...] velocity of a denoising network, whatever the unit."""
    entropy: Tensor | None = None
    """[n, u] entropy in nats of a token distribution, only when asked for."""


@dataclass(kw_only=True)
class MicroBatch:
    """The rows and units of one forward and backward pass, handed to `surrogate`, `live_weights` and `regularise`."""

    rollouts: RolloutBatch
    """`n` rows, on the training device; `rollouts.unit_mask` is [n, T]."""
    units: Tensor
    """[u] int64, the unit indices replayed in this pass (all `T`, or a chunk of them)."""
    advantages: Tensor
    """[n, u, *map], [n, 1] or [n, 1, *map], broadcastable to the unit loss."""
    mask: Tensor
    """[n, u] float, 1 on trained units."""
    log_prob: LogProb
    """of the policy being trained, with gradient."""
    old_log_prob: Tensor
    """[n, u, *map], no gradient; equals `log_prob.value.detach()` when the update is on-policy."""
    reference: LogProb | None = None
    """of the reference weights, no gradient; present when a regulariser asked for it."""


def field_names(cls: type) -> tuple[str, ...]:
    """Names of a dataclass's fields, for contract tests and error messages."""
    return tuple(f.name for f in fields(cls))
