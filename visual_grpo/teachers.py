"""Teachers of a distillation: exports of one base model, each a named set of weights, one for each task.

`teachers: {TASK: PATH}` of a method names for each task of `data.sources` the weights that own it: an exported LoRA for a run
with LoRA, a whole model for one without; a folder, a hub id or `stage://NAME`. With a single prompt set there is one teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from visual_grpo.config import RunConfig
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.exports import read_weights
from visual_grpo.method import LoopState
from visual_grpo.types import PromptBatch

PREFIX = "teacher/"


def check_teachers(method: str, teachers: Mapping[str, str], run: RunConfig) -> None:
    """Refuse a task without a teacher, before any weights are loaded.

    Raises:
        UserError: naming the task, or a teacher of no task.
    """
    tasks = list(run.data.sources)
    where = f"method.{method}.teachers"
    if not tasks:
        if len(teachers) != 1:
            raise UserError(
                f"{where} has {len(teachers)} entries; a run on one prompt set needs one, {{NAME: PATH}}. For several tasks set "
                "data.sources"
            )
        return
    for task in tasks:
        if task not in teachers:
            raise UserError(
                f"{where} has no teacher for task {task!r}.{did_you_mean(task, teachers)} Give {where}.{task}: a folder that a "
                f"run exported, a hub id or stage://NAME (tasks: {', '.join(tasks)})"
            )
    for name in teachers:
        if name not in tasks:
            raise UserError(
                f"{where} names {name!r}, which is no task of data.sources ({', '.join(tasks)}).{did_you_mean(name, tasks)}"
            )


def load_teachers(method: str, teachers: Mapping[str, str], state: LoopState) -> None:
    """Keep the weights of every teacher as a fixed set of the policy.

    Raises:
        UserError: an export that is not there, or does not fit the trained weights.
    """
    for name, path in teachers.items():
        values = read_weights(state.policy, path, f"method.{method}.teachers.{name}")
        state.policy.keep(PREFIX + name, values)


def by_teacher(
    prompts: PromptBatch, teachers: Mapping[str, str], state: LoopState
) -> Iterator[tuple[str, str, Tensor]]:
    """(teacher, name of its weights, its rows [n] int64) of each teacher that owns some of the rows."""
    tasks = prompts.tags.get("task")
    if tasks is None:
        (name,) = teachers
        yield name, PREFIX + name, torch.arange(len(prompts))
        return
    for number in torch.unique(tasks.cpu()).tolist():
        name = state.tasks[number]
        yield name, PREFIX + name, torch.nonzero(tasks.cpu() == number).flatten()
