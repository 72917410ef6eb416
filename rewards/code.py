"""Share of the tests that a completion's program passes; nothing of it ever runs in this process (see `sandbox`).

Source: card rewards, section 7: tests in a separate process with limits, reward passed / total or all-passed 0 / 1, an error or
a time-out scores 0. Range [0, 1]. A row without tests is not applicable; tests that cannot be read are a failed row.

The candidate cannot forge a verdict. Expected outputs never enter its process: a program gets its input and the output is
compared here; functions get their arguments, and what they return (plain data) is judged in a second process that runs none of
the candidate's code.

Test formats, in the metadata column `tests` (or the data sets' own `test_cases`, `input_output`, `test_list`, `test`):

- `[{"input": "3\\n", "output": "4\\n"}, ...]`: programs, standard input to standard output;
- `{"inputs": [...], "outputs": [...]}`, the same in APPS' form; with `fn_name` calls of that function (or method of `Solution`);
- `["assert f(1) == 2", ...]`, as in MBPP, with `test_imports` / `test_setup_code` in columns of their own, and
  `entry_point` where the function has a name of Python's own (`sum`);
- `"def check(candidate): ..."` with a column `entry_point`, as in HumanEval: one test.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.sandbox import Isolation, Limits, check_isolation, run_program, run_tests

__all__ = ["Code", "Tests", "extract_program", "parse_tests", "same_output"]

TEST_KEYS = ("tests", "test_cases", "input_output", "test_list", "test")
SETUP_KEYS = ("test_imports", "test_setup_code", "test_setup")
_FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Tests:
    """What a program must do: cases of a program, or statements about its functions; one of the two is empty."""

    cases: tuple[tuple[str, str], ...] = ()
    """(standard input, expected standard output)."""
    statements: tuple[str, ...] = ()
    setup: str = ""
    functions: tuple[str, ...] = ()
    """names of the program that the row states (`entry_point`, `fn_name`)."""

    def __len__(self) -> int:
        return len(self.cases) + len(self.statements)


def extract_program(completion: str) -> str:
    """The last fenced Python block after any reasoning, or the whole text if there is none.

    >>> extract_program("Try:\\n```python\\nprint(1)\\n```")
    'print(1)\\n'
    """
    blocks = _blocks(completion)
    return blocks[-1] if blocks else completion


def _blocks(completion: str) -> list[str]:
    """The fenced Python blocks after any reasoning."""
    found: list[str] = _FENCE.findall(completion.rpartition("</think>")[2])
    return found


def same_output(output: str, expected: str) -> bool:
    r"""Equality of lines without trailing blanks, and without empty lines at the end.

    >>> same_output("1 2 \n\n", "1 2"), same_output("1  2", "1 2")
    (True, False)
    """
    got, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected))
    return got == wanted


def _text(value: Any) -> str:
    """Standard input or output as text: APPS gives some as a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"an input or output of a program must be a text; got {type(value).__name__}")


