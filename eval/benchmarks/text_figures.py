"""What the benchmark text_methods says of its runs: differences to vanilla GRPO with two kinds of intervals, table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from visual_grpo.eval.benchmarks.text_conditions import CONDITIONS, Condition
from visual_grpo.eval.intervals import Difference, paired_bootstrap, paired_difference

__all__ = ["forest", "markdown", "summarise"]

Arms = Mapping[str, Sequence[Mapping[str, Any]]]


def summarise(found: Mapping[str, Arms]) -> dict[str, Any]:
    """By condition and arm, over the seeds that are there.

    Returns:
        By condition with at least one seed: vanilla, seeds, measures, holds, arms: by name final (mean of the last evaluations),
        finals (by seed), std (Bessel; None for one seed), path (mean over the evaluations), any (share of questions with a right
        answer among its samples, None where not all have the same number, two or more), steps, seconds, figures, and for variants
        difference: mean, within (paired bootstrap over the held-out questions of these runs), seeds (Student's t over seeds,
        None below two), reading, and any, any_within: the same for the questions with some right answer.
    """
    out: dict[str, Any] = {}
    for title, arms in found.items():
        condition = CONDITIONS[title]
        base = arms[condition.vanilla]
        if not base:
            continue
        out[title] = {
            "vanilla": condition.vanilla,
            "seeds": len(base),
            "measures": condition.measures,
            "holds": condition.holds,
            "arms": {
                name: _arm(runs, condition)
                | ({} if name == condition.vanilla else {"difference": difference(base, runs)})
                for name, runs in arms.items()
            },
        }
    return out


def _arm(runs: Sequence[Mapping[str, Any]], condition: Condition) -> dict[str, Any]:
    finals = [float(run["points"][-1]["score"]) for run in runs]
    some = [statistics.fmean(solved(run["rows"]).values()) for run in runs if solved(run["rows"])]

    def mean(key: str) -> float:
        return statistics.fmean(float(run[key]) for run in runs)

    figures = {
        name: statistics.fmean(values)
        for name in condition.shows
        if (values := [run["training"][name] for run in runs if name in run["training"]])
    }
    said = [condition.says(run["rows"]) for run in runs] if condition.says is not None else []
    keys = list(said[0]) if said else []
    figures |= {f"held-out {key}": statistics.fmean(one[key] for one in said) for key in keys}
    return {
        "final": statistics.fmean(finals),
        "finals": finals,
        "std": statistics.stdev(finals) if len(finals) > 1 else None,
        "path": statistics.fmean(statistics.fmean(p["score"] for p in run["points"]) for run in runs),
        "any": statistics.fmean(some) if some else None,
        "steps": mean("steps"),
        "seconds": mean("seconds"),
        "figures": figures,
    }


def solved(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """1 for each question of which some answer has the value 1 or more, else 0; empty unless all have as many, two or more.

    >>> solved([{"index": i, "value": v} for i, v in ((0, 0.0), (0, 1.0), (1, 0.0), (1, 0.0))])
    {0: 1.0, 1: 0.0}
    """
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["index"], []).append(row["value"])
    sizes = {len(found) for found in values.values()}
    if len(sizes) != 1 or sizes == {1}:
        return {}
    return {index: float(max(found) >= 1) for index, found in values.items()}


def difference(base: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Variant - vanilla at the end; the same held-out answers of the same seeds are pairs."""
    a, b, clusters = [], [], []
    for first, second in zip(base, runs, strict=True):
        other = {row["row"]: row["value"] for row in second["rows"]}
        for row in first["rows"]:
            if row["row"] in other:
                a.append(float(row["value"]))
                b.append(float(other[row["row"]]))
                clusters.append(int(row["index"]))
    within = paired_bootstrap(a, b, clusters=clusters)
    finals = [[float(run["points"][-1]["score"]) for run in side] for side in (base, runs)]
    over_seeds = paired_difference(*finals) if len(base) > 1 else None
    some = _difference_solved(base, runs)
    return {
        "mean": within.mean,
        "within": [within.low, within.high],
        "seeds": None if over_seeds is None else [over_seeds.low, over_seeds.high],
        "reading": reading(within, over_seeds),
        "any": None if some is None else some.mean,
        "any_within": None if some is None else [some.low, some.high],
    }


