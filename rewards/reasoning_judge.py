"""Scores of the package reasoning-gym; runs in a process of its own (see `reasoning_gym`).

This file imports nothing of the toolkit, so that the process starts without torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["judge", "serve"]

_SCORERS: dict[str, Callable[..., float]] = {}


def judge(dataset: str, answer: str | None, entry: dict[str, Any]) -> dict[str, Any]:
    """Score an answer by the scorer of `dataset`.

    Returns:
        {"ok": score, "raised": the scorer raised}, or {"error": reason} where the scorer or the entry is at fault: it raises
        on the entry's own answer too.
    """
    import reasoning_gym

    if dataset not in _SCORERS:
        try:
            _SCORERS[dataset] = reasoning_gym.get_score_answer_fn(dataset)
        except ValueError as error:
            return {"unknown": str(error)}
    score = _SCORERS[dataset]
    try:
        return {"ok": float(score(answer=answer, entry=entry)), "raised": False}
    except Exception as raised:  # junk of the policy is a wrong answer, a broken entry is a failure
        try:
            score(answer=entry["answer"], entry=entry)
        except Exception as error:
            return {
                "error": f"the scorer of {dataset!r} raises on the entry's own answer: {type(error).__name__}: {error}"
            }
        return {"ok": 0.0, "raised": True, "reason": f"{type(raised).__name__}: {raised}"}


def serve() -> None:
    """Answer requests, one JSON line each, until standard input ends; runs in the main thread of a process of its own."""
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    import reasoning_gym  # noqa: F401 - the slow part of the start

    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        try:
            verdict = judge(**json.loads(line))
        except BaseException as error:  # a scorer may even exit
            verdict = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(verdict), file=answers, flush=True)
