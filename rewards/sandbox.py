"""Runs Python programs that nobody trusts, each in a process of its own that holds next to nothing.

What holds with `isolation="full"`, the default (Linux on x86_64 or aarch64, no root needed, works in ordinary containers):

- time: the process is killed after `seconds` of processor time, or three times that (and a second) by the clock: the verdict
  hardly depends on how busy the machine is;
- memory: the address space ends at `memory_mb`; output past `output_kb` ends the run;
- processes and programs: none can be started (seccomp), threads can; no other process can be signalled, traced or changed;
- network: no socket of any kind can be made (seccomp);
- files: none can be created, written, renamed, deleted or chmod-ed (seccomp). Where the kernel has Landlock (5.13 and later,
  switched on) only Python's own library can be read; elsewhere whatever the user may read can be, which is logged once;
- environment: empty; no capability of root is kept; no descriptor but the pipes of the run.

What does not hold: a fault of the kernel is not contained, timing can be measured, and processor time up to the limits is
spent. Use a machine of its own (`visual-grpo serve-rewards code`) if that matters. The filter for aarch64 is untested.

With `isolation="limits"` (other systems) only the limits of time, memory, open files and file size hold: foreign code can read
and delete files, use the network and signal processes. Good for programs that are trusted.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from visual_grpo.errors import UserError

__all__ = ["Finished", "Isolation", "Limits", "SandboxError", "check_isolation", "run_program", "run_tests"]

logger = logging.getLogger(__name__)

Isolation = Literal["full", "limits"]
START_SECONDS = 30.0
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """The sandbox itself did not work, or the tests are broken; says nothing about the candidate."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use."""

    seconds: float = 4.0
    """of processor time, rounded up; the limit by the clock is `wall_seconds`."""
    memory_mb: int = 512
    output_kb: int = 256
    packages: bool = False
    """let programs import installed packages (numpy), not only the standard library."""
    isolation: Isolation = "full"

    @property
    def wall_seconds(self) -> float:
        """Limit by the clock, for programs that sleep and for busy machines."""
        return 3 * self.seconds + 1


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a run ended."""

    output: bytes
    status: int
    """exit status; negative for a signal."""
    timed_out: bool


def _readable(packages: bool) -> list[str]:
    """Where Python's library and the shared libraries of the system lie."""
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")]
    if packages:
        library += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    return [path for path in dict.fromkeys([*library, *system]) if path and os.path.exists(path)]


