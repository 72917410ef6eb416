"""Plan a pipeline: expand its stages, apply overrides, and check every reference and every stage before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from visual_grpo.api import Plan, nested_overrides, plan, read_config
from visual_grpo.config import RunConfig, merge, validate
from visual_grpo.config_stages import ALL, REFERENCE, MergeStage, PipelineConfig, references, replaced
from visual_grpo.errors import UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Export:
    """What a stage exports, as far as it is known before it runs."""

    adapter: str
    base: str
    """the `model.path` that its weights go back to."""
    lora: dict[str, Any] | None
    """rank, alpha and targets of a LoRA; None = a whole model."""

    @property
    def kind(self) -> str:
        """For messages."""
        return "a whole model" if self.lora is None else f"a LoRA of rank {self.lora['rank']}"


@dataclass(kw_only=True)
class Stage:
    """One stage, checked."""

    name: str
    export: Export
    plan: Plan | None = None
    """None for a merge."""
    merge: dict[str, float] = field(default_factory=dict)
    """weight of each stage that is merged."""

    @property
    def does(self) -> str:
        """One phrase about the stage."""
        if self.plan is None:
            return f"merge of {', '.join(self.merge)}"
        return " + ".join(self.plan.stack.methods) or "grpo"

    @property
    def sources(self) -> dict[str, str]:
        """Dotted key -> the earlier stage that it refers to."""
        if self.plan is None:
            return {f"merge.{name}": name for name in self.merge}
        return dict(references(self.plan.config.model_dump(mode="json")))

    def bound(self, folders: Mapping[str, str]) -> Plan:
        """The plan with the exports of earlier stages, `folders` by name, in place of the references."""
        assert self.plan is not None
        return plan(replaced(self.plan.config.model_dump(mode="json"), folders))

    def without_weights(self) -> Plan:
        """The plan for a dry run: the model that the weights go back to has the architecture of the export."""
        assert self.plan is not None
        model = self.plan.config.model.model_copy(update={"path": self.export.base})
        return replace(self.plan, config=self.plan.config.model_copy(update={"model": model}))


@dataclass(kw_only=True)
class PipelinePlan:
    """A resolved pipeline."""

    config: PipelineConfig
    """every stage with all of its settings, references as they were given."""
    stages: list[Stage]


def plan_pipeline(
    source: str | Path | PipelineConfig | Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str] = ()
) -> PipelinePlan:
    """Resolve a pipeline and check all of it, without loading weights.

    Args:
        source: recipe name, YAML file, `PipelineConfig` or dict.
        overrides: `STAGE.key=value` of one stage, `all.key=value` of every training stage, and `name`, `summary`.

    Raises:
        UserError: anything that does not fit, naming the stage.
    """
    config = _with_overrides(validate(PipelineConfig, read_config(source)), nested_overrides(overrides))
    stages: dict[str, Stage] = {}
    resolved: dict[str, dict[str, Any]] = {}
    for name, given in config.stages.items():
        try:
            stage = _plan_stage(name, given, list(config.stages), stages)
        except UserError as error:
            raise UserError(f"stage {name!r}: {error}") from None
        stages[name] = stage
        resolved[name] = {"merge": stage.merge} if stage.plan is None else stage.plan.config.model_dump(mode="json")
    full = PipelineConfig(name=config.name, summary=config.summary, stages=resolved)
    return PipelinePlan(config=full, stages=list(stages.values()))


def _with_overrides(config: PipelineConfig, over: Mapping[str, Any]) -> PipelineConfig:
    """`over` laid on the stages that it names."""
    own = {"name", "summary", "stages"}
    for key, value in over.items():
        if key in own:
            continue
        if key != ALL and key not in config.stages:
            raise UserError(
                f"override {key!r} names no stage of this pipeline.{did_you_mean(key, config.stages)} A setting of one stage is "
                f"STAGE.key=value, of every training stage {ALL}.key=value; the stages are {', '.join(config.stages)}"
            )
        if not isinstance(value, Mapping):
            raise UserError(
                f"override {key}={value!r} replaces a whole stage; name a setting of it, such as {key}.train.steps=20"
            )
    stages = {}
    for name, stage in config.stages.items():
        layers = [over.get(name, {})] if "merge" in stage else [over.get(ALL, {}), over.get(name, {})]
        for layer in layers:
            stage = merge(stage, layer)
        stages[name] = stage
    values = {"name": config.name, "summary": config.summary, "stages": stages}
    checked: PipelineConfig = validate(PipelineConfig, merge(values, {k: v for k, v in over.items() if k in own}))
    return checked


def _plan_stage(name: str, given: Mapping[str, Any], names: Sequence[str], earlier: Mapping[str, Stage]) -> Stage:
    if "merge" in given:
        weights = validate(MergeStage, given).merge
        for source in weights:
            _check_reference("merge", source, name, names, earlier)
        return Stage(name=name, merge=weights, export=_common_export(weights, earlier))
    values = _expanded(name, given)
    for key, source in references(values):
        _check_reference(key, source, name, names, earlier)
    made = plan(values)
    return Stage(name=name, plan=made, export=_export(made.config, earlier))


def _expanded(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a stage on top of its recipe's; it is called by the stage's name unless it has one of its own."""
    values: dict[str, Any] = {k: v for k, v in given.items() if k != "recipe"}
    values.setdefault("name", name)
    recipe = given.get("recipe")
    if recipe is None:
        return values
    if not isinstance(recipe, str):
        raise UserError(f"recipe: {recipe!r} is no name of a recipe and no YAML file")
    base = read_config(recipe)
    if "stages" in base:
        raise UserError(f"recipe {recipe!r} is a pipeline itself; give its stages here in its place")
    return merge(base, values)


