"""visual_grpo: post-train visual and language generators with group-relative RL.

```python
import visual_grpo as vg

result = vg.train("quickstart", overrides={"train.steps": 20})
vg.evaluate("geneval", images="out/")


@vg.register_reward("brightness")
def brightness(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3))
```

Importing this page loads neither torch nor any model library: each name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Source checkout only: rewards/, pipelines/ and eval/ lie beside this folder; an installed copy has them inside.
_here = Path(__file__).resolve().parent
if not (_here / "rewards").is_dir() and (_here.parent / "pyproject.toml").is_file():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from visual_grpo.api import evaluate as evaluate
    from visual_grpo.api import train as train
    from visual_grpo.config import RunConfig as RunConfig
    from visual_grpo.config_stages import PipelineConfig as PipelineConfig
    from visual_grpo.errors import RunError as RunError
    from visual_grpo.errors import UserError as UserError

_LAZY = {
    "train": "visual_grpo.api:train",
    "evaluate": "visual_grpo.api:evaluate",
    "PipelineConfig": "visual_grpo.config_stages:PipelineConfig",
    "RunConfig": "visual_grpo.config:RunConfig",
    "UserError": "visual_grpo.errors:UserError",
    "RunError": "visual_grpo.errors:RunError",
}
# name -> (registry, method of the registry)
_REGISTRY_CALLS = {
    "register_reward": ("REWARDS", "register"),
    "register_method": ("METHODS", "register"),
    "register_adapter": ("ADAPTERS", "register"),
    "list_models": ("ADAPTERS", "names"),
    "list_methods": ("METHODS", "names"),
    "list_rewards": ("REWARDS", "names"),
    "list_recipes": ("RECIPES", "names"),
    "list_evals": ("EVALS", "names"),
}

__all__ = [
    "PipelineConfig",
    "RunConfig",
    "RunError",
    "UserError",
    "__version__",
    "evaluate",
    "list_evals",
    "list_methods",
    "list_models",
    "list_recipes",
    "list_rewards",
    "register_adapter",
    "register_method",
    "register_reward",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in _LAZY:
        module_name, _, attribute = _LAZY[name].partition(":")
        value = getattr(importlib.import_module(module_name), attribute)
    elif name in _REGISTRY_CALLS:
        registry, method = _REGISTRY_CALLS[name]
        value = getattr(getattr(importlib.import_module("visual_grpo.registry"), registry), method)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
