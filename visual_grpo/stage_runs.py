"""Run a pipeline: each stage in a run folder of its own, finished stages skipped on a resume, a summary of all.

`RUN/NAME/` holds `config.yaml` (the pipeline), `summary.json`, and a folder for each stage: an ordinary run folder, or for a
merge its `model/` alone. `result.json` in a stage's folder says that it is finished.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from visual_grpo.build import build_suite, check_applies, read_prompts, run_plan
from visual_grpo.config import to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import RunError, UserError
from visual_grpo.evaluation import Evaluation, main_figures, summarise
from visual_grpo.exports import merge_exports
from visual_grpo.resumption import MAY_CHANGE
from visual_grpo.run_folder import RunFolder, write_atomic
from visual_grpo.selection import Best
from visual_grpo.stages import PipelinePlan, Stage
from visual_grpo.trainer import Result

logger = logging.getLogger(__name__)
LENGTH = ("train.steps", "train.max_minutes", "train.early_stop")
"""What may change of a run that goes on, but not of a stage that is finished: the later ones were built on it."""


@dataclass(kw_only=True)
class PipelineResult:
    """What a pipeline gives back."""

    folder: str
    stages: dict[str, Result | None]
    """by name; None for a merge."""
    summary: list[dict[str, Any]]
    """what summary.json holds: a record for each stage."""


def run_pipeline(
    plan: PipelinePlan,
    *,
    resume: bool,
    out: str | Path | None,
    root: str | Path,
    on_start: Callable[[str], None] = lambda _: None,
    on_end: Callable[[Result], None] = lambda _: None,
) -> PipelineResult:
    """Run the stages in order.

    Args:
        plan: checked.
        resume: skip finished stages of an earlier start and go on with the one that was interrupted.
        out: the pipeline's folder; default `root/NAME`.
        root: the folder of all runs.
        on_start: gets a line about each stage before it runs (main process).
        on_end: gets the result of each training stage (main process).

    Raises:
        UserError: the input is wrong; nothing has run where it is wrong from the start.
        RunError: a stage failed; the earlier ones are kept.
    """
    with Ranks() as ranks:
        made = None
        if ranks.main:
            made = RunFolder.create(
                root,
                plan.config.name,
                config_yaml=to_yaml(plan.config),
                resume=resume,
                out=out,
                stages_may_change=lambda path: _may_change(plan, path),
            )
        folder = Path(ranks.broadcast(str(made.path) if made is not None else None))
        try:
            for stage in plan.stages if not resume else ():
                if (
                    stage.plan is None and (folder / stage.name / "model").exists()
                ):  # a training stage sees to its own folder
                    raise UserError(
                        f"{str(folder / stage.name / 'model')!r} is there already, and stage {stage.name!r} would write over it: "
                        "use another --out"
                    )
            return _run_stages(plan, folder, ranks, on_start, on_end)
        except UserError:
            if made is not None:
                made.discard()
            raise
        finally:
            if made is not None:
                made.close()


def _run_stages(
    plan: PipelinePlan,
    folder: Path,
    ranks: Ranks,
    on_start: Callable[[str], None],
    on_end: Callable[[Result], None],
) -> PipelineResult:
    done = ranks.broadcast([stage.name for stage in plan.stages if _finished(folder / stage.name)])
    for stage in plan.stages:
        if stage.name in done:
            _check_sources_finished(stage, done, folder)
        elif stage.plan is not None:
            _check_inputs(stage, ranks)
    results: dict[str, Result | None] = {}
    for number, stage in enumerate(plan.stages, 1):
        label = f"stage {number} of {len(plan.stages)}, {stage.name} ({stage.does})"
        own = folder / stage.name
        if stage.name in done:
            if ranks.main:
                on_start(f"{label}: finished before")
            results[stage.name] = None if stage.plan is None else _stored(own)
            continue
        if ranks.main:
            on_start(label)
        try:
            results[stage.name] = _run_stage(stage, folder, ranks)
        except (UserError, RunError) as error:
            finished = list(results)
            if not finished:
                raise
            raise type(error)(
                f"{label}: {error}\nThe earlier stages ({', '.join(finished)}) are kept in {str(folder)!r}; the same command "
                "with --resume goes on from here, and may change every setting of a stage that has not begun"
            ) from error
        if ranks.main:
            _finish(stage, own, results[stage.name])
            _write_summary(plan.stages[:number], folder)
            result = results[stage.name]
            if result is not None:
                on_end(result)
        ranks.barrier()
    if ranks.main:
        _write_summary(plan.stages, folder)
    ranks.barrier()
    return PipelineResult(folder=str(folder), stages=results, summary=read_summary(folder))


def _run_stage(stage: Stage, folder: Path, ranks: Ranks) -> Result | None:
    own = folder / stage.name
    exports: dict[str, str] = ranks.broadcast(
        {path.parent.name: str(path.resolve()) for path in sorted(folder.glob("*/model"))}
    )
    for key, source in stage.sources.items():
        if source not in exports:
            raise UserError(
                f"{key} refers to what stage {source!r} exported, but {str(folder / source / 'model')!r} is gone: restore it, or "
                f"delete the folder {str(folder / source)!r}, so that the stage runs again"
            )
    if stage.plan is None:
        if ranks.main:
            merge_exports(stage.merge, own / "model", {name: Path(exports[name]) for name in stage.merge})
        ranks.barrier()
        return None
    begun = ranks.broadcast((own / "config.yaml").is_file())
    moved = [without_index(key) for key in stage.sources]
    return run_plan(stage.bound(exports), resume=begun, out=own, root=folder, ranks=ranks, moved=moved)


def without_index(key: str) -> str:
    """The part of a dotted key that two configs are compared by: lists are compared whole.

    >>> without_index("method.1.flow_opd.teachers.ocr"), without_index("model.path")
    ('method', 'model.path')
    """
    return re.split(r"\.\d+(?:\.|$)", key, maxsplit=1)[0]


def _check_sources_finished(stage: Stage, done: Collection[str], folder: Path) -> None:
    """A finished stage was made from what is there, and not from what an earlier stage will make."""
    for source in stage.sources.values():
        if source not in done:
            raise UserError(
                f"stage {stage.name!r} is finished, but {source!r}, which it was made from, is not (its result.json is gone): "
                f"restore {str(folder / source)!r}, or delete {str(folder / stage.name)!r} too, so that it is made again"
            )


def _check_inputs(stage: Stage, ranks: Ranks) -> None:
    """Prompts and rewards of a stage that may begin hours from now."""
    assert stage.plan is not None
    try:
        prompts = read_prompts(stage.plan)
        suite = build_suite(stage.plan, ranks.device)
        suite.close()
        check_applies(suite.specs, *prompts)
    except UserError as error:
        raise UserError(f"stage {stage.name!r}: {error}") from None


def _may_change(plan: PipelinePlan, folder: Path) -> list[str]:
    """Keys that may differ on a resume: by how far each stage has come."""
    keys = ["summary"]
    for stage in plan.stages:
        own, prefix = folder / stage.name, f"stages.{stage.name}"
        if _finished(own):
            keys += [f"{prefix}.{key}" for key in MAY_CHANGE if key not in LENGTH]
        elif (own / "config.yaml").is_file():
            keys += [f"{prefix}.{key}" for key in MAY_CHANGE]
        else:
            keys.append(prefix)
    return keys


def _finished(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def _finish(stage: Stage, folder: Path, result: Result | None) -> None:
    """Mark a stage as finished, with what the summary says of it."""
    record: dict[str, Any] = {"stage": stage.name, "does": stage.does, "model": str(Path(stage.name) / "model")}
    if result is not None:
        times = [line["time"]["total"] for line in RunFolder(folder).read_metrics("train")]
        record |= {
            "steps": result.step,
            "minutes": round(sum(times) / 60, 2),
            "stopped": result.stopped,
            "measured": result.measured,
            "best": None if result.best is None else asdict(result.best),
            "before": None if result.before is None else main_figures(result.before.metrics),
            "after": None if result.after is None else main_figures(result.after.metrics),
        }
    write_atomic(folder / "result.json", json.dumps(record, indent=2) + "\n")


def _stored(folder: Path) -> Result:
    """The result of a stage that an earlier start has finished."""
    record = _record(folder)
    return Result(
        folder=str(folder),
        step=record["steps"],
        before=_evaluation(folder, 0),
        after=_evaluation(folder, record["measured"]),
        stopped=record["stopped"],
        measured=record["measured"],
        best=None if record["best"] is None else Best(**record["best"]),
    )


def _record(folder: Path) -> dict[str, Any]:
    """What `result.json` of a finished stage says."""
    path = folder / "result.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"stage", "does", "model"} - found.keys()
    except (ValueError, AttributeError, OSError):
        missing = {"stage"}
    if missing:
        raise UserError(
            f"{str(path)!r} is damaged: restore it, or delete it and the folders of the stages made from this one"
        )
    return found


def _evaluation(folder: Path, step: int) -> Evaluation | None:
    rows = RunFolder(folder).read_eval(step)
    if not rows:
        return None
    metrics, by_tag = summarise(rows)
    return Evaluation(rows=rows, metrics=metrics, by_tag=by_tag)


def _write_summary(stages: Sequence[Stage], folder: Path) -> None:
    records = [_record(folder / stage.name) for stage in stages]
    write_atomic(folder / "summary.json", json.dumps(records, indent=2) + "\n")


def read_summary(folder: Path) -> list[dict[str, Any]]:
    """The records of the finished stages."""
    found: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def print_pipeline(result: PipelineResult) -> None:
    """Print a table of the stages: steps, minutes of training and held-out figures before and after."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"{len(result.summary)} stages: held-out, before -> after")
    table.add_column("stage", overflow="fold")
    for column in ("steps", "minutes"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("held-out", overflow="fold")
    for record in result.summary:
        before, after = record.get("before") or {}, record.get("after") or {}
        figures = []
        for name, value in after.items():
            reward, _, task = name.partition("/task/")
            if "/" not in reward:  # the parts of a reward stand in summary.json and in the stage's report
                start = f"{before[name]:.3f} -> " if name in before else ""
                figures.append(f"{reward}{f' ({task})' if task else ''} {start}{value:.3f}")
        table.add_row(
            Text(f"{record['stage']} ({record['does']})"),
            str(record.get("steps", "")),
            f"{record['minutes']:.1f}" if "minutes" in record else "",
            Text("\n".join(figures)),
        )
    console.print(table)
    last = result.summary[-1]
    for name, path in {"pipeline": result.folder, "model": str(Path(result.folder) / last["model"])}.items():
        console.print(f"{name:10s}{path}", soft_wrap=True, markup=False, highlight=False)
