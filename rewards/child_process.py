"""A process of its own for judging code that may hang, eat memory or evaluate what the policy wrote."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

import visual_grpo

__all__ = ["ChildProcess"]

START_SECONDS = 120.0


class ChildProcess:
    """A process that judges; it is started at the first question, and again after it had to be killed."""

    def __init__(self, module: str) -> None:
        """Name the module whose `serve()` answers: a line "ready" first, then one JSON line for each JSON line of input."""
        self.module = module
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        """Return the answer, or None if it took longer than `limit_s` and the process was killed."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = self._read(limit_s)
        if line is None:
            self.close()
            return None
        if not line:
            self.close()
            raise RuntimeError(f"the process of {self.module} ended while it was judging")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        root = Path(visual_grpo.__file__).resolve().parent.parent
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {self.module} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        if not self._read(START_SECONDS):
            self.close()
            raise RuntimeError(f"the process of {self.module} did not start; its error is printed above")

    def _read(self, limit_s: float) -> str | None:
        """One line; None when none came in time, empty when the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return None
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process.wait()
            self._process = None

    def __del__(self) -> None:
        if self._process is not None:
            self.close()