def _check_reference(key: str, source: str, name: str, names: Sequence[str], earlier: Mapping[str, Stage]) -> None:
    """Refuse what is no earlier stage."""
    if source in earlier:
        return
    if source == name:
        raise UserError(f"{key} refers to this stage itself; a stage starts from what an earlier one has exported")
    if source in names:
        raise UserError(f"{key} refers to stage {source!r}, which comes later; move it before {name!r}")
    raise UserError(
        f"{key} refers to {source!r}, but there is no such stage.{did_you_mean(source, names)} A reference is {REFERENCE}NAME "
        f"with the name of an earlier stage ({', '.join(earlier) or 'this is the first'})"
    )


def _export(config: RunConfig, earlier: Mapping[str, Stage]) -> Export:
    """What a training stage will export; refuses references to weights of another kind."""
    model = config.model
    lora = None if model.lora is None else model.lora.model_dump(include={"rank", "alpha", "targets"})
    base = model.path
    if base.startswith(REFERENCE):
        source = base.removeprefix(REFERENCE)
        export = earlier[source].export
        if export.lora is not None:
            raise UserError(
                f"model.path: stage {source!r} exports {export.kind} and no whole model: set model.path={export.base} and "
                f"model.init={REFERENCE}{source}"
            )
        if export.adapter != model.adapter:
            raise UserError(
                f"model.adapter is {model.adapter!r}, but stage {source!r} exports a model of {export.adapter!r}"
            )
        base = export.base
    own = Export(adapter=model.adapter, base=base, lora=lora)
    wanted = {"model": {"init": model.init}, "method": config.method}
    for key, source in references(wanted):
        if earlier[source].export != own:
            other = earlier[source].export
            raise UserError(
                f"{key}: stage {source!r} exports {other.kind} of {other.base!r} {other.lora or ''}, which does not fit this "
                f"stage's {own.kind} of {own.base!r} {own.lora or ''}: give both the same model.path and model.lora"
            )
    return own


def _common_export(weights: Mapping[str, float], earlier: Mapping[str, Stage]) -> Export:
    first, *others = weights
    export = earlier[first].export
    for name in others:
        if earlier[name].export != export:
            other = earlier[name].export
            raise UserError(
                f"stages {first!r} ({export.kind} of {export.base!r}) and {name!r} ({other.kind} of {other.base!r}) cannot be "
                "merged: give both the same model.path and model.lora"
            )
    return export
