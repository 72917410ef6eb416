"""Puzzles of the package reasoning-gym, scored by the package.

Source: Stojanovski et al. (arXiv 2505.24760); card rewards, section 7: `score_answer(answer, entry)`, wrapped, since some
scorers raise on junk. Range [0, 1], partial credit as the data set gives it (an empty answer is mostly 0, some give 0.01).
Rows without an entry are not applicable. An answer on which the scorer raises or does not come back scores 0; an entry on
whose own answer it raises is a failed row.

Scorers run in a process of their own: some evaluate what the policy wrote, and an integer power of it can hang for good.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.answers import Extraction, extract_answer
from visual_grpo.rewards.child_process import ChildProcess

__all__ = ["ReasoningGym"]


@register_reward("reasoning_gym")
class ReasoningGym(Reward):
    """The score that the puzzle's own data set gives. Details: `raised` and `timed_out` (0/1; score 0)."""

    needs = frozenset({"texts"})
    rows_per_call = 4  # each may take `limit_s`

    def __init__(
        self,
        dataset: str | None = None,
        *,
        extraction: Extraction = "auto",
        entry_key: str | None = None,
        limit_s: float = 20.0,
    ) -> None:
        """Name the data set.

        Args:
            dataset: of reasoning-gym ("countdown"); None: that of each row, `metadata.source_dataset` of the entry.
            extraction: see `answers.extract_answer`; "auto" takes the last <answer> body, else the whole completion.
            entry_key: metadata column with the entry (question, answer, metadata), as an object or JSON text; None: the row
                itself is the entry.
            limit_s: wall-clock limit of one row, past which the scoring process is killed and the row scores 0.
        """
        extract_answer("", extraction)
        if limit_s <= 0:
            raise UserError(f"reasoning_gym: limit_s is {limit_s}; give seconds above 0.")
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError(
                "the reward 'reasoning_gym' needs the package reasoning-gym: pip install 'visual-grpo[reasoning]'"
            )
        self.dataset, self.extraction, self.entry_key, self.limit_s = dataset, extraction, entry_key, limit_s
        self._process = ChildProcess("visual_grpo.rewards.reasoning_judge")
        self._lock = threading.Lock()

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        values: list[float | None] = []
        raised, timed_out = [], []
        for text, row in zip(request.texts, request.metadata, strict=True):
            entry = self._entry(row)
            answer: dict[str, Any] | None = {}
            if entry is not None:
                question = {"dataset": self._dataset(entry), "answer": self._answer(text), "entry": entry}
                with self._lock:
                    answer = self._process.ask(question, self.limit_s)
            values.append(None if entry is None else self._value(answer))
            raised.append(float(bool(answer and answer.get("raised"))))
            timed_out.append(float(answer is None))
        return RewardOutput.from_list(values, {"raised": raised, "timed_out": timed_out})

    def close(self) -> None:
        """End the scoring process."""
        self._process.close()

    def _entry(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        found: Any = row if self.entry_key is None else row.get(self.entry_key)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except ValueError:
                return None
        # Some puzzles have many answers and give none; their scorers check the moves.
        usable = isinstance(found, Mapping) and "answer" in found and isinstance(found.get("metadata"), Mapping)
        return {key: found.get(key) for key in ("question", "answer", "metadata")} if usable else None

    def _dataset(self, entry: Mapping[str, Any]) -> str:
        name = self.dataset or entry["metadata"].get("source_dataset")
        if not isinstance(name, str):
            raise UserError(
                "reasoning_gym: a row does not say of which data set it is (metadata.source_dataset); set params.dataset."
            )
        return name

    def _answer(self, text: str) -> str:
        if self.extraction == "auto":
            return extract_answer(text, "answer_tag") or text.strip()
        return extract_answer(text, self.extraction) or ""

    @staticmethod
    def _value(answer: dict[str, Any] | None) -> float:
        if answer is None:
            return 0.0
        if "unknown" in answer:
            raise UserError(f"reasoning_gym: {answer['unknown']}; list the names with reasoning_gym.factory.DATASETS.")
        return float(answer.get("ok", "nan"))
