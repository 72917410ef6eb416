"""The plots of a report, as SVG texts."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from visual_grpo.report.data import Run
from visual_grpo.report.stats import mean_interval

__all__ = ["AFTER", "BEFORE", "HELD_OUT", "PHASES", "constants", "histograms", "reward_curves", "small_curves"]

INK, MUTED, RULE = "#1f2937", "#6b7280", "#e5e7eb"
BEFORE, AFTER, HELD_OUT = "#94a3b8", "#2563eb", "#d97706"
PHASES = ("#2563eb", "#d97706", "#0f766e", "#9333ea", "#be185d", "#64748b", "#65a30d", "#0891b2")
_POINTS = 400  # at most so many points a curve: more is not seen and makes the file large

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "visual_grpo",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}

# figure of the training records -> (title, logarithmic scale)
_CURVES = {
    "loss": ("loss", False),
    "grad_norm": ("gradient norm", True),
    "kl": ("KL to the reference", True),
    "clip_fraction": ("clipped units, share", False),
    "ratio_mean": ("ratio, mean", False),
    "ratio_max": ("ratio, largest", False),
    "advantage_abs": ("advantage, mean size", False),
    "flat_groups": ("groups with equal rewards, share", False),
    "entropy": ("entropy", False),
    "length": ("length, units", False),
    "truncated": ("samples cut off, share", False),
    "reward_failed": ("failed rewards, share", False),
    "lr": ("learning rate", False),
}


def _svg(width: float, height: float, draw: Callable[[Any], None]) -> str:
    """Draw into one pair of axes and return the SVG, without the XML header."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A tag in a script that matplotlib's own font lacks is still shown: the reader's browser sets the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(width, height))
        # Fixed margins: panels in a row line up, and no layout engine draws everything twice.
        below = 0.46 if height > 3 else 0.26
        axes = figure.add_axes((0.58 / width, below / height, 1 - 0.7 / width, 1 - (below + 0.34) / height))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
            axis.set_major_formatter(_plain)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _plain(value: float, _: float) -> str:
    """A tick label without an offset or an exponent in small print."""
    return f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _thin(steps: Sequence[int], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """At most `_POINTS` points: means over equal stretches."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    if len(x) <= _POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _POINTS)
    kept = [p[np.isfinite(y[p])] for p in parts]
    return np.array([x[p].mean() for p in parts]), np.array([y[p].mean() if len(p) else math.nan for p in kept])


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a tenth of the run, of the finite values."""
    half = max(len(values) // 20, 1)
    out = np.full(len(values), math.nan)
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        near = near[np.isfinite(near)]
        if len(near):
            out[i] = near.mean()
    return out


def reward_curves(run: Run) -> list[str]:
    """Training reward, then with their intervals the held-out score and what is watched; those that the run has."""
    plots = []
    steps, values = run.series("reward/total")
    if steps:
        plots.append(_svg(5, 3.2, lambda axis: _draw_reward(axis, *_thin(steps, values))))
    for score in (*run.scores[:1], *run.watched):
        points = []
        for record in run.evals:
            found = mean_interval(run.samples(record["step"], score))
            if found is not None:
                points.append((float(record["step"]), *found))
        if points:
            plots.append(_svg(5, 3.2, partial(_draw_held_out, points, score, run.best)))
    return plots


def _draw_reward(axis: Any, x: np.ndarray, y: np.ndarray) -> None:
    crowded = len(x) > 8
    axis.plot(x, y, color=AFTER, alpha=0.3 if crowded else 1, marker="o" if len(x) == 1 else "", linewidth=1.2)
    if crowded:
        axis.plot(x, _smooth(y), color=AFTER)
    axis.set(title="training reward" + (" (each step, and smoothed)" if crowded else ""), xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_held_out(
    points: Sequence[tuple[float, float, float, float]], score: str, best: dict[str, Any] | None, axis: Any
) -> None:
    x, mean, low, high = (np.array(column) for column in zip(*points, strict=True))
    axis.fill_between(x, low, high, color=HELD_OUT, alpha=0.15, linewidth=0)
    axis.errorbar(
        x, mean, [mean - low, high - mean], color=HELD_OUT, marker="o", markersize=5, elinewidth=1.2, capsize=2
    )
    axis.axhline(mean[0], color=BEFORE, linewidth=1.2, linestyle=(0, (4, 3)))
    if best is not None:
        axis.axvline(best["step"], color=AFTER, linewidth=1.2, linestyle=(0, (1, 2)))
    axis.set(title=f"held-out {score}, 95 % interval", xlabel="step")
    axis.xaxis.get_major_locator().set_params(integer=True)


def small_curves(run: Run) -> list[str]:
    """One small panel for each figure of the optimisation that the run logged."""
    plots = []
    for key, (title, logarithmic) in _CURVES.items():
        steps, values = run.series(key)
        if len(set(_finite(values))) > 1:
            plots.append(_svg(3.4, 2.1, partial(_draw_curve, *_thin(steps, values), title, logarithmic)))
    return plots


def constants(run: Run) -> dict[str, float]:
    """Title and value of the figures that did not change during the run: a line of text, not a panel."""
    known = {title: set(_finite(run.series(key)[1])) for key, (title, _) in _CURVES.items()}
    return {title: values.pop() for title, values in known.items() if len(values) == 1}


def _finite(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _draw_curve(x: np.ndarray, y: np.ndarray, title: str, logarithmic: bool, axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.plot(x, y, color=AFTER, linewidth=1.5)
    finite = y[np.isfinite(y)]
    if logarithmic and (finite > 0).all() and finite.max() > 30 * finite.min():
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(numticks=5))
        axis.yaxis.set_major_formatter(_plain)
        axis.yaxis.set_minor_locator(NullLocator())
    axis.set_title(title)
    axis.xaxis.get_major_locator().set_params(integer=True)


def histograms(run: Run) -> tuple[list[str], list[tuple[int, str]]]:
    """Rewards, advantages and ratios of the first, a middle and the last step: the plots, and (step, colour) of each."""
    records = [r for r in run.train if r.get("histograms")]
    if not records:
        return [], []
    picked = list({r["step"]: r for r in (records[0], records[len(records) // 2], records[-1])}.values())
    colors = {1: [AFTER], 2: [BEFORE, AFTER], 3: [BEFORE, HELD_OUT, AFTER]}[len(picked)]
    plots = []
    for name in ("reward", "advantage", "ratio"):
        drawn = [(_bars(r["histograms"].get(name)), color) for r, color in zip(picked, colors, strict=True)]
        if any(bars is not None for bars, _ in drawn):
            plots.append(_svg(3.4, 2.5, partial(_draw_histogram, drawn, name)))
    return plots, [(int(r["step"]), color) for r, color in zip(picked, colors, strict=True)]


def _draw_histogram(drawn: Sequence[tuple[Any, str]], name: str, axis: Any) -> None:
    for bars, color in drawn:
        if bars is not None:
            edges, counts = bars
            share = counts / counts.sum()
            axis.stairs(share, edges, color=color, fill=True, alpha=0.1)
            axis.stairs(share, edges, color=color, linewidth=1.6)
    axis.set(title=f"{name}, share of values", ylim=(0, None))


def _bars(histogram: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Edges and counts without empty ends; an open end is drawn as wide as its neighbour. None where nothing was counted."""
    if not histogram or not histogram.get("counts"):
        return None
    edges = np.array([math.inf if e is None else e for e in histogram["edges"]], float)
    counts = np.array(histogram["counts"], float)
    if len(edges) != len(counts) + 1 or not counts.sum() > 0:
        return None
    used = np.flatnonzero(counts)
    first, last = max(used[0] - 1, 0), min(used[-1] + 1, len(counts) - 1)
    if len(edges) > 3:
        widths = np.diff(edges[1:-1])
        edges[0] = max(edges[0], edges[1] - 2 * widths[0])
        edges[-1] = min(edges[-1], edges[-2] + 2 * widths[-1])
    return edges[first : last + 2], counts[first : last + 1]
