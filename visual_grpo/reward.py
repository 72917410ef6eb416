"""The seam between the loop and everything that scores: a reward's request, its answer, and how a plain function becomes one.

A reward is a callable of one `RewardRequest`. Each row of its answer is in one of three states (`RewardStatus`): ok, not
applicable (`None`: it says nothing about this row) or failed (NaN, an exception). A poor sample is neither: it scores low.
Plain functions need no import of ours, `f(images, prompts, metadata)`, and TRL's reward functions work unchanged,
`f(prompts, completions, **columns)`, plain or async.
"""

from __future__ import annotations

import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visual_grpo.errors import RunError, UserError, did_you_mean
from visual_grpo.option_types import check_types
from visual_grpo.registry import REWARDS
from visual_grpo.types import RewardStatus

__all__ = [
    "GroupReward",
    "Reward",
    "RewardError",
    "RewardOutput",
    "RewardRequest",
    "as_reward",
    "register_reward",
    "to_output",
    "to_pil",
]

RANGE_SLACK = 1e-3
"""How far outside [0, 1] a pixel may lie before it is a mistake and not rounding."""


class RewardError(RunError):
    """A reward broke its contract, or kept failing where a number was needed; ends the run."""


def to_pil(images: Tensor) -> list[Image.Image]:
    """Convert images [N, 3, H, W] in [0, 1] to N RGB images: round(255 x), clamped (truncation would darken by half a level)."""
    pixels = (images.detach().float() * 255).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(array) for array in np.ascontiguousarray(pixels.permute(0, 2, 3, 1).cpu().numpy())]


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """N samples to score; rewards share it and change nothing in it."""

    prompts: list[str]
    """[N] prompt texts."""
    metadata: list[dict[str, Any]]
    """[N] data-set columns of the row's prompt."""
    group_ids: Tensor
    """[N] int64, equal for the samples of one prompt."""
    images: Tensor | None = None
    """[N, 3, H, W] float32 RGB in [0, 1]."""
    texts: list[str] | None = None
    """[N] completions."""
    extra: dict[str, Any] = field(default_factory=dict)
    """further columns: a list or tensor of length N is one value a row (`lengths`: sampled tokens, `completion_ids`),
    anything else is shared by all rows."""
    _parent: tuple[RewardRequest, list[int]] | None = field(default=None, repr=False, compare=False)
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        prompts: Sequence[str],
        *,
        images: Tensor | None = None,
        texts: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        group_ids: Tensor | None = None,
        **extra: Any,
    ) -> RewardRequest:
        """Make a request with defaults: no metadata, and every row a group of its own."""
        count = len(prompts)
        return cls(
            prompts=list(prompts),
            metadata=[{} for _ in prompts] if metadata is None else [dict(row) for row in metadata],
            group_ids=torch.arange(count) if group_ids is None else group_ids,
            images=images,
            texts=None if texts is None else list(texts),
            extra=extra,
        )

    def __post_init__(self) -> None:
        count = len(self.prompts)
        if count == 0:
            raise ValueError("a reward request needs at least one row; it has none. Do not score an empty batch.")
        lengths = {"metadata": len(self.metadata), "group_ids": len(self.group_ids)}
        if self.images is not None:
            lengths["images"] = len(self.images)
        if self.texts is not None:
            lengths["texts"] = len(self.texts)
        lengths |= {key: len(value) for key, value in self.extra.items() if isinstance(value, (list, Tensor))}
        wrong = {key: length for key, length in lengths.items() if length != count}
        if wrong:
            raise ValueError(f"a reward request of {count} prompts needs {count} rows in every column; it has {wrong}.")
        if self.images is not None and self._parent is None:
            _check_images(self.images)
            object.__setattr__(self, "images", self.images.detach().float())

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def pil_images(self) -> list[Image.Image]:
        """[N] RGB images, converted once and shared by all rewards and all parts of this request; do not draw on them."""
        if self._parent is not None:
            parent, index = self._parent
            everything = parent.pil_images
            return [everything[i] for i in index]
        if self.images is None:
            raise RewardError("this request has no images; a reward that reads pil_images must say needs={'images'}.")
        with self._lock:
            if "pil" not in self._cache:
                self._cache["pil"] = to_pil(self.images)
        found: list[Image.Image] = self._cache["pil"]
        return found

    def take(self, index: Sequence[int]) -> RewardRequest:
        """Return rows `index` as a request of their own."""
        rows = list(index)
        if rows == list(range(len(self))):
            return self
        at = torch.tensor(rows, dtype=torch.long)

        def pick(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[at.to(value.device)]
            return [value[i] for i in rows] if isinstance(value, list) else value

        return replace(
            self,
            prompts=pick(self.prompts),
            metadata=pick(self.metadata),
            group_ids=pick(self.group_ids),
            images=pick(self.images),
            texts=pick(self.texts),
            extra={key: pick(value) for key, value in self.extra.items()},
            _parent=(self, rows),
        )


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise ValueError(
            f"images must be float [N, 3, H, W]; got {str(images.dtype).removeprefix('torch.')} {list(images.shape)}. "
            f"Convert uint8 [N, H, W, 3] with images.permute(0, 3, 1, 2).float() / 255."
        )
    finite = images[torch.isfinite(images)]
    if finite.numel() == 0:
        return
    low, high = finite.min().item(), finite.max().item()
    if low < -RANGE_SLACK or high > 1 + RANGE_SLACK:
        hint = "they look like 0..255: divide by 255" if high > 2 else "a VAE gives [-1, 1]: use images / 2 + 0.5"
        raise ValueError(f"images must lie in [0, 1]; these reach from {low:.3f} to {high:.3f} ({hint}).")


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """What a reward says about N rows."""

    values: Tensor
    """[N] float32; NaN where there is none."""
    status: Tensor | None = None
    """[N] int8 of `RewardStatus`; None: ok where finite, failed elsewhere."""
    details: dict[str, Tensor] = field(default_factory=dict)
    """further figures, each [N] float, for logs and evaluations."""

    @staticmethod
    def from_list(values: Sequence[float | None], details: Mapping[str, Sequence[float]] | None = None) -> RewardOutput:
        """Make an output from Python numbers; `None` is not applicable, NaN is failed.

        >>> RewardOutput.from_list([0.5, None]).status.tolist()
        [0, 1]
        """
        numbers = torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float32)
        status = torch.where(torch.isfinite(numbers), int(RewardStatus.OK), int(RewardStatus.FAILED))
        absent = torch.tensor([v is None for v in values], dtype=torch.bool)
        status = status.masked_fill(absent, int(RewardStatus.NOT_APPLICABLE)).to(torch.int8)
        figures = {key: torch.tensor(list(row), dtype=torch.float32) for key, row in (details or {}).items()}
        return RewardOutput(values=numbers, status=status, details=figures)


