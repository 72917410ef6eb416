"""The benchmark text_methods: its conditions resolve, a run of a step, the figures, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from visual_grpo.cli import main
from visual_grpo.errors import UserError
from visual_grpo.eval.benchmarks.text_arms import training_figures
from visual_grpo.eval.benchmarks.text_conditions import CONDITIONS, Arm, Condition, chosen
from visual_grpo.eval.benchmarks.text_figures import difference, forest, markdown, solved, summarise
from visual_grpo.eval.benchmarks.text_methods import _plan, run

SETTINGS: dict[str, Any] = {"scale": 1.0, "overrides": {}}


@pytest.mark.parametrize("title", CONDITIONS)
def test_arms_differ_in_the_method_alone(title: str, tmp_path: Path) -> None:
    """Every arm resolves; what is sampled, scored, learned from and evaluated is the same, and only GRPO's options may differ."""
    condition = CONDITIONS[title]
    condition = Condition(**{**vars(condition), "warm_up": None}) if condition.warm_up else condition
    made = {name: _plan(condition, arm, title, 0, SETTINGS, tmp_path).config for name, arm in condition.arms.items()}
    base = made[condition.vanilla]
    named = [m for method in base.method for m in method]
    assert named == ["grpo"] or base.method == [{"degrpo": {"control_tokens": 0, "mode_rewards": {}}}]
    for name, config in made.items():
        for key in ("model", "data", "rewards", "sampling", "train", "eval"):
            assert getattr(config, key) == getattr(base, key), (name, key)
        if condition.arms[name].over == {} and name not in ("grail", "balanced_aggregation"):
            assert config.advantage.std == base.advantage.std, name
            assert config.loss == base.loss, name
            assert (config.kl.beta, config.kl.estimator) == (base.kl.beta, base.kl.estimator), name
            assert config.ratio == base.ratio, name


def test_every_variant_has_one_condition() -> None:
    names = [name for c in CONDITIONS.values() for name in c.arms if name != c.vanilla]
    assert len(names) == len(set(names))
    wanted = "balanced_aggregation lambda_grpo tmn_reweight seed_grpo fg_expo redit real lens s_grpo microcoder_grpo grail degrpo"
    assert set(wanted.split()) <= set(names)
    assert chosen(["lens"]) == {"rarely right": ["grpo", "lens"]}
    assert list(chosen(None)) == list(CONDITIONS)


