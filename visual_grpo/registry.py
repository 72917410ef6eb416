"""Names to objects: rewards, methods, adapters, evaluations and recipes, each imported when it is first asked for.

A name comes from one of four places, and a name that two of them hold for different objects is an error naming both:

- the static table of a built-in folder (`visual_grpo.rewards:TABLE` ...), `name -> ("module:attribute", "summary")`;
  the core knows the folder by a string only and never imports it until a name is looked up;
- the decorator, `@REWARDS.register("brightness")`;
- an installed package's entry point (`[project.entry-points."visual_grpo.rewards"]`);
- no registration at all: wherever a name is taken, `"package.module:Name"` is taken too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from visual_grpo.errors import UnknownNameError, UserError, did_you_mean

__all__ = ["ADAPTERS", "EVALS", "METHODS", "RECIPES", "REWARDS", "Registry", "Table", "load_object"]

MOST_LISTED = 60
"""Names that a message may hold."""
T = TypeVar("T")
Decorated = TypeVar("Decorated")
Table = Mapping[str, tuple[str, str] | tuple[str, str, Mapping[str, str]]]
"""Static table of built-ins: name -> ("module:attribute", one-line summary[, further facts by name])."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One claim on a name."""

    target: str  # "module:qualified name"
    origin: str  # for people: where the claim was made
    summary: str = ""
    value: Any = None  # the object, for a decorator's claim
    facts: Mapping[str, str] = field(default_factory=dict)


