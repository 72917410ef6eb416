"""Flow methods against each other on the testbed: the same wall time, reward, model and held-out pictures, several seeds.

    visual-grpo benchmark flow_methods --seeds 3 minutes=8
    visual-grpo benchmark flow_methods --seeds 2 minutes=4 "methods=[flow_grpo, v_grpo]" target=0.45

First an iteration of every method is timed, all methods in turn. Then each trains its recipe NAME_tiny (`quickstart` is V-GRPO's)
for as many steps as fit into `minutes` of such iterations (a learning rate falls to 0 at the last step), and is evaluated at even
distances under averaged weights, always by the same sampler. So work beside the benchmark can disturb the timing, never the
training. Sampled pictures and the network calls that a picture cost are counted, not computed. Timings and finished arms lie in
OUT/arms and are not made again.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.eval.benchmarks.flow_arms import CLOCKS, time_iterations, train_arm
from visual_grpo.run_folder import write_atomic

__all__ = ["METHODS", "run", "summarise", "table", "time_to"]

METHODS = (
    "flow_grpo",
    "flow_grpo_fast",
    "dancegrpo",
    "mixgrpo",
    "diffusion_nft",
    "v_grpo",
    "mv_grpo",
    "vipo",
)
RECIPE_OF = {"v_grpo": "quickstart"}
"""Where a method's recipe of the shared batch is not NAME_tiny."""
VANILLA, RIVAL = "flow_grpo", "v_grpo"
ROUNDS = 2
"""Of timing, through all methods."""
SAMPLER = {
    "solver": "ode",
    "steps": 6,
    "guidance": 1.0,
    "schedule": "scheduler",
    "shift": None,
    "same_noise": False,
    "tail_ratio": None,
}
"""Of every method's held-out pictures."""
SAME = ("model.adapter", "model.path", "data", "rewards", "train.prompts_per_step", "train.group_size")
"""Settings that all arms must share."""


