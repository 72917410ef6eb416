"""What may differ between the config of a run and that of its resumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MAY_CHANGE", "changed_keys"]

MAY_CHANGE = (
    "train.steps",
    "train.max_minutes",
    "train.early_stop",
    "train.micro_batch",
    "train.units_per_pass",
    "train.rollout_batch",
    "eval.batch",
    "sampling.vllm",
    "checkpoint.every",
    "checkpoint.keep",
    "track",
    "watchdog",
    "alarms",
    "summary",
)
"""Keys and sections that may differ between a run and its resumption: none of them changes what a step computes, but for
rounding. A run that ran out of memory goes on in smaller pieces, one whose engine is gone with an engine elsewhere."""


def changed_keys(
    stored: Mapping[str, Any], given: Mapping[str, Any], may_change: Sequence[str] = MAY_CHANGE
) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, without those that may change on a resume.

    >>> changed_keys({"train": {"steps": 5, "seed": 0}}, {"train": {"steps": 9, "seed": 1}})
    {'train.seed': (0, 1)}
    """
    old, new = _flat(stored), _flat(given)
    # The one loss that is a mean of micro-batches depends on their size.
    fixed = {"train.micro_batch"} if old.get("loss.aggregation") == "micro_batch_token_mean" else set()
    free = [m for m in may_change if m not in fixed]
    keys = [k for k in {**old, **new} if not any(k == m or k.startswith(m + ".") for m in free)]
    return {k: (old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            out.update(_flat(item, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = item
    return out
