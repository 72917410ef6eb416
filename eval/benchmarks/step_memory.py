"""Memory of a training step against the number of denoising steps: units are replayed in chunks, so it should not grow.

    visual-grpo benchmark step_memory

One real step (sample, score, replay, backward, optimizer) for each method family and number of denoising steps. Counted are the
bytes that autograd holds for the backward pass, at their peak: it is what a step adds to the weights, and it does not depend on
the allocator. On a GPU the allocator's own peak stands beside it. The stored transitions are counted apart: they do grow.
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
    methods: tuple[str, ...] = ("flow_grpo", "v_grpo"),
    steps: tuple[int, ...] = (5, 10, 20, 40),
    units_per_pass: int = 2,
) -> dict[str, Any]:
    """Measure.

    Args:
        seeds: unused; memory does not depend on the seed.
        out: folder for step_memory.json.
        methods: methods with a recipe `<method>_tiny`; units of flow_grpo are denoising transitions, of v_grpo noise pairs.
        steps: numbers of denoising steps.
        units_per_pass: units replayed at once.

    Returns:
        A row a method and number of steps: units of a row, held_mib (what autograd held at most), stored_mib (what a rollout of
        the step's 8 rows keeps), cuda_peak_mib on a GPU.
    """
    rows = {
        f"{method}, {count} steps": _row(f"{method}_tiny", {"sampling.steps": count}, units_per_pass)
        for method in methods
        for count in steps
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step_memory.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def held_bytes(source: Any, overrides: dict[str, Any]) -> int:
    """Peak bytes that autograd held in a run of one step of `source`, a recipe or a config, its self-test included."""
    import visual_grpo as vg

    once = {"train.steps": 1, "eval.every": 0, "eval.samples": 8, "eval.final_samples": 8}
    with TemporaryDirectory() as folder, SavedBytes() as saved:
        vg.train(source, overrides=once | overrides, out=Path(folder) / "run")
    return saved.peak


def _row(recipe: str, overrides: dict[str, Any], units_per_pass: int) -> dict[str, float]:
    from visual_grpo.api import plan

    size = {"train.prompts_per_step": 2, "train.group_size": 4, "train.micro_batch": 4}
    every = {**size, **overrides, "train.units_per_pass": units_per_pass}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    held = held_bytes(recipe, every)
    made = plan(recipe, every)
    (units,) = (method.units_per_row(made.sampling) for method in made.stack.methods.values())
    module = made.adapter_class.load_meta(made.config.model)
    memory = made.adapter_class.plan_memory(made.config.model, module, sampling=made.sampling, rows=8, units=units)
    row = {
        "units": float(units),
        "held_mib": held / 2**20,
        "stored_mib": memory.parts["rollout storage"] / 2**20,
    }
    if torch.cuda.is_available():
        row["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return row
