"""Configs as people write them: YAML files and `key=value` overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.config import merge
from visual_grpo.errors import UserError


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`["train.lr=1e-5", ...]` as a nested dict; values are YAML.

    Raises:
        UserError: an item without `=`, an empty key, or a value that is no YAML.
    """
    out: dict[str, Any] = {}
    for item in items:
        key, sep, text = item.partition("=")
        parts = key.strip().split(".")
        if not sep or not all(parts):
            raise UserError(f"override {item!r} must look like section.key=value, for example train.steps=20")
        try:
            value = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError as error:
            raise UserError(f"the value of override {item!r} is not valid YAML: {error}") from None
        if isinstance(value, str):
            value = _number(value)
        nested: Any = value
        for part in reversed(parts[1:]):
            nested = {part: nested}
        out = merge(out, {parts[0]: nested})
    return out


def _number(text: str) -> Any:
    """YAML 1.1 reads `1e-5` as text; a number is meant."""
    try:
        return float(text)
    except ValueError:
        return text


def _numbers(value: Any) -> Any:
    """`_number` for every text of a nested structure that looks like an exponent form."""
    if isinstance(value, Mapping):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, str) and value[:1] in "+-.0123456789" and "e" in value.lower():
        return _number(value)
    return value


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a config file.

    Raises:
        UserError: missing, a folder, unreadable, empty, invalid YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read config file {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"config file {str(path)!r} is not UTF-8 text") from None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"config file {str(path)!r} is not valid YAML: {error}") from None
    if not isinstance(value, Mapping):
        raise UserError(
            f"config file {str(path)!r} must hold sections such as model: and train:, got {type(value).__name__}"
        )
    return dict(_numbers(value))