def run(
    *,
    seeds: int = 3,
    out: Path | str = "runs/benchmark_flow_methods",
    minutes: float = 8.0,
    points: int = 8,
    samples: int = 240,
    final_samples: int = 480,
    methods: list[str] | None = None,
    score: str = "geneval/by_tag",
    target: float | None = None,
    calibration: int = 3,
    clock: str = "wall",
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train every method under every seed and compare; writes results.json, results.md and curves.svg into `out`.

    Args:
        seeds: seeds 0 .. seeds - 1 of every method.
        out: folder.
        minutes: training time of a run.
        points: evaluations in that time, evenly spaced, besides the one before the first step.
        samples: held-out pictures of an evaluation.
        final_samples: of the first and the last.
        methods: names; the recipe of NAME is NAME_tiny. Default: all of `METHODS` that have one.
        score: figure of an evaluation to compare.
        target: score whose time is asked for; default: what flow_grpo reaches in the end, else the weakest method.
        calibration: iterations of a method that are timed, `ROUNDS` times; 0 takes `minutes` for what the recipe's
            own steps need.
        clock: `wall`, or `processor`: seconds of this process's processors, for a machine that does other work too; set
            OMP_NUM_THREADS=1, and they are what a quiet machine's clock would show.
        overrides: of every run's config, nested.

    Raises:
        UserError: an unknown method, recipes that cannot be compared, results of other settings in `out`.
    """
    if minutes <= 0 or points < 1 or seeds < 1:
        raise UserError(f"minutes, points and seeds must be positive, got {minutes}, {points} and {seeds}")
    if clock not in CLOCKS:
        raise UserError(f"clock: {clock!r} is unknown; use {' or '.join(CLOCKS)}")
    folder = Path(out)
    chosen, absent = _chosen(methods)
    settings = {
        "minutes": minutes,
        "points": points,
        "samples": samples,
        "final_samples": final_samples,
        "calibration": calibration,
        "clock": clock,
        "overrides": overrides or {},
    }
    plans = {name: _plan(name, settings) for name in chosen}
    _check_same(plans)
    (folder / "arms").mkdir(parents=True, exist_ok=True)
    if calibration:
        step_s = _times(chosen, settings, folder)
    else:
        step_s = {name: 60 * minutes / made.config.train.steps for name, made in plans.items()}
    arms: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for seed in range(seeds):  # all methods of a seed before the next: an interrupted benchmark compares whole seeds
        for name in chosen:
            arms[name].append(_arm(name, seed, step_s[name], settings, folder))
    result = summarise(arms, score=score, target=target)
    result |= {"minutes": minutes, "seeds": seeds, "score": score, "absent": absent, "clock": clock}
    _write(folder, result, arms, score)
    return result | {"files": {name: str(folder / name) for name in ("results.json", "results.md", "curves.svg")}}


def _chosen(methods: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """(names to run, names of `METHODS` without a recipe)."""
    from visual_grpo.registry import RECIPES

    known = set(RECIPES.names())
    for name in methods or ():
        if _recipe(name) not in known:
            there = [k.removesuffix("_tiny") for k in known if k.endswith("_tiny")]
            raise UserError(
                f"methods: {name!r} has no recipe {_recipe(name)}.{did_you_mean(name, there)} Known: {', '.join(sorted(there))}."
            )
    names = list(dict.fromkeys(methods)) if methods else [name for name in METHODS if _recipe(name) in known]
    return names, [] if methods else [name for name in METHODS if name not in names]


def _recipe(name: str) -> str:
    return RECIPE_OF.get(name, f"{name}_tiny")


def _plan(name: str, settings: Mapping[str, Any], *, seed: int = 0, steps: int | None = None) -> Any:
    """The recipe's plan with what all arms share."""
    from visual_grpo.api import plan
    from visual_grpo.config import merge

    train: dict[str, Any] = {"seed": seed}
    if steps is not None:
        train["steps"] = steps
    over: dict[str, Any] = {
        "train": train,
        "eval": {"sampling": SAMPLER, "grid": 0},
        "self_test": {"enabled": False},
    }
    return plan(_recipe(name), merge(over, settings["overrides"]))


def _check_same(plans: Mapping[str, Any]) -> None:
    """Refuse arms whose scores or batches would not be comparable."""
    first = next(iter(plans))
    for name, made in plans.items():
        for key in SAME:
            mine, theirs = (_value(p.config, key) for p in (made, plans[first]))
            if mine != theirs:
                raise UserError(
                    f"{_recipe(name)} and {_recipe(first)} cannot be compared: {key} is {mine!r} and {theirs!r}; leave one "
                    f"out with methods=[...], or set overrides.{key}"
                )


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _arm(name: str, seed: int, step_s: float, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One run, from its file where it was finished before."""
    path = folder / "arms" / f"{name}-seed{seed}.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != settings:
            raise UserError(f"{str(path)!r} is of a benchmark with other settings; take another folder (--out)")
        return found
    steps = max(1, int(60 * settings["minutes"] / step_s + 1e-9))
    started = time.time()
    arm = train_arm(
        _plan(name, settings, seed=seed, steps=steps),
        folder / "runs" / f"{name}-seed{seed}",
        points=settings["points"],
        step_s=step_s,
        samples=settings["samples"],
        final_samples=settings["final_samples"],
    )
    arm |= {
        "method": name,
        "seed": seed,
        "step_s": step_s,
        "clock_s": time.time() - started,
        "settings": settings,
    }
    write_atomic(path, json.dumps(arm, indent=1))
    return arm


def _times(names: Sequence[str], settings: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Seconds of an iteration by method: the fastest of `ROUNDS` rounds through all methods; from its file where it is there."""
    path = folder / "arms" / "timing.json"
    rounds = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    timed = {"calibration": settings["calibration"], "clock": settings["clock"], "overrides": settings["overrides"]}
    if any(found["settings"] != timed for found in rounds):
        raise UserError(f"{str(path)!r} is of a benchmark with other settings; take another folder (--out)")
    while len(rounds) < ROUNDS or any(name not in found["seconds"] for name in names for found in rounds):
        place = next((i for i, found in enumerate(rounds) if not set(names) <= set(found["seconds"])), len(rounds))
        if place == len(rounds):
            rounds.append({"settings": timed, "seconds": {}})
        name = next(name for name in names if name not in rounds[place]["seconds"])
        run = folder / "runs" / f"{name}-timed{place}"
        seconds = time_iterations(_plan(name, settings), run, settings["calibration"], clock=settings["clock"])
        rounds[place]["seconds"][name] = seconds
        write_atomic(path, json.dumps(rounds, indent=1))
    return {name: min(found["seconds"][name] for found in rounds) for name in names}


# -- the comparison ---------------------------------------------------------------------------------------------------------


def time_to(points: Sequence[Mapping[str, Any]], score: str, target: float) -> float | None:
    """Training seconds until `score` first reaches `target`, between two evaluations by a straight line; None if never.

    >>> time_to([{"seconds": 0, "metrics": {"s": 0.25}}, {"seconds": 10, "metrics": {"s": 0.75}}], "s", 0.5)
    5.0
    """
    before = None
    for point in points:
        now = float(point["seconds"]), _score(point, score)
        if now[1] >= target:
            if before is None or now[1] == before[1]:
                return now[0]
            return before[0] + (now[0] - before[0]) * (target - before[1]) / (now[1] - before[1])
        before = now
    return None


def _score(point: Mapping[str, Any], score: str) -> float:
    metrics = point["metrics"]
    if score not in metrics:
        raise UserError(
            f"score: no figure {score!r} in the evaluations.{did_you_mean(score, metrics)} Known: {', '.join(metrics)}."
        )
    return float(metrics[score])


def summarise(arms: Mapping[str, Sequence[Mapping[str, Any]]], *, score: str, target: float | None) -> dict[str, Any]:
    """Means over seeds by method, the time to the target, and ratios to `RIVAL`.

    Returns:
        target; methods: by name, final (mean), final_std (Bessel; None for one seed), gain (over the score before), minutes,
        gradient_steps, pictures, calls_sampling and calls_training (network calls a sampled picture; training includes
        replays without gradient), calls (millions, all), minutes_to_target (mean of the seeds that reach it), reached,
        and to_rival: ratios of gain and of minutes_to_target.
    """
    finals = {name: [_score(arm["points"][-1], score) for arm in found] for name, found in arms.items()}
    if target is None:
        means = {name: statistics.fmean(values) for name, values in finals.items()}
        target = means.get(VANILLA, min(means.values()))
    rows = {name: _row(found, finals[name], score, target) for name, found in arms.items()}
    for row in rows.values():
        rival = rows.get(RIVAL)
        row["to_rival"] = {
            key: None if rival is None else _ratio(row[key], rival[key]) for key in ("gain", "minutes_to_target")
        }
    return {"target": target, "methods": rows}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None and b != 0 else None


def _row(found: Sequence[Mapping[str, Any]], finals: Sequence[float], score: str, target: float) -> dict[str, Any]:
    def mean(key: str) -> float:
        return statistics.fmean(float(arm["points"][-1][key]) for arm in found)

    reached = [t for arm in found if (t := time_to(arm["points"], score, target)) is not None]
    calls = {key: mean(key) for key in ("sampling", "replay", "training")}
    pictures = max(mean("pictures"), 1.0)
    return {
        "final": statistics.fmean(finals),
        "final_std": statistics.stdev(finals) if len(finals) > 1 else None,
        "gain": statistics.fmean(f - _score(arm["points"][0], score) for f, arm in zip(finals, found, strict=True)),
        "minutes": mean("seconds") / 60,
        "gradient_steps": mean("gradient_steps"),
        "pictures": mean("pictures"),
        "calls_sampling": calls["sampling"] / pictures,
        "calls_training": (calls["replay"] + calls["training"]) / pictures,
        "calls": math.fsum(calls.values()) / 1e6,
        "minutes_to_target": statistics.fmean(reached) / 60 if reached else None,
        "reached": f"{len(reached)} of {len(found)}",
    }


def table(result: Mapping[str, Any]) -> str:
    """The comparison as Markdown."""
    head = [
        "method", "held-out", "gain", "minutes", "gradient steps", "pictures", "calls a picture, sampling", "training",
        "calls, millions", f"minutes to {result['target']:.3f}", "reached", f"gain / {RIVAL}", f"time / {RIVAL}",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in sorted(result["methods"].items(), key=lambda item: -item[1]["final"]):
        spread = "" if row["final_std"] is None else f" ± {row['final_std']:.3f}"
        cells = [
            name, f"{row['final']:.3f}{spread}", f"{row['gain']:+.3f}", f"{row['minutes']:.2f}",
            f"{row['gradient_steps']:.0f}", f"{row['pictures']:.0f}", f"{row['calls_sampling']:.2f}",
            f"{row['calls_training']:.2f}", f"{row['calls']:.4g}", _number(row["minutes_to_target"]), row["reached"],
            _number(row["to_rival"]["gain"]), _number(row["to_rival"]["minutes_to_target"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _write(
    folder: Path, result: Mapping[str, Any], arms: Mapping[str, Sequence[Mapping[str, Any]]], score: str
) -> None:
    write_atomic(folder / "results.json", json.dumps({**result, "arms": arms}, indent=1))
    left_out = f" Not run, no recipe: {', '.join(result['absent'])}." if result["absent"] else ""
    head = (
        f"Held-out {score} after {result['minutes']:g} minutes of training ({result['clock']} time), mean ± standard deviation "
        f"of {result['seeds']} seed(s); all methods are evaluated by one sampler.{left_out}\n\n"
    )
    write_atomic(folder / "results.md", head + table(result))
    write_atomic(folder / "curves.svg", curves(arms, score, result["target"]))


def curves(arms: Mapping[str, Sequence[Mapping[str, Any]]], score: str, target: float) -> str:
    """SVG: held-out score against minutes of training; a thin line a seed, a thick one for the mean of a method."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, found) in enumerate(arms.items()):
        lines = [
            ([p["seconds"] / 60 for p in arm["points"]], [_score(p, score) for p in arm["points"]]) for arm in found
        ]
        for x, y in lines:
            axes.plot(x, y, color=f"C{place}", alpha=0.25, linewidth=1)
        shared = range(min(len(x) for x, _ in lines))
        x = [statistics.fmean(line[0][i] for line in lines) for i in shared]
        y = [statistics.fmean(line[1][i] for line in lines) for i in shared]
        axes.plot(x, y, color=f"C{place}", linewidth=2, marker="o", markersize=3, label=name)
    axes.axhline(target, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="minutes of training", ylabel=f"held-out {score}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
