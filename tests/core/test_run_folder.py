"""The run folder: numbering, resuming, records that survive a crash, and clear errors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from visual_grpo import run_folder
from visual_grpo.errors import RunError, UserError
from visual_grpo.resumption import changed_keys
from visual_grpo.run_folder import RunFolder, read_metrics

CONFIG = "train:\n  steps: 5\n  seed: 0\nrewards:\n  ocr:\n    weight: 1.0\n"


@pytest.fixture(autouse=True)
def _free_locks():
    yield
    for handle in run_folder._HELD.values():
        os.close(handle)
    run_folder._HELD.clear()


def create(tmp_path: Path, **kwargs) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "demo", **{"config_yaml": CONFIG, **kwargs})


def train(step: int, **metrics: float) -> dict:
    return {"kind": "train", "step": step, "metrics": metrics}


def test_second_run_gets_the_next_free_name(tmp_path):
    names = []
    for _ in range(3):
        folder = create(tmp_path)
        folder.append_metrics(train(1, loss=0.5))
        names.append(folder.path.name)
    assert names == ["demo", "demo-2", "demo-3"]
    assert all(p.is_dir() for p in (folder.samples, folder.eval, folder.checkpoints))
    assert folder.config.read_text() == CONFIG


def test_folder_of_a_start_that_failed_is_used_again(tmp_path):
    assert create(tmp_path).path == create(tmp_path).path


def test_folder_with_only_a_checkpoint_is_a_run(tmp_path):
    (create(tmp_path).checkpoints / "step-000001").mkdir()
    assert create(tmp_path).path.name == "demo-2"


def test_explicit_folder_that_holds_a_run_is_refused(tmp_path):
    create(tmp_path, out=tmp_path / "mine").append_metrics(train(1))
    with pytest.raises(UserError, match="already holds a run: use --resume"):
        create(tmp_path, out=tmp_path / "mine")
    assert create(tmp_path, out=tmp_path / "mine", resume=True).resumed


def test_resume_takes_the_newest(tmp_path):
    for _ in range(11):
        create(tmp_path).append_metrics(train(1))
    (tmp_path / "runs" / "demo-99").mkdir()  # no config: not a run
    (tmp_path / "runs" / "demo-other").mkdir()
    folder = create(tmp_path, resume=True)
    assert folder.path.name == "demo-11"
    assert folder.resumed


@pytest.mark.parametrize("out", [None, "mine"])
def test_nothing_to_resume(tmp_path, out):
    with pytest.raises(UserError, match="nothing to resume"):
        create(tmp_path, resume=True, out=None if out is None else tmp_path / out)


def test_resume_with_another_config_names_the_keys(tmp_path):
    create(tmp_path).append_metrics(train(1))
    with pytest.raises(UserError, match=r"train.seed: 0 in the run, 7 now") as error:
        create(tmp_path, resume=True, config_yaml=CONFIG.replace("seed: 0", "seed: 7").replace("steps: 5", "steps: 9"))
    assert "steps" not in str(error.value).partition("Only")[0]


def test_resume_may_be_longer_and_stores_the_new_config(tmp_path):
    create(tmp_path).append_metrics(train(1))
    longer = CONFIG.replace("steps: 5", "steps: 9")
    assert create(tmp_path, resume=True, config_yaml=longer).config.read_text() == longer


def test_changed_keys_sees_removed_and_added_keys():
    assert changed_keys({"rewards": {"a": {"weight": 1}}}, {"rewards": {"b": {"weight": 1}}}) == {
        "rewards.a.weight": (1, None),
        "rewards.b.weight": (None, 1),
    }
    assert changed_keys({"checkpoint": {"every": 1}, "kl": {}}, {"checkpoint": {"every": 2}, "kl": {}}) == {}


def test_a_resume_may_take_smaller_pieces_but_not_where_the_loss_depends_on_them():
    stored, given = (
        {"train": {"micro_batch": 32, "rollout_batch": None}},
        {"train": {"micro_batch": 4, "rollout_batch": 8}},
    )
    assert changed_keys(stored, given) == {}
    loss = {"loss": {"aggregation": "micro_batch_token_mean"}}
    assert changed_keys({**stored, **loss}, {**given, **loss}) == {"train.micro_batch": (32, 4)}


def test_a_stored_config_that_is_damaged_is_named(tmp_path):
    folder = create(tmp_path)
    folder.config.write_text("train: [")
    with pytest.raises(UserError, match=r"config\.yaml' is not valid YAML"):
        create(tmp_path, resume=True)


@pytest.mark.parametrize("name", ["model", "config.yaml", "checkpoints"])
def test_files_of_the_user_are_not_written_over(tmp_path, name):
    """`train config.yaml --out .` in a project of the user's own."""
    mine = tmp_path / "mine"
    (mine / name).mkdir(parents=True)
    with pytest.raises(UserError, match=f"holds {name}, which no run wrote"):
        create(tmp_path, out=mine)
    assert [p.name for p in mine.iterdir()] == [name]
    (tmp_path / "runs" / "demo" / name).mkdir(parents=True)
    assert create(tmp_path).path.name == "demo-2"


