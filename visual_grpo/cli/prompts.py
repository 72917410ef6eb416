"""`visual-grpo prompts`: prompt files made by rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visual_grpo.errors import UserError

app = typer.Typer(help="Make prompt files.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make prompt files."""


@app.command("geneval")
def geneval(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", dir_okay=False, help="The prompt file (.jsonl).")],
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts in all.")] = 600,
    mix: Annotated[
        str,
        typer.Option(
            "--mix",
            metavar="TASK=W,...",
            help="Weights of the tasks: 'equal', 'flow_grpo', or position=7,counting=5,...",
        ),
    ] = "equal",
    classes: Annotated[
        str | None,
        typer.Option("--classes", metavar="FILE", help="Class names, one a line; 'testbed'; default: COCO's 80."),
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            "--exclude", metavar="FILE", exists=True, dir_okay=False, help="Prompt file to leave out (the test)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draw.")] = 43,
    max_count: Annotated[int, typer.Option("--max-count", help="Largest number of objects in a counting prompt.")] = 4,
) -> None:
    """Draw GenEval prompts for any class list, seed and task mix, in GenEval's schema."""
    from visual_grpo.registry import load_object

    module = "visual_grpo.eval.geneval_prompts"
    counts = load_object(f"{module}:share_out")(count, _mix(mix))
    banned = [str(row.get("prompt", "")) for path in exclude or () for row in _read(path)]
    names, colors = _classes(classes)
    options = {} if colors is None else {"colors": colors}
    rows = load_object(f"{module}:generate_prompts")(
        counts, classes=names, seed=seed, max_count=max_count, exclude=banned, **options
    )
    load_object(f"{module}:write_prompts")(out, rows)
    drawn = ", ".join(f"{number} {tag}" for tag, number in counts.items() if number)
    print(f"{len(rows)} prompts in {out} ({drawn})")


def _mix(text: str) -> dict[str, float]:
    from visual_grpo.registry import load_object

    preset: dict[str, float] = load_object("visual_grpo.eval.geneval_prompts:FLOW_GRPO_MIX")
    if text == "flow_grpo":
        return dict(preset)
    if text == "equal":
        return dict.fromkeys(load_object("visual_grpo.eval.geneval:TASKS"), 1.0)
    weights = {}
    for part in text.split(","):
        tag, _, weight = part.partition("=")
        try:
            weights[tag.strip()] = float(weight)
        except ValueError:
            raise UserError(
                f"--mix: {part!r} is no TASK=WEIGHT; give 'equal', 'flow_grpo' or such as position=7,colors=1."
            ) from None
    return weights


def _classes(given: str | None) -> tuple[list[str] | None, list[str] | None]:
    """(class names, colours); None: the defaults."""
    if given is None:
        return None, None
    if given == "testbed":
        from visual_grpo.testbed.scenes import COLORS, SHAPES

        return list(SHAPES), list(COLORS)
    path = Path(given)
    if not path.is_file():
        raise UserError(f"--classes: there is no file {given!r}; give a file of names, one a line, or 'testbed'.")
    from visual_grpo.data import read_text

    return [line.strip() for line in read_text(path, "class names").splitlines() if line.strip()], None


def _read(path: Path) -> list[dict[str, object]]:
    from visual_grpo.registry import load_object

    rows: list[dict[str, object]] = load_object("visual_grpo.eval.images:read_prompts")(path)
    return rows


@app.command("dpg")
def dpg(
    questions: Annotated[
        Path, typer.Argument(metavar="CSV", exists=True, dir_okay=False, help="DPG-Bench's questions (dpg_bench.csv).")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", dir_okay=False, help="The prompt file (.jsonl).")],
) -> None:
    """Write the prompts of DPG-Bench's question file, so that a model can be sampled for `visual-grpo eval dpg`."""
    from visual_grpo.registry import load_object

    items = load_object("visual_grpo.eval.dpg:read_questions")(questions)
    rows = [{"prompt": item.prompt, "item_id": item.item_id} for item in items]
    load_object("visual_grpo.eval.geneval_prompts:write_prompts")(out, rows)
    print(f"{len(rows)} prompts in {out}")
