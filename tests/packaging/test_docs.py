"""README and docs: links lead somewhere, commands parse, every name of the tables is told, and the first method trains."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from toy_run import toy_config

import visual_grpo as vg
from visual_grpo.api import any_plan
from visual_grpo.cli import app
from visual_grpo.cli.list import Kind
from visual_grpo.cli.testbed import TABLE
from visual_grpo.config_text import parse_overrides
from visual_grpo.pipelines import METHOD_TABLE, RECIPE_TABLE

ROOT = Path(__file__).resolve().parents[2]
EXTENDING = ROOT / "docs/extending.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not heading or heading in anchors(there), f"{page.name}: {target}"


def commands() -> list[tuple[str, str]]:
    """Commands of all code blocks but the two overviews, which hold placeholders."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if "[key=value ...]" not in block:
                lines = block.replace("\\\n", " ").splitlines()
                matches = [re.match(r"(?:(?:accelerate|torchrun) .*?-m )?visual[-_]grpo (.*)", line) for line in lines]
                found += [(page.name, match[1]) for match in matches if match]
    return found


def test_there_are_commands() -> None:
    assert len(commands()) > 30


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_parse(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and options of each command, and the whole config of a recipe with changes; files that it names are made here."""
    monkeypatch.chdir(tmp_path)
    command: Any = typer.main.get_command(app)
    words, name = shlex.split(line.partition(" > ")[0], comments=True), "visual-grpo"
    while hasattr(command, "commands"):
        name, command, words = words[0], command.commands[words[0]], words[1:]
    for word in words:
        if Path(word).suffix:
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
        elif re.fullmatch(r"[\w/]+", word):
            Path(word).mkdir(parents=True, exist_ok=True)
    values = command.make_context(name, words).params
    settings = [word for value in values.values() if isinstance(value, list) for word in value if "=" in str(word)]
    parse_overrides(settings)
    if name == "train" and not values["recipe"].endswith(".yaml") and "my_" not in line:
        any_plan(values["recipe"], settings)


def expanded(text: str) -> set[str]:
    """Words in backticks, `a_{b,c}` as `a_b` and `a_c`."""
    words: set[str] = set()
    for word in re.findall(r"`([^`]+)`", text):
        parts = [part.split(",") for part in re.split(r"[{}]", word)]
        words |= {"".join(choice) for choice in itertools.product(*parts)}
    return words


def test_every_method_and_recipe_has_its_place_in_the_table() -> None:
    text = (ROOT / "docs/methods.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert rows == set(METHOD_TABLE)
    assert set(RECIPE_TABLE) <= expanded(text)


def test_the_overview_names_all_commands_and_models_of_the_testbed() -> None:
    text = (ROOT / "README.md").read_text()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"visual-grpo {name}" in text
    (kinds,) = re.findall(r"visual-grpo list \{(.*?)\}", text)
    assert kinds.split(",") == list(Kind)
    (built,) = re.findall(r"visual-grpo testbed build \{(.*?)\}", text)
    assert set(built.split(",")) == set(TABLE)


def test_the_first_method_trains_behind_dapo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/extending.md, with rewards and where all answers are wrong, so that DAPO leaves no row."""
    (block,) = re.findall(r"^```python\n(# my_methods\.py\n.*?)^```", EXTENDING.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_methods.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    stack = ["dapo", {"my_methods:Rare": {"power": 2}}]
    wrong = {"exact_match": {"weight": 0.0}, "format": {"params": {"style": "boxed"}}}
    for rewards, found in (({"exact_match": 1.0}, True), (wrong, False)):
        config = toy_config(
            tmp_path, method=stack, rewards=rewards, train={"steps": 2}, loss={"top_entropy": 0.5}, eval={"every": 0}
        )
        folder = Path(vg.train(config, root=tmp_path / "runs").folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [line["metrics"]["rows"] for line in lines if line["kind"] == "train"]
        assert [count > 0 for count in rows] == [found, found]
