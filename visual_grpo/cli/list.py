"""`visual-grpo list`: what can be named, instantly (nothing is imported but the tables)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from visual_grpo.registry import Registry


FACTS = ("range", "size", "licence")
"""What a reward of downloaded weights says about itself, in the order of the line."""


class Kind(StrEnum):
    """What can be listed."""

    models = "models"
    methods = "methods"
    rewards = "rewards"
    recipes = "recipes"
    evals = "evals"


def command(
    kind: Annotated[
        Kind,
        typer.Argument(
            metavar="|".join(Kind),
            help="What to list; models are families, each of which loads any model of its class.",
        ),
    ],
    as_json: Annotated[
        bool,
        typer.Option("--json", help='Print a JSON list of {"name", "summary", "origin", "target"} and further facts.'),
    ] = False,
) -> None:
    """List models, methods, rewards, recipes or evals, with one line about each."""
    from visual_grpo import registry
    from visual_grpo.cli.output import print_json, print_table

    registries: dict[Kind, Registry[Any]] = {
        Kind.models: registry.ADAPTERS,
        Kind.methods: registry.METHODS,
        Kind.rewards: registry.REWARDS,
        Kind.recipes: registry.RECIPES,
        Kind.evals: registry.EVALS,
    }
    rows = [_row(registries[kind], name) for name in registries[kind].names()]
    if as_json:
        print_json(rows)
        return
    third_party = any(row["origin"] != "built-in" for row in rows)
    columns = ["name", "summary", *(["origin"] if third_party else [])]
    shown = [{**row, "summary": _with_facts(row)} for row in rows]
    print_table("", columns, [[row[column] for column in columns] for row in shown], whole=["name"])


def _with_facts(row: dict[str, str]) -> str:
    """The summary and, on a line of its own, the facts: a column for each would leave none of them room."""
    facts = "; ".join(f"{fact} {row[fact]}" for fact in FACTS if fact in row)
    return f"{row['summary']}\n{facts}" if facts else row["summary"]


def _row(names: Registry[Any], name: str) -> dict[str, str]:
    from visual_grpo.errors import UserError

    try:
        return {
            "name": name,
            "summary": names.summary(name),
            "origin": names.origin(name),
            "target": names.target(name),
            **names.facts(name),
        }
    except UserError as error:  # a name held twice must not hide the others
        return {"name": name, "summary": str(error), "origin": "conflict", "target": ""}
