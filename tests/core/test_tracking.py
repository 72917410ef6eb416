"""Trackers and the progress line."""

from __future__ import annotations

import importlib.util
import io
import logging

import pytest

from visual_grpo import progress, tracking
from visual_grpo.config import RunConfig, TrackConfig
from visual_grpo.errors import UserError
from visual_grpo.evaluation import Evaluation, summarise
from visual_grpo.progress import Progress
from visual_grpo.run_folder import RunFolder
from visual_grpo.tracking import Tracker, flat_metrics
from visual_grpo.writer import RunWriter, held_out_line

RECORD = {
    "kind": "train",
    "step": 3,
    "metrics": {"loss": 0.5, "reward/total": 0.25, "kl": float("nan")},
    "time": {"total": 1.5, "rollout": 1.0},
    "memory_gb": {"resident": 2.0},
}


def test_without_trackers_nothing_happens(tmp_path):
    tracker = Tracker(TrackConfig(), RunFolder(tmp_path), {"name": "demo"})
    tracker.log(RECORD)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'wandb is not installed; run: pip install "visual-grpo\[track\]"'):
        Tracker(TrackConfig(trackers=["wandb"]), RunFolder(tmp_path))
    with pytest.raises(UserError, match='pip install "mlflow"'):
        Tracker(TrackConfig(trackers=["mlflow"]), RunFolder(tmp_path))


def test_every_tracker_of_the_config_has_a_package():
    from typing import get_args

    names = get_args(get_args(TrackConfig.model_fields["trackers"].annotation)[0])
    assert set(names) == set(tracking._PACKAGES)


def test_tensorboard_gets_the_figures(tmp_path):
    tracker = Tracker(
        TrackConfig(trackers=["tensorboard", "tensorboard"]), RunFolder(tmp_path), {"name": "demo", "train": {"lr": 1}}
    )
    tracker.log(RECORD)
    tracker.log({"kind": "alarm", "step": 3, "name": "kl"})
    tracker.log(
        {"kind": "eval", "step": 3, "metrics": {"reward/total": 0.5}, "by_tag": {"counting": {"reward/total": 0.25}}}
    )
    tracker.close()
    tracker.close()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]} == {
        "train/loss": 0.5,
        "train/reward/total": 0.25,
        "time/train/total": 1.5,
        "time/train/rollout": 1.0,
        "memory_gb/resident": 2.0,
        "eval/reward/total": 0.5,
        "eval/counting/reward/total": 0.25,
    }
    assert events.Scalars("train/loss")[0].step == 3


def test_tracker_that_does_not_start_is_a_clear_error(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("not logged in")

    monkeypatch.setattr(tracking, "_start", refuse)
    with pytest.raises(UserError, match="tensorboard did not start: RuntimeError: not logged in"):
        Tracker(TrackConfig(trackers=["tensorboard"]), RunFolder(tmp_path))


def test_a_tracker_that_fails_later_does_not_end_the_run(tmp_path, monkeypatch):
    class Broken:
        name = "broken"

        def log(self, values: object, step: int) -> None:
            raise ConnectionError("server is away")

        def finish(self) -> None:
            raise ConnectionError("still away")

    told = []
    monkeypatch.setattr(tracking, "_start", lambda *_: Broken())
    tracker = Tracker(TrackConfig(trackers=["tensorboard"]), RunFolder(tmp_path), tell=told.append)
    tracker.log(RECORD)
    tracker.log(RECORD)
    tracker.close()
    assert len(told) == 1
    assert "tracker broken failed" in told[0]
    assert "server is away" in told[0]


def test_a_reader_that_has_gone_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Progress(4, file=Closed()) as bar:
        bar.message("hello")
        bar.step(1, {}, {"total": 1.0})


def test_warnings_of_the_package_are_in_the_log(tmp_path, capsys):
    """Where the alarm `reward_failed` sends the user."""
    config = RunConfig(
        model={"adapter": "toy", "path": "toy"},
        data={"source": "x.txt"},
        rewards="length",
        watchdog={"timeout_s": None},
    )
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder, config, main=True, unit="tokens")
    logging.getLogger("visual_grpo.scoring").warning("reward %r failed on row 3", "ocr")
    writer.close()
    logging.getLogger("visual_grpo.scoring").warning("later")
    assert folder.log.read_text() == "WARNING reward 'ocr' failed on row 3\n"
    assert capsys.readouterr().err.count("failed on row 3") == 1


def test_values_from_json_that_are_null_are_left_out():
    assert flat_metrics({"kind": "train", "step": 1, "metrics": {"loss": None, "rows": 8}}) == {"train/rows": 8.0}


def test_plain_progress_is_one_line_a_step():
    out = io.StringIO()
    with Progress(4, file=out) as bar:
        bar.resume(2)
        bar.phase("rollout")
        bar.step(
            3,
            {"reward/total": 0.5, "kl": 0.25, "clip_fraction": 0.125, "loss": 9.0},
            {"total": 2.0, "tokens_per_s": 1234.0},
        )
        bar.message("held-out 0.41")
    line, message = out.getvalue().splitlines()
    assert line.startswith("step 3/4  reward 0.5000  KL 0.2500  clip 0.1250  1234 tok/s  2.0 s  left ")
    assert message == "held-out 0.41"


def test_other_ranks_print_nothing():
    out = io.StringIO()
    with Progress(4, enabled=False, file=out) as bar:
        bar.step(1, {"reward/total": 0.5}, {"total": 1.0})
        bar.message("hello")
    assert out.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_line_shows_phase_figures_and_messages(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    out = Terminal()
    with Progress(10, file=out) as bar:
        bar.phase("rollout")
        bar.step(1, {"reward/total": 0.5, "kl": 0.25}, {"total": 2.0, "images_per_s": 8.0})
        bar.message("held-out [bold] 0.41")
    text = out.getvalue()
    for words in ("rollout", "1/10", "reward 0.5000", "KL 0.2500", "8.0 img/s", "left", "held-out [bold] 0.41"):
        assert words in text


def test_time_left_keeps_to_the_time_limit():
    bar = Progress(1000, max_minutes=1.0, file=io.StringIO())
    bar._started -= 30
    bar.step(1, {}, {})
    assert bar._left() == pytest.approx(30, abs=1)


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "1 min 00 s"), (3600, "1 h 00 min"), (0.2, "0 s")])
def test_durations(seconds, text):
    assert progress.format_seconds(seconds) == text


def test_a_held_out_evaluation_in_one_line() -> None:
    """Means of tasks where there are tasks, under the plain names; no figure twice."""
    rows = [
        {"tag": tag, "values": {"geneval": value}, "details": {"geneval/correct": value}}
        for tag, value in (("colors", 1.0), ("colors", 0.0), ("position", 0.0))
    ]
    metrics, by_tag = summarise(rows)
    line = held_out_line(3, Evaluation(rows=rows, metrics=metrics, by_tag=by_tag))
    assert line == "held-out at step 3 (n=3, mean of tasks): geneval 0.2500  geneval/correct 0.2500"
    plain = [{**row, "tag": None} for row in rows]
    metrics, by_tag = summarise(plain)
    line = held_out_line(3, Evaluation(rows=plain, metrics=metrics, by_tag=by_tag))
    assert line == "held-out at step 3 (n=3): geneval 0.3333"
