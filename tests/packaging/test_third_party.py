"""A package of somebody else brings a reward, a method and a model through entry points: listed, and trained with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = '''
from visual_grpo.adapters.toy import ToyAdapter
from visual_grpo.method import Method, MethodConfig


def vowels(prompts, completions):
    """Share of even digits."""
    return [sum(c in "02468" for c in text) / 3 for text in completions]


class HalfConfig(MethodConfig):
    factor: float = 0.5


class Half(Method[HalfConfig]):
    """Smaller advantages."""

    Config = HalfConfig

    def adjust_advantages(self, advantages, rewards, rollouts, state):
        print("half is at work")
        return self.config.factor * advantages


class Words(ToyAdapter):
    """The toy under another name."""
'''
ENTRY_POINTS = """\
[visual_grpo.rewards]
even_digits = acme_grpo:vowels

[visual_grpo.methods]
half = acme_grpo:Half

[visual_grpo.adapters]
acme_words = acme_grpo:Words
"""
CONFIG = """\
model: {adapter: acme_words, path: none}
method: [{half: {factor: 0.25}}]
data: {source: train.txt}
rewards: even_digits
train: {steps: 2, prompts_per_step: 2, group_size: 8, optimizer: {lr: 0.01}}
eval: {source: test.txt, every: 0, final_samples: 4}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What `pip install acme-grpo` leaves in a folder of the path."""
    folder = tmp_path / "site"
    info = folder / "acme_grpo-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_grpo.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-grpo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "train.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "test.txt").write_text("four\nfive\n")
    (tmp_path / "run.yaml").write_text(CONFIG)
    return folder


def command(*args: str, site: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}
    line = [sys.executable, "-m", "visual_grpo", *args]
    return subprocess.run(line, cwd=site.parent, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(("kind", "name"), [("rewards", "even_digits"), ("methods", "half"), ("models", "acme_words")])
def test_listed(site: Path, kind: str, name: str) -> None:
    done = command("list", kind, "--json", site=site)
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in json.loads(done.stdout) if row["name"] == name]
    assert row["origin"] == "distribution acme-grpo"
    assert row["target"].startswith("acme_grpo:")


def test_trained_with(site: Path) -> None:
    done = command("train", "run.yaml", "--out", "run", site=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("half is at work") == 2
    records = [json.loads(line) for line in (site.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in steps] == [1, 2]
    assert steps[0]["metrics"]["reward/even_digits"] > 0
    assert steps[0]["metrics"]["grad_norm"] > 0


def test_a_mistake_in_its_options_names_them(site: Path) -> None:
    done = command("train", "run.yaml", "method=[{half: {facto: 1}}]", site=site)
    assert done.returncode == 2
    assert "unknown key 'method.half.facto'. Did you mean 'factor'?" in done.stderr
