"""A training run whose reward server dies for good: its message, in its time, with a checkpoint that goes on unharmed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from killed_run import exported, records
from serving import Server, serving
from toy_run import toy_config

import visual_grpo as vg
from visual_grpo.errors import RunError
from visual_grpo.trainer import Trainer

REWARD = "killed_run:digits"


def config(folder: Path, url: str) -> dict[str, Any]:
    rewards = {"digits": {"reward": REWARD, "url": url, "timeout_s": 3}}
    return toy_config(folder, rewards=rewards, train={"steps": 5}, eval={"every": 0}, checkpoint={"every": 100})


@pytest.mark.parametrize("where", ["in a step", "in the last evaluation"])
def test_a_server_that_dies_for_good(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(REWARD)
    plain = Trainer.iteration

    def iteration(trainer: Trainer) -> None:
        """Kill the server before the fourth step, or after the last."""
        if where == "in a step" and trainer.step == 3:
            server.kill()
        plain(trainer)
        if where == "in the last evaluation" and trainer.step == 5:
            server.kill()

    monkeypatch.setattr(Trainer, "iteration", iteration)
    given = config(tmp_path, server.url)
    with pytest.raises(
        RunError, match=rf"reward server gone: no answer within 2\.7 s \({server.url}: ConnectError.*--resume"
    ):
        vg.train(given, out=tmp_path / "run")
    kept = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert kept == ["step-000003" if where == "in a step" else "step-000005"]

    monkeypatch.setattr(Trainer, "iteration", plain)
    with serving(REWARD, "--port", str(server.port)) as again:
        assert again.url == server.url
        vg.train(given, out=tmp_path / "run", resume=True)
        vg.train(given, out=tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    mine, theirs = exported(tmp_path / "run"), exported(tmp_path / "whole")
    assert all(bool((mine[key] == theirs[key]).all()) for key in theirs)