def test_folders_that_the_system_refuses(tmp_path):
    with pytest.raises(RunError, match=r"cannot write .*File name too long"):
        create(tmp_path, out=tmp_path / ("n" * 300))
    with pytest.raises(UserError, match="zero byte"):
        create(tmp_path, out="a\0b")


@pytest.mark.parametrize("name", ["a/b", "..", "", "a\\b", ".hidden", "a\nb", "n" * 300, "\ud800"])
def test_name_that_is_no_folder_name(tmp_path, name):
    with pytest.raises(UserError, match="cannot name a folder"):
        RunFolder.create(tmp_path, name, config_yaml=CONFIG)


def test_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="use another --out"):
            create(tmp_path, out=out)


def test_records_are_sorted_exact_and_strict_json(tmp_path):
    folder = create(tmp_path)
    folder.append_metrics({"step": 1, "kind": "train", "metrics": {"b": 0.1 + 0.2, "a": torch.tensor(2.0), "π": 1}})
    line = folder.metrics.read_text()
    assert line == '{"kind": "train", "metrics": {"a": 2.0, "b": 0.30000000000000004, "π": 1}, "step": 1}\n'


def test_non_finite_values_become_null_and_are_named(tmp_path):
    folder = create(tmp_path)
    record = {
        "kind": "train",
        "step": 1,
        "metrics": {"loss": float("nan"), "kl": float("inf"), "ok": 1.0},
        "list": [1.0, float("nan")],
    }
    folder.append_metrics(record)
    text = folder.metrics.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    read = read_metrics(folder.path)[0]
    assert read["metrics"] == {"loss": None, "kl": None, "ok": 1.0}
    assert read["list"] == [1.0, None]
    assert read["non_finite"] == ["list.1", "metrics.kl", "metrics.loss"]


def test_cut_goes_back_to_the_checkpoint(tmp_path):
    folder = create(tmp_path)
    folder.cut_metrics(0)
    for step in range(1, 6):
        folder.append_metrics(train(step, loss=float("nan") if step == 2 else 1 / step))
        if step == 3:
            size = folder.metrics_size
    before = folder.metrics.read_bytes()
    folder.metrics.write_bytes(before + b'{"kind": "train", "st')
    assert len(read_metrics(folder.path)) == 5
    folder.cut_metrics(size)
    assert [r["step"] for r in folder.read_metrics("train")] == [1, 2, 3]
    for step in (4, 5):
        folder.append_metrics(train(step, loss=1 / step))
    assert folder.metrics.read_bytes() == before
    with pytest.raises(UserError, match="fewer records than at the last checkpoint"):
        folder.cut_metrics(len(before) + 1)


def test_discard_leaves_what_the_user_has_there(tmp_path):
    folder = create(tmp_path)
    folder.discard()
    assert not folder.path.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    create(tmp_path, out=tmp_path / "mine").discard()
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    folder = create(tmp_path)
    folder.append_metrics(train(1))
    folder.discard()
    assert folder.metrics.is_file()


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    folder = create(tmp_path)
    folder.metrics.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 of"):
        folder.read_metrics()


def test_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    folder = create(tmp_path)
    folder.write_json(folder.self_test, {"ok": True})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device.*--resume"):
        folder.append_metrics(train(1))
    with pytest.raises(RunError, match="No space left"):
        folder.write_json(folder.self_test, {"ok": False})
    assert json.loads(folder.self_test.read_text()) == {"ok": True}  # the old file is whole
    assert not list(folder.path.glob(".*.tmp"))


def test_eval_and_text_samples(tmp_path):
    folder = create(tmp_path)
    rows = [{"index": 0, "sample": 1, "prompt": "p", "values": {"ocr": float("nan")}}]
    path = folder.write_eval(10, rows)
    assert path.name == "step-000010.jsonl"
    assert folder.read_eval(10)[0]["values"] == {"ocr": None}
    assert folder.read_eval(11) == []
    page = folder.write_text_samples(10, ["2+2?"], ["4"], [1.0])
    assert page.read_text() == "[0] score 1\nprompt: 2+2?\n4\n"


def test_folder_is_locked_against_another_process(tmp_path):
    folder = create(tmp_path)
    code = (
        "import sys; from visual_grpo.run_folder import RunFolder\n"
        "print(RunFolder.create(sys.argv[1], 'demo', config_yaml=sys.argv[2]).path.name)\n"
        "try:\n    RunFolder.create(sys.argv[1], 'demo', config_yaml=sys.argv[2], out=sys.argv[1] + '/demo')\n"
        "except Exception as error:\n    print(error)\n"
    )
    run = [sys.executable, "-c", code, str(folder.path.parent), CONFIG]
    name, message = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert name == "demo-2"
    assert "another process is training" in message
    folder.close()
    folder.close()
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[0] == "demo"
