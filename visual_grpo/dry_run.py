"""`train --dry-run`: build the real network without weights, count what is trained, plan batches and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from visual_grpo.api import Plan
from visual_grpo.batching import check_geometry
from visual_grpo.build import build_suite, eval_data, read_prompts
from visual_grpo.config import to_yaml
from visual_grpo.data import MADE, is_local
from visual_grpo.distributed import launched_processes
from visual_grpo.errors import UserError
from visual_grpo.policy import choose_trainable, inject_lora
from visual_grpo.stages import PipelinePlan


def missing_prompts(sources: Sequence[str]) -> list[str]:
    """A note for each prompt set that is not here: a plan needs none, and a data set of the hub would be downloaded."""
    notes = []
    for source in dict.fromkeys(sources):
        if source.startswith(MADE):
            continue
        if not is_local(source):
            notes.append(f"prompts were not checked: {source!r} is a data set of the hub")
        elif not os.path.lexists(os.path.expanduser(source)):
            notes.append(f"prompts were not checked: there is no file {source!r} here; the run will need it")
    return notes


def print_any_dry_run(plan: Plan | PipelinePlan) -> None:
    """`print_dry_run` of a run, or of each stage of a pipeline: a stage's model is planned as the one it goes back to."""
    if isinstance(plan, Plan):
        print_dry_run(plan)
        return
    for number, stage in enumerate(plan.stages, 1):
        print(f"\nstage {number} of {len(plan.stages)}, {stage.name} ({stage.does})")
        if stage.plan is None:
            print(f"averages {stage.export.kind} of each, with weights {stage.merge}; trains nothing")
            continue
        try:
            print_dry_run(stage.without_weights())
        except UserError as error:
            raise UserError(f"stage {stage.name!r}: {error}") from None


def print_dry_run(plan: Plan) -> None:
    """Print the model, the batch geometry, the memory of one process and the resolved config; load and download nothing.

    Raises:
        UserError: whatever the real run would refuse before it loads weights.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    config = plan.config
    absent = missing_prompts([part.source or "" for data in (config.data, eval_data(plan)) for _, part in data.sets()])
    if not absent:
        read_prompts(plan)
    build_suite(plan, torch.device("cpu")).close()
    console = Console()
    module = plan.adapter_class.load_meta(config.model)
    total = sum(p.numel() for p in module.parameters())
    if config.model.lora is not None:
        inject_lora(module, config.model.lora, plan.adapter_class.lora_targets)
    trained = sum(p.numel() for p in choose_trainable(module, config.model).values())
    world = launched_processes()
    geometry = check_geometry(config.train, world, plan.stack.needs)
    table = Table(title=Text(f"{config.name}: dry run"), show_header=False)
    for name, value in [
        ("model", f"{type(module).__name__} from {config.model.path}"),
        ("parameters", f"{total:,} ({total / 1e9:.3f} B)"),
        ("trained", f"{trained:,} ({trained / total:.2%}), {'LoRA' if config.model.lora else 'full weights'}"),
        ("method", " + ".join(plan.stack.methods) or "grpo"),
        ("rewards", ", ".join(config.rewards)),
        ("processes", str(world)),
        *geometry.lines(),
    ]:
        table.add_row(name, Text(value))
    console.print(table)
    of_methods = (method.units_per_row(plan.sampling) for method in plan.stack.methods.values())
    all_units = next((n for n in of_methods if n is not None), getattr(plan.sampling, "max_new_tokens", 1))
    units = min(config.train.units_per_pass or all_units, all_units)
    memory = plan.adapter_class.plan_memory(
        config.model, module, sampling=plan.sampling, rows=config.train.micro_batch, units=units
    )
    parts = Table(title="memory of one process")
    parts.add_column("part")
    parts.add_column("GiB", justify="right")
    for name, size in memory.parts.items():
        parts.add_row(name, f"{size / 2**30:.2f}")
    parts.add_row("total", f"{memory.total / 2**30:.2f}", style="bold")
    console.print(parts)
    for note in [*memory.notes, *absent]:
        console.print(f"note: {note}", markup=False)
    console.print(
        f"nothing was loaded or trained. The resolved config:\n\n{to_yaml(config)}", markup=False, highlight=False
    )
