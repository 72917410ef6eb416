"""pyproject.toml, constraints.txt, Makefile, .ci/run and README agree with one another and with the tree."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OUTER = ("rewards", "pipelines", "eval")


def packages_of_the_tree() -> set[str]:
    found = set()
    for folder, package in {"visual_grpo": "visual_grpo", **{name: f"visual_grpo.{name}" for name in OUTER}}.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s;@/]+", line) for line in lines), (
        "constraints.txt holds name==version only"
    )
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_the_packages_are_those_of_the_tree() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_of_the_tree()


def test_every_folder_with_code_is_a_package() -> None:
    for folder in ("visual_grpo", *OUTER):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), (
                f"{path.parent} has no __init__.py and would not be installed"
            )


def test_the_table_of_package_folders_maps_the_three_outer_ones() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {f"visual_grpo.{name}": name for name in OUTER}


def installed_extras() -> list[str]:
    match = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert match
    return match[1].split(",")


@pytest.mark.parametrize("extra", [None, *installed_extras()])
def test_everything_that_make_installs_is_pinned_within_its_range(extra: str | None) -> None:
    project = PROJECT["project"]
    wanted = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    pinned = pins()
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} excludes the pinned {version}"


def test_ranges_stay_in_pyproject_and_pins_out_of_it() -> None:
    project = PROJECT["project"]
    everything = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert not [requirement for requirement in everything if "==" in requirement]
    assert {"ocr", "rewards", "text", "vllm", "deepspeed", "serve", "track", "dev"} <= set(
        project["optional-dependencies"]
    )


def test_the_readme_starts_with_the_two_commands() -> None:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert [line.partition("#")[0].strip() for line in blocks[0].strip().splitlines()] == [
        "make quickstart",
        "make test",
    ]


def test_ci_runs_make_test_in_an_environment_of_its_own() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert "rm -rf .venv" in text
    assert text.rstrip().endswith("make test")


def dry_run(*targets: str) -> str:
    command = ["make", "--dry-run", "--always-make", *targets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_both_commands_do_all_set_up_first() -> None:
    for target, job in {"quickstart": "visual-grpo train quickstart", "test": "-m pytest"}.items():
        steps = dry_run(target)
        install = steps.index("pip install")
        assert steps.index("-m venv") < install < steps.index(job)
        assert "-c constraints.txt" in steps


def test_make_test_lints_and_checks_types() -> None:
    steps = dry_run("test")
    assert "ruff check" in steps
    assert "ruff format --check" in steps
    assert "mypy" in steps
