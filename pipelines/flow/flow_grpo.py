"""Flow-GRPO and Flow-GRPO-Fast: "Flow-GRPO: Training Flow Matching Models via Online RL", arXiv 2505.05470.

What differs from GRPO: each Euler step of the flow becomes a Gaussian with the same marginals (Flow-SDE, CPS), each step is a
unit, the log-prob is a mean over dimensions (hence clip 1e-4), the advantage divides by the population std of ALL rewards of the
step, the KL compares means. Fast (`window`): only a few consecutive steps are noisy and trained, the start drawn once a step.
Departures: rows of flat groups are dropped and none is put back (the divisors need no even batches here); a failed reward drops
the row instead of scoring 0; gradient flows through both guidance branches (the newer code; `sampling.guidance_gradient`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from visual_grpo.config import (
    AdvantageConfig,
    DataConfig,
    EmaConfig,
    EvalConfig,
    KlConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RatioConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs, rollout_seed
from visual_grpo.schedules import training_window
from visual_grpo.types import PromptBatch, RolloutBatch


class FlowGrpoConfig(MethodConfig):
    """Options of Flow-GRPO."""

    window: int | None = Field(None, ge=1, description="Fast: noisy, trained steps; null = all steps but the last")
    window_low: int = Field(0, ge=0, description="Fast: first step the window may start at")
    window_high: int | None = Field(
        None, ge=1, description="Fast: end of the range the window lies in; null = all but the last step"
    )


class FlowGrpo(Method[FlowGrpoConfig]):
    """SDE sampling, and the choice of the trained steps."""

    Config: ClassVar[type[MethodConfig]] = FlowGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"transition"}), kinds=frozenset({"diffusion"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {"solver": "flow_sde", "noise_scale": 0.7, "reduction": "mean"},
        "eval": {"sampling": {"solver": "ode"}},
        "advantage": {"scope": "batch", "std": "population", "eps": 1e-4, "clip": 5.0, "drop_flat": True},
        "ratio": {"clip_low": 1e-4, "clip_high": 1e-4},
        "kl": {"estimator": "gaussian"},
        "train": {"updates_per_step": 2, "ema": {"decay": 0.9, "every": 8}},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """The sampler must be stochastic and hold the window."""
        if sampling.deterministic:
            raise UserError(
                f"flow_grpo trains noisy steps, but sampling.solver is {sampling.solver!r}; use flow_sde, dance_sde, cps or ddim"
            )
        if sampling.steps < 2:
            raise UserError("flow_grpo trains all steps but the last, and sampling.steps is 1: use 2 or more")
        if self.config.window is not None:
            self._window(sampling.steps, None)
            if sampling.solver in ("cps", "ddim") and self.config.window_high == sampling.steps:
                raise UserError(
                    f"method.flow_grpo.window_high ({self.config.window_high}) reaches the last step, which has no noise with "
                    f"solver {sampling.solver!r}: use at most sampling.steps - 1 ({sampling.steps - 1})"
                )
            return
        if self.config.window_low or self.config.window_high is not None:
            raise UserError(
                "method.flow_grpo.window_low and window_high say where the window may lie, but window is null (all steps but the "
                "last): set window, or leave them out"
            )
        if sampling.tail_ratio is not None:
            raise UserError(
                "sampling.tail_ratio shortens the steps after the window, and without method.flow_grpo.window all steps but the "
                "last are noisy: set window, or leave tail_ratio out"
            )

    def units_per_row(self, sampling: Any) -> int:
        """The window, or all steps but the last."""
        return self.config.window or sampling.steps - 1

    def _window(self, steps: int, generator: torch.Generator | None) -> range:
        config = self.config
        assert config.window is not None
        high = config.window_high if config.window_high is not None else steps - 1
        try:
            return training_window(steps, config.window, config.window_low, high, generator)
        except ValueError as error:
            raise UserError(f"method.flow_grpo: {error}") from None

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Sample with noise on all steps but the last, or on the window of this step."""
        sampling: Any = state.sampling
        units = None
        if self.config.window is not None:
            window = self._window(sampling.steps, state.generator(3))
            units = torch.arange(window.start, window.stop)
        return state.policy.sample(prompts, seed=rollout_seed(state), sampling=sampling, units=units)


