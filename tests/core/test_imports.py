"""The direction of imports, walked over the source; and what `import visual_grpo` leaves out."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import visual_grpo

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "visual_grpo": "visual_grpo",
    **{folder: f"visual_grpo.{folder}" for folder in ("rewards", "pipelines", "eval")},
}

# Lower layers know nothing of higher ones. A module that is not named here may be imported by any layer above the pure
# mathematics, and may import what lies below the trainer.
LAYERS = [
    {"errors", "types"},
    {"groups", "advantages", "objectives", "aggregation", "divergences", "transitions", "schedules", "importance"},
    {"adapters"},
    {"policy"},
    {"method", "stack"},
    {"trainer"},
    {"api"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PURE = LAYERS[0] | LAYERS[1]
OUTER = ("visual_grpo.rewards", "visual_grpo.pipelines", "visual_grpo.eval")
# Libraries that are slow to import or not always needed, and who may know them. They are imported when an object is built
# and never with a module; the testbed's builders, which nothing imports but a build, are the exception. A checkpoint is
# written in the format of the plain library by that library, an evaluation reads a foreign LoRA with it, and a benchmark
# runs rivals.
OWNERS = ("visual_grpo.adapters", "visual_grpo.rewards", "visual_grpo.testbed", "visual_grpo.eval.benchmarks")
HEAVY = {
    "fastapi": ("visual_grpo.reward_server",),
    "uvicorn": ("visual_grpo.reward_server",),
    "httpx": ("visual_grpo.rewards.judge_endpoint", "visual_grpo.rewards.remote", "visual_grpo.rollouts.vllm_server"),
    "vllm": ("visual_grpo.rollouts.vllm_colocated",),
    "diffusers": (*OWNERS, "visual_grpo.checkpoint"),
    "transformers": OWNERS,
    "open_clip": OWNERS,
    "timm": OWNERS,
    "pyiqa": ("visual_grpo.rewards",),
    "peft": (
        "visual_grpo.policy",
        "visual_grpo.checkpoint",
        "visual_grpo.rollouts.engine",
        "visual_grpo.eval.generate",
        "visual_grpo.eval.benchmarks",
    ),
}


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree: ast.AST, *, top_level: bool = False) -> Iterator[str]:
    """Yield absolute names of imported modules; with `top_level`, only what runs when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif top_level and (
            is_type_checking(node) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ):
            continue
        else:
            yield from imports(node, top_level=top_level)


def layer(module: str) -> int | None:
    """Level of a core module, by its first part (`adapters`, `trainer`); None where it is in no layer."""
    parts = module.split(".")
    return LEVEL.get(parts[1]) if len(parts) > 1 else None


def inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


CORE = [name for name in MODULES if not inside(name, OUTER)]


@pytest.mark.parametrize("module", CORE)
def test_the_core_never_imports_rewards_pipelines_or_eval(module: str) -> None:
    assert not [name for name in imports(TREES[module]) if inside(name, OUTER)]


@pytest.mark.parametrize("module", [name for name in CORE if layer(name) is not None])
def test_a_layer_imports_no_higher_layer(module: str) -> None:
    own = layer(module)
    assert own is not None
    wrong = [name for name in imports(TREES[module]) if name.startswith("visual_grpo.") and (layer(name) or 0) > own]
    assert not wrong, f"{module} lies below {wrong}"


@pytest.mark.parametrize("module", [name for name in CORE if name.partition(".")[2] in PURE])
def test_types_and_pure_mathematics_import_only_one_another(module: str) -> None:
    own = [name.split(".")[1] for name in imports(TREES[module]) if name.startswith("visual_grpo.")]
    assert set(own) <= PURE


@pytest.mark.parametrize("module", [name for name in MODULES if inside(name, OUTER[:1])])
def test_rewards_import_no_training(module: str) -> None:
    banned = ("visual_grpo.policy", "visual_grpo.method", "visual_grpo.trainer", "visual_grpo.api", *OUTER[1:])
    assert not [name for name in imports(TREES[module]) if inside(name, banned)]


PROTOCOLS = [name for name in MODULES if inside(name, OUTER[2:]) and not inside(name, ("visual_grpo.eval.benchmarks",))]


@pytest.mark.parametrize("module", PROTOCOLS)
def test_evaluations_import_no_training(module: str) -> None:
    banned = ("visual_grpo.trainer", "visual_grpo.api", "visual_grpo.pipelines")
    assert not [name for name in imports(TREES[module]) if inside(name, banned)]


@pytest.mark.parametrize("library", HEAVY)
def test_model_libraries_are_imported_where_they_belong_and_only_when_an_object_is_built(library: str) -> None:
    for module, tree in TREES.items():
        if library in {name.partition(".")[0] for name in imports(tree)}:
            assert module.startswith(HEAVY[library]), f"{module} imports {library}"
        if library in {name.partition(".")[0] for name in imports(tree, top_level=True)}:
            assert module.startswith("visual_grpo.testbed."), f"{module} imports {library} at its top level"


def test_no_method_is_built_on_another_method() -> None:
    """Recipes may call one another's functions; a class of another method's file is not for import."""
    for module in (name for name in MODULES if inside(name, OUTER[1:2])):
        for name in imports(TREES[module]):
            attribute = name.rpartition(".")[2]
            assert not (inside(name, OUTER[1:2]) and attribute[:1].isupper()), f"{module} imports {name}"


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = """
import sys, time
start = time.process_time()
import visual_grpo as vg
spent = time.process_time() - start
for names in (vg.list_rewards(), vg.list_methods(), vg.list_models(), vg.list_recipes(), vg.list_evals()):
    assert isinstance(names, list)
import visual_grpo.cli
heavy = {"torch", "numpy", "scipy", "matplotlib", "datasets", "accelerate", "diffusers", "transformers", "peft", "timm"}
print(sorted(heavy & set(sys.modules)), spent < 0.3)
"""
    assert fresh(code) == "[] True"


def test_the_public_names_are_few_and_all_resolve() -> None:
    assert len(visual_grpo.__all__) <= 15
    assert set(visual_grpo.__all__) <= set(dir(visual_grpo))
    for name in visual_grpo.__all__:
        assert getattr(visual_grpo, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        visual_grpo.trian  # noqa: B018


def test_the_outer_folders_refuse_to_be_imported_under_their_own_names() -> None:
    for folder in ("rewards", "pipelines", "eval"):
        code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\ntry: import {folder}\nexcept ImportError as e: print(e)"
        assert f"import this package as visual_grpo.{folder}" in fresh(code)


def test_a_checkout_that_is_not_installed_works() -> None:
    code = f"""
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path.insert(0, {str(ROOT)!r})
import visual_grpo.rewards, visual_grpo.pipelines, visual_grpo.eval
print(visual_grpo.rewards.__name__)
"""
    assert fresh(code) == "visual_grpo.rewards"
