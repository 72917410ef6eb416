"""Helper modules of this folder as fixtures: with pytest's importlib mode test files cannot import each other by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _helper(name: str) -> ModuleType:
    full = f"visual_grpo_tests_adapters_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def contract() -> ModuleType:
    """What every adapter must do, as functions (contract.py)."""
    return _helper("contract")


@pytest.fixture(scope="session")
def tiny_sd3() -> ModuleType:
    """Builder of a random StableDiffusion3Pipeline (tiny_sd3.py)."""
    return _helper("tiny_sd3")


@pytest.fixture(scope="session")
def tiny_pipelines() -> ModuleType:
    """Builders of random pipelines of the other diffusers families (tiny_pipelines.py)."""
    return _helper("tiny_pipelines")


@pytest.fixture(scope="session")
def tiny_text() -> ModuleType:
    """A random Qwen3 with its tokenizer, and what tests of text models share (tiny_text.py)."""
    return _helper("tiny_text")
