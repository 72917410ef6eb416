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
    """Print a recipe as YAML with every setting filled in, to edit and to train with."""
    from visual_grpo.registry import RECIPES

    RECIPES.target(name)  # an unknown name is refused before anything is loaded

    from visual_grpo.api import recipe_yaml

    print(recipe_yaml(name), end="")
