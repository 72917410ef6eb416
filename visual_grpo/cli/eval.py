"""`visual-grpo eval`: a published protocol over a model, a folder of images or a file of completions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
        typer.Option("--compare", metavar="A B", help="Paired differences B - A of two --out folders; scores nothing."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a model (--model), or images or texts that exist already, under a published protocol."""
    from visual_grpo.cli.output import as_mapping, print_figures, print_json
    from visual_grpo.config_text import parse_overrides
    from visual_grpo.errors import UserError
    from visual_grpo.registry import EVALS

    EVALS.target(name)  # an unknown name is refused before anything is loaded
    sources = {"--model": model, "--images": images, "--texts": texts}
    given = [option for option, value in sources.items() if value is not None]
    if compare is not None:
        if given or options:
            raise UserError(f"--compare reads two folders of results; leave out {(given + (options or []))[0]}.")
        _compare(compare, as_json)
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
    values = as_mapping(result)
    if as_json:
        print_json(values)
    else:
        print_figures(name, values)


def _compare(folders: tuple[Path, Path], as_json: bool) -> None:
    """Print the paired differences of two results."""
    from visual_grpo.cli.output import print_json, print_table
    from visual_grpo.registry import load_object

    found = load_object("visual_grpo.eval.results:compare")(*folders)
    if as_json:
        print_json(found)
        return
    left_out = f", {found['only_a']} and {found['only_b']} left out" if found["only_a"] or found["only_b"] else ""
    rows = [
        [f["figure"], f["a"], f["b"], f["value"], f"[{f['low']:+.4f}, {f['high']:+.4f}]", f["p_value"], f["items"]]
        for f in found["table"]
    ]
    title = f"{folders[1]} against {folders[0]}: paired over {found['items']} items{left_out}"
    print_table(title, ["figure", "A", "B", "B - A", "95 % interval", "p", "items"], rows)
