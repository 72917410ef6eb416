"""Text methods against vanilla GRPO on the tiny LM, each on the condition that its paper claims to mend; several seeds.

    visual-grpo benchmark text_methods --seeds 3
    visual-grpo benchmark text_methods --seeds 3 "methods=[lens, s_grpo]" scale=2

The conditions and their arms stand in `text_conditions`. The arms of a condition take the same number of steps, so they sample
and train the same number of answers; an arm whose steps cost more (GRAIL) stops after as many seconds of training as its vanilla
arm. Seconds are those of this process's processors (`clock=wall` for a quiet machine), evaluations not counted. Finished arms lie
in OUT/arms and are not run again, and an interrupted benchmark compares the seeds that are whole (`only_finished=true`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.eval.benchmarks.flow_arms import CLOCKS
from visual_grpo.eval.benchmarks.text_arms import train_arm
from visual_grpo.eval.benchmarks.text_conditions import CONDITIONS, Arm, Condition, chosen
from visual_grpo.eval.benchmarks.text_figures import forest, markdown, summarise

__all__ = ["run"]

RECIPE = "grpo_text_tiny"
SHARED: dict[str, Any] = {
    "train": {"prompts_per_step": 16, "group_size": 8, "micro_batch": 128, "optimizer": {"lr": 1e-3}},
    "eval": {"grid": 0, "batch": 480},
    "self_test": {"enabled": False},
}
"""Of all arms, under the settings of their condition."""


def run(
    *,
    seeds: int = 3,
    out: Path | str = "runs/benchmark_text_methods",
    methods: list[str] | None = None,
    scale: float = 1.0,
    points: int = 2,
    samples: int = 120,
    final_samples: int = 480,
    clock: str = "processor",
    only_finished: bool = False,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train every arm under every seed and compare; writes results.json, results.md and differences.svg into `out`.

    Args:
        seeds: seeds 0 .. seeds - 1 of every arm.
        out: folder.
        methods: variants to run, each with the vanilla arm of its condition; default: all.
        scale: factor of the steps of every condition.
        points: evaluations, evenly spaced over the steps.
        samples: held-out answers of each but the last.
        final_samples: of the last.
        clock: `processor` or `wall`: what a second of training is.
        only_finished: train nothing; compare the arms that are there, of the seeds that all of them have.
        overrides: of every run's config, nested.

    Raises:
        UserError: an unknown variant, options out of range, results of other settings in `out`.
    """
    if seeds < 1 or points < 1 or scale <= 0:
        raise UserError(f"seeds, points and scale must be positive, got {seeds}, {points} and {scale}")
    if clock not in CLOCKS:
        raise UserError(f"clock: {clock!r} is unknown; use {' or '.join(CLOCKS)}")
    folder = Path(out)
    plan = chosen(methods)
    settings = {
        "scale": scale,
        "points": points,
        "samples": samples,
        "final_samples": final_samples,
        "clock": clock,
        "overrides": overrides or {},
    }
    (folder / "arms").mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {t: {name: [] for name in names} for t, names in plan.items()}
    for seed in range(seeds):  # all arms of a seed before the next: an interrupted benchmark compares whole seeds
        for title, names in plan.items():
            paths = [folder / "arms" / f"{_slug(title)}-{_slug(name)}-seed{seed}.json" for name in names]
            if only_finished and not all(path.is_file() for path in paths):
                continue
            for name, path in zip(names, paths, strict=True):
                found[title][name].append(_arm(title, name, seed, path, settings, folder))
    result = {"seeds": seeds, "clock": clock, "conditions": summarise(found)}
    _write(folder, result)
    return result | {"files": {name: str(folder / name) for name in ("results.json", "results.md", "differences.svg")}}


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _arm(title: str, name: str, seed: int, path: Path, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One run, from its file where it was finished before."""
    from visual_grpo.run_folder import write_atomic

    if path.is_file():
        arm: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if arm["settings"] != settings:
            raise UserError(f"{str(path)!r} is of a benchmark with other settings; take another folder (--out)")
        return arm
    condition = CONDITIONS[title]
    limit = None
    if condition.arms[name].by_time:
        vanilla = path.with_name(f"{_slug(title)}-{_slug(condition.vanilla)}-seed{seed}.json")
        limit = float(json.loads(vanilla.read_text(encoding="utf-8"))["seconds"])
    made = _plan(condition, condition.arms[name], title, seed, settings, folder)
    arm = train_arm(
        made,
        folder / "runs" / path.stem,
        points=settings["points"],
        samples=settings["samples"],
        final_samples=settings["final_samples"],
        limit=limit,
        clock=settings["clock"],
        value=condition.value,
    )
    arm |= {"condition": title, "arm": name, "seed": seed, "settings": dict(settings)}
    write_atomic(path, json.dumps(arm, indent=1))
    return arm


def _plan(condition: Condition, arm: Arm, title: str, seed: int, settings: Mapping[str, Any], folder: Path) -> Any:
    """The resolved run."""
    from visual_grpo.api import plan
    from visual_grpo.config import merge

    over: dict[str, Any] = {
        "method": arm.method,
        "train": {"seed": seed, "steps": max(1, round(condition.steps * settings["scale"]))},
    }
    if condition.prompts is not None:
        over |= _prompt_files(condition, folder / "data" / _slug(title))
    if condition.warm_up is not None:
        over["model"] = {"path": _warmed_up(condition, folder / "runs" / f"{_slug(title)}-warm_up")}
    for layer in (condition.over, arm.over, settings["overrides"]):
        over = merge(over, layer)
    return plan(RECIPE, merge(SHARED, over))


def _warmed_up(condition: Condition, folder: Path) -> str:
    """The model that the arms of a condition start from; trained where it is not there."""
    from visual_grpo.api import train

    assert condition.warm_up is not None
    recipe, overrides = condition.warm_up
    if not (folder / "model").is_dir():
        train(recipe, overrides=overrides, out=folder, resume=folder.is_dir())
    return str(folder / "model")


def _prompt_files(condition: Condition, folder: Path) -> dict[str, Any]:
    """Write a condition's own prompts; the settings that read them."""
    from visual_grpo.run_folder import write_atomic

    assert condition.prompts is not None
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), condition.prompts(), strict=True):
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return {"data": {"source": str(folder / "train.jsonl")}, "eval": {"source": str(folder / "heldout.jsonl")}}


def _write(folder: Path, result: Mapping[str, Any]) -> None:
    from visual_grpo.run_folder import write_atomic

    write_atomic(folder / "results.json", json.dumps(result, indent=1))
    write_atomic(folder / "results.md", markdown(result))
    write_atomic(folder / "differences.svg", forest(result))
