"""`visual-grpo train`: one run, from a recipe or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|FILE.yaml", help="A name of `visual-grpo list recipes`, or a config file."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="key=value ...",
            help="Settings to change, e.g. train.steps=20 train.optimizer.lr=1e-5; of a pipeline STAGE.train.steps=20.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the config, print the plan and its memory; train nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", file_okay=False, help="Run folder (default: runs/NAME).")
    ] = None,
) -> None:
    """Train: RECIPE is the name of a built-in recipe or a YAML file, of one run or of a pipeline of stages.

    The run folder gets config.yaml, metrics.jsonl, samples/, checkpoints/ and report.html; each stage has such a folder.
    """
    from visual_grpo.api import train_command

    train_command(recipe, overrides=list(overrides or []), resume=resume, dry_run=dry_run, out=out)
