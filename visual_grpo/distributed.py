"""The processes of a run: which rows are mine, sums over all, rows of all. One process needs none of it and pays nothing.

A process that fails tells the others why and leaves; they meet its absence in their next collective and end with its message.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from visual_grpo.errors import RunError, UserError

FAILURE = "visual_grpo/failure"
LEFT = "visual_grpo/left/{}"
"""Set where a process needs the store no more."""
LISTEN_S = 0.5
"""Seconds between two looks for the failure of another process."""
FAREWELL = timedelta(seconds=30)
"""How long the main process keeps the store for the others."""
LOST = timedelta(seconds=5)
"""The same where one of them has gone without a word, and will not come."""
T = TypeVar("T")


def refuse_sharding() -> None:
    """Refuse FSDP and DeepSpeed launches: as full replicas they would fail silently, at the first model too large.

    Raises:
        UserError: naming the config that works.
    """
    for name, variable in (("FSDP", "ACCELERATE_USE_FSDP"), ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED")):
        if os.environ.get(variable, "false").lower() == "true":
            raise UserError(
                f"the launcher asks for {name}, but this version trains full replicas only: every process holds the "
                "whole model. Launch with docs/launch/ddp.yaml, and use model.lora, model.dtype=bfloat16 and "
                "model.gradient_checkpointing=true to fit (see visual-grpo train RECIPE --dry-run)"
            )


def launched_processes() -> int:
    """How many processes the launcher has started; 1 without one.

    Raises:
        UserError: WORLD_SIZE is no number above 0.
    """
    given = os.environ.get("WORLD_SIZE") or "1"
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"WORLD_SIZE is {given!r}; it is set by the launcher (torchrun, accelerate launch): unset it")
    return int(given)


class Ranks:
    """Rank and world size as `accelerate launch` or `torchrun` set them, and the few collectives that the loop needs."""

    def __init__(self) -> None:
        """Join the process group of the environment, if there is one.

        Raises:
            UserError: the launcher asks for sharded weights, which the loop does not do.
        """
        refuse_sharding()
        self.world = launched_processes()
        self.store: Any = None
        self._farewell = FAREWELL
        self._told: dict[str, Any] | None = None
        self._left = False  # the main process knows that this one needs its store no more
        self._closing = threading.Event()
        self._listener: threading.Thread | None = None
        if self.world > 1 and not dist.is_initialized():
            # Figures, rows and messages go between CPUs; only gradients go between accelerators.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(self.device)  # random states and NCCL go by the present device
            try:
                self.store, rank, _ = next(dist.rendezvous("env://"))
            except ValueError as error:  # a variable that is missing or no number
                raise UserError(
                    f"WORLD_SIZE is {self.world}, but the launcher's other variables do not fit ({error}): start with "
                    "torchrun or accelerate launch, or unset WORLD_SIZE"
                ) from None
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", self.store), rank=rank, world_size=self.world
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        if self.store is not None:
            self._listener = threading.Thread(target=self._listen, args=(self.store.clone(),), daemon=True)
            self._listener.start()

    def _listen(self, store: Any) -> None:
        """Take the reason of a failure as soon as it is told, and say so: then the main process, and its store, may go.

        Collectives wake up by the closing of sockets, which torch may put off until the process has ended.
        """
        with suppress(RuntimeError):
            while not self._closing.wait(LISTEN_S):
                if store.check([FAILURE]):
                    self._told = json.loads(store.get(FAILURE))
                    store.set(LEFT.format(self.rank), "")
                    self._left = True
                    return

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self.store is not None:
            self._tell(error)
        self.close()

    def _tell(self, error: BaseException) -> None:
        """Leave the reason where the other processes will look for it, unless it came from one of them."""
        if self._told is not None:
            return
        told = {"rank": self.rank, "message": str(error) or type(error).__name__, "user": isinstance(error, UserError)}
        with suppress(RuntimeError):
            if not self.store.check([FAILURE]):
                self.store.set(FAILURE, json.dumps(told))
                self.store.get(FAILURE)  # a set does not wait for the store; who meets our absence must find the reason

    def _together(self, collective: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a collective.

        Raises:
            RunError: another process has failed; with its message, or with what is known.
            UserError: the same, where the input was at fault.
        """
        try:
            return collective(*args, **options)
        except RuntimeError as error:
            self._farewell = LOST
            with suppress(RuntimeError):
                if self._told is None and self.store is not None and self.store.check([FAILURE]):
                    self._told = json.loads(self.store.get(FAILURE))
            told = self._told
            if told is None:
                raise RunError(
                    f"process {self.rank} lost the others: one has ended without a word (killed, or out of memory), or the "
                    f"network is gone; see their output, then go on with --resume ({str(error).splitlines()[0]})"
                ) from error
            kind = UserError if told["user"] else RunError
            raise kind(f"process {told['rank']} failed: {told['message']}") from None

    @property
    def main(self) -> bool:
        """True on the one process that writes files and talks to the user."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This process's accelerator, else the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")

    def share(self, count: int, what: str) -> range:
        """My block of `count` consecutive items.

        Raises:
            UserError: `count` is not a multiple of the number of processes; names the nearest legal values.
        """
        if count % self.world:
            low = count // self.world * self.world
            legal = [n for n in (low, low + self.world) if n > 0]
            raise UserError(
                f"{what} ({count}) must be a multiple of the {self.world} processes; use {' or '.join(map(str, legal))}"
            )
        size = count // self.world
        return range(self.rank * size, (self.rank + 1) * size)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all processes, the same on each."""
        if self.world == 1:
            return value
        out = value.detach().clone()
        self._together(dist.all_reduce, out)
        return out

    def max(self, value: Tensor) -> Tensor:
        """Maximum over all processes, the same on each."""
        if self.world == 1:
            return value
        out = value.detach().clone()
        self._together(dist.all_reduce, out, op=dist.ReduceOp.MAX)
        return out

    def gather(self, rows: Tensor) -> Tensor:
        """Rows of all processes in rank order; counts may differ (dimension 0), the rest of the shape must agree."""
        if self.world == 1:
            return rows
        parts: list[Any] = [None] * self.world
        self._together(dist.all_gather_object, parts, rows.detach().cpu())
        return torch.cat(parts).to(rows.device)

    def gather_objects(self, items: list[Any]) -> list[Any]:
        """Lists of all processes, joined in rank order."""
        if self.world == 1:
            return items
        parts: list[Any] = [None] * self.world
        self._together(dist.all_gather_object, parts, items)
        return [item for part in parts for item in part]

    def mine(self, gathered: Tensor, count: int) -> Tensor:
        """The `count` rows of this process back out of a gathered tensor."""
        if self.world == 1:
            return gathered
        counts = self.gather(torch.tensor([count]))
        start = int(counts[: self.rank].sum())
        return gathered[start : start + count]

    def broadcast(self, value: Any) -> Any:
        """The main process's picklable `value` on every process."""
        if self.world == 1:
            return value
        box = [value]
        self._together(dist.broadcast_object_list, box, src=0)
        return box[0]

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients of all processes, in one flat message; a missing gradient counts as zero."""
        if self.world == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        if flat.is_cuda:
            self.barrier()  # a process that failed on the way is met here: NCCL would wait for it
        self._together(dist.all_reduce, flat)
        offset = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = flat[offset : offset + grad.numel()].view_as(grad).clone()
            offset += grad.numel()

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            self._together(dist.barrier)

    def close(self) -> None:
        """Leave the process group. The main process, which may hold the store, lets the others read the last message."""
        if not dist.is_initialized():
            return
        dist.destroy_process_group()
        self._closing.set()
        if self._listener is not None:
            self._listener.join()
        if self.store is not None:
            with suppress(RuntimeError):
                if self.rank == 0:
                    self.store.set(LEFT.format(0), "")
                    self.store.wait([LEFT.format(rank) for rank in range(self.world)], self._farewell)
                elif not self._left:
                    self.store.set(LEFT.format(self.rank), "")
            self.store = None
