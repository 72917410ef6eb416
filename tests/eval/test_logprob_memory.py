"""The benchmark logprob_memory on a small vocabulary: with chunks, what is held does not grow with vocabulary times length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visual_grpo.cli import main
from visual_grpo.errors import UserError
from visual_grpo.eval.benchmarks.logprob_memory import run

MIB = 2**20


def test_all_logits_grow_with_vocabulary_times_length_and_chunks_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["vocabulary=4000", "lengths=[64, 128]", "chunk=16", "full_up_to=64", "width=8"]
    assert main(["benchmark", "logprob_memory", *options, "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    small, large = found["lengths"]["64"], found["lengths"]["128"]
    logits = 4 * 4000 * 64 / MIB
    assert small["full"]["held_mib"] > logits
    assert large["chunked"]["held_mib"] < logits / 4
    assert large["chunked"]["held_mib"] > small["chunked"]["held_mib"]  # the body's activations do grow
    assert small["value_gap"] < 1e-5
    assert large["full"] is None
    wide = run(vocabulary=8000, lengths=(64,), chunk=16, full_up_to=64, width=8)["lengths"]["64"]
    assert wide["full"]["held_mib"] > 1.8 * small["full"]["held_mib"]
    assert wide["chunked"]["held_mib"] == pytest.approx(small["chunked"]["held_mib"], rel=0.01)
    table = (tmp_path / "logprob_memory.md").read_text()
    assert "Vocabulary 4,000, MiB." in table
    assert table.splitlines()[-1].startswith("| 128 | ")
    assert table.splitlines()[-1].endswith("| - | - | - |")


def test_wrong_sizes() -> None:
    with pytest.raises(UserError, match="must be positive"):
        run(lengths=(0,))