def scenes(name: str, method: Any, summary: str, **sections: Any) -> RunConfig:
    """The tiny SD3 on the testbed's scenes with its GenEval reward; shared by the flow methods' tiny recipes."""
    settings: dict[str, Any] = {
        "model": ModelConfig(adapter="sd3", path="testbed/sd3_tiny"),
        "data": DataConfig(source="testbed/scenes", balance="tag"),
        "rewards": {"geneval": RewardConfig(params={"mode": "mixed", "detector": "testbed"})},
        "sampling": {"steps": 6, "guidance": 1.0},
        "train": TrainConfig(
            steps=60,
            prompts_per_step=8,
            group_size=12,
            micro_batch=96,
            optimizer=OptimizerConfig(lr=2e-4, betas=(0.9, 0.99)),
        ),
        "eval": EvalConfig(every=20, samples=240, final_samples=480, batch=240),
    }
    for key, value in sections.items():
        old = settings.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping) and key == "sampling"
        settings[key] = {**old, **value} if both and old is not None else value
    return RunConfig(name=name, summary=summary, method=method if isinstance(method, list) else [method], **settings)


def tiny_training(steps: int) -> TrainConfig:
    """The best of four settings on the testbed (docs/results.md), shared by the methods that train transitions."""
    return TrainConfig(
        steps=steps,
        prompts_per_step=8,
        group_size=12,
        micro_batch=96,
        units_per_pass=1,
        optimizer=OptimizerConfig(lr=6e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear"),
        ema=EmaConfig(decay=0.9, every=1),
    )


def flow_grpo_sd15_tiny() -> RunConfig:
    """Flow-GRPO on the tiny Stable Diffusion 1.5: DDIM transitions with eta 1, `flow_grpo_tiny` otherwise."""
    return scenes(
        "flow_grpo_sd15_tiny",
        "flow_grpo",
        "Flow-GRPO on a tiny SD1.5, DDIM transitions",
        model=ModelConfig(adapter="sd15", path="testbed/sd15_tiny"),
        sampling={"steps": 6, "guidance": 1.0, "solver": "ddim", "noise_scale": 1.0},
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=tiny_training(24),
    )


def flow_grpo_tiny() -> RunConfig:
    """Flow-GRPO on the tiny SD3, with the best of four settings (docs/results.md); as long as `quickstart` by the clock."""
    return scenes(
        "flow_grpo_tiny",
        "flow_grpo",
        "Flow-GRPO on the testbed's scenes",
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.7},
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=tiny_training(48),
    )


def flow_grpo_fast_tiny() -> RunConfig:
    """Flow-GRPO-Fast on the tiny SD3: two noisy steps."""
    return scenes(
        "flow_grpo_fast_tiny",
        {"flow_grpo": {"window": 2, "window_high": 4}},
        "Flow-GRPO-Fast on the testbed's scenes: two noisy steps",
        kl=KlConfig(beta=1.0, estimator="gaussian"),
    )


def sd35_medium(name: str, method: Any, summary: str, reward: str, **sections: Any) -> RunConfig:
    """SD3.5-medium at 512 px with the paper's LoRA and 128 T5 tokens; shared by the flow methods' recipes.

    bfloat16 and not the paper's float16, which needs a scaled loss to train.
    """
    settings: dict[str, Any] = {
        "model": ModelConfig(
            adapter="sd3",
            path="stabilityai/stable-diffusion-3.5-medium",
            dtype="bfloat16",
            lora=LoraConfig(rank=32, alpha=64),
        ),
        "data": DataConfig(source=f"data/{reward}/train.jsonl"),
        "rewards": {reward: RewardConfig()},
        "sampling": {"steps": 10, "guidance": 4.5},
        "eval": EvalConfig(
            source=f"data/{reward}/test.jsonl",
            every=30,
            samples=480,
            final_samples=2048,
            batch=16,
            sampling={"steps": 40},
        ),
    }
    settings |= sections
    settings["sampling"] = {"height": 512, "width": 512, "max_sequence_length": 128, **settings["sampling"]}
    return RunConfig(name=name, summary=summary, method=method if isinstance(method, list) else [method], **settings)


