"""What runs in a sandboxed process: a candidate's program, its functions on call, or the judge of its functions.

Started as a script by `sandbox.Child`, which sends one JSON line (the job) on a pipe and waits for the byte that says that the
process is confined. Imports the standard library only. Nothing that a candidate must not know is ever sent to its process: it
gets inputs and arguments, never expected values, so the worst that it can do in here is to answer wrongly.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import json
import os
import sys
from typing import Any

__all__ = ["Handle", "decode", "encode", "judge", "main", "serve_calls"]

LINE = 4 << 20
PLAIN = (bool, type(None))


def encode(value: Any, kept: list[Any] | None = None) -> Any:
    """Plain data as JSON; anything else becomes a reference into `kept`, or is refused where there is none."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, str):
        return ["s", value]
    if isinstance(value, int):
        return ["i", format(value, "x")]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    for mark, kind in (("l", list), ("t", tuple), ("S", set), ("F", frozenset)):
        if isinstance(value, kind):
            return [mark, [encode(item, kept) for item in value]]
    if isinstance(value, dict):
        return ["d", [[encode(k, kept), encode(v, kept)] for k, v in value.items()]]
    if isinstance(value, Handle):
        return ["r", value._place]
    if kept is None:
        raise TypeError(f"{type(value).__name__} cannot be passed to the program under test")
    if hasattr(value, "tolist"):  # numpy
        return encode(value.tolist(), kept)
    kept.append(value)
    return ["r", len(kept) - 1]


def decode(value: Any, refer: Any) -> Any:
    """Plain data back from JSON; `refer(place)` gives what stands for a reference."""
    if isinstance(value, PLAIN):
        return value
    mark, body = value[0], value[1]
    if mark == "s":
        return str(body)
    if mark == "i":
        return int(body, 16)
    if mark == "f":
        return float.fromhex(body)
    if mark == "c":
        return complex(float.fromhex(body), float.fromhex(value[2]))
    if mark == "b":
        return bytes.fromhex(body)
    if mark in "ltSF":
        kind: Any = {"l": list, "t": tuple, "S": set, "F": frozenset}[mark]
        return kind([decode(item, refer) for item in body])
    if mark == "d":
        return {decode(k, refer): decode(v, refer) for k, v in body}
    if mark == "r":
        return refer(body)
    raise ValueError(f"no mark {mark!r}")


# -- the candidate's side ----------------------------------------------------------------------------------------------------


