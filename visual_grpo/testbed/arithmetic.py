"""Arithmetic tasks with worked solutions: the text world of the testbed.

A prompt is one question, `What is 27+45?`. A completion is a working of zero or more equations, separated by single
spaces, then the final answer in GSM8K form::

    #### 72                            style "direct"
    27+40=67 #### 72                   style "short": all steps but the last
    27+40=67 67+5=72 #### 72           style "full"

`extract_answer` reads what follows the last `####`, and without a marker the last number of the text, so every
exact-match reward with that rule scores these completions. Difficulty is set by a `Kind`: operators, number of
operands, digits. The default kinds are `add` and `sub` (two digits each), `mul` (two digits by one) and `mixed` (two
digits, then two operands of one).

Prompts are split into train and held-out by a SHA-256 of their text: membership never depends on order, on Python's
hash seed or on how many prompts are drawn, and pre-training can ask `is_heldout` about any prompt.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

STYLES = ("direct", "short", "full")
MARKER = "####"
HELDOUT_SHARE = 0.2

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A family of problems of one difficulty."""

    name: str
    """Becomes the `tag` of the prompt."""
    operators: str
    """Characters of `+-*` to draw from; `*` stands alone, with two operands."""
    operands: int = 2
    digits: int = 2
    """Digits of the first operand."""
    other_digits: int = 2
    """Digits of each further operand; a second factor is at least 2."""


