"""The watchdog: timing, the stop of a hung phase in Python, in a system call and in C, and no thread when it is off."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from visual_grpo.errors import RunError
from visual_grpo.watchdog import Watchdog


def test_times_add_up_and_belong_to_the_innermost_phase():
    watchdog = Watchdog(None)
    started = time.monotonic()
    with watchdog.phase("eval"):
        time.sleep(0.05)
        with watchdog.phase("rollout"):
            time.sleep(0.1)
        time.sleep(0.05)
    total = time.monotonic() - started
    times = watchdog.pop_times()
    assert times["rollout"] == pytest.approx(0.1, abs=0.04)
    assert sum(times.values()) == pytest.approx(total, abs=0.01)
    assert watchdog.pop_times() == {}


def test_off_starts_no_thread_and_phases_are_told():
    phases: list[str] = []
    watchdog = Watchdog(None, on_phase=phases.append)
    before = threading.active_count()
    with watchdog.phase("rollout"), watchdog.phase("score"):
        assert threading.active_count() == before
    assert phases == ["rollout", "score"]


def test_errors_and_ctrl_c_of_the_user_pass():
    with Watchdog(60.0) as watchdog:
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error), watchdog.phase("train"):
                raise error
        assert watchdog._phases == []


def hang(watchdog: Watchdog, blocking: bool) -> None:
    started = time.monotonic()
    with watchdog.phase("step"), watchdog.phase("rollout"):
        if blocking:
            time.sleep(20)
        while time.monotonic() - started < 20:
            pass


@pytest.mark.parametrize("blocking", [True, False], ids=["system call", "python"])
def test_hung_phase_is_stopped(tmp_path, blocking):
    told: list[str] = []
    started = time.monotonic()
    with Watchdog(0.3, "stop", told.append, stacks=tmp_path / "stacks.txt") as watchdog:
        with pytest.raises(RunError, match=r"phase 'rollout' made no progress for .*watchdog.timeout_s is 0.3"):
            hang(watchdog, blocking)
        assert time.monotonic() - started < 10
        with watchdog.phase("checkpoint"):  # the trainer saves what it has
            pass
    assert len(told) == 1
    assert "in hang" in (tmp_path / "stacks.txt").read_text()


def test_beat_keeps_a_long_phase_alive():
    with Watchdog(0.4, "stop") as watchdog, watchdog.phase("eval"):
        for _ in range(8):
            time.sleep(0.1)
            watchdog.beat()


def test_warn_tells_once_and_goes_on():
    told: list[str] = []
    with Watchdog(0.1, "warn", told.append) as watchdog, watchdog.phase("score"):
        time.sleep(0.6)
    assert len(told) == 1


def test_an_error_in_the_callback_does_not_keep_it_from_stopping(capsys):
    def broken(_: str) -> None:
        raise OSError("no log")

    with Watchdog(0.1, "stop", broken) as watchdog, pytest.raises(RunError), watchdog.phase("score"):
        time.sleep(20)
    assert "could not report: no log" in capsys.readouterr().err


SCRIPT = """
import ctypes, signal, sys, time
from pathlib import Path
import visual_grpo.watchdog as module
from visual_grpo.errors import RunError

module._GRACE_S = 1.0
mode = sys.argv[1]
signal.signal(signal.SIGINT, signal.SIG_IGN)
watchdog = module.Watchdog(0.3, "stop", lambda message: print(message, flush=True))
try:
    with watchdog.phase("backward"):
        if mode == "C":  # code outside Python that no signal reaches
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            ctypes.CDLL(None).sleep(60)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.01)
except RunError as error:
    print("stopped", flush=True)
    sys.exit(3)
"""


def run_script(mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, timeout=60)


def test_stops_where_sigint_is_ignored():
    result = run_script("python")
    assert result.returncode == 3, result.stderr
    assert "phase 'backward'" in result.stdout


def test_ends_the_process_when_the_main_thread_hangs_in_c():
    result = run_script("C")
    assert result.returncode == 1, result.stderr
    assert "the process ends now" in result.stdout
