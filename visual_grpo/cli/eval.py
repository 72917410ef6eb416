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
        typer.Argument(
            metavar="key=value ...",
            help="Options of the protocol, e.g. detector=mask2former; with --model also of the sampling: samples=4 seed=42 "
            "batch=32 dtype=bfloat16 sampling.steps=40 sampling.guidance=4.5.",
        ),
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
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Prompts of a --model, of a flat folder of images or of --texts: a .jsonl or .txt file; for a --model also "
            "testbed/scenes and the like.",
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
    from visual_grpo.errors import UserError
    from visual_grpo.registry import EVALS

    EVALS.target(name)  # an unknown name is refused before anything is loaded
    sources = {"--model": model, "--images": images, "--texts": texts}
    given = [option for option, value in sources.items() if value is not None]
    if compare is not None:
        if given or options or adapter or prompts or out:
            raise UserError("--compare reads two result folders; it takes no model, images, texts, prompts or options.")
        _compare(name, *compare, as_json)
        return
    if len(given) != 1:
        raise UserError(
            f"visual-grpo eval needs one of --model PATH, --images DIR and --texts FILE; "
            f"{' and '.join(given) or 'none'} was given."
        )
    if adapter is not None and model is None:
        raise UserError(f"--adapter is a LoRA for --model; with {given[0]} there is no model to put it on.")
    _check_prompts(prompts, model)
    extra = _options(options or [])
    if texts is not None:
        extra["texts"] = texts

    from visual_grpo.api import evaluate

    result = evaluate(name, model=model, adapter=adapter, images=images, prompts=prompts, out=out, **extra)
    show(name, as_mapping(result), as_json)
    folder = out if out is not None or model is None else Path(f"eval-{name}")
    if folder is not None and result and not as_json:
        print(f"results: {folder}")


def _compare(name: str, a: Path, b: Path, as_json: bool) -> None:
    """Print the paired differences of two result folders."""
    from visual_grpo.registry import load_object

    found = load_object("visual_grpo.eval.compare:compare")(a, b, name)
    show(f"{name}: a = {a}, b = {b}", found, as_json)
    if found["only_a"] or found["only_b"]:
        print(
            f"Left out: {found['only_a']} samples that only a has and {found['only_b']} that only b has.",
            file=sys.stderr,
        )


def _options(given: list[str]) -> dict[str, Any]:
    """The options of the protocol; what is an option of the command line is refused among them."""
    from visual_grpo.config_text import parse_overrides
    from visual_grpo.errors import UserError

    extra = parse_overrides(given)
    taken = sorted({"model", "adapter", "images", "texts", "prompts", "out"} & set(extra))
    if taken:
        raise UserError(f"give {taken[0]} as the option --{taken[0]}, not as {taken[0]}=...")
    return extra


def _check_prompts(prompts: str | None, model: str | None) -> None:
    """Refuse a prompt file that is not there; a model can also be asked for a world of the testbed."""
    from visual_grpo.errors import UserError

    world = model is not None and prompts is not None and prompts.startswith("testbed/")
    if prompts is not None and not world and not Path(prompts).is_file():
        worlds = ", and it is no world of the testbed such as testbed/scenes" if model is not None else ""
        raise UserError(f"--prompts: there is no file {prompts!r}{worlds}.")


def show(title: str, values: dict[str, Any], as_json: bool) -> None:
    """Print a summary: its `table` with intervals where it has one, else its figures."""
    from visual_grpo.cli.output import print_figures, print_json, print_table

    table = values.get("table")
    if as_json:
        print_json(values)
    elif table:
        paired = any("a" in row for row in table)
        keys = [key for key in _COLUMNS if any(key in row for row in table) and not (paired and key == "prompts")]
        columns = ["b - a" if paired and key == "value" else _COLUMNS[key] for key in keys]
        print_table(title, columns, [[_cell(row, key) for key in keys] for row in table], whole=columns[1:])
    elif values:
        print_figures(title, values)


_COLUMNS = {
    "figure": "figure",
    "a": "a",
    "b": "b",
    "value": "value",
    "low": "95 % interval",
    "p_value": "p",
    "samples": "n",
    "images": "images",
    "prompts": "prompts",
}


def _cell(row: dict[str, Any], key: str) -> Any:
    """What a column shows of a row of the table: the group stands before the figure, the ends of the interval in one cell."""
    value = row.get(key)
    if key == "figure" and row.get("group"):
        return f"{row['group']}: {value}"
    if key == "low" and value is not None:
        return f"{value:.3f} to {row['high']:.3f}"
    return value
