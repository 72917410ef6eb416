"""`visual-grpo list`, `recipe show`, `testbed build` and `benchmark`: names to objects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from visual_grpo.cli import main
from visual_grpo.registry import RECIPES, REWARDS

KINDS = ["models", "methods", "rewards", "recipes", "evals"]


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_a_list_of_names_and_summaries(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    for row in rows:
        assert set(row) - {"range", "size", "licence"} == {"name", "summary", "origin", "target"}
        assert row["summary"]
    assert main(["list", kind]) == 0
    assert "summary" in capsys.readouterr().out


def test_every_reward_states_its_range_and_its_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "rewards", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    builtin = {name: row for name, row in rows.items() if row["origin"] == "built-in"}
    for name, row in builtin.items():
        assert row["range"], name
        assert row["size"], name
        assert ("licence" in row) == (row["size"] != "no weights"), name
    judges = ("llm_judge", "rubric", "vlm_judge", "vqa_score", "deqa", "unified_reward", "hps_v3", "caption_coverage")
    for name in ("aesthetic", "clip_score", "hps_v2", "image_reward", "iqa", "nsfw", "ocr", "pickscore", *judges):
        assert rows[name]["licence"]
    assert rows["math_verify"]["size"] == rows["brightness"]["size"] == "no weights"


def test_a_narrow_terminal_breaks_no_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["list", "rewards"]) == 0
    shown = capsys.readouterr().out
    assert "licence" in shown
    assert [name for name in REWARDS.names() if f" {name} " not in shown] == []
    assert len(shown.splitlines()) < 3 * len(REWARDS.names())


def test_listing_imports_no_heavy_library() -> None:
    code = """
import sys
from visual_grpo.cli import main
for kind in ("models", "methods", "rewards", "recipes", "evals"):
    assert main(["list", kind]) == 0
    assert main(["list", kind, "--json"]) == 0
print(sorted({"torch", "numpy", "diffusers", "transformers", "datasets"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def test_a_name_held_twice_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dist in ("one", "two"):
        info = tmp_path / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[visual_grpo.rewards]\nvg_twice = {dist}:Reward\nvg_{dist} = {dist}:Reward\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    REWARDS.refresh()
    try:
        assert main(["list", "rewards", "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert main(["list", "rewards"]) == 0
        assert "origin" in capsys.readouterr().out
    finally:
        monkeypatch.undo()
        REWARDS.refresh()
    assert rows["vg_one"]["origin"] == "distribution one"
    assert rows["vg_twice"]["origin"] == "conflict"
    assert "distribution one" in rows["vg_twice"]["summary"]
    assert "distribution two" in rows["vg_twice"]["summary"]


@pytest.mark.parametrize("name", RECIPES.names())
def test_every_recipe_prints_as_yaml_that_is_the_same_run(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from visual_grpo.api import Plan, any_plan

    assert main(["recipe", "show", name]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    shown, own = any_plan(tmp_path / "mine.yaml"), any_plan(name)
    assert shown.config == own.config
    if isinstance(own, Plan):
        assert shown.sampling == own.sampling
        assert shown.eval_sampling == own.eval_sampling


def test_testbed_build_calls_the_builder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vg_test_builder.py").write_text(
        "def build(out_dir, seed=0):\n    out_dir.mkdir()\n    (out_dir / 'seed').write_text(str(seed))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("visual_grpo.cli.testbed.TABLE", {"toy": ("vg_test_builder:build", "Toy.")})
    assert main(["testbed", "build", "toy", "--out", str(tmp_path / "toy"), "--seed", "7"]) == 0
    assert (tmp_path / "toy" / "seed").read_text() == "7"
    assert str(tmp_path / "toy") in capsys.readouterr().out


def test_benchmark_prints_the_arms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vg_test_bench.py").write_text(
        "def run(*, seeds, out):\n    return {'grpo': {'score': 0.25, 'seeds': seeds}, 'out': out}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("visual_grpo.eval.benchmarks.TABLE", {"toy": ("vg_test_bench:run", "Toy.")})
    assert main(["benchmark", "toy", "--seeds", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"grpo": {"score": 0.25, "seeds": 2}, "out": "runs/benchmark_toy"}
    assert main(["benchmark", "toy"]) == 0
    assert "grpo.score" in capsys.readouterr().out