def load_object(target: str, kind: str = "object") -> Any:
    """Import `"package.module:Name"`; a mistake in any part of it is a `UserError` that says which part."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{target!r} is not of the form 'package.module:Name' ({kind}).")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # anything may happen while a user's module runs
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        missing = absent is not None and absent in _prefixes(module_name)
        reason = f"there is no module {absent!r}" if missing else f"{type(error).__name__}: {error}"
        raise UserError(f"cannot import the {kind} {target!r}: {reason}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [name for name in dir(found) if not name.startswith("_")])
            raise UserError(f"cannot import the {kind} {target!r}: {module_name} has no {attribute!r}.{hint}")
        found = getattr(found, part)
    return found


def _prefixes(module_name: str) -> list[str]:
    parts = module_name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


class Registry(Generic[T]):
    """Thread-safe lazy mapping from names to objects of one kind.

    >>> colours = Registry[object]("colour")
    >>> @colours.register("blue", summary="The sky.")
    ... def blue(): ...
    >>> colours.names(), colours.summary("blue")
    (['blue'], 'The sky.')
    >>> colours.get("blu")
    Traceback (most recent call last):
        ...
    visual_grpo.errors.UnknownNameError: no colour named 'blu'. Did you mean 'blue'? Known: blue. ...
    """

    def __init__(self, kind: str, *, entry_points: str | None = None, builtin_module: str | None = None) -> None:
        """Create a registry.

        Args:
            kind: what a name stands for, in messages ("reward").
            entry_points: group of third-party entry points, or None.
            builtin_module: "module:TABLE" of the built-ins, imported at the first lookup, or None.
        """
        self.kind = kind
        self._group = entry_points
        self._builtin = builtin_module
        self._lock = threading.RLock()  # never held while a module is imported
        self._registered: dict[str, _Source] = {}
        self._loaded: dict[str, T] = {}
        self._static: dict[str, list[_Source]] | None = None

    def register(self, name: str, *, summary: str = "") -> Callable[[Decorated], Decorated]:
        """Decorate a class or function to hold `name`; without `summary` the first line of its docstring is taken."""
        if not isinstance(name, str) or not name or ":" in name or name != name.strip():
            raise UserError(f"a {self.kind} needs a name without ':' and outer blanks, not {name!r}.")

        def decorator(value: Decorated) -> Decorated:
            source = _Source(target=_target_of(value), origin=_where(value), summary=summary, value=value)
            # A built-in is compared with its table row when it is looked up: its module may be imported on its own.
            static = [] if source.target.startswith("visual_grpo.") else self._static_sources().get(name, [])
            with self._lock:
                for other in [*static, *filter(None, [self._registered.get(name)])]:
                    if other.target != source.target or "<locals>" in source.target:
                        raise UserError(self._held_twice(name, [other, source]))
                self._registered[name] = source
                self._loaded.pop(name, None)
            return value

        return decorator

    def get(self, name: str) -> T:
        """Return the object under `name` (or at "package.module:Name"), importing it if need be."""
        with self._lock:
            if name in self._loaded:
                return self._loaded[name]
        if ":" in name:
            value = load_object(name, self.kind)
        else:
            source = self._source(name)
            value = source.value if source.value is not None else load_object(source.target, self.kind)
            source = self._source(name)  # the import may have brought a second claim
            value = source.value if source.value is not None else value
        with self._lock:
            return self._loaded.setdefault(name, cast(T, value))

    def names(self) -> list[str]:
        """Return all known names, sorted; imports none of the objects."""
        static = self._static_sources()
        with self._lock:
            return sorted({*static, *self._registered})

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def summary(self, name: str) -> str:
        """Return one line about `name`; a built-in or entry point is not imported for it."""
        source = self._source(name)
        if source.summary:
            return source.summary
        lines = (inspect.getdoc(source.value) or "").splitlines() if source.value is not None else []
        return lines[0] if lines else f"from {source.origin}"

    def facts(self, name: str) -> dict[str, str]:
        """Return what the built-in table says beside the summary (size, licence, range of a reward); imports nothing."""
        return dict(self._source(name).facts)

    def origin(self, name: str) -> str:
        """Return where `name` comes from: "built-in", the distribution, or the file and line of the decorator."""
        return self._source(name).origin

    def target(self, name: str) -> str:
        """Return the "module:attribute" that `name` stands for."""
        return name if ":" in name else self._source(name).target

    def refresh(self) -> None:
        """Forget the built-in tables and entry points read so far (after an install in a running process)."""
        with self._lock:
            self._static = None
            self._loaded.clear()

    def _source(self, name: str) -> _Source:
        static = self._static_sources()
        with self._lock:
            sources = [*filter(None, [self._registered.get(name)]), *static.get(name, [])]
        if not sources:
            known = self.names()
            listing = ", ".join(known) if known else "none"
            if len(known) > MOST_LISTED:
                listing = f"{len(known)} names, which `visual-grpo list {self.kind}s` prints"
            raise UnknownNameError(
                f"no {self.kind} named {name!r}.{did_you_mean(name, known)} Known: {listing}. "
                f"To use your own, give 'package.module:Name' in place of the name."
            )
        if len({source.target for source in sources}) > 1:
            raise UserError(self._held_twice(name, sources))
        summary = next((source.summary for source in sources if source.summary), "")
        first = sources[0]
        origin = next((source.origin for source in sources if source.origin == "built-in"), first.origin)
        facts = next((source.facts for source in sources if source.facts), {})
        return _Source(target=first.target, origin=origin, summary=summary, value=first.value, facts=facts)

    def _held_twice(self, name: str, sources: list[_Source]) -> str:
        claims = " and ".join(f"{source.target!r} ({source.origin})" for source in sources)
        return f"the {self.kind} name {name!r} is held twice: by {claims}. Rename or uninstall one of them."

    def _static_sources(self) -> dict[str, list[_Source]]:
        """Read the built-in table and the entry points, once."""
        if self._static is None:
            found: dict[str, list[_Source]] = {}
            if self._builtin is not None:
                module_name, _, attribute = self._builtin.partition(":")
                table: Table = getattr(importlib.import_module(module_name), attribute)
                for name, (target, summary, *rest) in table.items():
                    facts = rest[0] if rest else {}
                    source = _Source(target=target, origin="built-in", summary=summary, facts=facts)
                    found.setdefault(name, []).append(source)
            if self._group is not None:
                for point in sorted(importlib.metadata.entry_points(group=self._group), key=_by_distribution):
                    dist = f"distribution {point.dist.name}" if point.dist is not None else "an installed package"
                    found.setdefault(point.name, []).append(_Source(target=point.value, origin=dist))
            with self._lock:
                if self._static is None:
                    self._static = found
        return self._static


def _by_distribution(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    return point.name, point.dist.name if point.dist is not None else ""


def _target_of(value: object) -> str:
    qualified = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', '?')}:{qualified}"


def _where(value: Any) -> str:
    """Return "file:line" of a class or function, as far as Python knows it."""
    try:
        return f"{inspect.getsourcefile(value)}:{inspect.getsourcelines(value)[1]}"
    except (OSError, TypeError):
        return f"module {getattr(value, '__module__', '?')}"


# The kinds of thing a user can name. `Any`, since the core must not import the base classes of the outer folders.
REWARDS: Registry[Any] = Registry(
    "reward", entry_points="visual_grpo.rewards", builtin_module="visual_grpo.rewards:TABLE"
)
METHODS: Registry[Any] = Registry(
    "method", entry_points="visual_grpo.methods", builtin_module="visual_grpo.pipelines:METHOD_TABLE"
)
ADAPTERS: Registry[Any] = Registry(
    "model", entry_points="visual_grpo.adapters", builtin_module="visual_grpo.adapters:TABLE"
)
EVALS: Registry[Any] = Registry("evaluation", entry_points="visual_grpo.evals", builtin_module="visual_grpo.eval:TABLE")
RECIPES: Registry[Callable[..., Any]] = Registry(
    "recipe", entry_points="visual_grpo.recipes", builtin_module="visual_grpo.pipelines:RECIPE_TABLE"
)
