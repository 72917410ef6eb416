"""DanceGRPO: "Unleashing GRPO on Visual Generation", arXiv 2505.07818.

What differs from GRPO: every step but the last is a unit, with noise of constant strength (`sampling.solver=dance_sde`), and a
random share of them is trained, drawn anew for each sample; a prompt's samples share their initial noise; the std is the
group's (Bessel, eps 1e-8), the advantage is clamped to 5, the clip range is 1e-4. The selection of the best and worst samples of
the video runs is a method of its own: `[dancegrpo, best_of_n]`.
Departures: the two rewards of the video runs are added as advantages, which equals the published sum of two losses wherever
nothing is clipped; levels reach the network exact, not cut to integer timesteps; a failed reward drops the row;
statistics without the lowest rewards, off in the published scripts, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    KlConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs, rollout_seed
from visual_grpo.pipelines.flow.flow_grpo import scenes, sd35_medium, tiny_training
from visual_grpo.pipelines.flow.mixgrpo import flux1_dev
from visual_grpo.types import PromptBatch, RolloutBatch


class DanceGrpoConfig(MethodConfig):
    """Options of DanceGRPO."""

    fraction: float = Field(
        0.6, gt=0, le=1, description="share of the steps, without the last, that a sample is trained on"
    )


class DanceGrpo(Method[DanceGrpoConfig]):
    """The random subset of steps."""

    Config: ClassVar[type[MethodConfig]] = DanceGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"transition"}), kinds=frozenset({"diffusion"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {
            "solver": "dance_sde",
            "noise_scale": 0.3,
            "reduction": "mean",
            "schedule": "linear",
            "shift": 3.0,
            "same_noise": True,
        },
        "eval": {"sampling": {"solver": "ode", "same_noise": False}},
        "combine": {"how": "sum_of_advantages"},
        "advantage": {"scope": "group", "std": "bessel", "eps": 1e-8, "clip": 5.0},
        "ratio": {"clip_low": 1e-4, "clip_high": 1e-4},
        "kl": {"estimator": "gaussian"},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """The sampler must be stochastic, and a step be left."""
        if sampling.solver in ("ode", "dpm"):
            raise UserError(
                f"dancegrpo trains noisy steps, but sampling.solver is {sampling.solver!r}; use dance_sde, flow_sde or cps"
            )
        if sampling.tail_ratio is not None:
            raise UserError(
                "sampling.tail_ratio shortens the steps after the last noisy one, and dancegrpo has noise on all but the last: "
                "leave it out, or use mixgrpo"
            )
        if self.units_per_row(sampling) < 1:
            raise UserError(
                f"method.dancegrpo.fraction ({self.config.fraction:g}) of the {sampling.steps - 1} steps before the last is less "
                "than one step; raise it, or sampling.steps"
            )

    def units_per_row(self, sampling: Any) -> int:
        """The trained steps of a sample."""
        return int((sampling.steps - 1) * self.config.fraction)

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Sample with noise on all steps but the last; keep each row's own random subset."""
        rollouts = state.policy.sample(prompts, seed=rollout_seed(state), sampling=state.sampling)
        kept = self.units_per_row(state.sampling)
        if kept == rollouts.num_units:
            return rollouts
        chosen = [
            torch.randperm(rollouts.num_units, generator=state.generator(32, row))[:kept].sort().values
            for row in prompts.row_ids.tolist()
        ]
        return rollouts.select_units(torch.stack(chosen), "latents", "next_latents")


def _tiny(name: str, method: list[Any], summary: str, *, iterations: int) -> RunConfig:
    """As `flow_grpo_tiny`, and as long by the clock; the schedule is the model's own."""
    return scenes(
        name,
        method,
        summary,
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.3, "schedule": "scheduler", "shift": None},
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=tiny_training(iterations),
    )


def dancegrpo_tiny() -> RunConfig:
    """DanceGRPO on the tiny SD3: 3 of 5 steps."""
    return _tiny("dancegrpo_tiny", ["dancegrpo"], "DanceGRPO on the testbed's scenes", iterations=65)


def dancegrpo_best_of_n_tiny() -> RunConfig:
    """The same, trained on the 2 best and the 2 worst of 12 samples."""
    return _tiny(
        "dancegrpo_best_of_n_tiny",
        ["dancegrpo", {"best_of_n": {"keep": 4}}],
        "DanceGRPO on the testbed's scenes, best and worst samples only",
        iterations=100,
    )


