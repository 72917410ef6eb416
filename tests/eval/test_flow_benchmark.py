"""The benchmark flow_methods on a toy flow model: runs of a third of a second, the figures, and what it refuses."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))
from toy_flow import flow_config

from visual_grpo.cli import main
from visual_grpo.errors import UserError
from visual_grpo.eval.benchmarks.flow_methods import run, summarise, table, time_to


def toy(folder: Path) -> dict[str, Any]:
    """Overrides that put a tiny recipe on the toy model."""
    config = flow_config(folder, "grpo")
    chosen = {key: config[key] for key in ("model", "data", "rewards", "train")}
    del chosen["train"]["ema"]
    return chosen | {"sampling": {"steps": 4}, "eval": {"source": config["eval"]["source"]}}


def options(folder: Path) -> dict[str, Any]:
    return {
        "minutes": 0.005,
        "points": 2,
        "samples": 2,
        "final_samples": 4,
        "calibration": 1,
        "score": "brightness/by_tag",
        "methods": ["flow_grpo", "v_grpo"],
        "overrides": toy(folder),
    }


def test_a_benchmark_of_a_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(tmp_path)
    out = tmp_path / "out"
    line = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    assert main(["benchmark", "flow_methods", *line, "--seeds", "1", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["methods"]
    assert set(rows) == {"flow_grpo", "v_grpo"}
    for row in rows.values():
        assert row["gradient_steps"] >= 1
        assert row["pictures"] == 8 * row["gradient_steps"]
        assert row["calls_sampling"] == 4
        assert row["minutes"] > 0
    # 3 of 4 steps, or 3 noise pairs, each once with gradient and once under the reference (kl.beta 0.3)
    assert rows["flow_grpo"]["calls_training"] == 6
    assert rows["v_grpo"]["calls_training"] == 6
    assert rows["v_grpo"]["to_rival"]["gain"] == pytest.approx(1)
    assert result["target"] == rows["flow_grpo"]["final"]
    arm = json.loads((out / "arms" / "flow_grpo-seed0.json").read_text())
    assert arm["points"][0]["n"] == arm["points"][-1]["n"] == 4
    assert arm["points"][0]["seconds"] == arm["points"][0]["sampling"] == 0
    assert len(arm["points"]) >= 2
    ET.fromstring((out / "curves.svg").read_text())
    assert "| v_grpo | " in (out / "results.md").read_text()

    files = {path: path.stat().st_mtime_ns for path in (out / "arms").iterdir()}
    assert json.loads(json.dumps(run(seeds=1, out=out, **given)["methods"])) == rows
    assert {path: path.stat().st_mtime_ns for path in (out / "arms").iterdir()} == files
    with pytest.raises(UserError, match="of a benchmark with other settings"):
        run(seeds=1, out=out, **{**given, "minutes": 1.0})
    with pytest.raises(UserError, match=r"no figure 'brightnes'.*Did you mean"):
        run(seeds=1, out=out, **{**given, "score": "brightnes"})


def test_arms_of_other_rewards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"flow_grpo_gdpo_tiny and flow_grpo_tiny cannot be compared: rewards is"):
        run(seeds=1, out=tmp_path, methods=["flow_grpo", "flow_grpo_gdpo"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["minuts=3"], "has no option 'minuts'. Did you mean 'minutes'? It takes minutes, points"),
        (["minutes=soon"], "option minutes is 'soon'"),
        (["methods=[v_grp]"], "'v_grp' has no recipe v_grp_tiny. Did you mean 'v_grpo'?"),
        (["minutes=0"], "must be positive"),
    ],
)
def test_wrong_options(line: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "flow_methods", *line, "--out", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def arm(*values: float, pictures: int = 10, steps: int = 4) -> dict[str, Any]:
    """Scores at 0, 60, 120 ... seconds."""
    points = [
        {
            "seconds": 60 * i,
            "metrics": {"s": value},
            "gradient_steps": steps * i,
            "pictures": pictures * i,
            "sampling": 40 * i,
            "replay": 10 * i,
            "training": 20 * i,
        }
        for i, value in enumerate(values)
    ]
    return {"points": points}


def test_means_times_and_ratios() -> None:
    arms = {"flow_grpo": [arm(0.2, 0.3, 0.4), arm(0.2, 0.2, 0.3)], "v_grpo": [arm(0.2, 0.5, 0.6), arm(0.2, 0.3, 0.6)]}
    result = summarise(arms, score="s", target=None)
    assert result["target"] == pytest.approx(0.35)
    flow, rival = result["methods"]["flow_grpo"], result["methods"]["v_grpo"]
    assert (flow["final"], flow["gain"]) == pytest.approx((0.35, 0.15))
    assert flow["final_std"] == pytest.approx(0.1 / 2**0.5)
    assert flow["minutes_to_target"] == pytest.approx(1.5)
    assert (flow["reached"], rival["reached"]) == ("1 of 2", "2 of 2")
    assert rival["minutes_to_target"] == pytest.approx((0.5 + 1 + 0.05 / 0.3) / 2)
    assert flow["to_rival"]["gain"] == pytest.approx(0.15 / 0.4)
    assert (flow["calls_sampling"], flow["calls_training"]) == (4, 3)
    assert (flow["gradient_steps"], flow["minutes"]) == (8, 2)
    lines = table(result).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| v_grpo", "| flow_grpo"]
    assert "0.350 ± 0.071" in lines[3]


def test_a_score_that_is_never_reached_has_no_time() -> None:
    points = arm(0.2, 0.3)["points"]
    assert time_to(points, "s", 0.31) is None
    assert time_to(points, "s", 0.1) == 0
    row = summarise({"mixgrpo": [arm(0.2, 0.3)]}, score="s", target=0.9)["methods"]["mixgrpo"]
    assert (row["minutes_to_target"], row["reached"], row["to_rival"]["gain"]) == (None, "0 of 1", None)
