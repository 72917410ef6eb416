"""Alarms: figures of a step that mean the run is not learning, or is about to break.

Each alarm warns, stops the run or is off (`config.alarms`); its message names the cause and the key that changes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from visual_grpo.config import AlarmConfig

__all__ = ["Alarm", "Alarms"]

_REPEAT = 10  # a condition that lasts, or comes and goes, is told again after so many steps, not at every step


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One alarm that went off."""

    name: str
    step: int
    message: str
    action: Literal["warn", "stop"]

    def record(self) -> dict[str, Any]:
        """The line for metrics.jsonl."""
        return {"kind": "alarm", "step": self.step, "name": self.name, "message": self.message, "action": self.action}


class Alarms:
    """Checks each step's figures; counts how long a condition has lasted (part of the checkpoint).

    The figures read are `loss`, `grad_norm`, `kl`, `clip_fraction`, `flat_groups` (share of groups with equal rewards),
    `reward_failed` (share of rows whose reward failed) and `sampler/log_prob_difference`; one that is absent raises no alarm.
    """

    def __init__(self, config: AlarmConfig, *, compares_rewards: bool = True) -> None:
        """`compares_rewards`: whether the methods learn from differences of rewards; if not, equal ones are no fault."""
        self.config = config
        self._compares_rewards = compares_rewards
        self._lasting: dict[str, int] = {}
        self._told: dict[str, int] = {}  # step of the last warning

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms of this step, those that stop the run first."""
        found = self._conditions(metrics)
        self._lasting = {name: self._lasting.get(name, 0) + 1 for name in found}
        alarms = []
        for name, message in found.items():
            action = getattr(self.config, name)
            first = self.config.flat_groups_steps if name == "flat_groups" else 1
            if action == "off" or self._lasting[name] < first:
                continue
            if action == "warn" and step < self._told.get(name, -_REPEAT) + _REPEAT:
                continue
            self._told[name] = step
            alarms.append(Alarm(name=name, step=step, message=f"step {step}: {message}", action=action))
        return sorted(alarms, key=lambda alarm: alarm.action != "stop")

    def evaluated(self, step: int, message: str | None) -> list[Alarm]:
        """The alarm of an evaluation whose figures say `message` (`hacking.hacking_message`)."""
        action = self.config.hacking
        if message is None or action == "off":
            return []
        if action == "warn" and step < self._told.get("hacking", -_REPEAT) + _REPEAT:
            return []
        self._told["hacking"] = step
        return [Alarm(name="hacking", step=step, message=f"step {step}: {message}", action=action)]

    def _conditions(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """What is wrong in this step: alarm name -> message."""
        config = self.config
        found: dict[str, str] = {}
        broken = [f"{k} is {metrics[k]}" for k in ("loss", "grad_norm", "kl") if not math.isfinite(metrics.get(k, 0.0))]
        if broken:
            found["non_finite"] = (
                f"{' and '.join(broken)}: the weights are about to be ruined. Lower train.optimizer.lr or the clip range "
                "(ratio.clip_low, ratio.clip_high), or use a wider model.dtype; alarms.non_finite decides what happens"
            )
        if metrics.get("grad_norm") == 0.0:
            found["zero_gradient"] = (
                "the gradient is exactly zero, so nothing was learned: every advantage is 0 (equal rewards in each "
                "group), every unit is masked or clipped, or no parameter is trainable. See reward/total and flat_groups, "
                "model.lora and model.train_layers; alarms.zero_gradient decides what happens"
            )
        if self._compares_rewards and metrics.get("flat_groups", 0.0) >= 1.0:
            steps = self._lasting.get("flat_groups", 0) + 1
            found["flat_groups"] = (
                f"for {steps} step{'s' if steps > 1 else ''} all groups had equal rewards, so no sample was better than "
                "another. Raise train.group_size or the noise of `sampling`, use prompts that the model sometimes gets "
                "right, or a reward with finer steps; alarms.flat_groups and alarms.flat_groups_steps decide when this is told"
            )
        if metrics.get("clip_fraction", 0.0) > config.clip_fraction_max:
            found["clip_fraction"] = (
                f"{metrics['clip_fraction']:.0%} of the units were clipped (limit {config.clip_fraction_max:.0%}): the "
                "policy moved too far in one rollout batch. Lower train.optimizer.lr, train.updates_per_step or "
                "train.epochs_per_step, or widen ratio.clip_low and ratio.clip_high; alarms.clip_fraction_max is the limit"
            )
        if metrics.get("kl", 0.0) > config.kl_max:
            found["kl"] = (
                f"the KL to the reference is {metrics['kl']:.4g} (limit {config.kl_max:g}): the policy drifts away from "
                "the start model and may be exploiting the reward. Raise kl.beta or lower train.optimizer.lr; "
                "alarms.kl_max is the limit"
            )
        if metrics.get("reward_failed", 0.0) > config.reward_failed_max:
            found["reward_failed"] = (
                f"the reward of {metrics['reward_failed']:.0%} of the rows failed (limit {config.reward_failed_max:.0%}) "
                "and those rows were dropped. See the run's log for the errors and rewards.NAME.timeout_s, retries and "
                "on_failed; alarms.reward_failed_max is the limit"
            )
        if metrics.get("sampler/log_prob_difference", 0.0) > config.sampler_max:
            found["sampler"] = (
                f"the log-probs of the rollout engine and of the model differ by {metrics['sampler/log_prob_difference']:.3g} a "
                f"token on average (limit {config.sampler_max:g}): the engine has other weights or a coarser precision. See "
                "docs/rollouts.md; alarms.sampler_max is the limit"
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """How long each condition has lasted and when it was told, for the checkpoint."""
        return {"lasting": dict(self._lasting), "told": dict(self._told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self._lasting, self._told = ({str(k): int(v) for k, v in state[part].items()} for part in ("lasting", "told"))
