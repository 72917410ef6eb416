"""`visual-grpo benchmark`: methods against each other or against a rival, same budget, several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a benchmark (a wrong one prints the list).")],
    seeds: Annotated[int, typer.Option("--seeds", metavar="K", min=1, help="Seeds an arm.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for the runs and the report.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a benchmark and print every arm's result with its spread."""
    from visual_grpo.cli.output import as_mapping, print_json, print_mapping
    from visual_grpo.registry import Registry

    benchmarks = Registry[object]("benchmark", builtin_module="visual_grpo.eval.benchmarks:TABLE")
    run = benchmarks.get(name)
    assert callable(run)
    values = as_mapping(run(seeds=seeds, out=out if out is not None else Path("runs") / f"benchmark_{name}"))
    if as_json:
        print_json(values)
    else:
        print_mapping(name, values)
