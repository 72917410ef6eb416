"""The code reward: test formats, scores, and programs that try to cheat or to do harm, each contained and scored 0."""

# ruff: noqa: E501 - programs in one line each

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward
from visual_grpo.rewards.code import extract_program, parse_tests
from visual_grpo.rewards.sandbox import Limits, SandboxError, run_program, run_tests
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

CASES = [{"input": "3\n", "output": "4\n"}, {"input": "10\n", "output": "11"}]
ASSERTS = ["assert f(1) == 2", "assert f([1, 2]) == [2, 3]", "assert set(f((1,))) == set([2])", "assert not f([])"]
GOOD_PROGRAM = "print(int(input()) + 1)"
GOOD_FUNCTION = "def f(x):\n    return x + 1 if isinstance(x, int) else [i + 1 for i in x]"


def score(text, metadata, **params):
    reward = as_reward("code", params={"seconds": 1, "workers": 1, **params})
    texts, rows = ([text], [metadata]) if isinstance(metadata, dict) else (text, metadata)
    request = RewardRequest.build(["p"] * len(texts), texts=texts, metadata=rows)
    return reward(request)


def value(text, metadata, **params):
    return score(text, metadata, **params).values.item()


def fenced(source):
    return f"<think>```python\nprint('no')\n```</think> Here it is:\n```python\n{source}\n```\nDone."


class TestScores:
    def test_programs(self):
        half = "n = int(input())\nprint(4 if n == 3 else 0)"
        crash = "print(int(input()) + 1)\nraise SystemExit(3)"
        rows = [{"tests": CASES}] * 4
        output = score([fenced(GOOD_PROGRAM), half, crash, ""], rows)
        assert output.values.tolist() == [1.0, 0.5, 0.0, 0.0]
        assert output.details["passed"].tolist() == [2, 1, 0, 0]
        assert output.details["total"].tolist() == [2, 2, 2, 2]
        assert output.details["complete"].tolist() == [1, 0, 0, 0]
        assert value(half, {"tests": CASES}, score="all") == 0.0

    def test_functions(self):
        assert value(fenced(GOOD_FUNCTION), {"test_list": ASSERTS}) == 1.0
        assert value("def f(x): return x + 1", {"test_list": ASSERTS}) == 0.25
        assert value("def g(x): return x + 1", {"test_list": ASSERTS}) == 0.0
        assert value("def f(x: return", {"test_list": ASSERTS}) == 0.0

    def test_the_forms_of_the_data_sets(self):
        method = "class Solution:\n    def add(self, a, b):\n        return (a + b, a)"
        apps = '{"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3, 1], [7, 3]]}'
        assert value(method, {"input_output": apps}) == 1.0
        functional = [{"input": "1\n2", "output": "[3, 1]", "testtype": "functional"}]
        assert value(method, {"tests": functional, "fn_name": "add"}) == 1.0
        human = {
            "test": "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i + 1",
            "entry_point": "f",
        }
        assert value(GOOD_FUNCTION, human) == 1.0
        assert value("def f(x): return 1", human) == 0.0
        imports = {"test_list": ["assert math.isclose(half(3), 1.5)"], "test_imports": ["import math"]}
        assert value("def half(x): return x / 2", imports) == 1.0

    def test_functions_with_names_of_pythons_own(self):
        source = "def sum(a, b): return a * b\ndef select(a): return a"
        row = {"test_list": ["assert sum(2, 3) == 6", "assert select(1) == 1", "assert math.sqrt(sum(2, 2)) == 2"]}
        assert value(source, {**row, "entry_point": "sum"}) == 1.0
        assert value(source, row) == pytest.approx(1 / 3)

    def test_values_of_every_plain_kind(self):
        tests = [
            f"assert f({v}) == {v}"
            for v in ("1.5", "10**400", "'é'", "b'a'", "{1: (2, {3})}", "None", "1j", "frozenset()")
        ]
        assert value("def f(x): return x", {"tests": tests}) == 1.0

    def test_objects_and_errors_of_the_program(self):
        stack = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()"
        tests = [
            "s = Stack(); s.push(3); assert s.pop() == 3",
            "try:\n    Stack().pop()\nexcept IndexError: pass\nelse: assert 0",
        ]
        assert value(stack, {"tests": tests}) == 1.0

    def test_rows_without_tests_are_not_applicable_and_broken_tests_are_failed(self):
        suite = RewardSuite({"code": {"params": {"seconds": 1}}})
        rows = [{}, {"tests": []}, {"tests": [{"in": "1"}]}, {"tests": CASES}]
        batch = suite.score(RewardRequest.build(["p"] * 4, texts=[GOOD_PROGRAM] * 4, metadata=rows))
        states = [RewardStatus.NOT_APPLICABLE, RewardStatus.NOT_APPLICABLE, RewardStatus.FAILED, RewardStatus.OK]
        assert batch.status[:, 0].tolist() == states
        assert "the tests in column 'tests' cannot be read" in suite.failures[0].error
        with pytest.raises(SandboxError, match="set-up code fails"):
            run_tests("", "import no_such_module", ["assert f(1)"], Limits(seconds=1))
        with pytest.raises(SandboxError, match="call nothing of the program"):
            run_tests("", "", ["assert sum([1]) == 1"], Limits(seconds=1))

    @pytest.mark.parametrize("tests", ["def check(f): pass", 3, {"inputs": ["1"], "outputs": []}, ["assert f("]])
    def test_unreadable_tests(self, tests):
        with pytest.raises(ValueError, match="cannot be read"):
            parse_tests({"tests": tests})

    @pytest.mark.parametrize("params", [{"score": "some"}, {"isolation": "none"}, {"seconds": 0}, {"memory_mb": 10}])
    def test_wrong_options(self, params):
        with pytest.raises(UserError, match=r"^code: "):
            as_reward("code", params=params)

    def test_the_program_is_the_last_block_after_the_reasoning(self):
        assert extract_program(fenced("x = 1")) == "x = 1\n"
        assert extract_program("x = 1") == "x = 1"


