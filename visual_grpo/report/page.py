"""The page of a report: sections in the order in which a reader asks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from visual_grpo.progress import format_seconds
from visual_grpo.report import plots
from visual_grpo.report.data import Run
from visual_grpo.report.samples import samples_section
from visual_grpo.report.stats import Paired, mean_interval
from visual_grpo.report.style import CSS

__all__ = ["render"]


def render(run: Run) -> str:
    """The whole page; nothing in it is loaded from elsewhere."""
    sections = [
        ("scores", "Held-out scores", _scores(run)),
        ("curves", "Learning curves", _curves(run)),
        ("samples", "Before and after", samples_section(run)),
        ("optimisation", "Optimisation", _optimisation(run)),
        ("distributions", "Rewards, advantages and ratios", _histograms(run)),
        ("time", "Where the time went", _time(run)),
        ("self-test", "Self-test before the first step", _self_test(run)),
        ("alarms", "Alarms", _alarms(run)),
        ("config", "Config", _config(run)),
    ]
    shown = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in shown)
    parts = [f'<section id="{key}"><h2>{escape(title)}</h2>{body}</section>' for key, title, body in shown]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(run.name)} - visual_grpo</title><style>{CSS}</style></head><body><main>"
        f"{_header(run)}<nav>{links}</nav>{_exploited(run)}{_verdict(run)}{''.join(parts)}"
        "<footer>Written by visual_grpo from config.yaml, metrics.jsonl, eval/ and samples/ of this run's folder.</footer>"
        "</main></body></html>\n"
    )


def _header(run: Run) -> str:
    config = run.config
    model = config.get("model", {})
    methods = [next(iter(m)) if isinstance(m, dict) else str(m) for m in config.get("method", [])]
    spent = sum(run.phases.values())
    chips = [
        ("model", f"{model.get('adapter', '?')} · {model.get('path', '?')}"),
        ("method", " + ".join(methods) or "grpo"),
        ("rewards", ", ".join(config.get("rewards") or {})),
        ("steps", f"{run.steps} of {run.planned}" + ("" if run.finished else ", not finished")),
        ("stopped", run.stopped or ""),
        ("best weights", _best(run)),
        ("seed", str(config.get("train", {}).get("seed", 0))),
        ("time", format_seconds(spent) if spent else ""),
    ]
    items = "".join(f"<li><b>{key}</b>{escape(value)}</li>" for key, value in chips if value)
    summary = f'<p class="summary">{escape(config["summary"])}</p>' if config.get("summary") else ""
    return f'<header class="top"><h1>{escape(run.name)}</h1>{summary}<ul class="chips">{items}</ul></header>'


def _best(run: Run) -> str:
    """Step and figure of the best weights, where the run keeps them."""
    best = run.best
    return "" if best is None else f"step {best['step']}, {best['metric']} {_number(best['value'])}"


def _exploited(run: Run) -> str:
    """The last alarm of an exploited reward, above everything else."""
    told = [alarm for alarm in run.alarms if alarm.get("name") == "hacking"]
    if not told:
        return ""
    text = f"<strong>The reward was exploited</strong><p>{escape(str(told[-1].get('message', '')))}</p>"
    return f'<section class="verdict worse"><div class="big">!</div><div>{text}</div></section>'


def _verdict(run: Run) -> str:
    found = run.compare(run.scores[0]) if run.scores else None
    if found is not None and run.ends is not None:
        words = {
            "better": "Better than before training",
            "worse": "Worse than before training",
            "unclear": "No clear change",
        }
        ends = _ends(found, " to ")
        interval = f"95 % interval {ends}" if ends else "no interval: a single prompt"
        return (
            f'<section class="verdict {found.verdict}"><div class="big"><span class="from">{_number(found.before)}</span>'
            f'<span class="arrow">→</span>{_number(found.after)}</div><div><strong>{words[found.verdict]}: '
            f"{_signed(found.difference)}</strong><p>held-out {escape(run.scores[0])}, {interval}</p>"
            f'<p class="note" style="margin:0">step {run.ends[0]} against step {run.ends[1]} on the same {found.n} samples '
            f"({found.prompts} prompts, same noises); the interval resamples prompts</p></div></section>"
        )
    _, values = run.series("reward/total")
    known = [v for v in values if math.isfinite(v)]
    if len(known) > 1:
        tenth = max(len(known) // 10, 1)
        first, last = (sum(part) / len(part) for part in (known[:tenth], known[-tenth:]))
        big = f'<span class="from">{_number(first)}</span><span class="arrow">→</span>{_number(last)}'
        text = (
            "training reward, first and last tenth of the steps. Prompts differ from step to step: "
            "only a held-out score is proof"
        )
    else:
        before = mean_interval(run.samples(run.evals[0]["step"], run.scores[0])) if run.evals and run.scores else None
        big = "–" if before is None else _number(before[0])
        text = "no step has been logged yet" if before is None else f"held-out {escape(run.scores[0])} before training"
    return (
        f'<section class="verdict"><div class="big">{big}</div><div><strong>No held-out comparison yet</strong><p>{text}</p>'
        "</div></section>"
    )


def _scores(run: Run) -> str:
    rows = [(score, run.compare(score)) for score in run.scores]
    known = [(score, found) for score, found in rows if found is not None]
    if not known:
        return ""
    head, tags = run.scores[0], run.tags
    body = _table(known, first="score")
    body += (
        '<p class="note" style="margin-top:10px">Means over samples; differences with 95 % intervals from resampling prompts. '
        "Grey ring: before; blue dot: after.</p>"
    )
    if len(tags) > 1:
        by_tag = [(tag, run.compare(head, tag)) for tag in tags]
        overall = run.compare_tags(head)
        listed = [(tag, found) for tag, found in by_tag if found is not None]
        body += f"<h3>{escape(head)} by kind of prompt</h3>"
        body += _table(
            listed + ([("mean of the kinds", overall)] if overall else []),
            first="kind",
            strong_last=overall is not None,
        )
    return body


def _table(rows: Sequence[tuple[str, Paired]], *, first: str, strong_last: bool = False) -> str:
    """Before, after and difference, with a bar on a scale that is [0, 1] where all values lie there."""
    cells = []
    for position, (name, found) in enumerate(rows):
        inside = min(found.before, found.after) >= 0 and max(found.before, found.after) <= 1
        mark = {"better": "pos", "worse": "neg", "unclear": ""}[found.verdict]
        ends = _ends(found, ", ")
        interval = f' <span class="range">[{ends}]</span>' if ends else ""
        strong = ' class="head"' if strong_last and position == len(rows) - 1 else ""
        cells.append(
            f'<tr{strong}><td>{escape(name)}</td><td class="n">{_number(found.before)}</td>'
            f'<td class="n">{_number(found.after)}</td>'
            f'<td class="n"><span class="{mark}">{_signed(found.difference)}</span>{interval}</td>'
            f'<td class="n">{found.n}</td><td class="bar">{_span(found.before, found.after) if inside else ""}</td></tr>'
        )
    return (
        f'<div class="scroll"><table><tr><th>{first}</th><th class="n">before</th><th class="n">after</th>'
        f'<th class="n">difference</th><th class="n">n</th><th class="bar"></th></tr>{"".join(cells)}</table></div>'
    )


def _span(before: float, after: float) -> str:
    low, high = min(before, after), max(before, after)
    return (
        f'<div class="span"><i style="left:{low:.1%};width:{high - low:.1%}"></i>'
        f'<b class="b" style="left:{before:.1%}"></b><b style="left:{after:.1%}"></b></div>'
    )


def _grid(size: str, drawn: Sequence[str]) -> str:
    return f'<div class="plots {size}">{"".join(drawn)}</div>' if drawn else ""


def _curves(run: Run) -> str:
    note = ""
    if run.evals:
        sizes = sorted({e["n"] for e in run.evals if e.get("n")})
        text = " to ".join(str(n) for n in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else ""
        note = (
            f'<p class="note">Held-out prompts and noises are fixed ({text} samples); '
            "the dashed line is the score before training"
            f"{', the dotted one the step of the best weights' if run.best else ''}.</p>"
        )
    drawn = plots.reward_curves(run)
    return note + _grid("two", drawn) if drawn else ""


def _optimisation(run: Run) -> str:
    fixed = "; ".join(f"{escape(title)} {value:.4g}" for title, value in plots.constants(run).items())
    return _grid("three", plots.small_curves(run)) + (
        f'<p class="note">The same at every step: {fixed}.</p>' if fixed else ""
    )


def _histograms(run: Run) -> str:
    drawn, steps = plots.histograms(run)
    items = "".join(f'<li><i class="dot" style="background:{color}"></i>step {step}</li>' for step, color in steps)
    return f'<ul class="legend">{items}</ul>{_grid("three", drawn)}' if drawn else ""


def _time(run: Run) -> str:
    phases = run.phases
    total = sum(phases.values())
    if total <= 0:
        return ""
    bars, items = [], []
    for (name, seconds), color in zip(
        phases.items(), plots.PHASES * (len(phases) // len(plots.PHASES) + 1), strict=False
    ):
        share = seconds / total
        bars.append(f'<i style="width:{share:.3%};background:{color}" title="{escape(name)} {share:.1%}"></i>')
        items.append(
            f'<li><i class="dot" style="background:{color}"></i>{escape(name)} '
            f"<span>{format_seconds(seconds)}, {share:.0%}</span></li>"
        )
    return (
        f'<div class="stack">{"".join(bars)}</div><ul class="legend">{"".join(items)}</ul>'
        f'<p class="note">{_speed(run, total)}</p>'
    )


def _speed(run: Run, total: float) -> str:
    parts = [f"{format_seconds(total)} in all"]
    times = [r["time"] for r in run.train if r.get("time")]
    steps = [t["total"] for t in times if t.get("total")]
    if steps:
        parts.append(f"{sum(steps) / len(steps):.3g} s a step")
    for key in ("images_per_s", "tokens_per_s", "samples_per_s"):
        rates = sorted(t[key] for t in times if t.get(key))
        if rates:
            parts.append(f"{rates[len(rates) // 2]:.3g} {key.removesuffix('_per_s')} a second (median step)")
    memory = run.train[-1].get("memory_gb") if run.train else None
    for key, value in (memory or {}).items():
        parts.append(f"peak {escape(str(key))} memory {value:.2f} GB")
    return "; ".join(parts)


def _self_test(run: Run) -> str:
    if run.self_test is None:
        return ""
    rows = "".join(
        f"<tr><td>{_badge(str(c.get('status')))}</td><td>{escape(str(c.get('name')))}</td>"
        f"<td>{escape(str(c.get('detail', '')))}</td></tr>"
        for c in run.self_test
    )
    return f'<div class="scroll"><table><tr><th>result</th><th>check</th><th>detail</th></tr>{rows}</table></div>'


def _alarms(run: Run) -> str:
    if not run.alarms:
        return '<p class="note" style="margin:0">None went off.</p>' if run.train else ""
    shown = run.alarms[:50]
    rows = "".join(
        f'<tr><td>{_badge(str(a.get("action")))}</td><td class="n">{a["step"]}</td><td>{escape(str(a.get("name")))}</td>'
        f"<td>{escape(str(a.get('message', '')))}</td></tr>"
        for a in shown
    )
    more = (
        f'<p class="note">and {len(run.alarms) - len(shown)} more in metrics.jsonl</p>'
        if len(run.alarms) > len(shown)
        else ""
    )
    head = '<tr><th>action</th><th class="n">step</th><th>alarm</th><th>message</th></tr>'
    return f'<div class="scroll"><table>{head}{rows}</table></div>{more}'


def _config(run: Run) -> str:
    return f"<details><summary>config.yaml, as resolved</summary><pre>{escape(run.config_text)}</pre></details>"


def _badge(status: str) -> str:
    return f'<span class="badge {escape(status)}">{escape(status)}</span>'


def _number(value: float) -> str:
    """Three digits that say something: 0.512, 12.3, 0.0041."""
    if value == 0 or 0.01 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:.1f}" if 10 <= abs(value) < 10000 else f"{value:.3g}"


def _ends(found: Paired, between: str) -> str:
    return "" if found.interval is None else between.join(_signed(end) for end in found.interval)


def _signed(value: float) -> str:
    text = _number(abs(value))
    if float(text) == 0:
        return text
    return f"{'−' if value < 0 else '+'}{text}"
