"""The signature of an exploited reward: it rises on held-out prompts while what was not trained on falls.

The falls are measured in standard deviations of the samples in the first evaluation, so that rewards of any scale share one
margin; both evaluations are compared on the same prompts and noises.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from visual_grpo.config import RunConfig
from visual_grpo.evaluation import DIVERSITY, summarise

__all__ = ["hacking_message"]

Rows = Sequence[dict[str, Any]]


def hacking_message(config: RunConfig, first: Rows, now: Rows) -> str | None:
    """What the alarm says; None where there is nothing to tell.

    Args:
        config: of the run.
        first, now: rows of the first and of this evaluation, of the same prompts and noises.
    """
    before, after = summarise(first)[0], summarise(now)[0]
    weights = {name: reward.weight for name, reward in config.rewards.items() if not reward.eval_only and reward.weight}
    trained = [name for name in weights if _headline(name, before) in after]
    rise = math.fsum(weights[n] * (after[_headline(n, before)] - before[_headline(n, before)]) for n in trained)
    if not trained or not rise > 0:
        return None
    falls = []
    for name in (*(n for n, reward in config.rewards.items() if reward.eval_only), DIVERSITY):
        headline = _headline(name, before)
        if headline not in before or headline not in after:
            continue
        penalty = name in config.rewards and config.rewards[name].weight < 0  # what is bad when it is high
        fall = (before[headline] - after[headline]) * (-1 if penalty else 1)
        spread = statistics.pstdev(_values(first, name))
        if fall > config.alarms.hacking_margin * spread:
            size = f" ({fall / spread:.2f} standard deviations of its samples)" if spread > 0 else ""
            word = "rose, which its negative weight calls worse," if penalty else "fell"
            falls.append(f"{headline} {word} from {before[headline]:.4f} to {after[headline]:.4f}{size}")
    if not falls:
        return None
    rose = ", ".join(
        f"{_headline(n, before)} {before[_headline(n, before)]:.4f} -> {after[_headline(n, before)]:.4f}"
        for n in trained
    )
    watched = next((name for name, reward in config.rewards.items() if reward.eval_only), DIVERSITY)
    guard = _headline(watched, before)
    lowest = watched in config.rewards and config.rewards[watched].weight < 0
    return (
        f"since the first evaluation the trained reward rose on held-out prompts ({rose}), but {' and '.join(falls)}: the policy "
        f"exploits the reward. Raise kl.beta, lower train.optimizer.lr or train on several rewards; keep the best weights "
        f"(checkpoint.best={_asked(guard, lowest)} eval.final=best) and end in time (train.early_stop"
        f"{'=' + _asked(guard, lowest) if lowest else '.metric=' + guard}); alarms.hacking and "
        f"alarms.hacking_margin ({config.alarms.hacking_margin:g} standard deviations) decide when this is told"
    )


def _asked(figure: str, lowest: bool) -> str:
    """A figure to keep the best weights by, as a setting."""
    return f"{{metric: {figure}, mode: min}}" if lowest else figure


def _headline(name: str, metrics: dict[str, float]) -> str:
    """The mean of the kinds of prompts where there are kinds, else the mean of the samples."""
    return f"{name}/by_tag" if f"{name}/by_tag" in metrics else name


def _values(rows: Rows, name: str) -> list[float]:
    found = [{**row["values"], **row["details"]}.get(name) for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]
