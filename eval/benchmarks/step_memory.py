"""Memory of a training step against the number of denoising steps: units are replayed in chunks, so it should not grow.

    visual-grpo benchmark step_memory

One real step of Flow-GRPO (sample, score, replay, backward, optimizer) for each number of denoising steps. Counted are the bytes
that autograd holds for the backward pass, at their peak: it is what a step adds to the weights, and it does not depend on the
allocator. On a GPU the allocator's own peak stands beside it. The stored transitions are counted apart: they do grow.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

__all__ = ["run"]


class _Held:
    """One saved tensor; its bytes count until the graph lets it go."""

    def __init__(self, counter: SavedBytes, tensor: Tensor) -> None:
        self.tensor, self.counter, self.size = tensor, counter, tensor.nbytes
        counter.now += self.size
        counter.peak = max(counter.peak, counter.now)

    def __del__(self) -> None:
        self.counter.now -= self.size


class SavedBytes:
    """Context in which the bytes that autograd saves are counted; a tensor that two operations save counts twice."""

    def __init__(self) -> None:
        """Start at 0."""
        self.now = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: _Held(self, x), lambda held: held.tensor)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def run(
    *,
    seeds: int = 1,
    out: Path | None = None,
    recipe: str = "flow_grpo_tiny",
    steps: tuple[int, ...] = (5, 10, 20, 40),
    units_per_pass: int = 2,
) -> dict[str, Any]:
    """Measure.

    Args:
        seeds: unused; memory does not depend on the seed.
        out: folder for step_memory.json.
        recipe: of a method whose units are denoising transitions.
        steps: numbers of denoising steps.
        units_per_pass: transitions replayed at once.

    Returns:
        A row a number of steps: units, peak_mib (what autograd held at most), stored_mib (transitions of the step's rows),
        cuda_peak_mib on a GPU.
    """
    rows = {f"{count} steps": _step(recipe, count, units_per_pass) for count in steps}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step_memory.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def _step(recipe: str, steps: int, units_per_pass: int) -> dict[str, float]:
    import visual_grpo as vg
    from visual_grpo.api import plan

    size = {"train.prompts_per_step": 2, "train.group_size": 4, "train.micro_batch": 4, "train.steps": 1}
    quiet = {"eval.every": 0, "eval.samples": 8, "eval.final_samples": 8, "train.units_per_pass": units_per_pass}
    overrides = {**size, **quiet, "sampling.steps": steps}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder, SavedBytes() as saved:
        vg.train(recipe, overrides=overrides, out=folder)
    made = plan(recipe, overrides)
    module = made.adapter_class.load_meta(made.config.model)
    memory = made.adapter_class.plan_memory(made.config.model, module, sampling=made.sampling, rows=8, units=steps - 1)
    row = {
        "units": float(steps - 1),
        "peak_mib": saved.peak / 2**20,
        "stored_mib": memory.parts["rollout storage"] / 2**20,
    }
    if torch.cuda.is_available():
        row["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row
