"""Which operations one GRPO step of `text_lm` spends its processor time in: what is left to gain beside the model's arithmetic.

    visual-grpo benchmark text_step_profile --seeds 1 shape=vlm

The shapes are those of `text_step_vs_trl`. The profiler slows every call down by the same few microseconds, so small operations
look larger than they are; the seconds to quote are those of `text_step_vs_trl`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.eval.benchmarks.text_step_sides import SHAPES, make_inputs, our_trainer

__all__ = ["run"]

PHASES = {"generate": ("policy", "sample"), "forward+backward": (None, "optimizer_step")}


def run(*, seeds: int = 1, out: Path | str | None = None, shape: str = "long", top: int = 10) -> dict[str, Any]:
    """Profile one step after a warm-up step.

    Args:
        seeds: the step is of seed `seeds` - 1.
        out: folder for text_step_profile.json.
        shape: which of `text_step_vs_trl`'s shapes.
        top: operations to name; the others are added up.

    Returns:
        By phase: "seconds" of processor time under the profiler, "calls" of operations, and "share" of each of the `top`
        operations (time inside it and not inside another), with its calls.

    Raises:
        UserError: an unknown shape.
    """
    if shape not in SHAPES:
        raise UserError(f"shape: {shape!r} is unknown; use {', '.join(SHAPES)}")
    with tempfile.TemporaryDirectory() as scratch:
        make_inputs(Path(scratch), SHAPES[shape])
        found = _profiled(Path(scratch), shape, seeds - 1, top)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "text_step_profile.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _profiled(work: Path, shape: str, seed: int, top: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, Any] = {}
    with our_trainer(work, SHAPES[shape], seed) as trainer:
        trainer.iteration()
        for phase, (part, name) in PHASES.items():
            owner = trainer if part is None else getattr(trainer, part)
            called = getattr(owner, name)

            def watched(*args: Any, _called: Any = called, _phase: str = phase, **options: Any) -> Any:
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    result = _called(*args, **options)
                found[_phase] = _shares(profiler, top)
                return result

            setattr(owner, name, watched)
        trainer.iteration()
    return found


def _shares(profiler: Any, top: int) -> dict[str, Any]:
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    named = {event.key: {"share": event.self_cpu_time_total / total, "calls": event.count} for event in events[:top]}
    rest = sum(event.self_cpu_time_total for event in events[top:])
    return {
        "seconds": total / 1e6,
        "calls": sum(event.count for event in events),
        "operations": named | {"others": {"share": rest / total, "calls": sum(e.count for e in events[top:])}},
    }
