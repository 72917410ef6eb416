"""A run on the toy adapter that tests change: seconds on one core, no model library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import merge, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.run_folder import RunFolder
from visual_grpo.trainer import Trainer


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
