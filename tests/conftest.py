"""What tests of several folders ask for: a judge's server, and a tiny vision-language model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def registered_names_end_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that one test registers is none in the next, whichever worker runs both."""
    from visual_grpo import registry

    for names in (value for value in vars(registry).values() if isinstance(value, registry.Registry)):
        for kept in ("_registered", "_loaded"):
            monkeypatch.setattr(names, kept, dict(getattr(names, kept)))


@pytest.fixture(scope="session")
def judges() -> ModuleType:
    """Helper module: pytest's importlib mode does not let test files import each other by name."""
    full = "visual_grpo_tests_rewards_judges"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / "rewards" / "judges.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


@pytest.fixture
def serve(judges: ModuleType) -> Iterator[Callable[[Any], Any]]:
    """Start a judge's server with a given way to answer."""
    started: list[Any] = []

    def start(answer: Any) -> Any:
        started.append(judges.JudgeServer(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def tiny_vlm(judges: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2.5-VL with its processor."""
    folder: Path = judges.tiny_vlm(tmp_path_factory.mktemp("vlm"))
    return folder
