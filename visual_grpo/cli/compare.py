"""`visual-grpo compare`: a table and a plot of several runs; runs that differ in the seed alone are pooled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from visual_grpo.cli.runs import Arm


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Run folders.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="Metric to compare; may be repeated (default: the evaluation's)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.png", dir_okay=False, help="The plot.")] = Path(
        "compare.png"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: settings that differ, first, last and best value of each metric, mean and spread over seeds."""
    from visual_grpo.cli.output import print_json, print_table
    from visual_grpo.cli.runs import choose_metrics, differing_settings, group_arms, read_run

    twice = [folder for i, folder in enumerate(runs) if folder.resolve() in {other.resolve() for other in runs[:i]}]
    if twice:
        raise UserError(f"{str(twice[0])!r} is given twice: one run would be counted as two seeds; leave one out")
    read = [read_run(folder) for folder in runs]
    metrics = choose_metrics(read, metric or [])
    settings = differing_settings(read)
    arms = group_arms(read)
    plot(arms, metrics, out)
    if as_json:
        print_json(
            {
                "metrics": metrics,
                "runs": [
                    {
                        "run": str(run.folder),
                        "steps": run.last_step,
                        "settings": {key: run.settings.get(key) for key in settings},
                        **({} if run.best is None else {"best_weights": run.best}),
                        **{name: run.extremes(name) for name in metrics},
                    }
                    for run in read
                ],
                "arms": [{"arm": arm.label, "runs": len(arm.runs), **arm.spread(metrics)} for arm in arms],
                "plot": str(out),
            }
        )
        return
    rows = [[str(run.folder), run.last_step, name, *run.extremes(name).values()] for name in metrics for run in read]
    print_table("Runs", ["run", "steps", "metric", "first", "last", "best"], rows)
    kept = [[str(run.folder), *(run.best[key] for key in ("step", "metric", "value"))] for run in read if run.best]
    if kept:
        print_table("Best weights", ["run", "step", "metric", "value"], kept)
    if settings:  # a setting a line: there are often more of them than of runs
        changed = [[key, *(_short(run.settings.get(key, "-")) for run in read)] for key in settings]
        print_table("Settings that differ", ["setting", *(str(run.folder) for run in read)], changed)
    if any(len(arm.runs) > 1 for arm in arms):
        pooled = [[arm.label, len(arm.runs), *(_mean_std(arm, name) for name in metrics)] for arm in arms]
        print_table("Last value over seeds, mean ± standard deviation", ["arm", "runs", *metrics], pooled)
    print(f"plot: {out}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _mean_std(arm: Arm, metric: str) -> str:
    spread = arm.spread([metric])[metric]
    if spread["mean"] is None:
        return ""
    return f"{spread['mean']:.4f}" + (f" ± {spread['std']:.4f}" if spread["std"] is not None else "")


def _plain(text: str) -> str:
    """What matplotlib shows as it stands: a dollar begins a formula, and a label that begins with `_` is left out."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def plot(arms: list[Arm], metrics: list[str], out: Path) -> None:
    """Draw one panel a metric: a thin line a run, a thick one for the mean of an arm's runs at the steps they share."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(metrics), figsize=(6 * len(metrics), 4), squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=True):
        for position, arm in enumerate(arms):
            colour = f"C{position % 10}"
            for run in arm.runs:
                points = run.series(metric)
                alone = len(arm.runs) == 1
                axis.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    alpha=1 if alone else 0.3,
                    label=_plain(arm.label) if alone else None,
                )
            mean = arm.mean_curve(metric)
            if len(arm.runs) > 1 and mean:
                axis.plot(
                    *zip(*mean, strict=True),
                    color=colour,
                    linewidth=2,
                    label=f"{_plain(arm.label)} (mean of {len(arm.runs)})",
                )
        axis.set(xlabel="step", title=_plain(metric))
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.tight_layout()
    try:
        figure.savefig(out, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the plot to {str(out)!r}: {error}") from error
    finally:
        plt.close(figure)
