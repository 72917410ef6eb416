"""What a finished run prints: the figures by task, readable in a terminal of 80 columns, and where everything is."""

from __future__ import annotations

from pathlib import Path

import pytest

from visual_grpo.evaluation import Evaluation
from visual_grpo.summary import print_summary
from visual_grpo.trainer import Result


def evaluation(value: float) -> Evaluation:
    rows = [
        {"tag": tag, "values": {"exact_match": value}, "details": {"exact_match/answered": 1.0}}
        for tag in ("colors", "single_object")
    ]
    return Evaluation(rows=rows, metrics={}, by_tag={})


def test_the_table_of_a_run_in_a_narrow_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    print_summary(Result(folder=str(run), step=2, before=evaluation(0.25), after=evaluation(0.75)))
    printed = capsys.readouterr().out
    assert max(map(len, printed.partition("\nrun ")[0].splitlines())) <= 80
    assert printed.count("exact_match/answered") == 1  # each figure once, as a headline
    (line,) = (line for line in printed.splitlines() if "mean of tasks" in line and "+0.500" in line)
    assert "0.250 │ 0.750 │ +0.500 │ [+0.500, +0.500]" in line
    assert str(run / "model") in printed
