"""Best weights by a held-out figure and early stop: what decides, what is exported, what a resumed run knows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import KILLED, assert_same_run, finish, output
from toy_run import toy_config

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.config import merge, resolve
from visual_grpo.errors import UserError
from visual_grpo.evaluation import Evaluation, summarise
from visual_grpo.selection import Selection

SCRIPT: list[float] = []


def scripted(prompts: list[str], completions: list[str]) -> list[float]:
    """A held-out reward with one value an evaluation, whatever the policy does."""
    return [SCRIPT.pop(0)] * len(prompts)


WATCHED = {"killed_run:digits": 1.0, "test_selection:scripted": {"eval_only": True}}
METRIC = "test_selection:scripted"


def run(folder: Path, script: list[float], **over: Any) -> Any:
    """A toy run with one evaluation at 0, 2, 4, 6 (and once more of the best weights with `eval.final=best`)."""
    import test_selection  # the copy that the run imports by name

    test_selection.SCRIPT[:] = script
    config = toy_config(
        folder, **merge({"rewards": WATCHED, "checkpoint": {"best": METRIC}, "eval": {"batch": 32}}, over)
    )
    return vg.train(config, out=folder / "run", resume=(folder / "run").exists())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def evals(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "eval"]


def selection(**over: Any) -> Selection:
    """Of a config with rewards a and b, 4 samples in the small evaluations."""
    base = {
        "model": {"adapter": "toy", "path": "toy"},
        "data": {"source": "x.jsonl"},
        "rewards": ["a", "b"],
        "eval": {"samples": 4, "final_samples": 8},
    }
    return Selection(resolve(merge(base, over)))


def rows(*values: float | None) -> list[dict[str, Any]]:
    return [{"tag": None, "values": {"a": value}, "details": {}} for value in values]


def test_the_best_is_the_first_of_equals_and_nan_is_never_best() -> None:
    found = selection(checkpoint={"best": "a"})
    told = [found.observe(step, rows(v, v)) for step, v in enumerate([0.2, 0.5, 0.5, float("nan"), None, 0.4])]
    assert told == [True, True, False, False, False, False]
    assert (found.best.step, found.best.value) == (1, 0.5)
    assert str(found.best) == "step 1, a 0.5000"


def test_the_smallest_is_best_where_the_config_says_so() -> None:
    found = selection(checkpoint={"best": {"metric": "a", "mode": "min"}})
    assert [found.observe(step, rows(v)) for step, v in enumerate([0.2, 0.5, 0.1])] == [True, False, True]


def test_evaluations_of_other_sizes_are_compared_on_the_samples_they_share() -> None:
    found = selection(checkpoint={"best": "a"})
    found.observe(0, rows(1, 1, 0, 0, 1, 1, 1, 1))
    assert found.best.value == 0.5
    assert found.observe(1, rows(1, 1, 1, 0))
    assert not found.observe(2, rows(1, 1, 0, 0, 1, 1, 1, 1), last=True)


def test_a_figure_that_the_shared_samples_lack_is_refused() -> None:
    """The first evaluation has it on its many samples, and no later one would: the best weights were never kept."""
    found = selection(checkpoint={"best": "a"})
    many = rows(None, None, None, None, 1, 0, 1, 1)
    with pytest.raises(UserError, match=r"'a' has no value on the first 4 samples.*raise eval.samples"):
        found.check(Evaluation(rows=many, metrics=summarise(many)[0], by_tag={}))
    found.check(Evaluation(rows=rows(1, *[None] * 7), metrics={"a": 1.0}, by_tag={}))


def test_patience_counts_evaluations_without_an_improvement() -> None:
    found = selection(train={"early_stop": {"metric": "a", "patience": 2, "min_delta": 0.1}})
    reasons = []
    for step, value in enumerate([0.2, 0.25, 0.35, 0.4, 0.44]):
        found.observe(step, rows(value))
        reasons.append(found.reason)
    assert reasons[:4] == [None] * 4
    assert reasons[4] == "train.early_stop: a has not risen by more than 0.1 from the 0.3500 of step 2 in 2 evaluations"
    assert found.marks(4) == {"stop": reasons[4]}
    assert found.marks(3) == {}


def test_a_figure_that_never_comes_ends_the_run_too() -> None:
    found = selection(train={"early_stop": {"metric": "a", "patience": 1, "mode": "min"}})
    found.observe(0, rows(None))
    assert found.reason == "train.early_stop: no value of a in 1 evaluation"


def test_nothing_is_stopped_after_the_last_step() -> None:
    found = selection(train={"early_stop": {"metric": "a", "patience": 1}})
    found.observe(0, rows(0.5))
    found.observe(4, rows(0.1), last=True)
    assert found.reason is None


def test_state_goes_through_a_checkpoint_and_another_figure_begins_anew() -> None:
    over = {"checkpoint": {"best": "a"}, "train": {"early_stop": {"metric": "a", "patience": 1}}}
    first, second = selection(**over), selection(**over)
    for step, value in enumerate([0.5, 0.3]):
        first.observe(step, rows(value))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.best, second.reason, second.step) == (first.best, first.reason, 1)
    other = selection(**merge(over, {"train": {"early_stop": {"metric": "b"}}}))
    other.load_state_dict(first.state_dict())
    assert other.reason is None


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (
            {"checkpoint": {"best": "exat_match"}},
            r"checkpoint\.best: no figure 'exat_match'.*Did you mean 'exact_match'",
        ),
        ({"train": {"early_stop": "exact/by_tag"}}, r"train\.early_stop\.metric: no figure 'exact/by_tag'"),
        ({"checkpoint": {"best": "diversity"}}, "diversity compares several pictures.*a model that makes images"),
        ({"train": {"early_stop": "exact_match"}, "eval": {"every": 0}}, r"set eval\.every \(now 0\)"),
        ({"eval": {"final": "best"}}, r"eval\.final=best measures the weights of checkpoint\.best"),
        ({"eval": {"group_size": 5}}, r"samples \(16\) must be a multiple of group_size \(5\); use 15 or 20"),
        ({"alarms": {"hacking": "stop"}}, r"alarms\.hacking=stop has nothing to watch.*eval_only: true"),
        ({"checkpoint": {"best": {"metrik": "exact_match"}}}, r"unknown key 'checkpoint\.best\.metrik'"),
    ],
)
def test_what_no_evaluation_can_decide_is_refused(tmp_path: Path, over: dict[str, Any], words: str) -> None:
    with pytest.raises(vg.UserError, match=words):
        plan(toy_config(tmp_path, **over))


def test_a_detail_that_the_first_evaluation_lacks_is_refused_before_step_1(tmp_path: Path) -> None:
    config = toy_config(tmp_path, checkpoint={"best": "exact_match/anserred"})
    with pytest.raises(vg.UserError, match=r"no figure 'exact_match/anserred'\. Did you mean 'exact_match/answered'"):
        vg.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


LORA = {"model": {"lora": {"rank": 2, "alpha": 4, "targets": ["head"]}}}
AVERAGED = {"train": {"updates_per_step": 2, "ema": {"decay": 0.5, "every": 1}}}


@pytest.mark.parametrize("over", [LORA, AVERAGED], ids=["lora", "averaged weights"])
def test_the_best_weights_are_those_of_their_step(tmp_path: Path, over: dict[str, Any]) -> None:
    """They are exported beside the last ones, and equal the model of a run that ends there."""
    (tmp_path / "whole").mkdir(), (tmp_path / "short").mkdir()
    result = run(tmp_path / "whole", [0.125, 0.5, 0.375, 0.25], **over)
    assert (result.best.step, result.best.metric, result.best.value) == (2, METRIC, 0.5)
    assert result.measured == 6
    run(tmp_path / "short", [0.125, 0.5], **merge(over, {"train": {"steps": 2}, "checkpoint": {"best": None}}))
    expected = weights(tmp_path / "short/run/model")
    kept, last = weights(tmp_path / "whole/run/best"), weights(tmp_path / "whole/run/model")
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
    assert not all(torch.equal(last[name], value) for name, value in expected.items())
    assert [e.get("best") for e in evals(tmp_path / "whole")] == [
        {"metric": METRIC, "value": 0.125},
        {"metric": METRIC, "value": 0.5},
        None,
        None,
    ]


def test_the_last_evaluation_and_the_model_are_of_the_best_weights(tmp_path: Path) -> None:
    result = run(tmp_path, [0.1, 0.5, 0.4, 0.2, 0.45], eval={"final": "best"})
    assert (result.step, result.measured, len(result.after.rows)) == (6, 2, 32)
    assert not (tmp_path / "run/best").exists()
    assert [(e["step"], e["n"], e.get("final", False)) for e in evals(tmp_path)] == [
        (0, 32, False),
        (2, 16, False),
        (4, 16, False),
        (6, 16, False),
        (2, 32, True),
    ]
    sizes = [(tmp_path / "run/metrics.jsonl").stat().st_size]
    again = run(tmp_path, [], eval={"final": "best"})  # a finished run evaluates nothing
    assert (again.best, again.measured, len(again.after.rows)) == (result.best, 2, 32)
    assert (tmp_path / "run/metrics.jsonl").stat().st_size == sizes[0]


def test_the_start_may_be_the_best(tmp_path: Path) -> None:
    result = run(tmp_path, [0.9, 0.5, 0.4, 0.2, 0.9], eval={"final": "best"})
    assert (result.best.step, result.measured) == (0, 0)
    kept = weights(tmp_path / "run/model")
    from visual_grpo.adapters.toy import ToyModel

    assert all(torch.equal(kept[name], value) for name, value in ToyModel().state_dict().items())


def test_early_stop_ends_the_run_and_may_be_lifted(tmp_path: Path) -> None:
    over = {"train": {"early_stop": {"metric": METRIC, "patience": 1}}}
    result = run(tmp_path, [0.5, 0.4, 0.4], **over)
    assert result.step == 2
    assert result.stopped == f"train.early_stop: {METRIC} has not risen from the 0.5000 of step 0 in 1 evaluation"
    assert [e.get("stop") for e in evals(tmp_path)] == [None, result.stopped, result.stopped]
    from visual_grpo.report.data import load_run
    from visual_grpo.run_folder import RunFolder

    read = load_run(RunFolder(tmp_path / "run"))
    assert (read.stopped, read.finished, read.best["step"]) == (result.stopped, True, 0)
    again = run(tmp_path, [], **over)
    assert (again.step, again.stopped, again.after.metrics) == (2, result.stopped, result.after.metrics)
    on = run(tmp_path, [0.6, 0.3], train={"early_stop": None})
    assert (on.step, on.stopped, on.best.step) == (6, None, 4)
    with pytest.raises(vg.UserError, match=r"checkpoint\.best"):
        run(tmp_path, [], checkpoint={"best": "killed_run:digits"})


@pytest.mark.parametrize(("where", "number"), [("eval/step-000006", 2), ("best", 1)])
def test_a_kill_at_the_end_keeps_what_was_best(tmp_path: Path, where: str, number: int) -> None:
    """After the last evaluation, and before the export: the last weights are the best ones."""
    config = toy_config(tmp_path, rewards={"killed_run:digits": 1.0}, checkpoint={"best": "killed_run:digits"})
    assert finish(config, tmp_path / "reference") == 0, output(tmp_path / "reference")
    killed = tmp_path / "run"
    assert finish(config, killed, kill_in=str(killed / where), kill_at=number) == KILLED
    assert finish(config, killed) == 0, output(killed)
    assert_same_run(killed, tmp_path / "reference")
    kept, expected = weights(killed / "best"), weights(tmp_path / "reference/best")
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
