"""A run that is killed and resumed, again and again, ends as the run that was never interrupted: records, weights, files."""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import KILLED, assert_same_run, exported, files, finish, output, records, start
from toy_run import toy_config

import visual_grpo as vg
from visual_grpo.adapters.toy import ToyModel
from visual_grpo.config import merge
from visual_grpo.errors import RunError, UserError
from visual_grpo.method import LoopState, Method, MethodConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "full weights": {},
    "lora": {"model": {"lora": {"rank": 2, "alpha": 4, "targets": ["head"], "dropout": 0.2}}},
    "averaged weights": {"train": {"updates_per_step": 2, "ema": {"decay": 0.5, "every": 1}}},
    "best weights, early stop": {
        "checkpoint": {"best": "killed_run:digits"},
        "eval": {"final": "best"},
        "train": {
            "ema": {"decay": 0.5, "every": 1},
            "early_stop": {"metric": "killed_run:digits", "patience": 2, "min_delta": 1.0},
        },
    },
    "stateful method and reference": {"method": ["killed_run:Drifting"], "kl": {"beta": 0.05}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """Config and folder of the uninterrupted run of each variant."""
    found = {}
    for name, over in VARIANTS.items():
        folder = tmp_path_factory.mktemp("reference")
        config = toy_config(folder, **merge({"rewards": {"killed_run:digits": 1.0}}, over))
        assert finish(config, folder / "run") == 0, output(folder / "run")
        found[name] = config, folder / "run"
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_five_kills_in_a_row_at_random_moments(runs: Any, variant: str, tmp_path: Path) -> None:
    """Kills fall before random accesses to the run's files: in checkpoints, records, evaluations, the export, the report."""
    config, reference = runs[variant]
    draws, kills = random.Random(variant), 0
    while kills < 5:
        kills += finish(config, tmp_path / "run", kill_at=draws.randint(1, 60)) == KILLED
    assert finish(config, tmp_path / "run") == 0, output(tmp_path / "run")
    assert_same_run(tmp_path / "run", reference)


def test_kills_by_the_clock(runs: Any, tmp_path: Path) -> None:
    """Five kills wherever the run happens to be."""
    config, reference = runs["stateful method and reference"]
    draws = random.Random(0)
    for _ in range(5):
        process = start(config, tmp_path / "run")
        deadline = time.monotonic() + draws.uniform(0.05, 1.5)
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.join(20)
    assert finish(config, tmp_path / "run") == 0, output(tmp_path / "run")
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("checkpoints/.step-000004", 3),  # half written
        ("checkpoints/.step-000004", 7),  # written, not flushed
        ("checkpoints/step-000006", 1),  # before the rename
        ("checkpoints/step-000002", 2),  # while the oldest goes
        ("metrics.jsonl", 3),  # before the first checkpoint
        ("eval/step-000006", 1),  # at the end of the final evaluation
        ("model", 1),  # before the export
        ("report.html", 1),
    ],
)
def test_a_kill_at_the_worst_moment(runs: Any, tmp_path: Path, where: str, number: int) -> None:
    config, reference = runs["full weights"]
    run = tmp_path / "run"
    assert finish(config, run, kill_in=str(run / where), kill_at=number) == KILLED
    if "/.step" in where:
        assert list((run / "checkpoints").glob(".step-*.tmp"))
    assert finish(config, run) == 0, output(run)
    assert_same_run(run, reference)


def test_a_finished_run_is_left_as_it_is(runs: Any) -> None:
    config, run = runs["averaged weights"]
    before = (run / "metrics.jsonl").read_bytes(), exported(run), files(run)
    assert finish(config, run) == 0
    assert (run / "metrics.jsonl").read_bytes() == before[0]
    assert files(run) == before[2]
    assert all(torch.equal(v, before[1][k]) for k, v in exported(run).items())


def test_the_reference_is_the_start(runs: Any, tmp_path: Path) -> None:
    """Also in a run that was resumed, whose present weights are others."""
    config, _ = runs["stateful method and reference"]
    run = tmp_path / "run"
    assert finish(config, run, kill_in=str(run / "checkpoints/.step-000004"), kill_at=1) == KILLED
    assert finish(config, run) == 0
    kept = load_file(run / "checkpoints/step-000006/set-reference.safetensors")
    trained = load_file(run / "checkpoints/step-000006/weights.safetensors")
    for name, value in ToyModel().state_dict().items():
        assert torch.equal(kept[name], value)
        assert not torch.equal(trained[name], value)


def test_a_longer_run_goes_on_from_a_shorter_one(runs: Any, tmp_path: Path) -> None:
    """`train.steps` and `train.max_minutes` may change; what was trained is kept."""
    config, reference = runs["full weights"]
    for over in ({"steps": 3}, {"max_minutes": 1e-9}, {}):
        assert finish(merge(config, {"train": over}), tmp_path / "run") == 0, output(tmp_path / "run")
    assert all(torch.equal(v, exported(tmp_path / "run")[k]) for k, v in exported(reference).items())


def test_max_minutes_keeps_the_last_step(runs: Any, tmp_path: Path) -> None:
    config, reference = runs["full weights"]
    assert finish(merge(config, {"train": {"max_minutes": 1e-9}}), tmp_path / "run") == 0
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    assert finish(config, tmp_path / "run") == 0
    assert records(tmp_path / "run") == records(reference)


