"""Two recipes that show reward hacking and what stands against it (docs/anti_hacking.md); no method of its own.

Both train Flow-GRPO on a learned reward alone, the testbed's two-tower model, and watch GenEval by the exact detector and the
diversity of four pictures a prompt, which are never trained on.
"""

from __future__ import annotations

from typing import Any

from visual_grpo.config import (
    CheckpointConfig,
    EvalConfig,
    KlConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.config_selection import BestConfig, EarlyStopConfig
from visual_grpo.pipelines.flow.flow_grpo import scenes, tiny_training

STEPS = 48


def _watched(name: str, summary: str, **sections: Any) -> RunConfig:
    return scenes(
        name,
        "flow_grpo",
        summary,
        rewards={
            "two_tower": RewardConfig(),
            "geneval": RewardConfig(params={"mode": "official", "detector": "testbed"}, eval_only=True),
        },
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.7},
        **sections,
    )


def _training(early_stop: EarlyStopConfig | None = None) -> TrainConfig:
    """Half the batch of `flow_grpo_tiny` at a constant, higher rate."""
    optimizer = OptimizerConfig(lr=1e-3, betas=(0.9, 0.99), warmup_steps=5)
    batch = {"prompts_per_step": 6, "group_size": 8, "micro_batch": 48}
    return tiny_training(STEPS).model_copy(update={**batch, "optimizer": optimizer, "early_stop": early_stop})


def _evaluations(**settings: Any) -> EvalConfig:
    return EvalConfig(every=6, samples=120, final_samples=240, group_size=4, batch=120, **settings)


def flow_grpo_hacked_tiny() -> RunConfig:
    """No KL, nothing watched: the reward rises, and what it stands for falls."""
    return _watched(
        "flow_grpo_hacked_tiny",
        "Flow-GRPO without KL exploits a learned reward on the testbed's scenes",
        train=_training(),
        eval=_evaluations(),
    )


def flow_grpo_guarded_tiny() -> RunConfig:
    """With a KL, the best weights by the held-out figure, and an end once it no longer rises."""
    return _watched(
        "flow_grpo_guarded_tiny",
        "Flow-GRPO on a learned reward with the anti-hacking kit on the testbed's scenes",
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=_training(EarlyStopConfig(metric="geneval/by_tag", patience=2)),
        checkpoint=CheckpointConfig(best=BestConfig(metric="geneval/by_tag")),
        eval=_evaluations(final="best"),
    )
