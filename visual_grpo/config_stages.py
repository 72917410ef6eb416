"""Configuration of a pipeline: stages that run one after the other, each on what earlier ones exported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from visual_grpo.config import RunConfig
from visual_grpo.config_section import Section

REFERENCE = "stage://"
"""`stage://NAME` in any value of a stage stands for the folder that the earlier stage NAME exported."""
ALL = "all"
"""The override `all.KEY=value` changes every training stage."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_RESERVED = (ALL, "name", "summary", "stages")


def _merge_weights(value: Any) -> Any:
    """`[a, b]` as equal weights."""
    if isinstance(value, list):
        twice = [item for item in value if value.count(item) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands twice; to make it count more, give {{{twice[0]}: 2.0}}")
        return dict.fromkeys(value, 1.0)
    return value


class MergeStage(Section):
    """A stage that trains nothing: the weighted mean of what earlier stages exported, tensor by tensor.

    The factors of LoRAs are averaged each by itself, which is not the mean of their products.
    """

    merge: Annotated[dict[str, Annotated[float, Field(gt=0)]], BeforeValidator(_merge_weights), Field(min_length=1)] = (
        Field(description="names of stages, or {stage: weight}; the weights are divided by their sum")
    )


def _stages(value: Any) -> Any:
    """A recipe's name as `{recipe: name}`, a `RunConfig` as what it sets, equal weights written out."""
    if not isinstance(value, Mapping):
        return value
    out: dict[Any, Any] = {}
    for name, stage in value.items():
        if isinstance(stage, RunConfig):
            stage = stage.explicit()
        elif isinstance(stage, MergeStage):
            stage = stage.model_dump()
        elif isinstance(stage, str):
            stage = {"recipe": stage}
        if isinstance(stage, Mapping) and "merge" in stage:
            stage = {**stage, "merge": _merge_weights(stage["merge"])}
        out[name] = stage
    return out


class PipelineConfig(Section):
    """A list of stages by name, in the order in which they run.

    A stage is the sections of a run's config, `recipe: NAME` (or a YAML file) with sections that lie on top of it, or
    `merge: [STAGE, ...]`. In Python also a `RunConfig`, or the name of a recipe.
    """

    name: str = "pipeline"
    summary: str = ""
    stages: Annotated[dict[str, dict[str, Any]], BeforeValidator(_stages)] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> PipelineConfig:
        """A stage's name is that of its folder and the first part of its overrides."""
        for name in self.stages:
            if not _NAME.fullmatch(name) or name in _RESERVED:
                raise ValueError(
                    f"a stage cannot be called {name!r}: use letters, digits, '-' and '_', begin with a letter, and none of "
                    f"{', '.join(_RESERVED)}"
                )
        return self


def references(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, stage) of every `stage://NAME` in a config, and (dotted key, whole text) of what is almost one."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from references(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from references(item, f"{key}.{number}")
    elif isinstance(value, str) and re.match(r"stages?:/", value, re.IGNORECASE):
        yield key, value.removeprefix(REFERENCE)


def replaced(value: Any, folders: Mapping[str, str]) -> Any:
    """A config with every `stage://NAME` replaced by `folders[NAME]`; a name that is not there stays as it is."""
    if isinstance(value, Mapping):
        return {k: replaced(v, folders) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(v, folders) for v in value]
    if isinstance(value, str) and value.startswith(REFERENCE):
        return folders.get(value.removeprefix(REFERENCE), value)
    return value
