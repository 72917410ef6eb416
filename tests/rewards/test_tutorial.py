"""The section "A reward" of docs/extending.md, run as it stands: a reward in a file of its own, trained with."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/extending.md").read_text().partition("\n## A reward\n")[2].partition("\n## ")[0]
FILES = {match[1]: match[0] for match in re.finditer(r"(?<=```python\n)# (\S+\.py)\n.*?(?=```)", SECTION, re.DOTALL)}
COMMANDS = re.findall(r"^visual-grpo (train .*)$", SECTION, re.MULTILINE)


def test_the_first_reward_has_ten_lines_at_most() -> None:
    assert len(FILES["my_rewards.py"].splitlines()) <= 10


@pytest.mark.parametrize(("command", "reward"), [*zip(COMMANDS, ["my_rewards:blue", "mine"], strict=True)])
def test_the_tutorial_trains(command: str, reward: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    # Smaller than a user's run in everything but what the tutorial is about.
    small = [
        "train.steps=1",
        "train.prompts_per_step=2",
        "train.group_size=2",
        "train.micro_batch=4",
        "eval.final_samples=2",
    ]
    small += ["eval.every=0", "eval.batch=2", "self_test.enabled=false"]
    words = [word for word in shlex.split(command) if not word.startswith("train.steps")]
    line = [sys.executable, "-m", "visual_grpo", *words, *small, "--out", "run"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = [record for record in records if record["kind"] == "train"]
    assert -1 <= step["metrics"][f"reward/{reward}"] <= 1