class Reward(ABC):
    """One figure of merit. Constructors are light; a model or engine is loaded at the first call."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """which of "images" and "texts" it reads: a run whose model makes neither is refused before weights are loaded."""
    whole_groups: ClassVar[bool] = False
    rows_per_call: ClassVar[int | None] = None
    """rows that it is given at a time unless the config says `batch_size`: small where a row takes long, since the time limit
    is that of a call; None: all rows."""

    @abstractmethod
    def __call__(self, request: RewardRequest) -> RewardOutput | Tensor | Sequence[float | None]:
        """Score every row of `request` by its own content, so that any split of a batch gives the same values."""

    def close(self) -> None:  # noqa: B027 - most rewards hold nothing
        """Let go of processes and connections; the next call may take them up again."""


class GroupReward(Reward):
    """A reward that compares siblings: each call gets one whole group (equal `group_ids`) and nothing else."""

    whole_groups: ClassVar[bool] = True


register_reward = REWARDS.register
"""`@register_reward("name")` on a `Reward` class or a plain function."""


def to_output(result: Any, count: int, name: str) -> RewardOutput:
    """Check and normalise what reward `name` returned for `count` rows.

    Returns:
        An output on the CPU: values [count] float32, status [count] int8 (non-finite values are failed), details [count].

    Raises:
        RewardError: wrong type or length; never retried, for the same call would give it again.
    """
    output = result if isinstance(result, RewardOutput) else _from_plain(result, name)
    for what, figure in {"values": output.values, "status": output.status, **output.details}.items():
        if not isinstance(figure, Tensor) and not (what == "status" and figure is None):
            raise RewardError(
                f"reward {name!r} returned a RewardOutput whose {what} is {type(figure).__name__}; give a tensor [{count}], or "
                f"use RewardOutput.from_list."
            )
    _check_length(output.values, count, name, "values")
    values = output.values.detach().to("cpu", torch.float32).clone()
    if output.status is None:
        status = torch.zeros(count, dtype=torch.int8)
    else:
        _check_length(output.status, count, name, "states")
        status = output.status.detach().to("cpu", torch.int8).clone()
    status[(status == RewardStatus.OK) & ~torch.isfinite(values)] = int(RewardStatus.FAILED)
    values[status != RewardStatus.OK] = float("nan")
    details = {}
    for key, figure in output.details.items():
        _check_length(figure, count, name, f"details[{key!r}]")
        details[key] = figure.detach().to("cpu", torch.float32)
    return RewardOutput(values=values, status=status, details=details)


def _from_plain(result: Any, name: str) -> RewardOutput:
    if isinstance(result, np.ndarray) and result.dtype != object:
        result = torch.from_numpy(result)
    if isinstance(result, Tensor):
        return RewardOutput(values=result)
    if isinstance(result, (list, tuple, np.ndarray)):
        numbers: list[float | None] = []
        for value in result:
            single = isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0
            if not (value is None or isinstance(value, (Real, np.generic)) or single):
                raise RewardError(
                    f"reward {name!r} returned {value!r} among its values; each must be a number, or None for a row that "
                    f"the reward does not apply to."
                )
            numbers.append(None if value is None else float(value))
        return RewardOutput.from_list(numbers)
    raise RewardError(
        f"reward {name!r} returned {type(result).__name__}; return a list of float | None or a tensor [N], one value a row."
    )


def _check_length(values: Tensor, count: int, name: str, what: str) -> None:
    if values.ndim != 1 or len(values) != count:
        given = f"{len(values)} {what}" if values.ndim == 1 else f"{what} of shape {list(values.shape)}"
        raise RewardError(
            f"reward {name!r} returned {given} for {count} rows; expected [{count}]: one value a row, in the order of the "
            f"request, and None for a row that it does not apply to."
        )


_PASSED_BY_US = frozenset(
    {"request", "images", "pil_images", "prompts", "texts", "metadata", "group_ids", "completions"}
)


def as_reward(
    given: Any,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    completions: Literal["auto", "text", "messages"] = "auto",
) -> Reward:
    """Turn a registered name, class, instance or plain function into a `Reward`.

    Args:
        given: "name", "package.module:Name", "http://HOST:PORT/name", a `Reward` (class or instance) or a function, told
            apart by the names of its parameters.
        name: what to call it in messages.
        params: constructor arguments of a class, or keyword arguments fixed on a function.
        completions: how a TRL function gets them: strings, lists of one message, or decided by its annotation and the data.

    Raises:
        UserError: unknown name, parameters that do not exist, or a signature of no known kind.
    """
    # Imported here: the wrapper is itself a `Reward`, and this is the one place from which callers should get one.
    from visual_grpo.reward_functions import FunctionReward

    if isinstance(given, str) and given.startswith(("http://", "https://")):
        given, params, name = "remote", {"url": given, **(params or {})}, name or given
    label = name or (given if isinstance(given, str) else str(getattr(given, "__name__", type(given).__name__)))
    target = REWARDS.get(given) if isinstance(given, str) else given
    options = dict(params or {})
    if inspect.isclass(target):
        target = _construct(target, options, label)
    elif isinstance(target, Reward) and options:
        raise UserError(
            f"reward {label!r} is already built, so params {sorted(options)} cannot be set; give the class."
        )
    elif options:
        _check_params(target, options, label)
        check_types(target, options, f"reward {label!r}")
        target = functools.partial(target, **options)
    if isinstance(target, Reward):
        return target
    if not callable(target):
        raise UserError(f"reward {label!r} is {type(target).__name__}, which cannot be called.")
    return FunctionReward(target, label, completions, fixed=frozenset(options))


def _construct(cls: type, options: dict[str, Any], label: str) -> Any:
    _check_params(cls, options, label)
    what = f"reward {label!r}"
    try:
        made = cls(**options)
        check_types(cls, options, what)  # after what the reward says itself, which knows more
        return made
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        check_types(cls, options, what)
        raise UserError(f"reward {label!r} cannot be built with params {options}: {error}.") from error
    except Exception as error:  # a file or a package that it needs
        raise UserError(
            f"reward {label!r} cannot be built with params {options}: {error} ({type(error).__name__})."
        ) from error


def signature_of(target: Any, label: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class or function.

    Raises:
        UserError: Python knows none (a builtin), so it is no reward.
    """
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        raise UserError(f"reward {label!r} leads to {target!r}, which is no reward class or function.") from None


def _check_params(target: Any, options: Mapping[str, Any], label: str) -> None:
    parameters = signature_of(target, label)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in options:
        if key not in parameters:
            known = [p for p in parameters if p not in _PASSED_BY_US]
            raise UserError(
                f"reward {label!r} has no parameter {key!r}.{did_you_mean(key, known)} It takes: {', '.join(known) or 'none'}."
            )
