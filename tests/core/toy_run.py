"""A run on the toy adapter that tests change: seconds on one core, no model library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import merge, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.loss import LossInputs, passes, step_totals
from visual_grpo.metrics import Stats
from visual_grpo.run_folder import RunFolder
from visual_grpo.stack import MethodStack
from visual_grpo.trainer import Trainer

BINARY = (torch.arange(32) * 0.37).sin() > 0.5
"""Rewards of four prompts x 8 rows: three groups with both values, and one without a right answer."""


def write_prompts(folder: Path) -> tuple[str, str]:
    """Sixteen training and eight held-out prompts with one-digit answers."""
    paths = []
    for name, numbers in (("train", range(16)), ("test", range(16, 24))):
        path = folder / f"{name}.jsonl"
        lines = [{"prompt": f"say {i}", "answer": str(i % 10), "tag": "even" if i % 2 == 0 else "odd"} for i in numbers]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths.append(str(path))
    return paths[0], paths[1]


def toy_config(folder: Path, **over: Any) -> dict[str, Any]:
    """The config as a nested dict, with `over` merged in."""
    train, test = write_prompts(folder)
    config: dict[str, Any] = {
        "name": "toy",
        "model": {"adapter": "toy", "path": "toy"},
        "data": {"source": train},
        "rewards": {"exact_match": 1.0},
        "sampling": {"max_new_tokens": 3},
        "train": {
            "steps": 6,
            "prompts_per_step": 4,
            "group_size": 8,
            "micro_batch": 16,
            "optimizer": {"lr": 3e-2},
        },
        "eval": {"source": test, "every": 2, "samples": 16, "final_samples": 32},
        "checkpoint": {"every": 2},
    }
    return merge(config, over)


def toy_trainer(folder: Path, **over: Any) -> Trainer:
    """A trainer that has not started."""
    made = plan(toy_config(folder, **over))
    run = RunFolder.create(folder / "runs", "toy", config_yaml=to_yaml(made.config))
    return build_trainer(made, run, Ranks())


def prepared(trainer: Trainer, scores: Tensor = BINARY) -> tuple[LossInputs, Tensor]:
    """Rows to train and the advantages of a rollout batch whose rewards are given."""
    logged(trainer)
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = scores.float()[:, None]
    return trainer.prepare(rollouts, trainer.stack.shaped(rewards, rollouts, trainer.state), Stats())


def gradient(
    trainer: Trainer, rows: LossInputs, size: int = 32, stack: MethodStack | None = None
) -> tuple[Tensor, float]:
    """Gradient and loss of one optimizer step in micro-batches of `size` rows."""
    stack = stack or trainer.stack
    for parameter in trainer.policy.trainable.values():
        parameter.grad = None
    parts = torch.arange(len(rows)).split(size)
    totals, loss = step_totals(rows, len(parts), trainer.ranks), 0.0
    for index in parts:
        for part, _ in passes(stack, rows.select(index), totals, trainer.state):
            part.backward()
            loss += part.item()
    grads = [p.grad for p in trainer.policy.trainable.values() if p.grad is not None]
    return torch.cat([g.flatten() for g in grads]), loss


def logged(trainer: Trainer) -> Stats:
    """What hooks log from now on."""
    stats = Stats()
    trainer.state.log = stats.update
    return stats


def move(trainer: Trainer) -> None:
    """Another policy than the one that sampled."""
    trainer.state.on_policy = False
    with torch.no_grad():
        for parameter in trainer.policy.trainable.values():
            parameter.add_(0.05 * torch.arange(parameter.numel(), dtype=parameter.dtype).view_as(parameter).sin())