class Child:
    """One sandboxed process; it runs from its construction until it ends or is killed."""

    def __init__(self, job: dict[str, Any], limits: Limits, *, descriptors: Sequence[int] = (), **streams: Any) -> None:
        control, control_end = os.pipe()
        ready, ready_end = os.pipe()
        self._ready = ready
        options = ["-s", "-P", "-B", "-X", "utf8", *([] if limits.packages else ["-S"])]
        command = [sys.executable, *options, str(HERE / "sandbox_child.py"), str(control), str(ready_end)]
        try:
            self.process = subprocess.Popen(
                command,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=(control, ready_end, *descriptors),
                start_new_session=True,
                stderr=subprocess.DEVNULL,
                **streams,
            )
        except BaseException:
            os.close(ready)
            os.close(control_end)
            raise
        finally:
            os.close(control)
            os.close(ready_end)
        job = {
            **job,
            "descriptors": list(descriptors),
            "layers": str(HERE / "sandbox_layers.py"),
            "isolation": limits.isolation,
            "memory": limits.memory_mb << 20,
            "cpu_s": math.ceil(limits.seconds),
            "readable": _readable(limits.packages),
        }
        try:
            with os.fdopen(control_end, "w", encoding="utf-8", errors="surrogatepass") as stream:
                stream.write(json.dumps(job) + "\n")
        except BrokenPipeError:
            pass  # it ended at once: `confined` says so

    def confined(self) -> dict[str, bool]:
        """Wait until the process has given up its rights; returns which layers hold.

        Raises:
            SandboxError: it could not.
        """
        with os.fdopen(self._ready, encoding="utf-8") as stream:
            line = stream.readline() if select.select([stream], [], [], START_SECONDS)[0] else ""
        if not line:
            self.kill()
            raise SandboxError(
                f"a sandboxed process did not start within {START_SECONDS:g} s (memory, or a broken Python)"
            )
        state: dict[str, Any] = json.loads(line)
        if "error" in state:
            self.kill()
            raise SandboxError(f"a process could not be confined: {state['error']}")
        return state

    def collect(self, stdin: bytes, limits: Limits, deadline: float) -> Finished:
        """Feed `stdin` and read the output until the process ends, `deadline` passes or the output is too long."""
        give, take = self.process.stdin, self.process.stdout
        assert take is not None
        output, sent, timed_out = bytearray(), 0, False
        if give is not None:
            os.set_blocking(give.fileno(), False)
        reading = True
        while reading:
            if give is not None and sent == len(stdin):
                give.close()
                give = None
            left = deadline - time.monotonic()
            can_read, can_write, _ = select.select([take], [give] if give is not None else [], [], max(left, 0))
            if left <= 0 or len(output) > limits.output_kb << 10:
                timed_out = left <= 0
                break
            if can_read:
                part = os.read(take.fileno(), 1 << 16)
                output += part
                reading = bool(part)
            if can_write and give is not None:
                try:
                    sent += os.write(give.fileno(), stdin[sent : sent + (1 << 16)])
                except BrokenPipeError:
                    sent = len(stdin)
        if not reading:
            try:
                self.process.wait(max(deadline - time.monotonic(), 0))
                timed_out = self.process.returncode in (-signal.SIGKILL, -signal.SIGXCPU)  # the kernel's limit
            except subprocess.TimeoutExpired:
                timed_out = True
        self.kill()
        return Finished(output=bytes(output), status=self.process.returncode, timed_out=timed_out)

    def kill(self) -> None:
        """End the process and what it may have started (nothing, under full isolation)."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()


@functools.cache
def check_isolation(isolation: Isolation) -> None:
    """Try the layers once, in a process that does nothing.

    Raises:
        UserError: full isolation cannot be had on this system.
    """
    if isolation == "limits":
        logger.warning(
            "isolation is 'limits': programs under test can read and delete files and use the network; only time, memory and "
            "file size are limited."
        )
        return
    hint = "Run the reward on a Linux machine (visual-grpo serve-rewards code), or set params.isolation: limits for trusted code."
    limits = Limits(isolation=isolation)
    child = None
    try:
        child = Child({"mode": "program", "source": ""}, limits, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        state = child.confined()
    except (SandboxError, OSError) as error:
        raise UserError(f"programs cannot be isolated here: {error}. {hint}") from error
    finally:
        if child is not None:
            child.kill()
    if not state["seccomp"]:
        raise UserError(f"programs cannot be isolated here: no table of system calls for this processor. {hint}")
    if not state["landlock"]:
        logger.warning(
            "this kernel has no Landlock: programs under test cannot change files or use the network, but can read every file "
            "that this user can."
        )


def run_program(source: str, stdin: str, limits: Limits) -> Finished:
    """Run `source` as a program on `stdin`.

    Raises:
        SandboxError: the process could not be confined, so the program was not run.
    """
    child = Child({"mode": "program", "source": source}, limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.confined()
    return child.collect(stdin.encode("utf-8", "surrogatepass"), limits, time.monotonic() + limits.wall_seconds)


def run_tests(
    source: str, setup: str, tests: Sequence[str], limits: Limits, functions: Sequence[str] = ()
) -> tuple[int, bool]:
    """Run tests of a program's functions: the program in one process, the tests in another that asks the first for values.

    The program's process gets the arguments of the calls and nothing else of the tests; its answers are plain data.

    Args:
        source: the program.
        setup: code that the tests need (imports).
        tests: Python statements, each passed if it raises nothing.
        functions: names that are the program's even though they are also Python's own (`sum`).
        limits: of each of the two processes; `seconds` holds for all tests together, and a test that is not reached has failed.

    Returns:
        Number of tests passed, and whether the time ran out.

    Raises:
        SandboxError: a process could not be confined, or `setup` fails by itself.
    """
    calls, calls_end = os.pipe()
    answers, answers_end = os.pipe()
    children: list[Child] = []
    try:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        children.append(Child({"mode": "calls", "source": source}, limits, descriptors=(calls, answers_end), **quiet))
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        job = {"mode": "judge", "setup": setup, "tests": list(tests), "functions": list(functions)}
        children.append(Child(job, limits, descriptors=(answers, calls_end), **streams))
        for descriptor in (calls, calls_end, answers, answers_end):
            os.close(descriptor)
        for child in children:
            child.confined()
        finished = children[1].collect(b"", limits, time.monotonic() + limits.wall_seconds)
    finally:
        for child in children:
            child.kill()
    lines = finished.output.decode(errors="replace").splitlines()
    if lines and lines[0].startswith("setup: "):
        raise SandboxError(
            f"the tests cannot be run, or their own set-up code fails: {lines[0].removeprefix('setup: ')}"
        )
    return lines.count("1"), finished.timed_out
