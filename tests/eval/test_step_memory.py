"""What the memory benchmark counts: bytes that autograd holds, from the forward pass until the graph lets them go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visual_grpo.eval.benchmarks.step_memory import SavedBytes, held_bytes


def test_saved_bytes_rise_and_fall() -> None:
    x = torch.ones(1000, requires_grad=True)
    with SavedBytes() as saved:
        value = x.exp().sum()  # exp keeps its output
        assert saved.now == saved.peak == 4000
        value.backward()
        del value
        assert saved.now == 0
        for _ in range(3):
            x.exp().sum().backward()
    assert (saved.now, saved.peak) == (0, 4000)
    x.exp()
    assert saved.peak == 4000


def test_chunks_hold_less_than_the_whole() -> None:
    x = torch.ones(100, requires_grad=True)
    with SavedBytes() as whole:
        (x.exp().sum() + x.exp().sum()).backward()
    with SavedBytes() as chunks:
        for _ in range(2):
            x.exp().sum().backward()
    assert whole.peak == 2 * chunks.peak


@pytest.mark.parametrize("method", ["flow_grpo", {"v_grpo": {"pairs": 3}}])
def test_memory_does_not_grow_with_the_denoising_steps(method: Any) -> None:
    """The same bytes, exactly, for 3 and 5 steps at the same units a pass; more units a pass hold more."""
    run = {
        "name": "memory",
        "model": {"adapter": "sd3", "path": "testbed/sd3_tiny", "lora": {"rank": 2}},
        "method": [method],
        "data": {"source": "testbed/scenes"},
        "rewards": {"brightness": 1.0},
        "sampling": {"guidance": 1.0},
        "train": {"prompts_per_step": 2, "group_size": 2, "micro_batch": 2, "ema": None},
    }
    of_eval = {"eval.samples": 2, "eval.final_samples": 2, "eval.batch": 2, "eval.grid": 2}
    held = {
        (steps, chunk): held_bytes(run, {**of_eval, "sampling.steps": steps, "train.units_per_pass": chunk})
        for steps, chunk in ((3, 1), (5, 1), (5, 2))
    }
    assert held[5, 1] == held[3, 1] > 0
    assert held[5, 2] > 1.5 * held[5, 1]
