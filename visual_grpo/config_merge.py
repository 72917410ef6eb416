"""The short forms of `method` and `rewards`, and how one layer of a config lies on top of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from visual_grpo.errors import UserError

__all__ = ["Dotted", "merge", "method_list", "reward_map"]


def method_list(value: Any) -> Any:
    """`name`, `{name: params}` or a list of both, as `[{name: params}, ...]`."""
    items = value if isinstance(value, list) else [value]
    out: list[dict[str, dict[str, Any]]] = []
    for item in items:
        if isinstance(item, str):
            out.append({item: {}})
        elif isinstance(item, Mapping) and len(item) == 1:
            name, params = next(iter(item.items()))
            if params is not None and not isinstance(params, Mapping):
                raise ValueError(f"the options of method {name!r} are {params!r}; write {{{name}: {{option: value}}}}")
            out.append({str(name): dict(params or {})})
        else:
            raise ValueError(f"a method is a name or one `name: {{options}}`, got {item!r}")
    return out


def reward_map(value: Any) -> Any:
    """`name`, `[name, ...]`, `{name: weight}` or `{name: {...}}` as `{name: {...}}`."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        wrong = [item for item in value if not isinstance(item, str)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name; give a list of names, or {{name: weight}}")
        twice = [item for item in value if value.count(item) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands twice; to make it count more, give {{{twice[0]}: 2.0}}")
        value = dict.fromkeys(value, 1.0)
    if not isinstance(value, Mapping):
        return value
    if "total" in value:
        raise ValueError("'total' is the name of the weighted sum in the records; give {another_name: {reward: total}}")
    return {k: {"weight": v} if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}


WHOLE = frozenset({"rewards", "sources", "params", "options", "applies", "gate", "merge", "teachers", "steps"})
"""Mappings whose keys are names of the user's own, not options."""


class Dotted(dict[str, Any]):
    """What a dotted key gives (`rewards.ocr.weight=2`): it changes this entry of what is there and leaves the others."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dict `base` with the values of `over` on top; neither is changed.

    Lists are replaced, and so are mappings with keys of the user's own (`WHOLE`), unless the value is `Dotted`:
    `rewards={ocr: 1}` is another set of rewards, `rewards.ocr=1` one more reward or another weight.

    Raises:
        UserError: a dotted `method.NAME...` whose method is not in the stack.
    """
    out = Dotted(base) if isinstance(base, Dotted) else dict(base)
    for key, value in over.items():
        present = out.get(key)
        if key == "method" and isinstance(value, Dotted) and isinstance(present, str | list):
            out[key] = _with_options(present, value)
            continue
        if key == "rewards" and isinstance(value, Dotted):
            present, value = _forms(reward_map, present), _forms(reward_map, value)
        whole = key in WHOLE and not isinstance(value, Dotted)
        if isinstance(value, Mapping) and isinstance(present, Mapping) and not whole:
            out[key] = merge(present, value)
        else:
            out[key] = value
    return out


def _forms(read: Callable[[Any], Any], value: Any) -> Any:
    """A short form written out, `Dotted` if it was; what is wrong in it is told by the validation."""
    try:
        return Dotted(read(value)) if isinstance(value, Dotted) else read(value)
    except ValueError:
        return value


def _with_options(stack: str | list[Any], over: Mapping[str, Any]) -> Any:
    """The methods of `stack` with the options `over`, by name."""
    methods = _forms(method_list, stack)
    known = [name for item in methods if isinstance(item, Mapping) for name in item]
    for name in over:
        if name not in known:
            raise UserError(
                f"method.{name}: there is no {name!r} in the stack ({', '.join(map(str, known)) or 'empty'}); to change the "
                f"stack give method={name} or method=[..., {name}]"
            )
    return [
        merge(item, {k: over[k] for k in item if k in over}) if isinstance(item, Mapping) else item for item in methods
    ]
