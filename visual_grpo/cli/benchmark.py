"""`visual-grpo benchmark`: methods against each other or against a rival, same budget, several seeds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a benchmark (a wrong one prints the list).")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTION=VALUE ...]", help="Options of the benchmark, such as minutes=4."),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="K", min=1, help="Seeds an arm.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for the runs and the report.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a benchmark and print every arm's result with its spread."""
    from visual_grpo.api import check_types
    from visual_grpo.cli.output import as_mapping, print_json, print_mapping
    from visual_grpo.config_text import parse_overrides
    from visual_grpo.errors import UserError, did_you_mean
    from visual_grpo.registry import Registry

    benchmarks = Registry[object]("benchmark", builtin_module="visual_grpo.eval.benchmarks:TABLE")
    run = benchmarks.get(name)
    assert callable(run)
    given = parse_overrides(options or [])
    known = [key for key in inspect.signature(run).parameters if key not in {"seeds", "out"}]
    for key in given:
        if key not in known:
            there = f" It takes {', '.join(known)}." if known else " It takes none."
            raise UserError(f"benchmark {name!r} has no option {key!r}.{did_you_mean(key, known)}{there}")
    check_types(run, given, f"benchmark {name!r}")
    values = as_mapping(run(seeds=seeds, out=out if out is not None else Path("runs") / f"benchmark_{name}", **given))
    if as_json:
        print_json(values)
    else:
        print_mapping(name, values)
