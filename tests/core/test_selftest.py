"""Every check before step 1 and every alarm, provoked through the whole loop, and its message read."""

from __future__ import annotations

import copy
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import digits, exported, records
from toy_run import toy_config

import visual_grpo as vg
from visual_grpo.adapters.toy import ToyAdapter, ToySampling
from visual_grpo.errors import RunError, UserError
from visual_grpo.method import Method, MethodConfig
from visual_grpo.run_folder import read_metrics


class FrozenSampler(ToyAdapter):
    """Samples from a copy of the weights that training never reaches, like a server that is not synchronised."""

    def __init__(self, model: Any, sampling: ToySampling) -> None:
        super().__init__(model, sampling)
        self.server = ToyAdapter(copy.deepcopy(model), sampling)

    def sample(self, *args: Any, **options: Any) -> Any:
        return self.server.sample(*args, **options)


class OtherTemperature(ToyAdapter):
    """Replays at another temperature than it samples with."""

    def log_prob(self, rollouts: Any, *args: Any, **options: Any) -> Any:
        other = torch.full_like(rollouts.data["temperature"], 1.3)
        return super().log_prob(replace(rollouts, data=rollouts.data | {"temperature": other}), *args, **options)


class Detached(ToyAdapter):
    """Replays without a gradient to the weights."""

    def log_prob(self, *args: Any, **options: Any) -> Any:
        found = super().log_prob(*args, **options)
        found.value = found.value.detach() + 0 * self.model.head.bias.sum()
        return found


class Counting(Method[MethodConfig]):
    """Its surrogate counts calls and uses random numbers: neither may be seen by the run that follows."""

    def __init__(self, config: MethodConfig) -> None:
        super().__init__(config)
        self.calls = torch.zeros(1)

    def surrogate(self, micro: Any, state: Any) -> Any:
        loss, figures = super().surrogate(micro, state)
        self.calls += 1
        return loss * (1 + 0.1 * self.calls + 0.1 * torch.rand(())), figures

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.calls = values["calls"]


class Exploding(Method[MethodConfig]):
    """The loss of the third step is not finite."""

    def surrogate(self, micro: Any, state: Any) -> Any:
        loss, figures = super().surrogate(micro, state)
        return (loss * torch.inf if state.step == 2 and Path("explode").exists() else loss), figures


def constant(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0] * len(prompts)


def sometimes_nan(prompts: list[str], completions: list[str]) -> list[float]:
    return [float("nan") if text.startswith("1") else float(len(text)) for text in completions]


def too_short(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0] * (len(prompts) - 1)


def silent(prompts: list[str], completions: list[str]) -> list[None]:
    return [None] * len(prompts)


def hangs(prompts: list[str], completions: list[str]) -> list[float]:
    time.sleep(20)
    return [1.0] * len(prompts)


CALLS: list[int] = []


def raises(prompts: list[str], completions: list[str]) -> list[float]:
    CALLS.append(len(prompts))
    raise ConnectionError("the reward server is away")


def raises_on_ones(prompts: list[str], completions: list[str]) -> list[float]:
    if any(text.startswith("1") for text in completions):
        raise ConnectionError("cannot read a one")
    return digits(prompts, completions)


HERE = "test_selftest"
SMALL = {"train": {"steps": 2}, "eval": {"every": 0, "final_samples": 8}}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This file can be named in configs, as the module that runs here."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    monkeypatch.chdir(tmp_path)


def run(folder: Path, **over: Any) -> Path:
    """Train to the end: the run's folder."""
    settings = {**SMALL, "rewards": {"killed_run:digits": 1.0}, **over}
    return Path(vg.train(toy_config(folder, **settings), out=folder / "run").folder)


def alarms(folder: Path) -> dict[str, str]:
    """Message of each alarm that went off."""
    return {r["name"]: r["message"] for r in read_metrics(folder) if r["kind"] == "alarm"}


@pytest.mark.parametrize(
    ("over", "error", "words"),
    [
        (
            {"model": {"lora": {"targets": ["to_q"]}}},
            UserError,
            ["model.lora.targets ['to_q'] match no module", "head"],
        ),
        (
            {"model": {"adapter": f"{HERE}:FrozenSampler"}},
            RunError,
            ["samples are bit-identical after a step", "a copy"],
        ),
        ({"model": {"adapter": f"{HERE}:OtherTemperature"}}, RunError, ["largest |ratio - 1|", "temperature"]),
        ({"model": {"adapter": f"{HERE}:Detached"}}, RunError, ["the gradient is zero everywhere"]),
        ({"train": {"group_size": 1}}, UserError, ["train.group_size is 1", "at least 2 samples"]),
        ({"rewards": {f"{HERE}:too_short": 1.0}}, RunError, ["returned 7 values for 8 rows", "one value a row"]),
        ({"rewards": {f"{HERE}:hangs": {"timeout_s": 1}}}, RunError, ["did not return within timeout_s = 1 s"]),
        (
            {"rewards": {f"{HERE}:raises": {"retries": 0}}},
            RunError,
            ["failed on every row", "the reward server is away"],
        ),
        ({"rewards": {f"{HERE}:silent": 1.0}}, RunError, ["gave None for each of the 32 rows", "data.answer_column"]),
        ({"rewards": {f"{HERE}:sometimes_nan": {"on_failed": "stop"}}}, RunError, ["not finite", "on_failed: drop"]),
        (
            {"rewards": {f"{HERE}:raises_on_ones": {"on_failed": "stop"}}},
            RunError,
            ["cannot read a one", "on_failed: drop"],
        ),
    ],
    ids=lambda value: None if isinstance(value, list | type) else str(value)[:60],
)
def test_a_run_that_cannot_learn_is_refused(
    tmp_path: Path, over: dict[str, Any], error: type, words: list[str]
) -> None:
    with pytest.raises(error) as found:
        run(tmp_path, **over)
    assert all(word in str(found.value) for word in words), found.value
    steps = read_metrics(tmp_path / "run") if (tmp_path / "run").exists() else []
    assert not [r for r in steps if r["kind"] == "train"]


