"""The command line: one file a subcommand. Heavy imports stand inside the commands, so that `--help` is instant.

Exit status: 0 done, 1 the run failed, 2 the user's input is wrong, 130 interrupted. An error of the user's input is one
message on stderr; `visual-grpo --debug COMMAND ...` or VISUAL_GRPO_DEBUG=1 adds the traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from visual_grpo import __version__
from visual_grpo.cli.benchmark import command as benchmark_command
from visual_grpo.cli.compare import command as compare_command
from visual_grpo.cli.eval import command as eval_command
from visual_grpo.cli.list import command as list_command  # `list` is that module here, not the builtin
from visual_grpo.cli.prompts import app as prompts_app
from visual_grpo.cli.recipe import app as recipe_app
from visual_grpo.cli.score import command as score_command
from visual_grpo.cli.serve_rewards import command as serve_rewards_command
from visual_grpo.cli.testbed import app as testbed_app
from visual_grpo.cli.train import command as train_command
from visual_grpo.errors import RunError, UserError

__all__ = ["app", "main"]

_DEBUG = "VISUAL_GRPO_DEBUG"

app = typer.Typer(
    name="visual-grpo",
    help="Post-train image, vision-language and text generators with group-relative RL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("eval")(eval_command)
app.command("score")(score_command)
app.command("list")(list_command)
app.add_typer(recipe_app, name="recipe")
app.add_typer(prompts_app, name="prompts")
app.command("compare")(compare_command)
app.command("serve-rewards")(serve_rewards_command)
app.add_typer(testbed_app, name="testbed")
app.command("benchmark")(benchmark_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"visual-grpo {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if debug:
        os.environ[_DEBUG] = "1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit status.
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was deleted: absolute paths still work
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # `--reward my_module:MyReward` finds a module of the working directory
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(
                OSError
            ):  # a stream whose descriptor was replaced by a pipe cannot be flushed by seeking
                stream.reconfigure(
                    errors="backslashreplace"
                )  # a terminal without UTF-8 must not end a run over a prompt
    args = sys.argv[1:] if argv is None else [*argv]
    try:
        app(args=args, prog_name="visual-grpo")
    except SystemExit as stop:
        if stop.code == 130:  # typer's answer to Ctrl-C
            print("Interrupted.", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except (UserError, RunError) as error:
        return _report(error, error.exit_status)
    except OSError as error:  # a full disk, a folder without rights, a network that is gone
        where = f" {error.filename!r}" if error.filename is not None else ""
        reason = f"{error.strerror or error or type(error).__name__}{where}"
        return _report(error, 1, f"{reason}: free space, change the rights or give another path (--debug shows where)")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


def _report(error: Exception, status: int, message: str | None = None) -> int:
    """Print one clear message, or the traceback as well where it was asked for."""
    if os.environ.get(_DEBUG, "") not in ("", "0"):
        traceback.print_exception(error, file=sys.stderr)
    print(f"Error: {message or error}", file=sys.stderr)
    return status
