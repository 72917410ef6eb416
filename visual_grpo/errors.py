"""What a user is told when something is wrong; each error carries the exit status of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["RunError", "UnknownNameError", "UserError", "did_you_mean"]


class UserError(ValueError):
    """The user's input is wrong (a path, key, value, name, file or prompt): one clear message and exit status 2.

    The message says what was given, what was expected and what to change.
    """

    exit_status = 2


class UnknownNameError(UserError):
    """A name that nothing is registered under."""


class RunError(RuntimeError):
    """The run itself failed (a loss that is not finite, a reward that keeps failing): exit status 1."""

    exit_status = 1


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string.

    >>> did_you_mean("pick_scor", ["ocr", "pickscore"])
    " Did you mean 'pickscore'?"
    >>> did_you_mean("zzz", ["ocr", "pickscore"])
    ''
    """
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(given.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {by_folded[near[0]]!r}?" if near else ""
