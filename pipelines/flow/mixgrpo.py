"""MixGRPO: "Unlocking Flow-based GRPO Efficiency with Mixed ODE-SDE", arXiv 2507.21802; MixGRPO-Flash by two options.

What differs from GRPO: only a window of `window` consecutive steps is noisy and trained, all others follow the ODE; the window
moves towards the image as training goes on, and where it stands is saved with the run. Inside it the steps are those of
Flow-GRPO. Levels are evenly spaced before the shift (`sampling.schedule=linear`), a prompt's samples share their initial noise,
the std is the group's (Bessel, eps 1e-8), several rewards are normalised one by one and added.
Flash: `sampling.tail_ratio=0.4` and `shift_every=20`; Flash*: `stride=0` and `sampling.tail_ratio=0.2`.
Departures: at the end of its range the window keeps its size (`shrink=true`: it shrinks and is empty at last, as published);
levels reach the network exact, not cut to integer timesteps; a failed reward drops the row; "decay" and "exp_decay" shorten
the stay by the published formulas; second-order solvers before the window are left out, since they spoil the ratio, and so are
statistics without the lowest rewards and a penalty on the log-ratio, both off in the published scripts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from visual_grpo.config import (
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
from visual_grpo.types import PromptBatch, RolloutBatch


class MixGrpoConfig(MethodConfig):
    """Options of MixGRPO."""

    window: int = Field(4, ge=1, description="noisy, trained steps")
    shift_every: int = Field(25, ge=1, description="iterations between two moves of the window; 20 in Flash")
    stride: int = Field(1, ge=0, description="steps of a move; 0 = the window stays at the start")
    order: Literal["progressive", "random", "decay", "exp_decay"] = Field(
        "progressive", description="random: drawn anew every iteration; decays: shorter stays at later steps"
    )
    window_high: int | None = Field(None, ge=1, description="end of the range the window moves in; null = steps - 2")
    roll_back: bool = Field(False, description="begin again at step 0 after the end of the range")
    shrink: bool = Field(
        False, description="as published: at the end of its range the window shrinks until it is empty"
    )
    decay_from: int = Field(13, ge=0, description="exp_decay: starts up to here have the full stay")
    decay_rate: float = Field(0.1, ge=0, description="exp_decay: of the stay, a step beyond decay_from")


def window_steps(start: int, size: int, high: int, *, shrink: bool) -> range:
    """The noisy steps of a window that starts at `start` in the range [0, high).

    >>> window_steps(3, 2, 4, shrink=True), window_steps(4, 2, 4, shrink=True), window_steps(4, 2, 4, shrink=False)
    (range(3, 4), range(4, 4), range(2, 4))
    """
    if not shrink:
        start = min(start, max(high - size, 0))
    return range(start, min(start + size, high))


def stay(start: int, high: int, config: MixGrpoConfig) -> int:
    """Iterations that a window at `start` stays there."""
    longest = config.shift_every
    if config.order == "decay":
        shortest = max(1, longest // 4)
        return max(shortest, int(longest * (1 - start / high) + shortest * start / high))
    if config.order == "exp_decay":
        return math.ceil(longest * math.exp(-config.decay_rate * max(start - config.decay_from, 0)))
    return longest


def moved(start: int, count: int, high: int, config: MixGrpoConfig) -> tuple[int, int]:
    """(start, iterations there) after one more iteration."""
    count += 1
    if count < stay(start, high, config):
        return start, count
    start += config.stride
    if start > high:
        start = 0 if config.roll_back else high
    return start, 0


def unread_options(order: str) -> tuple[str, ...]:
    """Options that mean nothing where the window moves by `order`."""
    moves = ("shift_every", "stride", "roll_back", "shrink") if order == "random" else ()
    return moves if order == "exp_decay" else (*moves, "decay_from", "decay_rate")


def _changed(config: MixGrpoConfig, key: str) -> bool:
    return bool(getattr(config, key) != type(config).model_fields[key].default)


class MixGrpo(Method[MixGrpoConfig]):
    """The window: sampling by it, and its state."""

    Config: ClassVar[type[MethodConfig]] = MixGrpoConfig
    needs: ClassVar[Needs] = Needs(
        unit_kinds=frozenset({"transition"}), kinds=frozenset({"diffusion"}), idle_steps=True
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {
            "solver": "flow_sde",
            "noise_scale": 0.7,
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

    def __init__(self, config: MixGrpoConfig) -> None:
        """Begin at step 0."""
        super().__init__(config)
        self.start = 0
        self.count = 0

    def check(self, run: RunConfig, sampling: Any) -> None:
        """The sampler must be stochastic, and the range leave the last step out."""
        if sampling.solver in ("ode", "dpm"):
            raise UserError(
                f"mixgrpo trains noisy steps, but sampling.solver is {sampling.solver!r}; use flow_sde, dance_sde or cps"
            )
        high = self._high(sampling)
        if not 1 <= high <= sampling.steps - 1:
            raise UserError(
                f"mixgrpo moves its window within steps 0..{high - 1}, but sampling.steps is {sampling.steps} and the last step "
                "is never noisy: use sampling.steps of 3 or more, or method.mixgrpo.window_high of at most sampling.steps - 1"
            )
        unread = [key for key in unread_options(self.config.order) if _changed(self.config, key)]
        if unread:
            raise UserError(
                f"method.mixgrpo.order={self.config.order} does not read {' and '.join(unread)}: leave it out, or use another "
                "order"
            )

    def units_per_row(self, sampling: Any) -> int:
        """The window."""
        return min(self.config.window, self._high(sampling))

    def _high(self, sampling: Any) -> int:
        high: int = self.config.window_high if self.config.window_high is not None else sampling.steps - 2
        return high

    def steps_now(self, state: LoopState) -> range:
        """The noisy steps of this iteration; the same on every process."""
        size, high = self.config.window, self._high(state.sampling)
        start = self.start
        if self.config.order == "random":
            start = int(torch.randint(max(high - size, 0) + 1, (1,), generator=state.generator(31)))
        return window_steps(start, size, high, shrink=self.config.shrink)

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Sample with noise in the window alone."""
        window = self.steps_now(state)
        units = torch.arange(window.start, window.stop)
        return state.policy.sample(prompts, seed=rollout_seed(state), sampling=state.sampling, units=units)

    def after_step(self, metrics: Mapping[str, float], state: LoopState) -> None:
        """Move the window where its time has come."""
        self.start, self.count = moved(self.start, self.count, self._high(state.sampling), self.config)

    def state_dict(self) -> dict[str, Any]:
        """Where the window stands, and since when."""
        return {"start": self.start, "count": self.count}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take the window's place back."""
        self.start, self.count = int(values["start"]), int(values["count"])


