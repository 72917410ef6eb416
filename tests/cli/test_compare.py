"""`visual-grpo compare`: reading run folders, pooling seeds, the table and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from visual_grpo.cli import main
from visual_grpo.cli.runs import differing_settings, group_arms, read_run
from visual_grpo.errors import UserError


def make_run(folder: Path, scores: list[float], **settings: Any) -> Path:
    folder.mkdir()
    config = {"name": "toy", "method": [{"grpo": {}}], "train": {"seed": 0, "lr": 0.1}}
    config["train"] |= settings  # type: ignore[operator]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows: list[dict[str, Any]] = []
    for step, score in enumerate(scores):
        figures = {"toy": score, "toy/by_tag": score, "toy/part": 1.0, "bad": None}
        rows.append({"kind": "eval", "step": step, "metrics": figures})
        rows.append({"kind": "train", "step": step, "metrics": {"reward/total": score / 2}, "time": {"total": 1.0}})
    rows.append({"kind": "alarm", "step": 1, "message": "x"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_seeds_are_pooled_and_settings_that_differ_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        make_run(tmp_path / "a", [0.1, 0.3, 0.2], seed=0),
        make_run(tmp_path / "b", [0.1, 0.5, 0.4], seed=1),
        make_run(tmp_path / "c", [0.1, 0.2], seed=0, lr=0.2),
    ]
    out = tmp_path / "plot.png"
    assert main(["compare", *map(str, runs), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"] == ["eval/toy/by_tag"]
    assert result["runs"][0] == {
        "run": str(runs[0]),
        "steps": 2,
        "settings": {"train.lr": 0.1, "train.seed": 0},
        "eval/toy/by_tag": {"first": 0.1, "last": 0.2, "best": 0.3},
    }
    pooled = result["arms"][0]
    assert pooled["runs"] == 2
    assert pooled["eval/toy/by_tag"]["mean"] == pytest.approx(0.3)
    assert pooled["eval/toy/by_tag"]["std"] == pytest.approx(0.02**0.5)
    assert result["arms"][1]["eval/toy/by_tag"] == {"mean": 0.2, "std": None}
    assert out.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *map(str, runs), "--out", str(out), "--metric", "train/reward/total"]) == 0
    printed = capsys.readouterr().out
    assert "±" in printed
    assert "train.seed" in printed  # one setting a line, its name in one piece in a narrow terminal
    assert "train/reward/total" in printed


def test_mean_curve_is_over_the_steps_all_runs_share(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / "a", [0.0, 1.0, 5.0])), read_run(make_run(tmp_path / "b", [1.0, 3.0], seed=1))]
    assert differing_settings(runs) == ["train.seed"]
    (arm,) = group_arms(runs)
    assert arm.mean_curve("eval/toy/by_tag") == [(0, 0.5), (1, 2.0)]


def test_the_line_that_a_killed_run_was_writing_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [0.1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "ev')
    assert read_run(folder).series("eval/toy") == [(0, 0.1)]


def test_without_an_evaluation_the_training_reward_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a", [0.1, 0.2])
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["compare", str(folder), "--out", str(tmp_path / "plot.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == ["train/reward/total"]


def test_broken_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_run(tmp_path / "good", [0.1])
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        read_run(tmp_path / "empty")
    (good / "metrics.jsonl").write_text("{oops\n{}\n")
    with pytest.raises(UserError, match="line 1 of"):
        read_run(good)
    (good / "metrics.jsonl").write_text("")
    assert main(["compare", str(good)]) == 2
    assert "neither an evaluation" in capsys.readouterr().err


def test_an_unknown_metric_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", [0.1])
    assert main(["compare", str(folder), "--metric", "eval/toyy"]) == 2
    assert (
        "Did you mean 'eval/toy'? It has: eval/toy, eval/toy/by_tag, eval/toy/part, train/reward/total."
        in capsys.readouterr().err
    )


def test_a_run_given_twice_is_no_second_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", [0.1])
    assert main(["compare", str(folder), f"{folder}/../a"]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_names_that_matplotlib_would_read_as_formulas(tmp_path: Path) -> None:
    folders = [str(make_run(tmp_path / name, [0.1], seed=seed)) for seed, name in enumerate(("$a_b", "_x$^{"))]
    assert main(["compare", folders[0], "--out", str(tmp_path / "one.png")]) == 0
    assert main(["compare", folders[1], "--out", str(tmp_path / "two.png")]) == 0


def test_a_plot_that_cannot_be_written_is_the_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a", [0.1])
    assert main(["compare", str(folder), "--out", str(tmp_path / "none" / "plot.png")]) == 2
    assert "cannot write the plot" in capsys.readouterr().err
