"""A wheel is built from an sdist, listed against the tree, installed elsewhere and used from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("rewards", "pipelines", "eval")
FOLDERS = ("visual_grpo", *OUTER)
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.egg-info")


def tree(root: Path) -> set[str]:
    """Every file that belongs in the wheel, under the name it has there."""
    found = set()
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file():
                inner = path.relative_to(root).as_posix()
                found.add(inner if folder == "visual_grpo" else f"visual_grpo/{inner}")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build in the checkout would leave folders there, and find those of the last one."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=CACHES)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return target


def python(*args: str, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=120, check=False, env=env, cwd=cwd
    )


def test_the_wheel_holds_the_tree_and_nothing_else(dist: Path, source: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        listed = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing, extra = tree(source) - listed, listed - tree(source)
    assert not missing, f"not in the wheel (add the package or its package-data to pyproject.toml): {sorted(missing)}"
    assert not extra, f"in the wheel but not in the tree: {sorted(extra)}"


def test_the_wheel_is_small_enough_to_ship(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < 100e6


def test_the_sdist_builds_and_holds_the_three_outer_folders(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"{folder}/__init__.py" for folder in FOLDERS} <= names


def test_the_installed_copy_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    code = """
import json, visual_grpo, visual_grpo.rewards, visual_grpo.pipelines.flow, visual_grpo.eval
print(json.dumps([m.__file__ for m in (visual_grpo, visual_grpo.rewards, visual_grpo.pipelines.flow, visual_grpo.eval)]))
"""
    done = python("-c", code, path=[installed], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for file in json.loads(done.stdout):
        assert Path(file).is_relative_to(installed), f"{file} is not of the wheel"
    listed = python("-m", "visual_grpo", "list", "rewards", "--json", path=[installed], cwd=tmp_path)
    here = python("-m", "visual_grpo", "list", "rewards", "--json", path=[ROOT], cwd=tmp_path)
    assert json.loads(listed.stdout) == json.loads(here.stdout)
    done = python("-m", "visual_grpo.eval", "no_such_eval", path=[installed], cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_console_script(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "visual-grpo"
    done = python(str(script), "--version", path=[installed], cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("visual-grpo ")


def test_the_checkout_as_working_directory_wins_and_is_whole(installed: Path) -> None:
    code = "import visual_grpo.rewards as r, visual_grpo as v; print(v.__file__); print(r.__file__)"
    done = python("-c", code, path=[installed], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert Path(line).is_relative_to(ROOT)


BLUE = """
def blue(images, prompts, metadata):
    return [float(v) for v in images[:, 2].mean((1, 2))]
"""


@pytest.fixture
def third_party(tmp_path: Path) -> Path:
    """A package that knows nothing of this one but the names of the entry-point groups."""
    folder = tmp_path / "site"
    info = folder / "blue_reward-0.1.dist-info"
    info.mkdir(parents=True)
    (folder / "blue_reward.py").write_text(BLUE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: blue-reward\nVersion: 0.1\n")
    kinds = {"rewards": "blue", "methods": "blue_method", "adapters": "blue_model", "evals": "blue_eval"}
    (info / "entry_points.txt").write_text(
        "\n".join(f"[visual_grpo.{kind}]\n{name} = blue_reward:blue" for kind, name in kinds.items())
    )
    return folder


def test_entry_points_of_a_third_party_are_found(installed: Path, third_party: Path, tmp_path: Path) -> None:
    for kind, name in {
        "rewards": "blue",
        "methods": "blue_method",
        "models": "blue_model",
        "evals": "blue_eval",
    }.items():
        done = python("-m", "visual_grpo", "list", kind, "--json", path=[installed, third_party], cwd=tmp_path)
        rows = {row["name"]: row for row in json.loads(done.stdout)}
        assert rows[name]["origin"] == "distribution blue-reward"
        assert rows[name]["target"] == "blue_reward:blue"


def test_a_third_partys_reward_scores(installed: Path, third_party: Path, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8), (0, 0, 255)).save(tmp_path / "images" / "0.png")
    (tmp_path / "prompts.txt").write_text("the sky\n")
    args = ["score", "--reward", "blue", "--images", "images", "--prompts", "prompts.txt", "--json"]
    done = python("-m", "visual_grpo", *args, path=[installed, third_party], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rewards"][0]["mean"] == 1.0
