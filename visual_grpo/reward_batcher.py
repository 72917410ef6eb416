"""Joins requests that arrive together into one call of a reward, and takes the answer apart again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import RunError, UserError
from visual_grpo.reward import RewardOutput, RewardRequest
from visual_grpo.reward_runner import RewardRunner

__all__ = ["Batcher", "Scored", "join"]

Scored = tuple[RewardOutput, dict[int, str]]
"""Values, states and details of a request's rows, and the error of each failed row."""


def _kind(request: RewardRequest) -> str:
    """Requests of one kind can be joined: the same parts, image sizes and shared columns."""
    rows = {k: (str(v.dtype), list(v.shape[1:])) if isinstance(v, Tensor) else "list" for k, v in request.extra.items()
            if isinstance(v, list | Tensor)}  # fmt: skip
    shared = {k: v for k, v in request.extra.items() if k not in rows}
    images = None if request.images is None else list(request.images.shape[1:])
    return json.dumps([request.texts is None, images, rows, shared], sort_keys=True, default=str)


def join(requests: Sequence[RewardRequest]) -> RewardRequest:
    """One request of all rows; groups of different requests stay different groups."""
    if len(requests) == 1:
        return requests[0]
    first = requests[0]

    def rows(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(list(values))
        return [item for value in values for item in value] if isinstance(values[0], list) else values[0]

    ids, offset = [], 0
    for request in requests:
        dense = torch.unique(request.group_ids, return_inverse=True)[1]
        ids.append(dense + offset)
        offset += int(dense.max()) + 1
    return RewardRequest(
        prompts=rows([r.prompts for r in requests]),
        metadata=rows([r.metadata for r in requests]),
        group_ids=torch.cat(ids),
        images=None if first.images is None else rows([r.images for r in requests]),
        texts=None if first.texts is None else rows([r.texts for r in requests]),
        extra={key: rows([r.extra[key] for r in requests]) for key in first.extra},
    )


def _score(runner: RewardRunner, requests: Sequence[RewardRequest]) -> list[Scored | Exception]:
    """Score the requests in one call; if it breaks its contract over one of them, the others are scored without it."""
    try:
        output, errors = runner.run(join(requests))
    except (RunError, UserError) as error:
        if len(requests) == 1:
            return [error]
        return [_score(runner, [request])[0] for request in requests]
    parts: list[Scored | Exception] = []
    start = 0
    for request in requests:
        rows = slice(start, start + len(request))
        assert output.status is not None
        details = {key: figure[rows] for key, figure in output.details.items()}
        part = RewardOutput(values=output.values[rows], status=output.status[rows], details=details)
        own = {r - start: f"{type(e).__name__}: {e}"[:500] for r, e in errors.items() if rows.start <= r < rows.stop}
        parts.append((part, own))
        start += len(request)
    return parts


@dataclass(kw_only=True)
class Counts:
    """Totals of one reward for /metrics."""

    requests: int = 0
    rows: int = 0
    failed_rows: int = 0
    batches: int = 0
    seconds: float = 0.0


@dataclass(eq=False)
class _Waiting:
    request: RewardRequest
    future: asyncio.Future[Scored | Exception]
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.kind = _kind(self.request)


class Batcher:
    """The queue of one reward and the thread that works it off."""

    def __init__(self, runner: RewardRunner, *, max_rows: int, wait_s: float) -> None:
        self.runner, self.max_rows, self.wait_s = runner, max_rows, wait_s
        self.counts = Counts()
        self.waiting: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"serve-{runner.spec.name}")
        self._task = asyncio.create_task(self._work())

    async def score(self, request: RewardRequest) -> Scored:
        """Wait for a request's turn and for its scores.

        Raises:
            RunError, UserError: what the reward says about this request.
        """
        mine = _Waiting(request, asyncio.get_running_loop().create_future())
        self.waiting.append(mine)
        self._arrived.set()
        result = await mine.future
        if isinstance(result, Exception):
            raise result
        return result

    def _take(self) -> list[_Waiting]:
        """The oldest request and those behind it that can be joined with it."""
        self.waiting = [item for item in self.waiting if not item.future.cancelled()]
        batch: list[_Waiting] = []
        rows = 0
        for item in self.waiting:
            fits = item.kind == self.waiting[0].kind and rows + len(item.request) <= self.max_rows
            if not batch or fits:
                batch.append(item)
                rows += len(item.request)
        self.waiting = [item for item in self.waiting if item not in batch]
        return batch

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.waiting:
                self._arrived.clear()
                await self._arrived.wait()
                await asyncio.sleep(self.wait_s)
            batch = self._take()
            if not batch:
                continue
            began = time.perf_counter()
            requests = [item.request for item in batch]
            try:
                results = await loop.run_in_executor(self._thread, _score, self.runner, requests)
            except Exception as error:  # a fault of ours must not end the worker
                results = [error] * len(batch)
            self.counts.batches += 1
            self.counts.seconds += time.perf_counter() - began
            for item, result in zip(batch, results, strict=True):
                self.counts.requests += 1
                self.counts.rows += len(item.request)
                self.counts.failed_rows += len(result[1]) if isinstance(result, tuple) else len(item.request)
                if not item.future.done():
                    item.future.set_result(result)

    async def close(self) -> None:
        """End the worker and what the reward holds."""
        self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.runner.close()
