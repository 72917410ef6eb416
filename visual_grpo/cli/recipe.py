"""`visual-grpo recipe`: recipes as files to edit."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Show recipes as YAML.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Show recipes as YAML."""


@app.command("show")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="A name of `visual-grpo list recipes`.")]) -> None:
    """Print a recipe as YAML: `visual-grpo recipe show NAME > mine.yaml`, edit, `visual-grpo train mine.yaml`."""
    from visual_grpo.registry import RECIPES

    recipe = RECIPES.get(name)

    from visual_grpo.config import to_yaml

    print(to_yaml(recipe()), end="")
