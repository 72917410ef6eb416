"""Configs and sizes of published pipelines, packaged so that a dry run needs neither weights nor network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


def published(path: str) -> Mapping[str, Any] | None:
    """Published values of a hub id; None where there are none.

    Keys: `source` (the hub id), `aliases` (other ids of the same model), `class` (of the pipeline), the configs of the trained
    network (`transformer` or `unet`), of `vae` and `scheduler`, and `parameters` (a number for each part).
    """
    return next((values for values in _pipelines() if path in (values["source"], *values.get("aliases", ()))), None)


def published_ids(pipeline_class: str) -> list[str]:
    """Hub ids of the packaged pipelines of a class."""
    return sorted(values["source"] for values in _pipelines() if values["class"] == pipeline_class)


def _pipelines() -> list[dict[str, Any]]:
    folder = resources.files("visual_grpo.adapters") / "published"
    values = [json.loads(f.read_text(encoding="utf-8")) for f in folder.iterdir() if f.name.endswith(".json")]
    return [value for value in values if isinstance(value, dict) and "class" in value]
