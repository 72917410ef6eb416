"""Configs as people write them: YAML files and `key=value` overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.config_merge import Dotted, merge
from visual_grpo.errors import UserError

_PLUGIN_KEY = re.compile(r"((?:[\w-]+\.)?(?:rewards|method))\.([\w.]+:\w+)(?:\.(.*))?")
"""The name of a plug-in, `package.module:Name`, has dots of its own; a pipeline's stage may stand before the section."""


class _Loader(yaml.SafeLoader):
    """YAML's safe types; a key that stands twice, of which YAML would silently keep the last, is refused."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[str, yaml.Mark] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key.value!r} stands twice, first in line {seen[key.value].line + 1}",
                    key.start_mark,
                )
            seen[key.value] = key.start_mark
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back: a text that looks like a number stands in quotes."""


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
for _class in (_Loader, _Dumper):  # YAML 1.1 reads `1e-5` as text; a number is meant
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        UserError: no YAML, a key that stands twice, a value that no type can hold, or a structure that holds itself.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or number out of range is a ValueError
        raise UserError(f"{where} is not valid YAML: {error}") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML of plain values, in the order of the mapping."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def dotted(parts: Sequence[str], value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` of the key `a.b`."""
    for part in reversed(parts[1:]):
        value = Dotted({part: value})
    return {parts[0]: value}


def key_parts(key: str) -> list[str]:
    """The sections of a dotted key.

    >>> key_parts("train.steps"), key_parts("rewards.my.module:Reward.weight")
    (['train', 'steps'], ['rewards', 'my.module:Reward', 'weight'])
    """
    plugin = _PLUGIN_KEY.fullmatch(key)
    if plugin is None:
        return key.split(".")
    return [*plugin[1].split("."), plugin[2], *(plugin[3].split(".") if plugin[3] is not None else [])]


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`["train.lr=1e-5", ...]` as a nested dict; values are YAML.

    Raises:
        UserError: an item without `=`, an empty key, or a value that is no YAML.
    """
    out: dict[str, Any] = {}
    for item in items:
        key, sep, text = item.partition("=")
        parts = key_parts(key.strip())
        if not sep or not all(parts):
            raise UserError(f"override {item!r} must look like section.key=value, for example train.steps=20")
        value = parse_yaml(text, f"the value of override {item!r}") if text.strip() else None
        out = merge(out, dotted(parts, value))
    return out


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a config file.

    Raises:
        UserError: missing, a folder, unreadable, empty, invalid YAML, a key twice, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read config file {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"config file {str(path)!r} is not UTF-8 text") from None
    except ValueError as error:  # a path that no system can have
        raise UserError(f"cannot read config file {str(path)!r}: {error}") from None
    value = parse_yaml(text, f"config file {str(path)!r}")
    if not isinstance(value, Mapping):
        raise UserError(
            f"config file {str(path)!r} must hold sections such as model: and train:, got {type(value).__name__}"
        )
    return dict(value)
