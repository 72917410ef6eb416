"""Settings of rewards on the command line, `NAME.key=value`, as they stand under `rewards:` in a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["reward_settings"]


def reward_settings(chosen: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """Each chosen reward with its settings, or with weight 1.

    >>> reward_settings(["ocr", "code"], ["code.params.seconds=2", "code.timeout_s=60"])
    {'ocr': 1.0, 'code': {'params': {'seconds': 2}, 'timeout_s': 60}}

    Raises:
        UserError: a setting that cannot be read, or of a reward that is not chosen.
    """
    from visual_grpo.config_text import parse_overrides
    from visual_grpo.errors import UserError

    given: dict[str, Any] = {}
    for setting in settings:
        _join(given, parse_overrides([setting]))
    if unknown := sorted(set(given) - set(chosen)):
        raise UserError(
            f"{unknown[0]!r} is set, but it is not one of the rewards named here ({', '.join(chosen) or 'none'}); "
            f"a setting is NAME.key=value, such as code.params.seconds=2."
        )
    return {name: given.get(name, 1.0) for name in chosen}


def _join(base: dict[str, Any], more: dict[str, Any]) -> None:
    """Put nested values into `base`; unlike in a run's config, `params` are joined key by key."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _join(base[key], value)
        else:
            base[key] = value
