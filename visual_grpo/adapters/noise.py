"""Random numbers that belong to a row: they do not depend on the batch, the rank, the process count or the device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def row_seed(seed: int, row: int, stream: str = "row") -> int:
    """Seed of row `row` in a run's step `seed`; distinct `stream` names give unrelated numbers.

    >>> row_seed(0, 1) == row_seed(0, 1), row_seed(0, 1) == row_seed(1, 0), row_seed(0, 1) == row_seed(0, 1, "group")
    (True, False, False)
    """
    digest = hashlib.sha256(f"{stream}/{seed}/{row}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # the top bit off: torch takes a signed 64-bit seed


def row_noise(seed: int, rows: Tensor, shape: Sequence[int], stream: str = "row") -> Tensor:
    """Standard normal numbers for each row from a generator of its own.

    Args:
        seed: of the step.
        rows: [N] int64 row (or group) ids; equal ids get equal numbers.
        shape: of one row's numbers.
        stream: what they are for.

    Returns:
        [N, *shape] float32 on the CPU: CUDA's generator would give other numbers, and half precision coarser ones.
    """
    noise = torch.empty(len(rows), *shape)
    generator = torch.Generator()
    for slot, row in zip(noise, rows.tolist(), strict=True):
        generator.manual_seed(row_seed(seed, row, stream))
        torch.randn(tuple(shape), generator=generator, out=slot)
    return noise
