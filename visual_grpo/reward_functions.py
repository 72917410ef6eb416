"""Plain functions as rewards: `f(images, prompts, metadata)` and TRL's `f(prompts, completions, **columns)`, plain or async."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, signature_of, to_output

__all__ = ["REQUEST_FIELDS", "CompletionFormat", "FunctionReward"]

CompletionFormat = Literal["auto", "text", "messages"]
REQUEST_FIELDS = ("request", "images", "pil_images", "prompts", "texts", "metadata", "group_ids")
"""Parameter names that a plain function may have; it gets the request's fields of these names."""
_TRL_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")


class FunctionReward(Reward):
    """A plain function as a reward; the names of its parameters say what it gets."""

    def __init__(
        self, function: Callable[..., Any], name: str, completions: CompletionFormat, fixed: frozenset[str]
    ) -> None:
        self.function, self.name, self.completions = function, name, completions
        parameters = {k: p for k, p in signature_of(function, name).items() if k not in fixed}
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {k: p for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        self.names = tuple(named)
        self.required = tuple(k for k, p in named.items() if p.default is p.empty)
        self.trl = "completions" in named
        self.annotation = str(named["completions"].annotation) if self.trl else ""
        known = set(REQUEST_FIELDS) & set(self.names)
        if not self.trl and (not known or not set(self.required) <= set(REQUEST_FIELDS)):
            raise UserError(
                f"reward function {name!r} takes ({', '.join(parameters)}), which is no known signature. Name the "
                f"parameters (images, prompts, metadata) or any of {', '.join(REQUEST_FIELDS)}; or, as in TRL, "
                f"(prompts, completions, **columns)."
            )
        found = set()
        if known & {"images", "pil_images"}:
            found.add("images")
        if self.trl or "texts" in known:
            found.add("texts")
        # Declared on the class elsewhere; a function has no class of its own to put it on.
        self.needs = frozenset(getattr(function, "needs", found))  # type: ignore[misc]

    def __call__(self, request: RewardRequest) -> RewardOutput:
        extra_details: dict[str, Tensor] = {}
        arguments = self._trl_arguments(request, extra_details) if self.trl else self._plain_arguments(request)
        result = self.function(**arguments)
        if inspect.isawaitable(result):
            result = _run_async(result)
        output = to_output(result, len(request), self.name)
        return replace(output, details={**output.details, **extra_details})

    def _plain_arguments(self, request: RewardRequest) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key in self.names:
            if key == "metadata":
                values[key] = [dict(row) for row in request.metadata]
            elif key == "request":
                values[key] = request
            elif key in REQUEST_FIELDS:
                value = getattr(request, key)
                values[key] = list(value) if isinstance(value, list) else value
        return values

    def _trl_arguments(self, request: RewardRequest, details: dict[str, Tensor]) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            """Keep numeric columns; TRL's table of texts has no place among figures."""
            if len(values) == len(request) and all(isinstance(v, Real) for v in values):
                details[column] = torch.tensor([float(v) for v in values])

        chats = [row.get("prompt") for row in request.metadata]
        conversational = all(isinstance(chat, list) for chat in chats)
        as_messages = self.completions == "messages" or (
            self.completions == "auto" and (conversational or "dict" in self.annotation)
        )
        texts = request.texts or []
        columns = {key: None for row in request.metadata for key in row if key not in _TRL_RESERVED}
        available: dict[str, Any] = {
            "trainer_state": None,
            "log_extra": log_extra,
            "log_metric": lambda *_: None,
            **request.extra,
            **{key: [row.get(key) for row in request.metadata] for key in columns},
            "prompts": chats if conversational else list(request.prompts),
            "completions": [[{"role": "assistant", "content": t}] for t in texts] if as_messages else list(texts),
        }
        missing = [key for key in self.required if key not in available]
        if missing:
            raise RewardError(
                f"reward {self.name!r} needs the data-set column(s) {', '.join(missing)}, which no row has; the rows have "
                f"{', '.join(columns) or 'none'}. Rename the columns, or give the parameters a default."
            )
        return available if self.open else {key: available[key] for key in self.names if key in available}


def _run_async(awaitable: Any) -> Any:
    """Wait for a coroutine, also from a thread whose event loop is busy (a notebook)."""

    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(wait()))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
