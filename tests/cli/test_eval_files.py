"""`eval` and `prompts` from the command line to files: a table, JSON, comparisons, prompt files, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from visual_grpo.cli import main
from visual_grpo.eval.images import write_samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(3):
        row = {"tag": "single_object", "prompt": f"prompt {index}", "include": [{"class": "ring", "count": 1}]}
        write_samples(tmp_path / "images", index, row, torch.full((2, 3, 8, 8), index / 4))
    return tmp_path / "images"


def test_a_result_table_json_and_a_comparison(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert main(["eval", "preference", "rewards=brightness", "--images", str(folder), "--out", str(first)]) == 0
    printed = capsys.readouterr().out
    assert "brightness" in printed
    assert "0.25" in printed
    assert f"results: {first}" in printed.replace("\n", "")
    assert {"results.jsonl", "settings.json", "summary.json", "table.md"} <= {p.name for p in first.iterdir()}
    args = ["eval", "preference", "rewards=brightness", "--images", str(folder), "--out", str(second), "--json"]
    assert main(args) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 6
    assert main(["eval", "preference", "--compare", str(first), str(second), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["table"]
    assert (row["figure"], row["value"], row["p_value"]) == ("brightness", 0.0, 1.0)
    assert main(["eval", "preference", "--compare", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "b - a" in printed
    assert "0.000 to 0.000" in printed  # the interval in one piece
    assert main(["eval", "preference", "--compare", str(first), str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err
    assert main(["eval", "preference", "samples=2", "--compare", str(first), str(second)]) == 2
    assert "--compare reads two result folders" in capsys.readouterr().err


@pytest.mark.parametrize("prompts", ["none.jsonl", "testbed/scenes"])
def test_pictures_made_already_need_a_prompt_file(
    prompts: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "geneval", "--images", str(folder), "--prompts", prompts]) == 2
    assert f"--prompts: there is no file '{prompts}'" in capsys.readouterr().err


def test_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    small = ["prompts", "geneval", "--classes", "testbed", "--mix", "two_object=1", "--count"]
    assert main([*small, "10", "--out", str(test), "--seed", "1"]) == 0
    assert main([*small, "20", "--out", str(out), "--exclude", str(test)]) == 0
    texts = [[json.loads(line)["prompt"] for line in p.read_text().splitlines()] for p in (out, test)]
    assert [len(set(part)) for part in texts] == [20, 10]
    assert not set(texts[0]) & set(texts[1])
    assert main([*small, "21", "--out", str(out), "--exclude", str(test)]) == 2
    assert "only 20 different two_object prompts are left" in capsys.readouterr().err
    assert main(["prompts", "geneval", "--mix", "position", "--out", str(out)]) == 2
    assert "is no TASK=WEIGHT" in capsys.readouterr().err


def test_the_prompts_of_dpg(tmp_path: Path) -> None:
    table = tmp_path / "dpg.csv"
    head = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language"
    table.write_text(f"{head}\none,a red ring,,1,0,entity,whole,entity - whole (ring),Is there a ring?\n")
    assert main(["prompts", "dpg", str(table), "--out", str(tmp_path / "p.jsonl")]) == 0
    assert json.loads((tmp_path / "p.jsonl").read_text()) == {"prompt": "a red ring", "item_id": "one"}
