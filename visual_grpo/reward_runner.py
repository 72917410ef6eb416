"""One reward with its limits: how it is configured, called, repeated and given up on."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.option_types import check_types
from visual_grpo.registry import REWARDS
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, as_reward, signature_of, to_output
from visual_grpo.types import RewardStatus
from visual_grpo.workers import DaemonWorkers

__all__ = ["HangError", "RewardCounts", "RewardRunner", "RewardSpec", "device_of"]

MAX_ABANDONED = 4
"""Calls of one reward that may hang before it is called no more: each keeps a thread, and perhaps a core, for good."""

Applies = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """How one reward takes part in a run."""

    name: str
    reward: Any = None
    """registered name, "package.module:Name", "http://HOST:PORT/name", `Reward` or function; None: `name` itself."""
    url: str | Sequence[str] | None = None
    """server(s) that have the reward, replicas of each other; `params` are then those of `rewards/remote.py`."""
    weight: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = 120.0
    """wall-clock limit of one call (one batch, or one group); None: no limit, and the call runs in the caller's thread."""
    retries: int = 2
    retry_wait_s: float = 0.0
    on_failed: Literal["drop", "stop"] = "drop"
    eval_only: bool = False
    batch_size: int | None = None
    """most rows a call; None: what the reward itself asks for, which is mostly all at once."""
    applies: Applies | None = None
    """which rows it scores: {metadata key: value or list of values}, or a function of a row's metadata; None: all."""
    completions: Literal["auto", "text", "messages"] = "auto"
    """how a TRL function gets completions."""

    @classmethod
    def parse(cls, name: str, given: Any) -> RewardSpec:
        """Read a weight, a mapping of the fields above, a config section, or a reward itself (weight 1)."""
        if isinstance(given, RewardSpec):
            return given
        if hasattr(given, "model_dump"):
            given = dict(given.model_dump())
            given.pop("normalise", None)  # of the loop: a suite gives raw scores
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            given = {"weight": given}
        elif callable(given):
            given = {"reward": given}
        if not isinstance(given, Mapping):
            raise UserError(
                f"rewards.{name} is {given!r}; give a weight, or a mapping such as {{weight: 1.0, params: {{}}}}."
            )
        known = [f.name for f in fields(cls) if f.name != "name"]
        for key in given:
            if key not in known:
                raise UserError(
                    f"rewards.{name} has no setting {key!r}.{did_you_mean(str(key), known)} Known: {', '.join(known)}."
                )
        told_below = ("weight", "on_failed")
        check_types(cls, {k: v for k, v in given.items() if k not in told_below}, f"rewards.{name}")
        spec = cls(name=name, **given)
        spec._check()
        return spec

    def _check(self) -> None:
        if isinstance(self.weight, bool) or not isinstance(self.weight, (int, float)) or not math.isfinite(self.weight):
            raise UserError(f"rewards.{self.name}.weight is {self.weight!r}; it must be a finite number.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UserError(
                f"rewards.{self.name}.timeout_s is {self.timeout_s}; give seconds above 0, or null for no limit."
            )
        for key in ("retries", "retry_wait_s"):
            if getattr(self, key) < 0:
                raise UserError(f"rewards.{self.name}.{key} is {getattr(self, key)}; give 0 or more.")
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError(
                f"rewards.{self.name}.batch_size is {self.batch_size}; give 1 or more, or null for all rows."
            )
        if self.on_failed not in ("drop", "stop"):
            raise UserError(f"rewards.{self.name}.on_failed is {self.on_failed!r}; give drop or stop.")

    def located(self) -> tuple[Any, dict[str, Any]]:
        """What to build and with which parameters: the reward itself, or the client of the server that has it."""
        given = self.name if self.reward is None else self.reward
        params = dict(self.params)
        if isinstance(given, str) and given.startswith(("http://", "https://")):
            given, params = "remote", {"url": given, **params}
        elif self.url is not None:
            if not isinstance(given, str):
                raise UserError(f"rewards.{self.name} has a url, so `reward` must be its name on the server.")
            named = {} if given == "remote" else {"reward": given}
            given, params = "remote", {"url": self.url, **named, **params}
        if given == "remote":
            params.setdefault("timeout_s", self.timeout_s)
        return given, params

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Say whether this reward applies to a row with metadata `row`."""
        if self.applies is None:
            return True
        if callable(self.applies):
            return bool(self.applies(row))
        return all(
            row.get(key) in (wanted if isinstance(wanted, (list, tuple, set)) else [wanted])
            for key, wanted in self.applies.items()
        )


@dataclass(kw_only=True)
class RewardCounts:
    """What happened to one reward since the suite was made; for logs and alarms."""

    calls: int = 0
    rows: int = 0
    not_applicable: int = 0
    failed: int = 0
    retried: int = 0
    """calls repeated after an exception or a NaN."""
    timeouts: int = 0
    seconds: float = 0.0


def device_of(given: torch.device | str) -> torch.device:
    """The device of that name.

    Raises:
        UserError: there is no such kind of device.
    """
    try:
        return torch.device(given)
    except RuntimeError as error:
        raise UserError(f"device {given!r}: {str(error).splitlines()[0]}") from None


class HangError(Exception):
    """A call ran past its limit."""


class RewardRunner:
    """One reward with its limits; a lock keeps its calls apart, so a reward need not be thread-safe."""

    def __init__(self, spec: RewardSpec, device: torch.device) -> None:
        self.spec = spec
        self.counts = RewardCounts()
        self._lock = threading.Lock()
        self._worker: DaemonWorkers | None = None
        self._abandoned: list[Future[Any]] = []
        given, params = spec.located()
        target = REWARDS.get(given) if isinstance(given, str) else given
        if inspect.isclass(target) and "device" in signature_of(target, spec.name):
            params.setdefault("device", device)
        self.reward: Reward = as_reward(given, name=spec.name, params=params, completions=spec.completions)

    def run(self, request: RewardRequest) -> tuple[RewardOutput, dict[int, BaseException]]:
        """Score `request`; returns values, states and details [N], and the last error of each failed row."""
        began = time.perf_counter()
        board = Board(request, self.spec, self.spec.batch_size or self.reward.rows_per_call)
        with self._lock:
            if "images" in self.reward.needs:
                board.fail_broken_pixels()
            for rows in board.units(self.reward.whole_groups):
                self._score(request, rows, board)
            counts = self.counts
            counts.rows += len(request)
            counts.failed += int((board.status == RewardStatus.FAILED).sum())
            counts.not_applicable += int((board.status == RewardStatus.NOT_APPLICABLE).sum())
            counts.seconds += time.perf_counter() - began
        return RewardOutput(values=board.values, status=board.status, details=board.details), board.errors

    def _score(self, request: RewardRequest, rows: list[int], board: Board) -> None:
        """Score the rows of one call with its retries, into `board`."""
        pending, error = rows, None
        for attempt in range(self.spec.retries + 1):
            if attempt:
                self.counts.retried += 1
                time.sleep(self.spec.retry_wait_s)
            try:
                output = self._call(request.take(pending))
            except HangError as hang:
                return board.fail(pending, hang)
            except (RewardError, UserError, KeyboardInterrupt):
                raise
            except BaseException as raised:  # libraries raise BaseException for their own time-outs
                error = raised
                continue
            error = None
            failed = board.put(pending, output)
            if not failed:
                return None
            board.fail(failed, ValueError("the value is not finite"))
            pending = pending if self.reward.whole_groups else failed
        if error is None:
            return None
        if len(pending) == 1 or self.reward.whole_groups:
            return board.fail(pending, error)
        return self._score_singly(request, pending, board)

    def _score_singly(self, request: RewardRequest, rows: list[int], board: Board) -> None:
        """Find the rows that a batch fails on; each gets one call."""
        for row in rows:
            self.counts.retried += 1
            try:
                failed = board.put([row], self._call(request.take([row])))
            except (RewardError, UserError, KeyboardInterrupt):
                raise
            except BaseException as error:
                board.fail([row], error)
            else:
                board.fail(failed, ValueError("the value is not finite"))

    def _call(self, request: RewardRequest) -> RewardOutput:
        images = request.images
        version = None if images is None else images._version
        self.counts.calls += 1
        result = self._limited(lambda: _without_gradient(self.reward, request))
        if images is not None and images._version != version:
            raise RewardError(
                f"reward {self.spec.name!r} changed the images in place, which other rewards share; let it work on "
                f"images.clone()."
            )
        return to_output(result, len(request), self.spec.name)

    def _limited(self, call: Callable[[], Any]) -> Any:
        """Run `call`, at most `timeout_s` long; past that its thread is left behind."""
        limit = self.spec.timeout_s
        if limit is None:
            return call()
        self._abandoned = [future for future in self._abandoned if not future.done()]
        if len(self._abandoned) >= MAX_ABANDONED:
            raise RewardError(
                f"reward {self.spec.name!r} has {MAX_ABANDONED} calls that never came back within timeout_s = {limit:g} s; "
                f"mend it, raise rewards.{self.spec.name}.timeout_s, or remove it."
            )
        if self._worker is None:
            self._worker = DaemonWorkers(f"reward-{self.spec.name}")
        future = self._worker.submit(call)
        try:
            return future.result(min(limit, threading.TIMEOUT_MAX))
        except FutureTimeoutError:
            if future.done():  # the reward's own TimeoutError, or an answer in the last moment
                return future.result()
            self.counts.timeouts += 1
            self._abandoned.append(future)
            self._worker.close()
            self._worker = None
            raise HangError(
                f"reward {self.spec.name!r} did not return within timeout_s = {limit:g} s and its call was given up; if it is "
                f"only slow, raise rewards.{self.spec.name}.timeout_s or lower batch_size"
            ) from None

    def close(self) -> None:
        """End the worker thread and what the reward holds."""
        self.reward.close()
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _without_gradient(reward: Reward, request: RewardRequest) -> Any:
    with torch.no_grad():  # gradient mode belongs to a thread, and this may be a new one
        return reward(request)


class Board:
    """Values and states of N rows while they are being filled in."""

    def __init__(self, request: RewardRequest, spec: RewardSpec, batch_size: int | None) -> None:
        count = len(request)
        self.request = request
        self.batch_size = batch_size or count
        self.values = torch.full((count,), torch.nan)
        self.status = torch.full((count,), int(RewardStatus.NOT_APPLICABLE), dtype=torch.int8)
        self.details: dict[str, Tensor] = {}
        self.errors: dict[int, BaseException] = {}
        self.rows = [row for row in range(count) if spec.matches(request.metadata[row])]

    def fail_broken_pixels(self) -> None:
        """A sample of NaN pixels has no score, whatever a reward would make of it."""
        if self.request.images is not None:
            finite = torch.isfinite(self.request.images).flatten(1).all(1).tolist()
            self.fail(
                [row for row in self.rows if not finite[row]], ValueError("the image has pixels that are not finite")
            )
            self.rows = [row for row in self.rows if finite[row]]

    def units(self, whole_groups: bool) -> list[list[int]]:
        """Split the rows into calls: whole groups, or at most `batch_size` rows."""
        if not whole_groups:
            return [self.rows[i : i + self.batch_size] for i in range(0, len(self.rows), self.batch_size)]
        groups: dict[int, list[int]] = {}
        ids = self.request.group_ids.tolist()
        for row in self.rows:
            groups.setdefault(ids[row], []).append(row)
        return list(groups.values())

    def put(self, rows: Sequence[int], output: RewardOutput) -> list[int]:
        """Store an output for `rows`; returns those that failed."""
        assert output.status is not None
        at = torch.tensor(rows, dtype=torch.long)
        self.values[at] = output.values
        self.status[at] = output.status
        for key, figure in output.details.items():
            self.details.setdefault(key, torch.full_like(self.values, torch.nan))[at] = figure
        for row in rows:
            self.errors.pop(row, None)
        return [row for row, state in zip(rows, output.status.tolist(), strict=True) if state == RewardStatus.FAILED]

    def fail(self, rows: Sequence[int], error: BaseException) -> None:
        """Mark `rows` as failed."""
        for row in rows:
            self.values[row] = torch.nan
            self.status[row] = int(RewardStatus.FAILED)
            self.errors[row] = error