def paper_training() -> TrainConfig:
    """48 prompts x 24 images, AdamW 3e-4, two updates a step; shared with what is stacked on Flow-GRPO."""
    return TrainConfig(
        steps=2500,
        prompts_per_step=48,
        group_size=24,
        updates_per_step=2,
        micro_batch=9,
        units_per_pass=1,
        rollout_batch=48,
        optimizer=OptimizerConfig(lr=3e-4, weight_decay=1e-4),
        ema=EmaConfig(decay=0.9, every=8),
    )


def _paper(beta: float) -> dict[str, Any]:
    """Flow-GRPO's published settings with KL `beta`."""
    return {
        "advantage": AdvantageConfig(scope="batch"),
        "ratio": RatioConfig(clip_low=1e-4, clip_high=1e-4),
        "kl": KlConfig(beta=beta, estimator="gaussian"),
        "train": paper_training(),
    }


def flow_grpo_sd35_medium_geneval() -> RunConfig:
    """Flow-GRPO, SD3.5-medium, GenEval (partial credit), KL 0.04."""
    geneval = {"geneval": RewardConfig(params={"mode": "partial", "detector": "mask2former"})}
    return sd35_medium(
        "flow_grpo_sd35_medium_geneval",
        "flow_grpo",
        "Flow-GRPO on SD3.5-medium, GenEval",
        "geneval",
        rewards=geneval,
        **_paper(0.04),
    )


def flow_grpo_sd35_medium_ocr() -> RunConfig:
    """Flow-GRPO, SD3.5-medium, text rendering, KL 0.04."""
    return sd35_medium(
        "flow_grpo_sd35_medium_ocr", "flow_grpo", "Flow-GRPO on SD3.5-medium, OCR", "ocr", **_paper(0.04)
    )


def flow_grpo_sd35_medium_pickscore() -> RunConfig:
    """Flow-GRPO, SD3.5-medium, PickScore / 26, KL 0.01 (the authors train CLIPScore with 0.02)."""
    return sd35_medium(
        "flow_grpo_sd35_medium_pickscore",
        "flow_grpo",
        "Flow-GRPO on SD3.5-medium, PickScore",
        "pickscore",
        **_paper(0.01),
    )


def flow_grpo_sd35_large_geneval() -> RunConfig:
    """Flow-GRPO on SD3.5-large: the settings of SD3.5-medium, which the paper trains; smaller micro-batches, checkpointing."""
    paper = _paper(0.04)
    return sd35_medium(
        "flow_grpo_sd35_large_geneval",
        "flow_grpo",
        "Flow-GRPO on SD3.5-large, GenEval",
        "geneval",
        model=ModelConfig(
            adapter="sd3",
            path="stabilityai/stable-diffusion-3.5-large",
            dtype="bfloat16",
            lora=LoraConfig(rank=32, alpha=64),
            gradient_checkpointing=True,
        ),
        rewards={"geneval": RewardConfig(params={"mode": "partial", "detector": "mask2former"})},
        **paper | {"train": paper["train"].model_copy(update={"micro_batch": 3, "rollout_batch": 24})},
    )