def _difference_solved(base: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> Difference | None:
    pairs = [(solved(first["rows"]), solved(second["rows"])) for first, second in zip(base, runs, strict=True)]
    triples = [(a[index], b[index], index) for a, b in pairs for index in a if index in b]
    if not triples:
        return None
    first, second, clusters = zip(*triples, strict=True)
    return paired_bootstrap(first, second, clusters=clusters)


def reading(within: Difference, over_seeds: Difference | None) -> str:
    """A gain or loss where the interval over at least three seeds leaves out 0; else what these runs alone say, or a tie.

    Two seeds give a t interval too wide to say anything, and it is not asked.
    """

    def sign(interval: Difference) -> str | None:
        return "gain" if interval.low > 0 else "loss" if interval.high < 0 else None

    found = None if over_seeds is None or over_seeds.count < 3 else sign(over_seeds)
    if found is not None:
        return found
    alone = sign(within)
    return "tie" if alone is None else f"{alone} in these runs, open over seeds"


def _span(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"


def _some(arm: Mapping[str, Any], gap: Mapping[str, Any] | None) -> str:
    if arm["any"] is None:
        return ""
    change = "" if gap is None or gap["any"] is None else f" ({gap['any']:+.3f} {_span(gap['any_within'])})"
    return f"{arm['any']:.3f}{change}"


def markdown(result: Mapping[str, Any]) -> str:
    """The comparison as Markdown: one table, then what each condition is."""
    head = [
        "condition", "arm", "seeds", "steps", "seconds", "held-out", "minus vanilla", "within these runs, 95 %",
        "over seeds, 95 %", "reading", "some answer right",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for title, condition in result["conditions"].items():
        for name, arm in condition["arms"].items():
            spread = "" if arm["std"] is None else f" ± {arm['std']:.3f}"
            gap = arm.get("difference")
            cells = [
                title, f"`{name}`", str(condition["seeds"]), f"{arm['steps']:.0f}", f"{arm['seconds']:.0f}",
                f"{arm['final']:.3f}{spread}",
                *(["", "", "", "vanilla"] if gap is None else [
                    f"{gap['mean']:+.3f}", _span(gap["within"]), _span(gap["seeds"]), gap["reading"],
                ]),
                _some(arm, gap),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    notes = []
    for title, condition in result["conditions"].items():
        figures = "; ".join(
            f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in arm["figures"].items())
            for name, arm in condition["arms"].items()
            if arm["figures"]
        )
        notes.append(
            f"- **{title}** ({condition['measures']}): {condition['holds']}. Means over the steps and seeds: {figures}."
        )
    what = (
        f"Held-out mean after the last step, ± standard deviation over seeds; seconds of training ({result['clock']} time) are "
        "for comparison within a condition."
    )
    return "\n".join([what, "", *lines, "", *notes, ""])


def forest(result: Mapping[str, Any]) -> str:
    """SVG: the difference of each variant to its vanilla arm, with both intervals and a dot a seed."""
    import io

    from matplotlib.figure import Figure

    rows = [
        (f"{name}\n({title})", condition["arms"][condition["vanilla"]], arm)
        for title, condition in result["conditions"].items()
        for name, arm in condition["arms"].items()
        if "difference" in arm
    ]
    figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, base, arm) in enumerate(rows):
        gap, height = arm["difference"], len(rows) - 1 - place
        if gap["seeds"] is not None and len(base["finals"]) > 2:
            axes.plot(gap["seeds"], [height, height], color="0.6", linewidth=1)
        axes.plot(gap["within"], [height, height], color="C0", linewidth=4, alpha=0.5)
        axes.plot(gap["mean"], height, "o", color="C0")
        dots = [b - a for a, b in zip(base["finals"], arm["finals"], strict=True)]
        axes.plot(dots, [height + 0.22] * len(dots), "|", color="black", markersize=7)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in reversed(rows)], fontsize="small")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(
        "held-out score minus vanilla GRPO (thick: within these runs, thin: over seeds, 95 %; ticks: seeds)",
        fontsize="small",
    )
    axes.grid(alpha=0.3, axis="x")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
