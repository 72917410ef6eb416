"""The launch configs of docs/ are what accelerate reads, and a launch that would need sharding is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError

LAUNCH = Path(__file__).parents[2] / "docs" / "launch"
EXPECTED = {"cpu": "MULTI_CPU", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed_zero2": "DEEPSPEED"}


def test_every_config_parses() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(EXPECTED)
    for name, kind in EXPECTED.items():
        config = load_config_from_file(str(LAUNCH / f"{name}.yaml"))
        assert str(config.distributed_type).rpartition(".")[2] == kind
        assert config.num_processes >= 2
    fsdp = yaml.safe_load((LAUNCH / "fsdp2.yaml").read_text())["fsdp_config"]
    assert fsdp["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("variable", "name"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_sharding_is_refused_and_not_ignored(monkeypatch: pytest.MonkeyPatch, variable: str, name: str) -> None:
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UserError, match=f"asks for {name}.*docs/launch/ddp.yaml"):
        Ranks()


def test_accelerate_launch_runs_two_processes(tmp_path: Path) -> None:
    """The CPU config, as a user would start it: two processes, one run folder, a finished run."""
    lines = {"train": range(16), "test": range(16, 24)}
    for split, numbers in lines.items():
        (tmp_path / f"{split}.jsonl").write_text(
            "".join(f'{{"prompt": "say {i}", "answer": "{i % 10}"}}\n' for i in numbers)
        )
    config = {
        "name": "toy",
        "model": {"adapter": "toy", "path": "toy"},
        "data": {"source": str(tmp_path / "train.jsonl")},
        "rewards": {"exact_match": 1.0},
        "train": {"steps": 2, "prompts_per_step": 4, "group_size": 4, "optimizer": {"lr": 0.01}},
        "eval": {"source": str(tmp_path / "test.jsonl"), "samples": 8, "final_samples": 8},
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "cpu.yaml")]
    command += ["-m", "visual_grpo", "train", str(tmp_path / "toy.yaml"), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 2/2" in done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
