"""Whole toy runs under every combination: they learn, resume, and two processes compute what one computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import exported, finish, output, records
from test_processes import assert_close_runs, pair
from toy_run import toy_config, toy_trainer

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import merge, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.run_folder import RunFolder
from visual_grpo.summary import comparison, figures_of


def ended(completions: list[str]) -> list[float]:
    """Short words; cheap."""
    return [1.0 if len(text) < 3 else 0.0 for text in completions]


def low(completions: list[str], answer: list[str]) -> list[float | None]:
    """Small digits, on a scale of its own; nothing to say about an answer of 0."""
    return [
        None if a == "0" else 100 * (1 - sum(map(int, text)) / 27) for text, a in zip(completions, answer, strict=True)
    ]


def rounded(values: dict[str, Tensor], weights: dict[str, float], power: float) -> Tensor:
    """A mean with a power."""
    return torch.stack([torch.nan_to_num(v).clamp(min=0) ** power for v in values.values()]).mean(0)


TWO = {"test_combined_runs:ended": 1.0, "test_combined_runs:low": 1.0}
LOW = "test_combined_runs:low"
RUNS: dict[str, dict[str, Any]] = {
    "sum": {"combine": "sum"},
    "sum_of_advantages": {"combine": "sum_of_advantages"},
    "gdpo": {"combine": "gdpo"},
    "gdpo_tokens": {"combine": {"how": "gdpo", "level": "tokens"}},
    "rank": {"combine": "rank"},
    "product": {
        "combine": "product",
        "rewards": {
            "test_combined_runs:ended": {"normalise": {"kind": "min_max", "low": -1, "high": 1}},
            LOW: {"normalise": {"kind": "min_max", "low": 0, "high": 100}},
        },
    },
    "gate": {"combine": {"how": "gate", "gate": {"test_combined_runs:ended": 1.0}}},
    "gated gdpo": {"combine": {"how": "gdpo", "gate": {"test_combined_runs:ended": 1.0}}},
    "function": {"combine": {"how": "test_combined_runs:rounded", "params": {"power": 0.5}}},
    "z_score": {"rewards": {"test_combined_runs:ended": 1.0, LOW: {"normalise": "z_score"}}},
}
FAST = {"train": {"steps": 12, "optimizer": {"lr": 5e-2}}, "eval": {"every": 0, "final_samples": 64}}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_under_every_combination(name: str, tmp_path: Path) -> None:
    config = toy_config(tmp_path, **merge(merge({"rewards": TWO}, FAST), RUNS[name]))
    result = vg.train(config, out=tmp_path / "run")
    assert result.before is not None
    assert result.after is not None
    for reward in TWO:
        assert result.after.metrics[reward] > result.before.metrics[reward], reward
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(record["metrics"] for record in steps if record["kind"] == "train")
    assert 0 < step[f"applies/{LOW}"] <= 1
    assert f"flat_groups/{LOW}" in step
    if "gate" in name:
        assert 0 < step[f"reward/{LOW}/open"] < 1
        assert step[f"reward/{LOW}/scored"] > step[f"reward/{LOW}"]
    if name == "z_score":
        assert step[f"reward/{LOW}/raw"] > 10
        assert abs(step[f"reward/{LOW}"]) < 1e-5  # all values so far are those of this step


def test_a_partial_reward_is_in_the_summary() -> None:
    """On the samples that have it before and after."""
    before = [{"values": {"a": 0.0, "b": v}, "details": {}, "tag": None} for v in (0.0, None, 1.0, None)]
    after = [{"values": {"a": 1.0, "b": v}, "details": {}, "tag": None} for v in (1.0, 1.0, 1.0, None)]
    assert figures_of(before) == ["a", "b"]
    rows = comparison(before, after)
    assert [row[:5] for row in rows] == [
        ("a", "all", "0.000", "1.000", "+1.000"),
        ("b (n=2)", "all", "0.500", "1.000", "+0.500"),
    ]


def test_rewards_for_evaluation_only_are_scored_and_never_trained_on(tmp_path: Path) -> None:
    rewards = {"test_combined_runs:ended": 1.0, LOW: {"eval_only": True, "weight": 1000}}
    config = toy_config(tmp_path, rewards=rewards, **FAST)
    result = vg.train(config, out=tmp_path / "run")
    assert result.after is not None
    assert LOW in result.after.metrics
    alone = vg.train({**config, "rewards": {"test_combined_runs:ended": 1.0}}, out=tmp_path / "alone")
    one, two = exported(Path(result.folder)), exported(Path(alone.folder))
    assert all(torch.equal(one[k], two[k]) for k in one)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(f"reward/{LOW}" not in record["metrics"] for record in steps if record["kind"] == "train")


class OwnAdvantages(Method[MethodConfig]):
    """Fills the hook that gdpo would."""

    def advantages(self, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        """None."""
        raise AssertionError


def test_two_makers_of_advantages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"so does method 'test_combined_runs:OwnAdvantages'"):
        plan(toy_config(tmp_path, combine="gdpo", method=["test_combined_runs:OwnAdvantages"]))


def test_a_flat_sum_with_opposed_parts_is_no_flat_group(tmp_path: Path) -> None:
    """Flatness follows the combination: under the sum there is nothing to learn, under weighted advantages there is."""
    shares = {}
    for how in ("sum", "sum_of_advantages"):
        folder = tmp_path / how
        folder.mkdir()
        opposed = {"test_combined_runs:ended": 1.0, "test_combined_runs:not_ended": 2.0}
        trainer = toy_trainer(folder, rewards=opposed, combine=how, advantage={"drop_flat": True})
        trainer.iteration()
        record = json.loads((trainer.writer.folder.path / "metrics.jsonl").read_text().splitlines()[0])
        shares[how] = (record["metrics"]["flat_groups"], record["metrics"].get("rows", 0.0))
        trainer.writer.close()
    assert shares["sum"] == (1.0, 0.0)
    assert shares["sum_of_advantages"][0] < 1
    assert shares["sum_of_advantages"][1] > 0


def not_ended(completions: list[str]) -> list[float]:
    """Half of what `ended` leaves, so that ended + 2 * this is constant."""
    return [0.0 if len(text) < 3 else 0.5 for text in completions]


STATE = {
    "rewards": {
        "test_combined_runs:ended": {"normalise": {"kind": "z_score", "decay": 0.9}},
        LOW: {"normalise": "z_score"},
    }
}


def test_a_resumed_run_has_its_running_statistics(tmp_path: Path) -> None:
    config = toy_config(tmp_path, **merge(STATE, {"train": {"steps": 4}}))
    assert finish(config, tmp_path / "whole") == 0, output(tmp_path / "whole")
    short = merge(config, {"train": {"steps": 4}})
    made = plan(short)
    folder = RunFolder.create(tmp_path, "cut", config_yaml=to_yaml(made.config), out=tmp_path / "cut")
    trainer = build_trainer(made, folder, Ranks())
    trainer.first = trainer.evaluate(32)
    for _ in range(2):
        trainer.iteration()
    trainer.evaluate(16)
    trainer.save()
    assert trainer.normalisers.state_dict()[LOW]["weight"] > 1
    trainer.writer.close()
    assert finish(config, tmp_path / "cut", resume=True) == 0, output(tmp_path / "cut")
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    mine, theirs = exported(tmp_path / "cut"), exported(tmp_path / "whole")
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)


PROCESSES: dict[str, dict[str, Any]] = {
    "gated gdpo": merge(RUNS["gated gdpo"], {"advantage": {"drop_flat": True}}),
    "gdpo over tokens, z_score": merge(STATE, RUNS["gdpo_tokens"]),
    "rank": RUNS["rank"],
    "product": RUNS["product"],
}


@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_compute_what_one_computes(name: str, tmp_path: Path) -> None:
    base = {"model": {"dtype": "float64"}, "rewards": TWO, "train": {"steps": 2}}
    config = toy_config(tmp_path, **merge(base, PROCESSES[name]))
    assert finish(config, tmp_path / "one") == 0, output(tmp_path / "one")
    assert pair(config, tmp_path / "two") == [0, 0], (tmp_path / "two-0.log").read_text()
    assert_close_runs(tmp_path / "two", tmp_path / "one")
