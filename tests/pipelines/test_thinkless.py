"""Thinkless in two stages: fine-tuning on two modes, then DeGRPO from its model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
import toy_run

import visual_grpo as vg
from visual_grpo.api import any_plan
from visual_grpo.config import merge


def test_degrpo_goes_on_from_what_fine_tuning_exported(tmp_path: Path) -> None:
    """On the toy model: brief answers start with 1, long ones with another digit; stage 2 starts where stage 1 ended."""
    given = tmp_path / "given.jsonl"
    lines = [{"prompt": f"say {i}", "answer": "7", "completion": ["1", "27"]} for i in range(16)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base: dict[str, Any] = toy_run.toy_config(tmp_path)
    warm_up = {"method": ["sft"], "data": {"source": str(given)}, "train": {"steps": 12, "group_size": 2}}
    modes = {"short_start": "1", "think_start": ""}
    second = {"method": [{"degrpo": {"mode_rewards": modes}}], "model": {"path": "stage://warm_up"}}
    stages = {"warm_up": merge(base, warm_up), "degrpo": merge(base, merge(second, {"train": {"steps": 2}}))}
    result = vg.train({"name": "thinkless", "stages": stages}, out=tmp_path / "out")
    first, then = result.stages["warm_up"], result.stages["degrpo"]
    assert (first.step, then.step) == (12, 2)
    assert first.after.metrics == then.before.metrics
    assert first.after.rows == then.before.rows
    assert first.before.rows != first.after.rows
    records = [json.loads(r) for r in (tmp_path / "out" / "degrpo" / "metrics.jsonl").read_text().splitlines()]
    shares = [r["metrics"] for r in records if r["kind"] == "train"]
    assert all(0 < s["degrpo/short"] < 1 and 0 < s["degrpo/think"] < 1 for s in shares), "both modes were taught"
    assert shares[0]["degrpo/short"] + shares[0]["degrpo/think"] == pytest.approx(1)


@pytest.mark.parametrize("name", ["thinkless_tiny", "thinkless_1_5b"])
def test_the_recipes_hand_the_model_on(name: str) -> None:
    made = any_plan(name)
    warm_up, second = (made.config.stages[stage] for stage in ("warm_up", "degrpo"))
    assert warm_up["method"] == [{"sft": {"column": "completion"}}] or warm_up["method"] == [{"sft": {}}]
    assert warm_up["train"]["group_size"] == 2, "a brief and a long answer to every prompt"
    assert second["model"]["path"] == "stage://warm_up"
    (method,) = second["method"]
    options = method["degrpo"]
    # Control tokens are those that the first stage teaches, which are degrpo's defaults.
    assert options["mode_rewards"].get("short_start", "<short>") == "<short>"
    assert options["mode_rewards"].get("think_start", "<think>") == "<think>"
    assert warm_up["data"]["source"] == second["data"]["source"] or name == "thinkless_1_5b"
