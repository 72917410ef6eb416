"""Exit statuses and messages of the command line: a user's mistake is one message and status 2, never a traceback."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from visual_grpo import __version__
from visual_grpo.cli import main
from visual_grpo.cli.output import print_json
from visual_grpo.errors import RunError, UserError


@pytest.fixture(autouse=True)
def no_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL_GRPO_DEBUG", "0")  # `--debug` sets it for the process


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """In place of `visual_grpo.api`: records its calls and raises or returns what a test sets."""
    fake = SimpleNamespace(calls=[], error=None, result={"score": 0.5})

    def call(*args: Any, **kwargs: Any) -> Any:
        fake.calls.append((args, kwargs))
        if fake.error is not None:
            raise fake.error
        return fake.result

    fake.train_command = fake.evaluate = call
    monkeypatch.setitem(sys.modules, "visual_grpo.api", fake)  # type: ignore[arg-type]
    return fake


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "visual_grpo", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_help_lists_the_commands_and_is_fast() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    for command in (
        "train",
        "eval",
        "score",
        "list",
        "recipe",
        "prompts",
        "compare",
        "serve-rewards",
        "testbed",
        "benchmark",
    ):
        assert command in done.stdout
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1, f"--help took {spent:.2f} s of processor time"


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "eval",
        "score",
        "list",
        "recipe",
        "recipe show",
        "prompts geneval",
        "compare",
        "serve-rewards",
        "testbed",
        "testbed build",
        "benchmark",
    ],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"visual-grpo {__version__}"


WRONG = [
    ["trian", "x"],
    ["train"],
    ["train", "x", "--resum"],
    ["list"],
    ["list", "rewardz"],
    ["recipe", "show"],
    ["recipe", "show", "no_such_recipe"],
    ["eval", "no_such_eval", "--images", "."],
    ["score", "--reward", "no_such_reward", "--images", ".", "--prompts", "no_such_file.txt"],
    ["score", "--images", "."],
    ["serve-rewards", "no_such_reward"],
    ["serve-rewards", "brightness", "jpeg_compressibility.batch_size=2"],
    ["serve-rewards", "brightness", "brightness.params.size=2"],
    ["compare"],
    ["compare", "no_such_run"],
    ["testbed", "build", "no_such_model"],
    ["benchmark", "no_such_benchmark"],
    ["benchmark", "x", "--seeds", "0"],
    ["benchmark", "x", "--seeds", "many"],
]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_wrong_input_is_status_2_on_stderr_without_a_traceback(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    printed = capsys.readouterr()
    assert printed.err.strip()
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["recipe", "show", "no_such_recipe"], "Error: no recipe named 'no_such_recipe'."),
        (["eval", "no_such_eval", "--images", "."], "Error: no evaluation named 'no_such_eval'."),
        (["testbed", "build", "sd3_tinny"], "Did you mean 'sd3_tiny'? Known: flux_tiny, lm_tiny"),
        (["benchmark", "no_such_benchmark"], "Error: no benchmark named 'no_such_benchmark'."),
    ],
)
def test_a_wrong_name_in_a_process_of_its_own(args: list[str], message: str, tmp_path: Path) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_train_hands_its_arguments_on(api: SimpleNamespace, tmp_path: Path) -> None:
    args = [
        "train",
        "quickstart",
        "train.steps=20",
        "--resume",
        "name=a b",
        "--dry-run",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(args) == 0
    assert api.calls == [
        (
            ("quickstart",),
            {"overrides": ["train.steps=20", "name=a b"], "resume": True, "dry_run": True, "out": tmp_path / "run"},
        )
    ]
    assert main(["train", "quickstart"]) == 0
    assert api.calls[1][1] == {"overrides": [], "resume": False, "dry_run": False, "out": None}


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("train.lr must be positive, got -1."), 2, "Error: train.lr must be positive, got -1.\n"),
        (RunError("the loss is not finite."), 1, "Error: the loss is not finite.\n"),
    ],
)
def test_errors_of_a_run(
    api: SimpleNamespace, error: Exception, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.error = error
    assert main(["train", "quickstart"]) == status
    assert capsys.readouterr().err == message


def test_debug_adds_the_traceback(api: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    api.error = UserError("wrong.")
    assert main(["--debug", "train", "quickstart"]) == 2
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert printed.endswith("Error: wrong.\n")


def test_an_interrupt_is_status_130(api: SimpleNamespace) -> None:
    api.error = KeyboardInterrupt()
    assert main(["train", "quickstart"]) == 130


def test_eval_hands_on_its_arguments_and_prints_json(
    api: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("visual_grpo.registry.EVALS._static", {})
    from visual_grpo.registry import EVALS

    monkeypatch.setattr(EVALS, "_registered", {})
    EVALS.register("toy_eval", summary="x")(print)
    api.result = {"score": 0.5, "by_kind": {"two": float("nan")}}
    assert main(["eval", "toy_eval", "samples=4", "--images", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"score": 0.5, "by_kind": {"two": None}}
    (name,), given = api.calls[0]
    assert name == "toy_eval"
    assert given == {"model": None, "adapter": None, "images": tmp_path, "prompts": None, "out": None, "samples": 4}
    assert main(["eval", "toy_eval", "--images", str(tmp_path)]) == 0
    assert "0.5000" in capsys.readouterr().out
    for wrong in (
        [],
        ["--images", str(tmp_path), "--model", "m"],
        ["--images", str(tmp_path), "--adapter", str(tmp_path)],
    ):
        assert main(["eval", "toy_eval", *wrong]) == 2
    assert len(api.calls) == 2
    (tmp_path / "texts.jsonl").write_text('{"text": "x"}\n')
    assert main(["eval", "toy_eval", "--texts", str(tmp_path / "texts.jsonl")]) == 0
    assert api.calls[2][1]["texts"] == tmp_path / "texts.jsonl"


def test_module_entry_of_the_evaluations() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "visual_grpo.eval", "no_such_eval"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no evaluation named 'no_such_eval'" in done.stderr


def test_an_error_of_the_system_is_one_message(api: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    api.error = PermissionError(13, "Permission denied", "/somewhere/results.jsonl")
    assert main(["train", "x"]) == 1
    assert capsys.readouterr().err.startswith("Error: Permission denied '/somewhere/results.jsonl': free space, change")


def test_json_for_a_terminal_without_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    print_json({"prompt": "漢字"})
    out.flush()
    assert json.loads(out.buffer.getvalue()) == {"prompt": "漢字"}  # type: ignore[attr-defined]


def test_a_working_directory_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["list", "methods"]) == 0
    monkeypatch.chdir(tmp_path)
