"""From a recipe, a file or a `RunConfig` to a finished run; the command line and the Python API meet here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from visual_grpo.config import RunConfig, merge, resolve, to_yaml, validate
from visual_grpo.config_stages import PipelineConfig
from visual_grpo.config_text import dotted, key_parts, load_yaml, parse_overrides
from visual_grpo.errors import UnknownNameError, UserError
from visual_grpo.option_types import check_types

if TYPE_CHECKING:
    from visual_grpo.stage_runs import PipelineResult
    from visual_grpo.stages import PipelinePlan
    from visual_grpo.trainer import Result


@dataclass(kw_only=True)
class Plan:
    """A resolved config with the classes it names: checked against each other before any weights are loaded."""

    config: RunConfig
    adapter_class: Any
    stack: Any
    sampling: Any
    eval_sampling: Any

    @property
    def media(self) -> str:
        """What the adapter makes: `texts` or `images`."""
        return "texts" if self.adapter_class.kind == "autoregressive" else "images"


Source = str | Path | RunConfig | PipelineConfig | Mapping[str, Any]
"""What can be trained: the name of a recipe, a YAML file, or a config."""


def read_config(source: Source) -> dict[str, Any]:
    """The explicitly set values of a recipe name, a YAML file, a config or a dict; those of a pipeline have `stages`.

    Raises:
        UserError: no such recipe or file.
    """
    if isinstance(source, RunConfig):
        return source.explicit()
    if isinstance(source, PipelineConfig):
        return source.model_dump(exclude_unset=True)
    if isinstance(source, Mapping):
        return dict(source)
    text = str(source)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return load_yaml(Path(text))
    return read_config(read_recipe(text))


def read_recipe(name: str) -> RunConfig | PipelineConfig:
    """The config of a recipe, which a plug-in may have made.

    Raises:
        UserError: no such recipe, or what the name leads to makes no config.
    """
    from pydantic import ValidationError

    from visual_grpo.registry import RECIPES

    try:
        recipe: Any = RECIPES.get(name)
    except UnknownNameError as error:
        hint = f" To train with the file {name!r}, write ./{name}." if Path(name).is_file() else ""
        raise UnknownNameError(f"{error}{hint}") from None
    if not isinstance(recipe, RunConfig | PipelineConfig):
        try:
            recipe = recipe()
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise UserError(f"recipe {name!r} could not be made: {faults}") from None
        except Exception as error:  # somebody else's code
            raise UserError(f"recipe {name!r} could not be made: {error} ({type(error).__name__})") from error
    if not isinstance(recipe, RunConfig | PipelineConfig):
        raise UserError(f"recipe {name!r} makes {type(recipe).__name__}, not a RunConfig or PipelineConfig")
    return recipe


def any_plan(source: Source, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Plan | PipelinePlan:
    """`plan` of one run, or `plan_pipeline` of a source with stages."""
    values = read_config(source)
    if "stages" in values:
        from visual_grpo.stages import plan_pipeline

        return plan_pipeline(values, overrides)
    return plan(values, overrides)


def plan(source: Source, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Plan:
    """Resolve the config of one run and check methods, adapter, sampling and batch geometry, without loading weights.

    Raises:
        UserError: anything that does not fit, in one message.
    """
    from visual_grpo.adapters.protocol import PolicyAdapter
    from visual_grpo.batching import check_geometry
    from visual_grpo.distributed import launched_processes
    from visual_grpo.plan_checks import (
        check_adapter,
        check_loss,
        check_rewards,
        check_sampling,
        check_surrogate,
        check_temperature,
        check_unread,
    )
    from visual_grpo.registry import ADAPTERS
    from visual_grpo.rollouts.connect import check_engine
    from visual_grpo.selection import check_selection
    from visual_grpo.stack import MethodStack, method_class, named_methods
    from visual_grpo.tracking import check_trackers

    raw = merge(read_config(source), nested_overrides(overrides))
    draft: RunConfig = validate(RunConfig, raw)
    defaults = [method_class(name).defaults for name, _ in named_methods(draft.method)]
    config = resolve(raw, defaults)
    stack = MethodStack.build(config)
    adapter: Any = ADAPTERS.get(config.model.adapter)
    if not (isinstance(adapter, type) and issubclass(adapter, PolicyAdapter)):
        raise UserError(
            f"model.adapter {config.model.adapter!r} leads to {adapter!r}, which is no subclass of PolicyAdapter"
        )
    needs = stack.needs
    check_adapter(config.model.adapter, adapter, stack)
    sampling = validate(adapter.Sampling, config.sampling, where="sampling")
    eval_sampling = validate(adapter.Sampling, merge(config.sampling, config.eval.sampling), where="eval.sampling")
    for check in stack.methods.values():
        check.check(config, sampling)
    check_geometry(config.train, launched_processes(), needs)
    check_loss(config, stack, adapter.unit_kinds & needs.unit_kinds, sampling)
    check_surrogate(config, stack.provider("surrogate"))
    check_unread(config, stack, defaults)
    check_sampling(config, adapter, adapter.unit_kinds & needs.unit_kinds, sampling, eval_sampling)
    check_temperature(stack, sampling)
    check_engine(config, sampling, eval_sampling, launched_processes())
    check_rewards(config, stack)
    check_trackers(config.track)
    made = Plan(config=config, adapter_class=adapter, stack=stack, sampling=sampling, eval_sampling=eval_sampling)
    check_selection(config, media=made.media)
    return made


def nested_overrides(overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Overrides as a nested dict, from `["a.b=1"]` (or one `"a.b=1"`) or `{"a.b": 1}`."""
    if isinstance(overrides, str):
        overrides = [overrides]
    if not isinstance(overrides, Mapping):
        return parse_overrides(overrides)
    out: dict[str, Any] = {}
    for key, value in overrides.items():
        out = merge(out, dotted(key_parts(str(key)), value))
    return out


