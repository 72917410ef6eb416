"""The watchdog: times the phases of a run and reports one that hangs, with the stack of where it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from visual_grpo.errors import RunError

__all__ = ["Watchdog"]

_GRACE_S = 30.0  # how long the main thread has to react before the process is ended


class _Hung(KeyboardInterrupt):
    """Raised in the main thread by the watchdog; whatever lets Ctrl-C through lets it through."""


class Watchdog:
    """Phase timer and hang detector.

    Time counts for the innermost phase only, so the phases of a step add up to the step. A phase counts as hung when it runs
    `timeout_s` without `beat()`, a nested phase or its end.

    Example:
        >>> watchdog = Watchdog(None)
        >>> with watchdog.phase("rollout"):
        ...     pass
        >>> sorted(watchdog.pop_times())
        ['rollout']

    Args:
        timeout_s: None turns the detection (not the timing) off.
        action: `stop` raises `RunError` in the main thread, and ends the process when that does not react within 30 s.
        on_timeout: called once with the message, from the watchdog's thread.
        stacks: file that gets the Python stacks of all threads.
        on_phase: called with the name of each phase as it begins (the progress line).
    """

    def __init__(
        self,
        timeout_s: float | None,
        action: Literal["warn", "stop"] = "stop",
        on_timeout: Callable[[str], None] | None = None,
        *,
        stacks: Path | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.action = action
        self.on_timeout = on_timeout
        self.stacks = stacks
        self.on_phase = on_phase
        self.times: dict[str, float] = {}
        """seconds spent in each phase since the last `pop_times`."""
        self._phases: list[str] = []
        self._mark = 0.0  # since when the innermost phase's time has not been counted
        self._beat = 0.0
        self._fired: str | None = None
        self._warned = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._reacted = threading.Event()
        self._thread: threading.Thread | None = None
        if timeout_s is not None and action == "stop":
            _listen()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`, and watch it.

        Raises:
            RunError: the watchdog stopped it.
        """
        try:
            self._begin(name)
            try:
                yield
            finally:
                self._end()
            if self._fired is not None:
                self._await_interrupt()
        except KeyboardInterrupt:
            if self._fired is None:
                raise  # the user's own Ctrl-C
        if self._fired is not None:
            message, self._fired = self._fired, None  # told once: the checkpoint that follows has phases too
            self._reacted.set()
            raise RunError(message)

    def beat(self) -> None:
        """Tell that the current phase goes forward (one batch of a long phase is done)."""
        self._beat = time.monotonic()
        self._warned = False

    def pop_times(self) -> dict[str, float]:
        """Seconds in each phase since the last call; the counts start again at zero."""
        self._count()
        times, self.times = self.times, {}
        return times

    def close(self) -> None:
        """End the watchdog's thread."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._thread = None

    def _count(self) -> None:
        now = time.monotonic()
        if self._phases:
            self.times[self._phases[-1]] = self.times.get(self._phases[-1], 0.0) + now - self._mark
        self._mark = now

    def _begin(self, name: str) -> None:
        with self._lock:
            self._count()
            self._phases.append(name)
            self.beat()
        if self.on_phase is not None:
            self.on_phase(name)
        if self.timeout_s is not None and self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._watch, name="visual_grpo watchdog", daemon=True)
            self._thread.start()

    def _end(self) -> None:
        with self._lock:
            self._count()
            self._phases.pop()
            self.beat()

    def _await_interrupt(self) -> None:
        """The phase ended just as the watchdog fired: take its interrupt here and not somewhere later."""
        self._reacted.set()
        for _ in range(100):
            time.sleep(0.01)

    def _watch(self) -> None:
        assert self.timeout_s is not None
        while not self._closed.wait(min(self.timeout_s / 4, 5.0)):
            with self._lock:  # no phase begins or ends between the decision and the interrupt
                late = time.monotonic() - self._beat
                if not self._phases or late < self.timeout_s or self._warned:
                    continue
                self._warned = True
                message = self._message(late)
                if self.action == "stop":
                    self._fired = message
                self._dump(message)
                self._tell(message)
                if self.action == "stop":
                    _interrupt_main()
            if self.action == "stop":
                self._end_unless_reacted()
                return

    def _message(self, late: float) -> str:
        where = f"; the stacks are in {str(self.stacks)!r}" if self.stacks is not None else ""
        return (
            f"phase {self._phases[-1]!r} made no progress for {late:.0f} s (watchdog.timeout_s is {self.timeout_s:g}){where}. "
            "Raise watchdog.timeout_s where a phase may take longer, or set it to null to wait for ever"
        )

    def _dump(self, message: str) -> None:
        """Write the stacks of all threads; a full disk must not keep the watchdog from acting."""
        if self.stacks is None:
            return
        with contextlib.suppress(OSError), self.stacks.open("a", encoding="utf-8") as file:
            file.write(message + "\nmain thread (most recent call last):\n")
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            file.writelines(traceback.format_stack(main))  # faulthandler stops after 100 threads, the main one last
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")

    def _tell(self, message: str) -> None:
        try:
            if self.on_timeout is not None:
                self.on_timeout(message)
        except Exception as error:  # whatever fails in the caller's code, the run must still be stopped
            print(f"the watchdog could not report: {error}", file=sys.stderr)

    def _end_unless_reacted(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            if self._reacted.wait(0.1) or self._closed.is_set():
                return
        self._tell(
            f"the main thread hangs outside Python and did not react within {_GRACE_S:g} s: the process ends now"
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


def _wake(_signal: int, _frame: object) -> None:
    raise _Hung


def _listen() -> None:
    """Let SIGUSR2 wake the main thread: SIGINT is ignored in a process that runs in the background (nohup, a CI job)."""
    here = threading.current_thread() is threading.main_thread()
    if here and hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _wake)


def _interrupt_main() -> None:
    """Raise in the main thread, waking it from a blocking system call where the system allows that."""
    main = threading.main_thread()
    if main.ident is not None and hasattr(signal, "SIGUSR2") and signal.getsignal(signal.SIGUSR2) is _wake:
        signal.pthread_kill(main.ident, signal.SIGUSR2)
        return
    # The run is not in the main thread, or SIGUSR2 is somebody else's: raise at the next Python instruction.
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main.ident or 0), ctypes.py_object(_Hung))