def flow_grpo_flux1_dev_pickscore() -> RunConfig:
    """Flow-GRPO on FLUX.1-dev, PickScore: 6 steps, noise 0.9, guidance 3.5 as an input, LoRA rank 64, no KL."""
    paper = _paper(0.0)
    return sd35_medium(
        "flow_grpo_flux1_dev_pickscore",
        "flow_grpo",
        "Flow-GRPO on FLUX.1-dev, PickScore",
        "pickscore",
        model=ModelConfig(
            adapter="flux",
            path="black-forest-labs/FLUX.1-dev",
            dtype="bfloat16",
            lora=LoraConfig(rank=64, alpha=128),
            gradient_checkpointing=True,
        ),
        sampling={"steps": 6, "embedded_guidance": 3.5, "noise_scale": 0.9},
        eval=EvalConfig(
            source="data/pickscore/test.jsonl",
            every=30,
            samples=480,
            final_samples=2048,
            batch=16,
            sampling={"steps": 28},
        ),
        **paper | {"train": paper["train"].model_copy(update={"micro_batch": 3, "rollout_batch": 24})},
    )


def flow_grpo_sdxl_base_pickscore() -> RunConfig:
    """Flow-GRPO on SDXL-base, PickScore, on DDIM's transitions with eta 1 and guidance 5, as DanceGRPO samples SD1.4.

    No paper trains SDXL so: steps, micro-batches and learning rate are our choice, all else is Flow-GRPO's.
    """
    paper = _paper(0.01)
    optimizer = OptimizerConfig(lr=1e-4, weight_decay=1e-4)
    return RunConfig(
        name="flow_grpo_sdxl_base_pickscore",
        summary="Flow-GRPO on SDXL-base with DDIM transitions, PickScore",
        method=["flow_grpo"],
        model=ModelConfig(
            adapter="sdxl",
            path="stabilityai/stable-diffusion-xl-base-1.0",
            dtype="bfloat16",
            lora=LoraConfig(rank=32, alpha=64),
            gradient_checkpointing=True,
        ),
        data=DataConfig(source="data/pickscore/train.jsonl"),
        rewards={"pickscore": RewardConfig()},
        sampling={"steps": 20, "guidance": 5.0, "solver": "ddim", "noise_scale": 1.0},
        eval=EvalConfig(
            source="data/pickscore/test.jsonl",
            every=30,
            samples=480,
            final_samples=2048,
            batch=16,
            sampling={"steps": 30},
        ),
        **paper | {"train": paper["train"].model_copy(update={"micro_batch": 4, "optimizer": optimizer})},
    )


def flow_grpo_fast_sd35_medium_geneval() -> RunConfig:
    """Flow-GRPO-Fast without guidance: CPS noise 0.8, three steps in [0, 5), clip 1e-5, no KL.

    On PickScore the authors take 64 prompts x 18.
    """
    settings = _paper(0.0) | {"ratio": RatioConfig(clip_low=1e-5, clip_high=1e-5)}
    return sd35_medium(
        "flow_grpo_fast_sd35_medium_geneval",
        {"flow_grpo": {"window": 3, "window_high": 5}},
        "Flow-GRPO-Fast on SD3.5-medium without guidance, GenEval",
        "geneval",
        rewards={"geneval": RewardConfig(params={"mode": "partial", "detector": "mask2former"})},
        sampling={"steps": 10, "guidance": 1.0, "solver": "cps", "noise_scale": 0.8},
        **settings,
    )


def flow_grpo_fast_flux1_dev_pickscore() -> RunConfig:
    """Flow-GRPO-Fast on FLUX.1-dev, PickScore: CPS noise 0.8 on the first three of 6 steps, clip 1e-5, the group's std, no KL.

    GenEval on FLUX divides by the std of the whole step (`advantage.scope=batch`).
    """
    plain = flow_grpo_flux1_dev_pickscore()
    return plain.model_copy(
        update={
            "name": "flow_grpo_fast_flux1_dev_pickscore",
            "summary": "Flow-GRPO-Fast on FLUX.1-dev, PickScore",
            "method": [{"flow_grpo": {"window": 3, "window_high": 3}}],
            "sampling": plain.sampling | {"solver": "cps", "noise_scale": 0.8},
            "advantage": AdvantageConfig(scope="group"),
            "ratio": RatioConfig(clip_low=1e-5, clip_high=1e-5),
        }
    )
