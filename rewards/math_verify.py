r"""Mathematical equality of the final answer with the gold answer, by the package math-verify.

Source: TRL's accuracy reward; card rewards, section 7: gold first (verify is not symmetric), a gold answer that cannot be parsed
makes the row not applicable, the answer must stand in LaTeX (\boxed tried first, no match without an anchor). Range 0 or 1.

Answers are judged in a process of its own. math-verify bounds its work by signal.alarm, which exists only in a main thread,
and a policy that writes \boxed{9^{9^{9^9}}} hangs any other for good: the integer power holds Python's lock, so not even
a time-out in another thread would run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import visual_grpo
from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import gold_answer
from visual_grpo.rewards.math_judge import Extraction

__all__ = ["MathVerify"]

START_SECONDS = 120.0


class _Process:
    """The judging process; it is started at the first question, and again after it had to be killed."""

    def __init__(self) -> None:
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
            raise RuntimeError("the math-verify process ended while it was judging")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> None:
        root = Path(visual_grpo.__file__).resolve().parent.parent
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from visual_grpo.rewards.math_judge import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        if not self._read(START_SECONDS):
            self.close()
            raise RuntimeError("the math-verify process did not start; its error is printed above")

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


@register_reward("math_verify")
class MathVerify(Reward):
    """1 if the answer equals the gold answer mathematically. Details: `timed_out`, 1 where judging was given up (score 0)."""

    needs = frozenset({"texts"})
    rows_per_call = 4  # each may take `limit_s`

    def __init__(self, extraction: Extraction = "latex", *, gold_key: str | None = None, limit_s: float = 20.0) -> None:
        """Choose what counts as an answer.

        Args:
            extraction: see `math_judge.judge`.
            gold_key: metadata column of the gold answer; None: see `answers.GOLD_KEYS`.
            limit_s: wall-clock limit of one row, past which the judging process is killed and the row scores 0.
        """
        if extraction not in ("latex", "any"):
            raise UserError(f"math_verify: extraction is {extraction!r}; give latex or any.")
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("the reward 'math_verify' needs the package math-verify: pip install 'visual-grpo[text]'")
        self.extraction, self.gold_key, self.limit_s = extraction, gold_key, limit_s
        self._process = _Process()
        self._lock = threading.Lock()

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        timed_out = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            gold = gold_answer(row, self.gold_key)
            slow = False
            if gold is None:
                values.append(None)
            else:
                question = {"gold": str(gold), "completion": text, "extraction": self.extraction}
                with self._lock:
                    answer = self._process.ask(question, self.limit_s)
                slow = answer is None
                values.append(self._value(answer))
            timed_out.append(float(slow))
        return RewardOutput.from_list(values, {"timed_out": timed_out})

    def close(self) -> None:
        """End the judging process."""
        self._process.close()

    @staticmethod
    def _value(answer: dict[str, Any] | None) -> float | None:
        if answer is None:
            return 0.0
        if "error" in answer:
            return float("nan")
        return None if answer["ok"] is None else float(answer["ok"])
