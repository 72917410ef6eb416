"""Memory that runs out is told in one message that says which sizes to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from visual_grpo.errors import RunError


@contextmanager
def memory_errors() -> Iterator[None]:
    """What the allocators raise when memory runs out becomes a `RunError` that says what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        # The CPU's allocator raises a plain RuntimeError.
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)):
            raise
        raise RunError(
            f"out of memory: {reason}. Lower train.micro_batch or train.units_per_pass (training), train.rollout_batch "
            "(sampling) or eval.batch (evaluation); model.lora, model.dtype=bfloat16 and model.gradient_checkpointing=true need "
            "less too (visual-grpo train RECIPE --dry-run adds it up). A run that has begun goes on with --resume and smaller "
            "batches"
        ) from error
