"""What the memory benchmark counts: bytes that autograd holds, from the forward pass until the graph lets them go."""

from __future__ import annotations

import torch

from visual_grpo.eval.benchmarks.step_memory import SavedBytes


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
