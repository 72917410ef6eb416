"""What the memory benchmark counts: bytes that autograd holds, from the forward pass until the graph lets them go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
from toy_flow import flow_config, flow_trainer, gradient, rows_of

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


@pytest.mark.parametrize("method", ["flow_grpo", {"v_grpo": {"pairs": 4}}])
def test_memory_does_not_grow_with_the_denoising_steps(tmp_path: Path, method: Any) -> None:
    """The same bytes, exactly, for any number of steps at the same units a pass; more units a pass hold more."""
    held = {}
    for steps, chunk in ((5, 2), (9, 2), (9, 4)):
        folder = tmp_path / f"{steps}-{chunk}"
        folder.mkdir()
        trainer = flow_trainer(folder, [method], sampling={"steps": steps}, train={"units_per_pass": chunk})
        rows, _ = rows_of(trainer)
        with SavedBytes() as saved:
            gradient(trainer, rows)
        held[steps, chunk] = saved.peak
        trainer.suite.close()
        trainer.writer.close()
    assert held[9, 2] == held[5, 2] > 0
    assert held[9, 4] > 1.5 * held[9, 2]


def test_a_run_is_measured_with_its_self_test(tmp_path: Path) -> None:
    config = flow_config(tmp_path, ["flow_grpo"], train={"units_per_pass": 1})
    assert held_bytes(config, {"eval.samples": 4, "eval.final_samples": 4}) > 0