FLAG = "/tmp/visual_grpo_code_test"
HARM = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork bomb that goes on": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "10 GB": "x = bytearray(10 * 10**9)\nx[::4096] = b'1' * len(x[::4096])",
    "10 GB in parts": "x = []\nwhile True: x.append('a' * 10**6)",
    "endless loop": "while True: pass",
    "sleeping": "import time\ntime.sleep(99)",
    "deleting": f"import os\nos.remove('{FLAG}')",
    "overwriting": f"open('{FLAG}', 'w').write('x')",
    "writing through a call of C": f"import ctypes\nctypes.CDLL(None).unlink(b'{FLAG}')\nctypes.CDLL(None).truncate(b'{FLAG}', 0)",
    "making a file": f"open('{FLAG}.new', 'x')",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1).send(b'x')\nprint(4)",
    "environment": "import os\nprint(os.environ['VISUAL_GRPO_SECRET'])",
    "environment of the parent": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
    "another program": f"import subprocess\nsubprocess.run(['rm', '{FLAG}'])",
    "killing the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "killing all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "a signal by way of a pipe": "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETSIG, 9); fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "limits of the parent": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))",
    "flood": "while True: print('4' * 10**5)",
}
CHEATS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "printing the verdict": "print('1\\n' * 99, 'passed', '{\"passed\": 2}')",
    "builtins": "import builtins\nbuiltins.len = builtins.sum = lambda *a: 2\nbuiltins.isinstance = lambda *a: True\nbuiltins.print = lambda *a, **k: None",
    "json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(x): return x",
    "always equal": "class E:\n    def __eq__(self, o): return True\n    def __bool__(self): return False\n    def __iter__(self): return iter([self])\n    __hash__ = lambda s: 0\ndef f(x): return E()",
    "equal number": "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef f(x): return E(77)",
    "forged lines": "import os\nfor fd in range(64):\n    for _ in range(4):\n        try: os.write(fd, b'1\\n')\n        except OSError: pass\ndef f(x): return 99",
    "forged answers": "import os, json\nfor fd in range(64):\n    try: os.write(fd, (json.dumps({'value': True}) + '\\n').encode() * 9)\n    except OSError: pass\ndef f(x): return 99",
    "deep answer": "import os\nfor fd in range(64):\n    try: os.write(fd, b'[' * 60000 + b'\\n')\n    except OSError: pass\ndef f(x): return 99",
    "reading the frames": "import gc, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'tests' in o and 'setup' in o]\ndef f(x): return found[0]['tests']",
    "no more asserts": "import sys\nsys.modules['math'] = None\n__debug__ = False",
}  # fmt: skip


@pytest.fixture
def flag(monkeypatch):
    monkeypatch.setenv("VISUAL_GRPO_SECRET", "4")
    path = Path(FLAG)
    path.write_text("here")
    yield path
    path.unlink()


@pytest.mark.parametrize("name", HARM)
def test_harm_is_contained_and_scores_0(name, flag, unused_port):
    source = HARM[name].replace("PORT", str(unused_port.getsockname()[1]))
    began = time.monotonic()
    assert value(source, {"tests": CASES[:1]}, memory_mb=256) == 0.0
    assert time.monotonic() - began < 30
    assert flag.read_text() == "here"
    assert not Path(f"{FLAG}.new").exists()
    assert not leftovers()
    unused_port.settimeout(0)
    with pytest.raises(BlockingIOError):
        unused_port.accept()