def limit_3000() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


def limit_12000() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))


@pytest.mark.parametrize(
    ("limit", "file"), [(limit_3000, "eval/step-000000.jsonl"), (limit_12000, "checkpoints/step-000002")]
)
def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(runs: Any, tmp_path: Path, limit: Any, file: str) -> None:
    """The system refuses files beyond a size, first in an evaluation, then in the first checkpoint."""
    config, reference = runs["full weights"]
    run = tmp_path / "run"
    assert finish(config, run, before=limit) == 1
    told = output(run)
    assert told.count("Error: ") == 1
    assert re.search(rf"cannot write '\S+{file}': .*File too large", told)
    assert "Free space" in told
    assert "Traceback" not in told
    assert finish(config, run) == 0, output(run)
    assert_same_run(run, reference)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write '/proc/.*change the rights"):
        vg.train(toy_config(tmp_path), out="/proc/visual_grpo/run")


def test_a_damaged_checkpoint_is_named(runs: Any, tmp_path: Path) -> None:
    config, _ = runs["full weights"]
    run = tmp_path / "run"
    vg.train(config, overrides={"train.steps": 2}, out=run)
    (run / "checkpoints/step-000002/weights.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(vg.UserError, match=r"step-000002' is damaged .*delete this folder"):
        vg.train(config, out=run, resume=True)
    (run / "checkpoints/step-000002/weights.safetensors").unlink()
    with pytest.raises(vg.UserError, match=r"step-000002' is damaged|other trained parameters"):
        vg.train(config, out=run, resume=True)


def test_a_checkpoint_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    """Without its moments the optimizer would start again, without its averages the evaluation would use other weights."""
    config = toy_config(tmp_path, train={"steps": 1, "ema": {"decay": 0.5, "every": 1}})
    run = tmp_path / "run"
    vg.train(config, out=run)
    for name in ("optimizer.safetensors", "set-ema.safetensors", "state.safetensors"):
        kept = (run / "checkpoints/step-000001" / name).rename(tmp_path / name)
        with pytest.raises(vg.UserError, match=rf"is damaged \({name} is gone\)"):
            vg.train(config, out=run, resume=True)
        kept.rename(run / "checkpoints/step-000001" / name)
    weights = load_file(run / "checkpoints/step-000001/weights.safetensors")
    save_file({k: v[:1].clone() for k, v in weights.items()}, run / "checkpoints/step-000001/weights.safetensors")
    with pytest.raises(vg.UserError, match="other trained parameters than this model"):
        vg.train(config, out=run, resume=True)
    assert exported(run)


def test_other_prompts_under_the_name_of_the_old_ones_are_refused(tmp_path: Path) -> None:
    """The place in the data, and what methods keep by prompt, would belong to others in silence."""
    config = toy_config(tmp_path, train={"steps": 2}, eval={"every": 0, "final_samples": 8})
    vg.train(config, out=tmp_path / "run")
    prompts = tmp_path / "train.jsonl"
    longer = merge(config, {"train": {"steps": 3}})
    kept = prompts.read_text()
    prompts.write_text(kept.replace("say 5", "say 55"))
    with pytest.raises(UserError, match="its training prompts are no longer those that the run began with"):
        vg.train(longer, out=tmp_path / "run", resume=True)
    prompts.write_text(kept)
    assert vg.train(longer, out=tmp_path / "run", resume=True).step == 3


def test_memory_that_runs_out_says_what_to_change(tmp_path: Path) -> None:
    config = toy_config(tmp_path)
    with pytest.raises(RunError, match=r"out of memory: .*eval\.batch.*--resume"):
        vg.train(config, overrides={"sampling.max_new_tokens": 10**15}, out=tmp_path / "run")


class Exhausting(Method[MethodConfig]):
    """Memory runs out in the rollout of the fourth step."""

    def before_rollout(self, prompts: Any, state: LoopState) -> Any:
        """Run out."""
        if state.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prompts


def test_memory_that_runs_out_between_checkpoints_loses_no_step(tmp_path: Path) -> None:
    config = toy_config(tmp_path, method=["test_resume:Exhausting"], checkpoint={"every": 50})
    with pytest.raises(RunError, match="out of memory"):
        vg.train(config, out=tmp_path / "run")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-000003"]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = toy_config(tmp_path, method=["test_resume:Interrupted"], eval={"final_samples": 2, "every": 0})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            vg.train(config, out=tmp_path / "run", resume=(tmp_path / "run").exists())
    assert "interrupted after step 3; the checkpoint of step 2 is kept: go on with --resume" in capsys.readouterr().err


class Interrupted(Method[MethodConfig]):
    """Ctrl-C in the fourth step."""

    def adjust_advantages(self, advantages: Any, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        """Interrupt."""
        if state.step == 3:
            raise KeyboardInterrupt
        return advantages


def test_the_command_line_resumes(tmp_path: Path) -> None:
    """The real command, killed by the system before its first checkpoint is whole, and resumed by hand."""
    import yaml

    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(toy_config(tmp_path, train={"steps": 2})))
    command = [sys.executable, "-m", "visual_grpo", "train", "toy.yaml", "--out", "run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # sums of another number of threads are rounded otherwise
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == KILLED
    again = [*command, "--resume"]
    done = subprocess.run(again, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert finish(toy_config(tmp_path, train={"steps": 2}), tmp_path / "whole") == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")