@overload
def train(
    source: RunConfig,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = ...,
    resume: bool = ...,
    out: str | Path | None = ...,
    root: str | Path = ...,
) -> Result: ...
@overload
def train(
    source: PipelineConfig,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = ...,
    resume: bool = ...,
    out: str | Path | None = ...,
    root: str | Path = ...,
) -> PipelineResult: ...
@overload
def train(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | Sequence[str] = ...,
    resume: bool = ...,
    out: str | Path | None = ...,
    root: str | Path = ...,
) -> Any: ...
def train(
    source: Source,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    resume: bool = False,
    out: str | Path | None = None,
    root: str | Path = "runs",
) -> Result | PipelineResult:
    """Run a recipe, a YAML file, a `RunConfig`, a `PipelineConfig` or a dict to its end.

    Args:
        source: what to run.
        overrides: `{"train.steps": 20}` or `["train.steps=20"]`; of a pipeline `STAGE.train.steps` or `all.train.steps`.
        resume: go on from the last checkpoint of the run folder; a pipeline skips the stages that are finished.
        out: the run folder; default `root/NAME`.
        root: the folder of all runs.

    Returns:
        The run's folder, the evaluations before and after, and why it stopped early, if it did. Of a pipeline the folder and
        such a result for each stage.

    Raises:
        UserError: the input is wrong.
        RunError: the run failed.
    """
    made = any_plan(source, overrides)
    if isinstance(made, Plan):
        from visual_grpo.build import run_plan

        return run_plan(made, resume=resume, out=out, root=root)
    from visual_grpo.stage_runs import run_pipeline

    return run_pipeline(made, resume=resume, out=out, root=root)


def train_command(recipe: str, *, overrides: Sequence[str], resume: bool, dry_run: bool, out: Path | None) -> None:
    """`visual-grpo train`."""
    made = any_plan(recipe, overrides)
    if dry_run:
        from visual_grpo.dry_run import print_any_dry_run

        print_any_dry_run(made)
        return
    from visual_grpo.summary import print_summary

    if isinstance(made, Plan):
        from visual_grpo.build import run_plan

        print_summary(run_plan(made, resume=resume, out=out, root="runs"))
        return
    from visual_grpo.stage_runs import print_pipeline, run_pipeline

    print_pipeline(run_pipeline(made, resume=resume, out=out, root="runs", on_start=print_line, on_end=print_summary))


