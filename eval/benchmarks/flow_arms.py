"""One run of the benchmark flow_methods: the toolkit's trainer, with evaluations between its steps."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from visual_grpo.api import Plan
    from visual_grpo.policy import Policy
    from visual_grpo.trainer import Trainer

__all__ = ["CLOCKS", "NetworkCalls", "open_trainer", "time_iterations", "train_arm"]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""What a second of training is: by the clock, or of this process's processors (with one thread the same on a quiet machine)."""


class NetworkCalls:
    """Counts rows that go through the network: `sampling`, `training` (with gradient) and `replay` (without)."""

    def __init__(self, policy: Policy) -> None:
        """Watch the policy's adapter from now on."""
        self.rows: Counter[str] = Counter()
        self.pictures = 0
        self._sampling = self._paused = False
        adapter: Any = policy.adapter
        predict, sample = adapter.predict_velocity, policy.sample

        def counted(latents: Any, *args: Any, **options: Any) -> Any:
            if not self._paused:
                kind = "sampling" if self._sampling else "training" if torch.is_grad_enabled() else "replay"
                self.rows[kind] += len(latents)
            return predict(latents, *args, **options)

        def sampled(prompts: Any, *args: Any, **options: Any) -> Any:
            self._sampling = True
            try:
                return sample(prompts, *args, **options)
            finally:
                self._sampling = False
                if not self._paused:
                    self.pictures += len(prompts)

        adapter.predict_velocity = counted
        policy.sample = sampled  # type: ignore[method-assign]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing is counted."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


@contextmanager
def open_trainer(made: Plan, folder: Path) -> Iterator[Trainer]:
    """A trainer in a run folder of its own, closed afterwards."""
    from visual_grpo.build import build_trainer
    from visual_grpo.config import to_yaml
    from visual_grpo.distributed import Ranks
    from visual_grpo.run_folder import RunFolder

    run = RunFolder.create(folder.parent, folder.name, config_yaml=to_yaml(made.config))
    try:
        with Ranks() as ranks:
            trainer = build_trainer(made, run, ranks)
            try:
                yield trainer
            finally:
                trainer.suite.close()
                trainer.writer.close()
    finally:
        run.close()


def time_iterations(made: Plan, folder: Path, count: int, *, clock: str = "wall") -> float:
    """Seconds of an iteration: the fastest of `count` after one that warms up."""
    now = CLOCKS[clock]
    with open_trainer(made, folder) as trainer:
        trainer.iteration()
        seconds = []
        for _ in range(count):
            started = now()
            trainer.iteration()
            seconds.append(now() - started)
    return min(seconds)


def train_arm(
    made: Plan, folder: Path, *, points: int, step_s: float, samples: int, final_samples: int
) -> dict[str, Any]:
    """Train the config's steps; evaluate before the first and `points` times, evenly spaced, the last after the last step.

    Returns:
        points: step, seconds (steps times `step_s`), gradient_steps, pictures, the rows of `NetworkCalls`, n (held-out
        pictures) and metrics; steps; train_s: what the steps really took by the clock.
    """
    steps = made.config.train.steps
    due = {math.ceil(steps * (i + 1) / points) for i in range(points)}
    with open_trainer(made, folder) as trainer:
        calls = NetworkCalls(trainer.policy)

        def point(count: int) -> dict[str, Any]:
            with calls.paused():
                found = trainer.evaluate(count)
            return {
                "step": trainer.step,
                "seconds": trainer.step * step_s,
                "gradient_steps": trainer.optimizer.steps_done,
                "pictures": calls.pictures,
                **{kind: calls.rows[kind] for kind in ("sampling", "replay", "training")},
                "n": len(found.rows),
                "metrics": found.metrics,
            }

        found = [point(final_samples)]
        while trainer.step < steps:
            trainer.iteration()
            if trainer.step in due:
                found.append(point(samples if trainer.step < steps else final_samples))
        return {"points": found, "steps": steps, "train_s": trainer.progress.trained_s}