@pytest.mark.parametrize("name", ["fork bomb", "10 GB", "endless loop", "deleting", "socket", "environment"])
def test_harm_in_a_function_is_contained_and_scores_0(name, flag, unused_port):
    source = HARM[name].replace("PORT", str(unused_port.getsockname()[1]))
    inside = "def f(x):\n" + "\n".join(f"    {line}" for line in source.splitlines())
    assert value(inside, {"tests": ASSERTS[:1]}, memory_mb=256) == 0.0
    assert flag.read_text() == "here"
    assert not leftovers()


def test_a_run_goes_on_beside_all_of_it(flag, unused_port):
    """One batch of a run with every kind of harm in it: the honest rows are scored, and nothing has failed."""
    kinds = ("fork bomb", "10 GB", "endless loop", "deleting", "socket", "environment")
    bad = [HARM[kind].replace("PORT", str(unused_port.getsockname()[1])) for kind in kinds] + [CHEATS["builtins"]]
    texts = [GOOD_PROGRAM, *bad, GOOD_PROGRAM]
    made = RewardRequest.build(["p"] * len(texts), texts=texts, metadata=[{"tests": CASES}] * len(texts))
    with RewardSuite({"code": {"params": {"seconds": 1, "memory_mb": 256}}}) as suite:
        batch = suite.submit(made).result(120)
        assert batch.values[:, 0].tolist() == [1.0, *[0.0] * len(bad), 1.0]
        assert (batch.status == RewardStatus.OK).all()
        again = suite.submit(made.take([0])).result(120)
        assert again.values.item() == 1.0
    assert flag.read_text() == "here"
    assert not leftovers()


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_score_0(name):
    tests = ["assert f(1) == 2", "assert f(2) == 3", "assert math.sqrt(f(3)) == 2"]
    output = score([CHEATS[name]] * 2, [{"tests": CASES}, {"tests": tests}])
    assert output.values.tolist() == [0.0, 0.0]


@pytest.fixture
def unused_port():
    """A socket that listens and must get no visitor."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def leftovers():
    """Sandboxed processes that are still there."""
    mine = str(os.getpid())
    done = subprocess.run(["ps", "-o", "args", "--ppid", mine], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if "sandbox_child" in line]


def test_what_ordinary_programs_use_works():
    source = """
import asyncio, collections, datetime, decimal, fractions, hashlib, heapq, itertools, math, random, re, string, sys, threading, zlib
sys.setrecursionlimit(10**5)
threading.stack_size(1 << 26)
async def later():
    await asyncio.sleep(0.001)
    return 1
def depth(n): return n and depth(n - 1)
def run():
    print(asyncio.run(later()), depth(5000), hashlib.sha256(b"a").hexdigest()[:4], len(sys.stdin.read()))
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    done = run_program(source, "x" * 300_000, Limits(seconds=5))
    assert (done.output, done.status) == (b"1 0 ca97 300000\n", 0)


def test_large_programs_and_answers():
    source = "x = '" + "a" * 300_000 + "'\ndef f(n): return x[:n]"
    assert run_tests(source, "", ["assert len(f(300000)) == 300000", "assert f(1) == 'a'"], Limits(seconds=2)) == (
        2,
        False,
    )


def test_installed_packages_are_a_choice():
    source = "import numpy\ndef f(n): return numpy.arange(n)"
    row = {"tests": ["assert f(3) == [0, 1, 2]"]}
    assert value(source, row, packages=True, memory_mb=1024, seconds=5) == 1.0
    assert value(source, row) == 0.0


def test_without_full_isolation_time_and_memory_are_still_limited(caplog):
    for name in ("endless loop", "10 GB", "overwriting"):
        assert (
            value(HARM[name].replace(FLAG, "/tmp/visual_grpo_never"), {"tests": CASES[:1]}, isolation="limits") == 0.0
        )
    Path("/tmp/visual_grpo_never").unlink(missing_ok=True)
    assert value(GOOD_PROGRAM, {"tests": CASES}, isolation="limits") == 1.0


def test_the_child_imports_nothing_of_ours():
    code = "import sys; sys.path.insert(0, 'x')\nfor m in ('torch', 'visual_grpo', 'numpy'): sys.modules[m] = None\n"
    for name in ("sandbox_child", "sandbox_layers"):
        path = Path(__file__).parents[2] / "rewards" / f"{name}.py"
        subprocess.run(
            [sys.executable, "-S", "-c", code + f"exec(open({str(path)!r}).read(), {{'__name__': 'x'}})"], check=True
        )
