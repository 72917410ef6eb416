"""A cycle over the tasks of `data.sources`, in any stack: which task each step takes its prompts from.

Source: the curriculum of Flow-OPD (arXiv 2605.08063), for any model and units. Step index modulo the length of the cycle
selects the task. Without it the prompts of all tasks are shuffled together, or take turns (`data.balance: task`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.adapters.protocol import SamplingConfig
from visual_grpo.config import RunConfig
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.method import LoopState, Method, MethodConfig


class TaskCycleConfig(MethodConfig):
    """Options of the cycle."""

    steps: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="{task: consecutive steps}, in order; empty = one step of each task"
    )


class TaskCycle(Method[TaskCycleConfig]):
    """Prompts of one task a step."""

    Config: ClassVar[type[MethodConfig]] = TaskCycleConfig

    def check(self, run: RunConfig, sampling: SamplingConfig) -> None:
        """The tasks must be there."""
        known = list(run.data.sources)
        if len(known) < 2:
            raise UserError("task_cycle needs several tasks: set data.sources to {TASK: SOURCE, TASK: SOURCE}")
        for task in self.config.steps:
            if task not in known:
                raise UserError(
                    f"method.task_cycle.steps names task {task!r}, but data.sources has {', '.join(known)}."
                    f"{did_you_mean(task, known)}"
                )

    def setup(self, state: LoopState) -> None:
        """Every task of the cycle needs the prompts of a step, also the one whose turn comes late."""
        assert state.prompt_tasks is not None
        need = state.config.train.prompts_per_step
        for task in self._steps(state.tasks):
            have = int((state.prompt_tasks == state.tasks.index(task)).sum())
            if have < need:
                raise UserError(
                    f"task_cycle takes all prompts of a step from one task, and task {task!r} has {have} for "
                    f"train.prompts_per_step={need}: use {have} or fewer, or a larger set"
                )

    def task_of(self, step: int, tasks: tuple[str, ...]) -> str:
        """The task of a step (0-based)."""
        cycle = [task for task, steps in self._steps(tasks).items() for _ in range(steps)]
        return cycle[step % len(cycle)]

    def _steps(self, tasks: tuple[str, ...]) -> dict[str, int]:
        return self.config.steps or dict.fromkeys(tasks, 1)

    def select_prompts(self, weights: Tensor, state: LoopState) -> Tensor:
        """0 for the prompts of the other tasks."""
        assert state.prompt_tasks is not None
        number = state.tasks.index(self.task_of(state.step, state.tasks))
        state.figure("task_cycle/task", torch.tensor([float(number)]))
        return torch.where(state.prompt_tasks == number, weights, torch.zeros_like(weights))