def test_retries_are_bounded(tmp_path: Path) -> None:
    CALLS.clear()
    with pytest.raises(RunError, match="failed on every row"):
        run(tmp_path, rewards={f"{HERE}:raises": {"retries": 2}})
    assert CALLS == [8, 8, 8] + [1] * 8


@pytest.mark.parametrize("reward", ["sometimes_nan", "raises_on_ones"])
def test_failed_rows_are_dropped_and_told(tmp_path: Path, reward: str) -> None:
    """No number takes their place: they are missing from the rows that are trained."""
    folder = run(tmp_path, rewards={f"{HERE}:{reward}": {"retries": 0}}, alarms={"reward_failed_max": 0.001})
    train = [r["metrics"] for r in read_metrics(folder) if r["kind"] == "train"]
    assert 0 < train[0]["reward_failed"] < 0.5
    assert train[0]["rows"] == round(32 * (1 - train[0]["reward_failed"]))
    assert "those rows were dropped" in alarms(folder)["reward_failed"]


def test_equal_rewards_warn_at_once_and_alarm_after_k_steps(tmp_path: Path) -> None:
    rewards = {f"{HERE}:constant": 1.0}
    folder = run(tmp_path, rewards=rewards, train={"steps": 3}, alarms={"flat_groups_steps": 2})
    assert "0 of 4: nothing to learn from yet. Raise train.group_size" in (folder / "self_test.json").read_text()
    assert "step 2: for 2 steps all groups had equal rewards" in alarms(folder)["flat_groups"]
    assert "the gradient is exactly zero" in alarms(folder)["zero_gradient"]


def test_a_kl_that_explodes_is_told(tmp_path: Path) -> None:
    folder = run(tmp_path, kl={"beta": 1e-4}, train={"steps": 6, "optimizer": {"lr": 3.0}}, alarms={"kl_max": 0.5})
    assert "the policy drifts away from the start model" in alarms(folder)["kl"]
    assert "kl.beta" in alarms(folder)["kl"]


def test_a_loss_that_is_not_finite_stops_and_the_run_can_go_on(tmp_path: Path) -> None:
    """The weights are those before the step, a checkpoint is there, and `--resume` ends the run."""
    config = toy_config(tmp_path, **{**SMALL, "train": {"steps": 4}}, method=[f"{HERE}:Exploding"])
    config["rewards"] = {"killed_run:digits": 1.0}
    vg.train(config, overrides={"train.steps": 2}, out=tmp_path / "two")
    Path("explode").touch()
    with pytest.raises(RunError, match=r"grad_norm is (nan|inf).* a checkpoint was written, go on with --resume"):
        vg.train(config, out=tmp_path / "run")
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "run/checkpoints/step-000003/weights.safetensors")
    assert all(torch.equal(kept[k], v) for k, v in exported(tmp_path / "two").items())
    Path("explode").unlink()
    assert vg.train(config, out=tmp_path / "run", resume=True).step == 4
    assert [r["step"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize("background", [False, True])
def test_a_hung_phase_is_stopped(tmp_path: Path, background: bool) -> None:
    """A reward without a limit of its own; the stacks say where it hangs. In the background SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
    try:
        _stop_a_hung_phase(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def _stop_a_hung_phase(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"phase 'evaluate' made no progress for .*watchdog.timeout_s is 1"):
        run(tmp_path, rewards={f"{HERE}:hangs": {"timeout_s": 1000}}, watchdog={"timeout_s": 1})
    assert "in hangs" in (tmp_path / "run" / "stacks.txt").read_text()


def test_held_out_prompts_that_are_trained_on(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    config["eval"]["source"] = config["data"]["source"]
    with pytest.raises(UserError, match="16 held-out prompts are also training prompts"):
        vg.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_self_test_changes_nothing(tmp_path: Path) -> None:
    """With and without it: equal records and weights, also with dropout and a method with state that draws at random."""
    found = []
    for enabled in (True, False):
        config = toy_config(tmp_path, **SMALL, model={"lora": {"rank": 2, "dropout": 0.3}}, method=[f"{HERE}:Counting"])
        config |= {"rewards": {"killed_run:digits": 1.0}, "self_test": {"enabled": enabled}}
        found.append(Path(vg.train(config, out=tmp_path / str(enabled)).folder))
    assert records(found[0]) == records(found[1])
    assert all(torch.equal(v, exported(found[1])[k]) for k, v in exported(found[0]).items())
    assert (found[0] / "self_test.json").exists()
    assert not (found[1] / "self_test.json").exists()
