"""The worked examples in docstrings, run under the installed names of the modules."""

import doctest
import importlib
import pkgutil

import pytest

import visual_grpo.eval as evaluations
import visual_grpo.rewards as rewards

MODULES = [
    "visual_grpo.reward",
    "visual_grpo.reward_functions",
    "visual_grpo.scoring",
    *(
        f"{package.__name__}.{m.name}"
        for package in (rewards, evaluations)
        for m in pkgutil.iter_modules(package.__path__)
    ),
]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