def print_line(text: str) -> None:
    """Print a line as it is, at once."""
    print(text, flush=True)


def recipe_yaml(name: str) -> str:
    """A recipe as YAML, with the defaults of its methods filled in."""
    return to_yaml(any_plan(name).config)


def evaluate(
    name: str,
    *,
    model: str | None = None,
    adapter: str | Path | None = None,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    samples: int | None = None,
    seed: int = 42,
    batch: int = 32,
    sampling: Mapping[str, Any] | None = None,
    family: str | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Any:
    """Run an evaluation of `visual-grpo list evals` on a model or a folder of images.

    Args:
        name: of the protocol.
        model: folder, hub id or testbed/NAME to sample from; its samples go to `out`/samples and are kept.
        adapter: a LoRA to put on the model.
        images: pictures made already, in place of a model.
        prompts: prompt file; with a testbed model the default is the testbed's held-out prompts.
        out: folder of the results; with a model the default is `eval-NAME`.
        samples: of each prompt; default: what the protocol prescribes.
        seed, batch, sampling, family, dtype: of sampling, see `visual_grpo.eval.generate`.
        options: of the protocol.

    Returns:
        The protocol's summary; nothing ({}) on processes other than the first, which only help with the sampling.

    Raises:
        UserError: unknown evaluation or wrong options.
    """
    from visual_grpo.registry import EVALS, load_object

    protocol: Any = EVALS.get(name)
    own: dict[str, Any] = {"samples": samples, "seed": seed, "batch": batch, "sampling": sampling, "family": family}
    own |= {"dtype": dtype, "model": model, "adapter": adapter, "images": images, "prompts": prompts, "out": out}
    check_types(evaluate, own, f"evaluation {name!r}")
    check_types(protocol, options, f"evaluation {name!r}")
    if model is not None:
        folder = Path(out if out is not None else f"eval-{name}")
        prescribed = getattr(sys.modules.get(protocol.__module__), "SAMPLES", 4)
        made = load_object("visual_grpo.eval.generate:generate")(
            model, out=folder / "samples", prompts=_prompts_of(name, model, prompts),
            lora=None if adapter is None else Path(adapter), family=family,
            samples=prescribed if samples is None else samples, batch=batch, seed=seed, sampling=sampling, dtype=dtype,
        )  # fmt: skip
        out = folder
        if Path(made).is_file():
            options["texts"], prompts = made, Path(made).with_name("prompts.jsonl")
        else:
            images, prompts = made, None  # the folder holds each prompt's metadata
    elif samples is not None:
        raise UserError("samples is how many images to make of each prompt; it belongs to a model (--model PATH)")
    if os.environ.get("RANK", "0") != "0":
        return {}
    return protocol(**_accepted(name, protocol, {"images": images, "prompts": prompts, "out": out, **options}))


def _prompts_of(name: str, model: str, prompts: str | Path | None) -> str:
    """The prompts to sample; a model of the testbed has some of its own."""
    if prompts is not None:
        return str(prompts)
    if model.startswith("testbed/"):
        return {"text": "testbed/arithmetic", "ocr": "testbed/words"}.get(name, "testbed/scenes")
    raise UserError(
        f"evaluation {name!r} of a model needs its prompts: --prompts FILE, or --prompts testbed/scenes "
        f"(testbed/words for ocr, testbed/arithmetic for text) for a model of the testbed"
    )


def _accepted(name: str, protocol: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as far as the protocol takes it; what it does not know must be unset."""
    import inspect

    try:
        accepted = inspect.signature(protocol).parameters
    except ValueError:
        raise UserError(f"evaluation {name!r} leads to {protocol!r}, which is no protocol") from None
    if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        return dict(given)
    unknown = sorted(k for k, v in given.items() if k not in accepted and v is not None)
    if unknown:
        raise UserError(f"evaluation {name!r} has no option {unknown[0]!r}; it takes {', '.join(sorted(accepted))}")
    return {k: v for k, v in given.items() if k in accepted}
