"""Alarms: each condition, what its message names, and how often it is told."""

from __future__ import annotations

import pytest

from visual_grpo.alarms import Alarms
from visual_grpo.config import AlarmConfig

HEALTHY = {"loss": -0.1, "grad_norm": 0.3, "kl": 0.01, "clip_fraction": 0.1, "flat_groups": 0.25, "reward_failed": 0.0}


def test_healthy_step_raises_none():
    assert Alarms(AlarmConfig()).check(1, HEALTHY) == []
    assert Alarms(AlarmConfig()).check(1, {}) == []


@pytest.mark.parametrize(
    ("name", "metrics", "words", "action"),
    [
        ("non_finite", {"loss": float("nan")}, ["loss is nan", "train.optimizer.lr", "alarms.non_finite"], "stop"),
        ("non_finite", {"grad_norm": float("inf")}, ["grad_norm is inf"], "stop"),
        ("non_finite", {"kl": float("nan")}, ["kl is nan"], "stop"),
        ("zero_gradient", {"grad_norm": 0.0}, ["exactly zero", "alarms.zero_gradient"], "warn"),
        ("clip_fraction", {"clip_fraction": 0.95}, ["95%", "ratio.clip_low", "alarms.clip_fraction_max"], "warn"),
        ("kl", {"kl": 12.5}, ["12.5", "kl.beta", "alarms.kl_max"], "warn"),
        ("reward_failed", {"reward_failed": 0.5}, ["50%", "on_failed", "alarms.reward_failed_max"], "warn"),
    ],
)
def test_condition_names_cause_and_key(name, metrics, words, action):
    (alarm,) = Alarms(AlarmConfig()).check(7, {**HEALTHY, **metrics})
    assert (alarm.name, alarm.action, alarm.step) == (name, action, 7)
    assert all(word in alarm.message for word in ["step 7", *words])
    assert alarm.record()["kind"] == "alarm"


def test_off_and_stop_come_from_the_config():
    metrics = {**HEALTHY, "kl": 99.0}
    assert Alarms(AlarmConfig(kl="off")).check(1, metrics) == []
    alarms = Alarms(AlarmConfig(kl="stop"))
    assert [alarms.check(step, metrics)[0].action for step in (1, 2)] == ["stop", "stop"]


def test_flat_groups_wait_for_k_steps_in_a_row():
    alarms = Alarms(AlarmConfig(flat_groups_steps=3))
    flat = {**HEALTHY, "flat_groups": 1.0}
    assert [len(alarms.check(step, flat)) for step in (1, 2)] == [0, 0]
    alarms.check(3, HEALTHY)
    assert [len(alarms.check(step, flat)) for step in (4, 5, 6)] == [0, 0, 1]
    assert alarms.check(7, flat) == []


def test_lasting_condition_is_told_every_ten_steps():
    alarms = Alarms(AlarmConfig())
    told = [step for step in range(1, 32) if alarms.check(step, {**HEALTHY, "kl": 99.0})]
    assert told == [1, 11, 21, 31]


def test_condition_that_comes_and_goes_is_not_told_each_time():
    alarms = Alarms(AlarmConfig())
    told = [step for step in range(1, 23) if alarms.check(step, {**HEALTHY, "grad_norm": float(step % 2)})]
    assert told == [2, 12, 22]


def test_state_goes_through_a_checkpoint():
    flat = {**HEALTHY, "flat_groups": 1.0}
    first, second = Alarms(AlarmConfig(flat_groups_steps=2)), Alarms(AlarmConfig(flat_groups_steps=2))
    first.check(1, flat)
    second.load_state_dict(first.state_dict())
    (alarm,) = second.check(2, flat)
    assert "for 2 steps all groups" in alarm.message
    third = Alarms(AlarmConfig(flat_groups_steps=2))
    third.load_state_dict(second.state_dict())
    assert third.check(3, flat) == []


def test_those_that_stop_come_first():
    metrics = {**HEALTHY, "loss": float("nan"), "clip_fraction": 1.0}
    assert [a.action for a in Alarms(AlarmConfig()).check(1, metrics)] == ["stop", "warn"]
