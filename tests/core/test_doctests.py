"""Runs the worked examples in the docstrings of every module that has one."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"visual_grpo": "visual_grpo", **{name: f"visual_grpo.{name}" for name in ("rewards", "pipelines", "eval")}}


def with_examples() -> list[str]:
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *parts]).removesuffix(".__init__"))
    return found


@pytest.mark.parametrize("name", with_examples())
def test_the_examples_of_a_module(name: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0