def test_a_benchmark_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    options = ["scale=0.05", "points=2", "samples=8", "final_samples=120", "methods=[redit]"]
    options += ["overrides.train.prompts_per_step=4", "overrides.train.micro_batch=32"]
    line = ["benchmark", "text_methods", *options, "--out", str(out), "--json", "--seeds"]
    assert main([*line, "1"]) == 0
    found = json.loads(capsys.readouterr().out)["conditions"]["rarely right"]
    assert (found["vanilla"], found["seeds"]) == ("grpo", 1)
    base, variant = found["arms"]["grpo"], found["arms"]["redit"]
    assert (base["steps"], variant["steps"]) == (2, 2)
    assert base["any"] >= base["final"]  # two answers to each of 60 questions
    assert variant["difference"]["mean"] == pytest.approx(variant["final"] - base["final"])
    assert variant["difference"]["within"][0] <= variant["difference"]["mean"] <= variant["difference"]["within"][1]
    assert "redit/noise_only_groups" in variant["figures"]
    arm = json.loads((out / "arms" / "rarely_right-redit-seed0.json").read_text())
    assert [point["step"] for point in arm["points"]] == [1, 2]
    assert len(arm["rows"]) == 120
    assert {row["tag"] for row in arm["rows"]} == {"add", "sub", "mul", "mixed"}
    ET.fromstring((out / "differences.svg").read_text())
    assert "| rarely right | `redit` | 1 |" in (out / "results.md").read_text()

    files = {path: path.stat().st_mtime_ns for path in (out / "arms").iterdir()}
    assert main([*line, "2", "only_finished=true"]) == 0  # the second seed is not there
    assert json.loads(capsys.readouterr().out)["conditions"]["rarely right"] == found
    assert {path: path.stat().st_mtime_ns for path in (out / "arms").iterdir()} == files
    with pytest.raises(UserError, match="of a benchmark with other settings"):
        run(seeds=1, out=out, methods=["redit"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["lense"]}, r"no arm 'lense'. Did you mean 'lens'\?.*each runs with its vanilla GRPO"),
        ({"scale": 0.0}, "must be positive"),
        ({"points": 0}, "must be positive"),
        ({"clock": "sun"}, "clock: 'sun' is unknown; use wall or processor"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run(out=tmp_path, **options)


def rows(*values: float, answers: int = 2) -> list[dict[str, Any]]:
    """`answers` a question."""
    return [
        {"row": i, "index": i // answers, "tag": "add", "text": "", "value": value} for i, value in enumerate(values)
    ]


def arm(*values: float, **training: float) -> dict[str, Any]:
    final = {"step": 4, "seconds": 8.0, "score": sum(values) / len(values)}
    points = [{"step": 2, "seconds": 4.0, "score": 0.0}, final]
    return {"points": points, "steps": 4, "seconds": 8.0, "rows": rows(*values), "training": training}


def test_differences_over_seeds_and_within_runs() -> None:
    base = [arm(0, 0, 1, 0), arm(0, 0, 0, 0), arm(0, 1, 0, 0)]
    better = [arm(1, 0, 1, 1), arm(1, 0, 1, 0), arm(1, 1, 0, 1)]
    found = difference(base, better)
    assert found["mean"] == pytest.approx(0.5)
    # differences 0.5, 0.5, 0.5: no spread over seeds
    assert found["seeds"] == pytest.approx([0.5, 0.5])
    assert found["reading"] == "gain"
    assert difference(better, base)["reading"] == "loss"
    assert difference(base, base)["reading"] == "tie"
    assert found["any"] == pytest.approx(1 - 1 / 3)  # all six against two of six questions
    two = difference(base[:2], better[:2])
    assert two["reading"] == "gain in these runs, open over seeds"
    assert difference(base[:1], better[:1])["seeds"] is None


def test_an_arm_that_was_stopped_earlier_is_compared_on_shared_answers() -> None:
    short = arm(1, 1)
    assert difference([arm(0, 0, 1, 1)], [short])["mean"] == 1.0


def test_table_and_plot() -> None:
    found = {
        "noisy labels": {
            "grpo": [arm(0, 0, 1, 0, truncated=0.5), arm(0, 0, 0, 0)],
            "s_grpo": [arm(1, 0, 1, 1, **{"s_grpo/weight": 0.25}), arm(1, 0, 1, 0, **{"s_grpo/weight": 0.75})],
        },
        "two scales": {"grpo": [], "tmn_reweight": []},
    }
    result = {"clock": "processor", "conditions": summarise(found)}
    assert list(result["conditions"]) == ["noisy labels"]  # the other has no whole seed
    table = markdown(result)
    assert "| noisy labels | `s_grpo` | 2 | 4 | 8 | 0.625 ± 0.177 | +0.500 | " in table
    assert "`grpo` | 2 | 4 | 8 | 0.125 ± 0.177 |  |  |  | vanilla | 0.250 |" in table
    assert "s_grpo: s_grpo/weight 0.5" in table
    ET.fromstring(forest(result))


def test_figures_of_training() -> None:
    found = training_figures([{"grad_norm": 1.0, "kl": 0.5}, {"grad_norm": 3.0}, {"grad_norm": 0.0}])
    assert found["kl"] == 0.5
    assert found["zero_gradient"] == pytest.approx(1 / 3)
    assert found["grad_norm_spread"] == pytest.approx((14 / 9) ** 0.5 / (4 / 3))
    assert training_figures([]) == {}


def test_questions_with_several_answers() -> None:
    assert solved(rows(0, 1, 0, 0)) == {0: 1.0, 1: 0.0}
    assert solved(rows(0, 1, answers=1)) == {}
    assert solved(rows(0, 1, 0)) == {}  # one question has more answers than the other


def test_rewards_by_mode() -> None:
    condition = CONDITIONS["two modes"]
    values = [("<short>#### 3", 1.0), ("<think>1+2=3</think> #### 3", 1.0), ("<short>#### 4", 0.0), ("#### 3", 1.0)]
    scored = [
        {"text": text, "tag": "add", "index": i, "values": {"exact_match": right}}
        for i, (text, right) in enumerate(values)
    ]
    rewards = [condition.value(row) for row in scored]
    assert rewards == [1.0, 0.5, -1.0, -1.0]
    assert condition.says is not None
    said = condition.says([row | {"value": value} for row, value in zip(scored, rewards, strict=True)])
    assert said == {"right": 0.5, "think": 0.25, "think, add": 0.25}
    assert Arm(method=["grpo"]).over == {}