def dancegrpo_training(*, group_size: int = 12, updates: int = 3) -> TrainConfig:
    """Geometry of the published runs: 16 prompts, AdamW 1e-5, 300 iterations; shared with what is stacked on them."""
    return TrainConfig(
        steps=300,
        prompts_per_step=16,
        group_size=group_size,
        updates_per_step=updates,
        micro_batch=1,
        units_per_pass=1,
        rollout_batch=group_size,
        optimizer=OptimizerConfig(lr=1e-5, weight_decay=1e-4),
    )


def _sd35_medium(name: str, method: list[Any], summary: str, train: TrainConfig) -> RunConfig:
    """SD3.5-medium in full, HPS v2.1, 16 steps, guidance 4.5 in both branches; the paper trained other models."""
    return sd35_medium(
        name,
        method,
        summary,
        "hpdv2",
        model=ModelConfig(
            adapter="sd3",
            path="stabilityai/stable-diffusion-3.5-medium",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        rewards={"hps_v2": RewardConfig()},
        sampling={"steps": 16, "guidance": 4.5},
        train=train,
    )


def dancegrpo_sd35_medium() -> RunConfig:
    """The paper's image settings on SD3.5-medium."""
    return _sd35_medium(
        "dancegrpo_sd35_medium",
        ["dancegrpo"],
        "DanceGRPO on SD3.5-medium with the settings of its FLUX runs",
        dancegrpo_training(),
    )


def dancegrpo_best_of_n_sd35_medium() -> RunConfig:
    """The selection of the paper's video runs, 8 of 24, on SD3.5-medium: there is no video model here."""
    return _sd35_medium(
        "dancegrpo_best_of_n_sd35_medium",
        ["dancegrpo", {"best_of_n": {"keep": 8}}],
        "DanceGRPO on SD3.5-medium, trained on the 4 best and 4 worst of 24 samples",
        dancegrpo_training(group_size=24, updates=2),
    )


def dancegrpo_flux1_dev() -> RunConfig:
    """The paper's run: 9 of 15 steps, HPS v2.1, 16 prompts x 12, full weights.

    The authors' script for 8 GPUs has 8 prompts, one update an iteration and `train.optimizer.grad_norm=0.01`.
    """
    return flux1_dev(
        "dancegrpo_flux1_dev",
        "dancegrpo",
        "DanceGRPO on FLUX.1-dev",
        rewards={"hps_v2": RewardConfig()},
        sampling={"steps": 16},
        train=dancegrpo_training(),
    )


def dancegrpo_lora_flux1_dev() -> RunConfig:
    """The published LoRA run: 6 of 11 steps, rank 128, AdamW 3e-4, one update an iteration."""
    train = dancegrpo_training(updates=1)
    optimizer = train.optimizer.model_copy(update={"lr": 3e-4})
    return flux1_dev(
        "dancegrpo_lora_flux1_dev",
        "dancegrpo",
        "DanceGRPO on FLUX.1-dev, LoRA of rank 128",
        lora=LoraConfig(rank=128, alpha=256),
        rewards={"hps_v2": RewardConfig()},
        sampling={"steps": 12},
        train=train.model_copy(update={"steps": 301, "optimizer": optimizer}),
    )


def dancegrpo_sd15() -> RunConfig:
    """The paper's Stable Diffusion run (there 1.4): DDIM with eta 1, 50 steps, guidance 5, 16 images a prompt, AdamW 1e-5.

    The schedule is the model's own. With guidance there is one update an iteration, as the authors advise.
    """
    return RunConfig(
        name="dancegrpo_sd15",
        summary="DanceGRPO on Stable Diffusion 1.5, DDIM transitions",
        method=["dancegrpo"],
        model=ModelConfig(
            adapter="sd15",
            path="stable-diffusion-v1-5/stable-diffusion-v1-5",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        data=DataConfig(source="data/hpdv2/train.jsonl"),
        rewards={"hps_v2": RewardConfig()},
        sampling={
            "solver": "ddim",
            "noise_scale": 1.0,
            "steps": 50,
            "guidance": 5.0,
            "schedule": "scheduler",
            "shift": None,
        },
        train=dancegrpo_training(group_size=16, updates=1),
        eval=EvalConfig(source="data/hpdv2/test.jsonl", every=50, samples=400, final_samples=400, batch=16),
    )