def _call(name: str, arguments: Any, expected: Any) -> str:
    """A statement that calls `name`; texts hold JSON, one argument a line (LiveCodeBench)."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
    if isinstance(expected, str):
        with suppress(json.JSONDecodeError):  # else a plain text
            expected = json.loads(expected)
    if not isinstance(arguments, Sequence) or not name.isidentifier():
        raise ValueError(f"the arguments of fn_name {name!r} must be a list, got {type(arguments).__name__}")
    return f"assert __same__({name}(*{list(arguments)!r}), {expected!r})"


def parse_tests(row: Mapping[str, Any], key: str | None = None) -> Tests | None:
    """Read the tests of a row; None if it has none.

    Args:
        row: metadata.
        key: column of the tests; None: the first of `TEST_KEYS` that the row has.

    Raises:
        ValueError: they have no known form; says which column.
    """
    name = next((k for k in ((key,) if key else TEST_KEYS) if row.get(k)), None)
    if name is None:
        return None
    try:
        return _parse(row, row[name])
    except (ValueError, TypeError, KeyError, SyntaxError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the tests in column {name!r} cannot be read ({reason}); see the forms in rewards/code.py"
        ) from error


def _parse(row: Mapping[str, Any], given: Any) -> Tests | None:
    parts = [row[k] for k in SETUP_KEYS if row.get(k)]
    setup = "\n".join("\n".join(part) if isinstance(part, list) else str(part) for part in parts)
    stated = tuple(str(row[k]) for k in ("entry_point", "fn_name") if row.get(k))
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        given = json.loads(given)
    if isinstance(given, str):
        entry = row.get("entry_point")
        if not entry:
            raise ValueError("a text of tests needs a column entry_point, the function that check(...) gets")
        return Tests(statements=(_compiled(f"{given}\ncheck({entry})"),), setup=_compiled(setup), functions=stated)
    if isinstance(given, Mapping):
        inputs, outputs = given["inputs"], given["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        shared = {"fn_name": given.get("fn_name")}
        given = [{"input": i, "output": o, **shared} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(given, Sequence):
        raise TypeError(f"expected a list, got {type(given).__name__}")
    if not given:
        return None
    if all(isinstance(test, str) for test in given):
        return Tests(statements=tuple(map(_compiled, given)), setup=_compiled(setup), functions=stated)
    functions = [
        test.get("fn_name") or (row.get("fn_name") if test.get("testtype") == "functional" else None) for test in given
    ]
    if all(functions):
        calls = [_call(str(f), test["input"], test["output"]) for f, test in zip(functions, given, strict=True)]
        named = tuple(dict.fromkeys(map(str, functions)))
        return Tests(statements=tuple(map(_compiled, calls)), setup=_compiled(setup), functions=named)
    if any(functions) or any(test.get("testtype") == "functional" for test in given):
        raise ValueError("tests of functions need fn_name each, and cannot be mixed with tests of programs")
    return Tests(cases=tuple((_text(test["input"]), _text(test["output"])) for test in given))


def _compiled(source: str) -> str:
    compile(source, "test.py", "exec")
    return source


@register_reward("code")
class Code(Reward):
    """Runs the last Python block of each completion against the row's tests.

    Details: `passed`, `total` (tests), `timed_out` (0/1) and `complete`, 1 where a fenced block was closed.
    """

    needs = frozenset({"texts"})
    rows_per_call = 8  # a row may take its limits in full

    def __init__(
        self,
        *,
        tests_key: str | None = None,
        score: Literal["fraction", "all"] = "fraction",
        seconds: float = 4.0,
        row_seconds: float = 20.0,
        memory_mb: int = 512,
        output_kb: int = 256,
        packages: bool = False,
        isolation: Isolation = "full",
        workers: int | None = None,
    ) -> None:
        """Choose tests, score and limits.

        Args:
            tests_key: metadata column of the tests; None: see `TEST_KEYS`.
            score: "fraction": passed / total; "all": 1 if all passed, else 0.
            seconds: processor time of one program, or of all tests of a row's functions.
            row_seconds: once a row has taken this long by the clock, its remaining programs are not run and have failed.
            memory_mb, output_kb, packages, isolation: see `sandbox.Limits`.
            workers: rows at a time; None: one a processor, four at most.
        """
        if score not in ("fraction", "all"):
            raise UserError(f"code: score is {score!r}; give fraction or all.")
        if isolation not in ("full", "limits"):
            raise UserError(f"code: isolation is {isolation!r}; give full or limits.")
        numbers = {"seconds": seconds, "row_seconds": row_seconds, "memory_mb": memory_mb, "output_kb": output_kb}
        for name, value in {**numbers, "workers": workers or 1}.items():
            if value <= 0:
                raise UserError(f"code: {name} is {value}; give a number above 0.")
        if memory_mb < 64:
            raise UserError(f"code: memory_mb is {memory_mb}; Python itself needs about 40, so give 64 or more.")
        self.tests_key, self.score, self.row_seconds = tests_key, score, row_seconds
        self.limits = Limits(
            seconds=seconds, memory_mb=memory_mb, output_kb=output_kb, packages=packages, isolation=isolation
        )
        self.workers = workers or min(4, os.cpu_count() or 1)

    def __call__(self, request: RewardRequest) -> RewardOutput:
        assert request.texts is not None
        tests = [parse_tests(row, self.tests_key) for row in request.metadata]  # before anything is run
        check_isolation(self.limits.isolation)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="code") as pool:
            found = list(pool.map(self._row, request.texts, tests))
        passed, timed_out = [float(p) for p, _ in found], [float(t) for _, t in found]
        total = [0 if test is None else len(test) for test in tests]
        values = [None if not n else self._value(p, n) for p, n in zip(passed, total, strict=True)]
        return RewardOutput.from_list(
            values,
            {
                "passed": passed,
                "total": [float(n) for n in total],
                "timed_out": timed_out,
                "complete": [float(bool(_blocks(text))) for text in request.texts],
            },
        )

    def _value(self, passed: float, total: int) -> float:
        return float(passed == total) if self.score == "all" else passed / total

    def _row(self, completion: str, tests: Tests | None) -> tuple[int, bool]:
        """Tests passed, and whether any ran out of time."""
        source = extract_program(completion)
        if tests is None or not source.strip() or "\0" in source:
            return 0, False
        if tests.statements:
            return run_tests(source, tests.setup, tests.statements, self.limits, tests.functions)
        passed, slow, began = 0, False, time.monotonic()
        for given, expected in tests.cases:
            if time.monotonic() - began > self.row_seconds:
                return passed, True
            done = run_program(source, given, self.limits)
            slow |= done.timed_out
            right = done.status == 0 and same_output(done.output.decode("utf-8", "replace"), expected)
            passed += right
            if not right and self.score == "all":
                break
        return passed, slow