def _tiny(name: str, method: Mapping[str, Any], summary: str, *, iterations: int, **sampling: Any) -> RunConfig:
    """As `flow_grpo_tiny`, and as long by the clock; held-out pictures are made by the model's own schedule."""
    return scenes(
        name,
        {"mixgrpo": dict(method)},
        summary,
        sampling={"guidance": 1.0, "noise_scale": 0.7, **sampling},
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        eval=EvalConfig(
            every=20,
            samples=240,
            final_samples=480,
            batch=240,
            sampling={"solver": "ode", "steps": 6, "schedule": "scheduler", "shift": None, "tail_ratio": None},
        ),
        train=tiny_training(iterations),
    )


def mixgrpo_tiny() -> RunConfig:
    """MixGRPO on the tiny SD3: a window of 2 of 6 steps that moves twice; the schedule is the model's own."""
    return _tiny(
        "mixgrpo_tiny",
        {"window": 2, "shift_every": 27},
        "MixGRPO on the testbed's scenes",
        iterations=81,
        steps=6,
        schedule="scheduler",
        shift=None,
    )


def mixgrpo_flash_tiny() -> RunConfig:
    """MixGRPO-Flash on the tiny SD3: a window of 2 of 10 steps and a second-order tail, 4 to 9 network calls a picture."""
    return _tiny(
        "mixgrpo_flash_tiny",
        {"window": 2, "shift_every": 12},
        "MixGRPO-Flash on the testbed's scenes: a short second-order tail",
        iterations=84,
        steps=10,
        tail_ratio=0.4,
    )


def published_training() -> TrainConfig:
    """Of the published runs: 32 prompts x 12 pictures, 4 updates, AdamW 1e-5, 300 iterations; V-GRPO on FLUX shares it."""
    return TrainConfig(
        steps=300,
        prompts_per_step=32,
        group_size=12,
        updates_per_step=4,
        micro_batch=1,
        units_per_pass=1,
        rollout_batch=12,
        optimizer=OptimizerConfig(lr=1e-5, weight_decay=1e-4),
    )


def _paper() -> dict[str, Any]:
    """Sections of the published runs: three rewards, and how they train."""
    return {
        "rewards": {
            "hps_v2": RewardConfig(),
            "image_reward": RewardConfig(),
            "pickscore": RewardConfig(),
        },
        "train": published_training(),
    }


def mixgrpo_sd35_medium() -> RunConfig:
    """The paper's settings on SD3.5-medium, which the paper did not train: 512 px, guidance 4.5 in both branches."""
    return sd35_medium(
        "mixgrpo_sd35_medium",
        "mixgrpo",
        "MixGRPO on SD3.5-medium with the settings of its FLUX runs",
        "hpdv2",
        model=ModelConfig(
            adapter="sd3",
            path="stabilityai/stable-diffusion-3.5-medium",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        sampling={"steps": 25, "guidance": 4.5},
        **_paper(),
    )


def flux1_dev(
    name: str,
    method: Any,
    summary: str,
    *,
    sampling: Mapping[str, Any],
    lora: LoraConfig | None = None,
    **sections: Any,
) -> RunConfig:
    """FLUX.1-dev at 720 px with guidance 3.5 as an input, on HPDv2's prompts; shared by MixGRPO's and DanceGRPO's recipes.

    Held-out pictures take the pipeline's own 50 steps; that number is our choice.
    """
    return sd35_medium(
        name,
        method,
        summary,
        "hpdv2",
        model=ModelConfig(
            adapter="flux",
            path="black-forest-labs/FLUX.1-dev",
            dtype="bfloat16",
            lora=lora,
            gradient_checkpointing=True,
        ),
        sampling={"embedded_guidance": 3.5, "height": 720, "width": 720, "max_sequence_length": 512, **sampling},
        eval=EvalConfig(
            source="data/hpdv2/test.jsonl",
            every=50,
            samples=400,
            final_samples=400,
            batch=8,
            sampling={"steps": 50},
        ),
        **sections,
    )


def mixgrpo_flux1_dev() -> RunConfig:
    """The paper's run: a window of 4 of 25 steps, three rewards, 32 prompts x 12, full weights."""
    return flux1_dev("mixgrpo_flux1_dev", "mixgrpo", "MixGRPO on FLUX.1-dev", sampling={"steps": 25}, **_paper())


def mixgrpo_flash_flux1_dev() -> RunConfig:
    """The paper's faster run: 20 iterations a stay, second-order steps after the window."""
    return flux1_dev(
        "mixgrpo_flash_flux1_dev",
        {"mixgrpo": {"shift_every": 20}},
        "MixGRPO-Flash on FLUX.1-dev",
        sampling={"steps": 25, "tail_ratio": 0.4},
        **_paper(),
    )