KINDS: tuple[Kind, ...] = (
    Kind(name="add", operators="+"),
    Kind(name="sub", operators="-"),
    Kind(name="mul", operators="*", other_digits=1),
    Kind(name="mixed", operators="+-", operands=3, other_digits=1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One expression, read from left to right.

    Example:
        >>> p = Problem(kind="mixed", operands=(12, 34, 5), operators=("+", "-"))
        >>> p.prompt, p.answer
        ('What is 12+34-5?', 41)
    """

    kind: str
    operands: tuple[int, ...]
    """[M] non-negative numbers."""
    operators: tuple[str, ...]
    """[M - 1] each one of `+`, `-`, `*`; `*` only as the single operator."""

    @property
    def expression(self) -> str:
        """The expression without spaces."""
        tail = "".join(f"{op}{number}" for op, number in zip(self.operators, self.operands[1:], strict=True))
        return f"{self.operands[0]}{tail}"

    @property
    def prompt(self) -> str:
        """The question put to the model."""
        return f"What is {self.expression}?"

    @property
    def answer(self) -> int:
        """The exact value."""
        total = self.operands[0]
        for op, number in zip(self.operators, self.operands[1:], strict=True):
            total = _apply(total, op, number)
        return total

    @property
    def metadata(self) -> dict[str, str]:
        """The row of a prompt set: `prompt`, `answer`, `tag`."""
        return {"prompt": self.prompt, "answer": str(self.answer), "tag": self.kind}


def _apply(left: int, op: str, right: int) -> int:
    """`left op right` for one operator."""
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    if op == "*":
        return left * right
    raise ValueError(f"operator must be one of + - *, got {op!r}")


def _places(number: int) -> list[int]:
    """Non-zero place values, highest first: 405 -> [400, 5]; 0 -> [0]."""
    text = str(number)
    parts = [int(digit) * 10 ** (len(text) - 1 - i) for i, digit in enumerate(text)]
    return [part for part in parts if part] or [0]


def sample_problem(kind: Kind, rng: random.Random) -> Problem:
    """Draws one problem whose running totals are never negative.

    Args:
        kind: operators and size of the problem.
        rng: source of randomness; the caller owns its seed.

    Returns:
        A problem tagged with `kind.name`.
    """

    def draw(digits: int) -> int:
        return rng.randint(10 ** (digits - 1), 10**digits - 1)

    if kind.operators == "*":
        return Problem(kind=kind.name, operands=(draw(kind.digits), max(2, draw(kind.other_digits))), operators=("*",))
    if "*" in kind.operators or kind.operands < 2:
        raise ValueError(f"kind {kind.name!r}: '*' cannot be mixed with other operators, and operands must be >= 2")
    while True:
        operands = (draw(kind.digits), *(draw(kind.other_digits) for _ in range(kind.operands - 1)))
        operators = tuple(rng.choice(kind.operators) for _ in range(kind.operands - 1))
        total, lowest = operands[0], 0
        for op, number in zip(operators, operands[1:], strict=True):
            total = _apply(total, op, number)
            lowest = min(lowest, total)
        if lowest >= 0:
            return Problem(kind=kind.name, operands=operands, operators=operators)


def is_heldout(prompt: str) -> bool:
    """Whether a prompt text belongs to the held-out split (a stable hash of the text decides)."""
    digest = hashlib.sha256(prompt.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELDOUT_SHARE


def all_problems(per_kind: int = 400, *, kinds: Sequence[Kind] = KINDS, seed: int = 0) -> list[Problem]:
    """Draws distinct problems, the same for the same arguments on every machine.

    Args:
        per_kind: prompts of each kind (fewer where a kind has fewer distinct ones).
        kinds: the kinds, in the order of the result.
        seed: seed of the draw.

    Returns:
        Problems of distinct prompts, grouped by kind.
    """
    problems: list[Problem] = []
    for kind in kinds:
        rng = random.Random(f"{seed}/{kind.name}")
        found: dict[str, Problem] = {}
        for _ in range(50 * per_kind):
            if len(found) == per_kind:
                break
            problem = sample_problem(kind, rng)
            found.setdefault(problem.prompt, problem)
        problems.extend(found.values())
    return problems


def all_prompts(per_kind: int = 400, *, kinds: Sequence[Kind] = KINDS, seed: int = 0) -> list[dict[str, str]]:
    """The rows `{"prompt": ..., "answer": ..., "tag": ...}` of `all_problems`."""
    return [problem.metadata for problem in all_problems(per_kind, kinds=kinds, seed=seed)]


def split_prompts(
    per_kind: int = 400, *, kinds: Sequence[Kind] = KINDS, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Splits `all_prompts` into `(train, heldout)`; the two share no prompt text."""
    rows = all_prompts(per_kind, kinds=kinds, seed=seed)
    train = [row for row in rows if not is_heldout(row["prompt"])]
    return train, [row for row in rows if is_heldout(row["prompt"])]


def solve(problem: Problem, style: str = "full", *, wrong_step: int | None = None, offset: int = 0) -> str:
    """Writes a worked solution.

    Args:
        problem: what to solve.
        style: one of `STYLES`: how many equations are written before the answer.
        wrong_step: index of an equation of the full working whose result is off by `offset`; later equations build
            on it. An index past the end spoils only the answer. None writes a right solution.
        offset: the error; results are kept non-negative by flipping its sign where needed.

    Returns:
        The completion text, without an end-of-sequence token.
    """
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, got {style!r}")
    steps: list[str] = []

    def compute(left: int, op: str, right: int) -> int:
        value = _off(_apply(left, op, right), offset if len(steps) == wrong_step else 0)
        steps.append(f"{left}{op}{right}={value}")
        return value

    if problem.operators == ("*",):
        parts = [compute(place, "*", problem.operands[1]) for place in _places(problem.operands[0])]
        total = parts[0]
        for part in parts[1:]:
            total = compute(total, "+", part)
    else:
        moves = list(zip(problem.operators, problem.operands[1:], strict=True))
        if len(moves) == 1:
            moves = [(moves[0][0], place) for place in _places(moves[0][1])]
        total = problem.operands[0]
        for op, number in moves:
            total = compute(total, op, number)
    if wrong_step is not None and wrong_step >= len(steps):
        total = _off(total, offset)
    written = {"direct": [], "short": steps[:-1], "full": steps}[style]
    return " ".join([*written, MARKER, str(total)])


def _off(value: int, offset: int) -> int:
    """`value + offset`, or `value - offset` where the sum would be negative."""
    return value + offset if value + offset >= 0 else value - offset


def extract_answer(completion: str) -> str | None:
    """Reads the final answer of a completion.

    Args:
        completion: generated text without special tokens.

    Returns:
        The last number after the last `####`; without a marker the last number of the text; None where there is none.
        Thousands separators are removed.

    Example:
        >>> extract_answer("27+40=67 67+5=72 #### 72"), extract_answer("27+45=71"), extract_answer("27+45=72 #### ?")
        ('72', '71', None)
    """
    found = _NUMBER.findall(completion.rpartition(MARKER)[2])
    return found[-1].replace(",", "") if found else None


def is_correct(completion: str, answer: str) -> bool:
    """Whether the extracted answer equals `answer` as text."""
    return extract_answer(completion) == answer
