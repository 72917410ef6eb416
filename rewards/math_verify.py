r"""Mathematical equality of the final answer with the gold answer, by the package math-verify.

Source: TRL's accuracy reward; card rewards, section 7: gold first (verify is not symmetric), a gold answer that cannot be parsed
makes the row not applicable, the answer must stand in LaTeX (\boxed tried first, no match without an anchor). Range 0 or 1.

Answers are judged in a process of its own. math-verify bounds its work by signal.alarm, which exists only in a main thread,
and a policy that writes \boxed{9^{9^{9^9}}} hangs any other for good: the integer power holds Python's lock, so not even
a time-out in another thread would run.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import gold_answer, gold_texts
from visual_grpo.rewards.child_process import ChildProcess
from visual_grpo.rewards.math_judge import Extraction

__all__ = ["MathVerify"]


def _certainty(value: float) -> float:
    """Right before failed before wrong: a gold answer that could not be compared may have been the equal one."""
    return 0.5 if math.isnan(value) else value


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
        if limit_s <= 0:
            raise UserError(f"math_verify: limit_s is {limit_s}; give seconds above 0.")
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("the reward 'math_verify' needs the package math-verify: pip install 'visual-grpo[text]'")
        self.extraction, self.gold_key, self.limit_s = extraction, gold_key, limit_s
        self._process = ChildProcess("visual_grpo.rewards.math_judge")
        self._lock = threading.Lock()

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        timed_out = []
        for text, row in zip(request.texts, request.metadata, strict=True):
            value: float | None = None
            slow = False
            for gold in gold_texts(gold_answer(row, self.gold_key)):  # one or several accepted ones
                question = {"gold": gold, "completion": text, "extraction": self.extraction}
                with self._lock:
                    answer = self._process.ask(question, self.limit_s)
                slow |= answer is None
                found = self._value(answer)
                value = found if value is None else value if found is None else max(value, found, key=_certainty)
            values.append(value)
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
