"""Options that a user gives by name, checked against the annotations of what takes them."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any

from visual_grpo.errors import UserError

__all__ = ["check_types"]

PLAIN = (str, int, float, list, tuple, dict, set, type(None))
"""What a config can hold; other objects come from Python code and are left to their owner."""


def check_types(owner: Any, options: Mapping[str, Any], what: str) -> None:
    """Check `options` by the annotations of a function, a class's constructor or a dataclass; those without one pass.

    A text or a truth value is no number, and numbers are finite: YAML reads `1e-4` as a text, `yes` as a truth value.

    Args:
        owner: what takes the options.
        options: name -> value.
        what: the owner in messages, such as "reward 'ocr'".

    Raises:
        UserError: naming the option, what was given and what is expected.
    """
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    for key, hint in _hints(owner, what).items():
        value = options.get(key)
        if key not in options or not isinstance(value, PLAIN):
            continue
        try:
            adapter = TypeAdapter(hint)
        except PydanticUserError:  # a class of its own, which pydantic does not know
            continue
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as error:
            if not _converted(adapter, value):
                raise UserError(f"{what}: option {key} is {value!r}; {error.errors()[0]['msg']}") from None
        if _infinite(value):
            raise UserError(f"{what}: option {key} is {value!r}; numbers must be finite")


def _hints(owner: Any, what: str) -> dict[str, Any]:
    if isinstance(owner, type) and not hasattr(owner, "__dataclass_fields__"):
        owner = owner.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(owner)
    except (NameError, AttributeError):  # annotations that exist for type checkers only; a constructor written in C
        return {}
    except TypeError:
        raise UserError(f"{what} leads to {owner!r}, which is no function") from None


def _converted(adapter: Any, value: Any) -> bool:
    """Whether a value stands for what is wanted, such as a text for a path or a list for a tuple, without another meaning."""
    from pydantic import ValidationError

    try:
        return _unchanged(adapter.validate_python(value), value)
    except ValidationError:
        return False


def _unchanged(found: Any, value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(found, dict) and all(map(_unchanged, found.values(), value.values()))
    if isinstance(value, list | tuple | set):
        return isinstance(found, list | tuple | set | frozenset) and all(map(_unchanged, found, value))
    if isinstance(value, bool) or isinstance(found, bool):
        return found is value
    if isinstance(value, str):
        return not isinstance(found, int | float)
    return isinstance(found, float) or not isinstance(value, float)


def _infinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, list | tuple) and any(map(_infinite, value))
