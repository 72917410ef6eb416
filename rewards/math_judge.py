"""Mathematical equality of two answers by the package math-verify; runs in a process of its own (see `math_verify`).

This file imports nothing of the toolkit, so that the process starts without torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any, Literal

__all__ = ["Extraction", "judge", "serve"]

Extraction = Literal["latex", "any"]
PARSE_SECONDS = 10
VERIFY_SECONDS = 5


def judge(gold: str, completion: str, extraction: Extraction, *, alarms: bool) -> bool | None:
    """Compare a completion with the gold answer.

    Args:
        gold: gold answer; of a worked solution (GSM8K) the part after ####, without commas.
        completion: the whole completion.
        extraction: "latex" as in TRL, or "any" to accept plain numbers and expressions too.
        alarms: bound the work by signal.alarm (main thread only).

    Returns:
        None if the gold answer cannot be parsed.
    """
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if "####" in gold:
        gold = gold.rsplit("####", 1)[1].replace(",", "").strip()
    parsed_gold = parse(gold, parsing_timeout=PARSE_SECONDS if alarms else None)
    if not parsed_gold:
        return None
    config: list[Any] = [
        LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
    ]
    if extraction == "any":
        config.append(ExprExtractionConfig())
    answer = parse(
        completion,
        extraction_config=config,
        extraction_mode="first_match",
        parsing_timeout=PARSE_SECONDS if alarms else None,
    )
    return bool(verify(parsed_gold, answer, timeout_seconds=VERIFY_SECONDS if alarms else None))


def serve() -> None:
    """Answer requests, one JSON line each, until standard input ends; runs in the main thread of a process of its own."""
    logging.disable(logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    judge("1", r"\boxed{1}", "latex", alarms=True)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        try:
            verdict: Any = {"ok": judge(**json.loads(line), alarms=True)}
        except Exception as error:
            verdict = {"error": f"{type(error).__name__}: {error}"}
        except BaseException:  # math-verify's own time-out is not an Exception
            verdict = {"ok": False}
        print(json.dumps(verdict), file=answers, flush=True)
