"""Arithmetic with two ways to answer: at once, or after a working; the first token of an answer says which.

Every prompt of this world carries one answer of each mode, both right, in the column `completion`::

    <short>#### 72
    <think>27+40=67 67+5=72</think> #### 72

`<short>`, `<think>` and `</think>` are single tokens of `testbed/lm_tiny` that its pre-training never shows. The kinds of
problems go from easy (`one`: a single step, which a working does not shorten) to hard (`mixed`: three operands).
"""

from __future__ import annotations

from typing import Any

from visual_grpo.testbed.arithmetic import KINDS, MARKER, Kind, Problem, all_problems, is_heldout, solve

SHORT, THINK, THOUGHT = "<short>", "<think>", "</think>"
EASY = Kind(name="one", operators="+-", other_digits=1)
MODE_KINDS = (EASY, *KINDS)


def two_answers(problem: Problem) -> list[str]:
    """The brief and the long answer.

    Example:
        >>> two_answers(Problem(kind="add", operands=(27, 45), operators=("+",)))
        ['<short>#### 72', '<think>27+40=67 67+5=72</think> #### 72']
    """
    working, _, answer = solve(problem).rpartition(MARKER)
    return [f"{SHORT}{MARKER}{answer}", f"{THINK}{working.strip()}{THOUGHT} {MARKER}{answer}"]


def split_prompts(per_kind: int = 400, *, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`(train, heldout)` rows with `prompt`, `answer`, `tag` and `completion`, a list of two; the split of `arithmetic`."""
    rows = [p.metadata | {"completion": two_answers(p)} for p in all_problems(per_kind, kinds=MODE_KINDS, seed=seed)]
    train = [row for row in rows if not is_heldout(str(row["prompt"]))]
    return train, [row for row in rows if is_heldout(str(row["prompt"]))]