def serve_calls(source: str, calls: Any, answers: Any) -> None:
    """Run `source`, then call its functions and methods as asked, one JSON line each."""
    names: dict[str, Any] = {"__name__": "solution"}
    broken: BaseException | None = None
    try:
        exec(compile(source, "solution.py", "exec"), names)
    except BaseException as error:
        broken = error
    kept: list[Any] = []

    def find(place: Any) -> Any:
        if broken is not None:
            raise broken
        if isinstance(place, int):
            return kept[place]
        if place not in names and hasattr(names.get("Solution"), place):
            return getattr(names["Solution"](), place)
        if place not in names:
            raise NameError(f"name {place!r} is not defined")
        return names[place]

    for line in calls:
        try:
            job = json.loads(line)
            target = find(job["place"])
            if "attribute" in job:
                result = getattr(target, job["attribute"])
            else:
                positional, named = decode(job["arguments"], find)
                result = target(*positional, **named)
            answer = {"value": encode(result, kept)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": "".join(map(str, error.args[:1]))[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# -- the judge's side --------------------------------------------------------------------------------------------------------


class Handle:
    """Stands in the judge for a name or an object of the candidate; never equal, true or ordered, whatever the object says."""

    def __init__(self, ask: Any, place: Any) -> None:
        self._ask, self._place = ask, place

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask({"place": self._place, "arguments": encode((arguments, named))})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask({"place": self._place, "attribute": name})

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("an object of the program under test has no value of its own; compare plain data")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse  # type: ignore[assignment]


def same(value: Any, expected: Any) -> bool:
    """Equality in which tuples and lists are alike, as JSON has no tuples."""

    def plain(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [plain(part) for part in item]
        return {k: plain(v) for k, v in item.items()} if isinstance(item, dict) else item

    return bool(plain(value) == plain(expected))


def _foreign_names(trees: list[ast.AST]) -> tuple[set[str], set[str]]:
    """Names that the tests use and do not define: those of the program, and modules of the standard library.

    A name of both kinds (`select`) is the program's if it is called, and a module if something is taken out of it.
    """
    used: set[str] = set()
    defined: set[str] = set()
    called: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    foreign = used - defined - set(dir(builtins))
    modules = (foreign & sys.stdlib_module_names) - called
    return foreign - modules, modules


def judge(setup: str, tests: list[str], functions: list[str], calls: Any, answers: Any, verdicts: Any) -> None:
    """Run each test, the names of the candidate (`functions`, all unknown ones) bound to handles; a line "1" or "0" each."""

    asked = False

    def ask(job: dict[str, Any]) -> Any:
        nonlocal asked
        asked = True
        calls.write(json.dumps(job) + "\n")
        calls.flush()
        line = answers.readline(LINE)
        if not line.endswith("\n"):
            raise RuntimeError("the program under test has ended, or its answer is too long")
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), RuntimeError)
            kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
            raise kind(answer.get("message"))
        return decode(answer["value"], lambda place: Handle(ask, place))

    names: dict[str, Any] = {"__name__": "tests", "__same__": same}
    foreign, modules = _foreign_names([ast.parse(part) for part in (setup, *tests)])
    foreign = (foreign | set(functions)) - names.keys()
    try:
        if not foreign:
            raise NameError("the tests call nothing of the program; name its function in a column entry_point")
        names |= {name: Handle(ask, name) for name in foreign}
        # A module of the standard library must be the judge's own: the candidate's would learn what is compared with what.
        names |= {name: importlib.import_module(name) for name in modules}
        exec(compile(setup, "setup.py", "exec"), names)
    except BaseException as error:
        # Without the candidate's help it is the tests that are broken, which is no verdict on anybody.
        verdicts.write("0\n" * len(tests) if asked else f"setup: {type(error).__name__}: {error}\n")
        verdicts.flush()
        return
    for test in tests:
        try:
            exec(compile(test, "test.py", "exec"), names)
            passed = True
        except BaseException:
            passed = False
        verdicts.write(f"{int(passed)}\n")
        verdicts.flush()


def confine(layers: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Give up what `job` says; returns which of the kernel's layers hold."""
    full = job["isolation"] == "full"
    layers.limit_resources(memory=job["memory"], cpu_s=job["cpu_s"], processes=None if full else 0)
    if not full:
        return {"landlock": False, "seccomp": False}
    layers.drop_privileges()
    return {"landlock": layers.confine_files(job["readable"]), "seccomp": layers.filter_calls()}


def main() -> None:
    """Read the job from the first descriptor of the command line, confine this process, say so on the second, and begin."""
    control, ready = map(int, sys.argv[1:3])
    with os.fdopen(control, encoding="utf-8") as stream:
        job = json.loads(stream.readline())
    spec = importlib.util.spec_from_file_location("sandbox_layers", job["layers"])
    assert spec is not None
    assert spec.loader is not None
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    descriptors = job["descriptors"]
    layers.close_descriptors([ready, *descriptors])
    verdicts = None
    if job["mode"] == "judge":
        verdicts = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a test prints must not be taken for a verdict
    try:
        state = confine(layers, job)
    except Exception as error:  # also what an operating system without these calls raises
        state = {"error": f"{type(error).__name__}: {error}"}
    os.write(ready, json.dumps(state).encode() + b"\n")
    os.close(ready)
    if "error" in state:
        return
    sys.argv = ["solution.py"]
    if job["mode"] == "program":
        exec(compile(job["source"], "solution.py", "exec"), {"__name__": "__main__", "__builtins__": builtins})
        return
    incoming, outgoing = os.fdopen(descriptors[0]), os.fdopen(descriptors[1], "w")
    if job["mode"] == "calls":
        serve_calls(job["source"], incoming, outgoing)
    else:
        judge(job["setup"], job["tests"], job["functions"], outgoing, incoming, verdicts)


if __name__ == "__main__":
    main()
