"""The processes of a run: which rows are mine, sums over all, rows of all. One process needs none of it and pays nothing."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from visual_grpo.errors import UserError


class Ranks:
    """Rank and world size as `accelerate launch` or `torchrun` set them, and the few collectives that the loop needs."""

    def __init__(self) -> None:
        """Join the process group of the environment, if there is one."""
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1 and not dist.is_initialized():
            from accelerate import PartialState

            PartialState()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

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
        dist.all_reduce(out)
        return out

    def max(self, value: Tensor) -> Tensor:
        """Maximum over all processes, the same on each."""
        if self.world == 1:
            return value
        out = value.detach().clone()
        dist.all_reduce(out, op=dist.ReduceOp.MAX)
        return out

    def gather(self, rows: Tensor) -> Tensor:
        """Rows of all processes in rank order; counts may differ (dimension 0), the rest of the shape must agree."""
        if self.world == 1:
            return rows
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, rows.detach().cpu())
        return torch.cat(parts).to(rows.device)

    def gather_objects(self, items: list[Any]) -> list[Any]:
        """Lists of all processes, joined in rank order."""
        if self.world == 1:
            return items
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, items)
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
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def reduce_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients of all processes, in one flat message; a missing gradient counts as zero."""
        if self.world == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        offset = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = flat[offset : offset + grad.numel()].view_as(grad).clone()
            offset += grad.numel()

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
