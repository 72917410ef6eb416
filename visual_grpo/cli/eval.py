"""`visual-grpo eval`: a published protocol over a model, a folder of images or a file of completions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of `visual-grpo list evals`.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value ...", help="Options of the protocol, e.g. samples=4 seed=1."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="Model folder, hub id or testbed/NAME to sample from.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", metavar="LORA", exists=True, help="LoRA to put on the model.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option("--images", metavar="DIR", exists=True, file_okay=False, help="Images made already."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option("--texts", metavar="FILE", exists=True, dir_okay=False, help="Completions made already (.jsonl)."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Prompts of a --model or a bare folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for results and samples.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", metavar="A B", help="Paired differences B - A of two result folders, in place of a run."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a model (--model), or images or texts that exist already, under a published protocol."""
    from visual_grpo.cli.output import as_mapping
    from visual_grpo.config_text import parse_overrides
    from visual_grpo.errors import UserError
    from visual_grpo.registry import EVALS

    EVALS.target(name)  # an unknown name is refused before anything is loaded
    sources = {"--model": model, "--images": images, "--texts": texts}
    given = [option for option, value in sources.items() if value is not None]
    if compare is not None:
        if given or options or adapter or prompts or out:
            raise UserError("--compare reads two result folders; it takes no model, images, texts, prompts or options.")
        from visual_grpo.registry import load_object

        found = load_object("visual_grpo.eval.compare:compare")(*compare, name)
        show(name, found, as_json)
        if found["only_a"] or found["only_b"]:
            print(
                f"Left out: {found['only_a']} samples that only A has and {found['only_b']} that only B has.",
                file=sys.stderr,
            )
        return
    if len(given) != 1:
        raise UserError(
            f"visual-grpo eval needs one of --model PATH, --images DIR and --texts FILE; "
            f"{' and '.join(given) or 'none'} was given."
        )
    if adapter is not None and model is None:
        raise UserError(f"--adapter is a LoRA for --model; with {given[0]} there is no model to put it on.")
    extra = parse_overrides(options or [])
    taken = sorted({"model", "adapter", "images", "texts", "prompts", "out"} & set(extra))
    if taken:
        raise UserError(f"give {taken[0]} as the option --{taken[0]}, not as {taken[0]}=...")
    if texts is not None:
        extra["texts"] = texts

    from visual_grpo.api import evaluate

    result = evaluate(name, model=model, adapter=adapter, images=images, prompts=prompts, out=out, **extra)
    show(name, as_mapping(result), as_json)


def show(name: str, values: dict[str, Any], as_json: bool) -> None:
    """Print a summary: its `table` with intervals where it has one, else its figures."""
    from visual_grpo.cli.output import print_figures, print_json, print_table

    table = values.get("table")
    if as_json:
        print_json(values)
    elif table:
        columns = [column for column in _COLUMNS if any(column in row for row in table)]
        print_table(name, columns, [[row.get(column) for column in columns] for row in table])
    elif values:
        print_figures(name, values)


_COLUMNS = ("group", "figure", "a", "b", "value", "low", "high", "p_value", "samples", "images", "prompts")
