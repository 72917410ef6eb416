"""GDPO: "Group reward-Decoupled Normalization Policy Optimization", arXiv 2601.05242, as a member of any stack.

What differs from GRPO: each reward is normalised inside its group, the weighted sum over the whole batch; see
docs/combining_rewards.md. The mathematics is the core's `combine.how=gdpo`: this member sets it, with the paper's conventions
(group scope, Bessel std, eps 1e-4), over what the methods before it in the stack set: `method: [flow_grpo, gdpo]`. Its
variants are options of `combine` (`batch_step`, `level`, `zero_flat`).
Departures: a group without any signal gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from visual_grpo.config import KlConfig, RewardConfig, RunConfig
from visual_grpo.errors import UserError
from visual_grpo.method import Method, MethodConfig
from visual_grpo.pipelines.flow.flow_grpo import paper_training, scenes, sd35_medium, tiny_training


class GdpoConfig(MethodConfig):
    """GDPO has no options of its own; its variants are `combine` options."""


class Gdpo(Method[GdpoConfig]):
    """Core options alone."""

    Config: ClassVar[type[MethodConfig]] = GdpoConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "combine": {"how": "gdpo"},
        "advantage": {"scope": "group", "std": "bessel", "eps": 1e-4},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """A run that names the method and combines in another way contradicts itself."""
        if run.combine.how != "gdpo":
            raise UserError(
                f"method gdpo sets combine.how=gdpo, but combine.how is {run.combine.how!r}; remove one of the two (a method "
                "later in the stack may have set it: put gdpo last)"
            )


def flow_grpo_gdpo_tiny() -> RunConfig:
    """Flow-GRPO on the tiny SD3 with two rewards of unequal difficulty: strict correctness and partial credit."""
    return scenes(
        "flow_grpo_gdpo_tiny",
        ["flow_grpo", "gdpo"],
        "Flow-GRPO with GDPO on the testbed's scenes: strict correctness and partial credit as two rewards",
        rewards={
            mode: RewardConfig(reward="geneval", params={"mode": mode, "detector": "testbed"})
            for mode in ("strict", "partial")
        },
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.7},
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=tiny_training(48),
    )


def flow_grpo_gdpo_sd35_medium() -> RunConfig:
    """Flow-GRPO's geometry on SD3.5-medium with three preference rewards; the paper trained language models."""
    return sd35_medium(
        "flow_grpo_gdpo_sd35_medium",
        ["flow_grpo", "gdpo"],
        "Flow-GRPO with GDPO on SD3.5-medium: PickScore, HPS v2.1 and ImageReward",
        "pickscore",
        rewards={name: RewardConfig() for name in ("pickscore", "hps_v2", "image_reward")},
        kl=KlConfig(beta=0.01, estimator="gaussian"),
        train=paper_training(),
    )
