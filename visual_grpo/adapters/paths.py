"""Where a model's files are: a folder, a packaged model of the testbed, or a hub id; and clear messages where they are not."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError, did_you_mean

TESTBED = "testbed/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def packaged_folder(name: str) -> Path:
    """The folder of the packaged model `name`; it need not exist."""
    return Path(str(resources.files("visual_grpo.testbed"))) / "weights" / name


def packaged_names() -> list[str]:
    """Names of the packaged models that are there."""
    root = packaged_folder(".")
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def resolve_model_path(path: str, *, marker: str, what: str = "model") -> str:
    """Turn `model.path` into a folder that holds `marker`, or into a hub id that is not a folder here.

    Args:
        path: a folder, a hub id (`owner/name`), or `testbed/NAME`.
        marker: the file that such a folder must hold (`model_index.json` of diffusers, `config.json` of transformers).
        what: the model class that is looked for, in messages.

    Raises:
        UserError: neither; the message says where it was looked for and what to do.
    """
    if path.startswith(TESTBED):
        return _resolve_testbed(path, marker)
    if not path.strip() or "\0" in path:
        raise UserError(f"model.path {path!r} names no folder; give a folder, a hub id, or one of {_packaged()}.")
    folder = Path(os.path.expanduser(path))  # not Path.expanduser: it raises for a user that does not exist
    if folder.is_dir():
        if not (folder / marker).is_file():
            held = sorted(entry.name for entry in folder.iterdir())
            listing = ", ".join(held[:8]) + (", ..." if len(held) > 8 else "") if held else "nothing"
            raise UserError(
                f"model.path {path!r} is a folder without {marker}, so no {what} (it holds: {listing}). "
                f"Give the folder that save_pretrained wrote."
            )
        return str(folder)
    if folder.exists():
        raise UserError(f"model.path {path!r} is a file; give the folder of a {what} (with its {marker}).")
    if _HUB_ID.fullmatch(path):
        return path
    raise UserError(
        f"model.path {path!r} is not there: no folder {str(folder.resolve())!r}, and it is no hub id (owner/name). "
        f"Give a folder with {marker}, a hub id, or one of the packaged models: {_packaged()}."
    )


def _packaged() -> str:
    return ", ".join(TESTBED + name for name in packaged_names()) or "none in this installation"


def _resolve_testbed(path: str, marker: str) -> str:
    name = path.removeprefix(TESTBED)
    folder = packaged_folder(name)
    if name and "/" not in name and (folder / marker).is_file():
        return str(folder)
    from visual_grpo.registry import Registry

    buildable = Registry[object]("testbed model", builtin_module="visual_grpo.cli.testbed:TABLE").names()
    if name in buildable:
        raise UserError(
            f"model.path {path!r}: this installation has no weights of it (no {marker} in {str(folder)!r}). "
            f"`visual-grpo testbed build {name}` pretrains it; then give model.path=build/{name}"
        )
    hint = did_you_mean(name, [*packaged_names(), *buildable])
    raise UserError(
        f"model.path {path!r}: no {marker} in {str(folder)!r}.{hint} Packaged models: {_packaged()}. "
        f"`visual-grpo testbed build NAME` makes one again."
    )


def read_config(resolved: str, file: str, *, revision: str | None = None) -> dict[str, Any] | None:
    """Read one JSON file of a resolved model without network: from its folder or the hub cache; None where it is not.

    Raises:
        UserError: the file is there and is no JSON object.
    """
    found = Path(resolved) / file
    if not found.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(resolved, file, revision=revision) if _HUB_ID.fullmatch(resolved) else None
        if not isinstance(cached, str):
            return None
        found = Path(cached)
    try:
        value = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {str(found)!r}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{str(found)!r} must hold a JSON object, got {type(value).__name__}")
    return value


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep the bars that the libraries draw while loading and saving out of the run's own progress display."""
    used = [name for name in ("transformers", "diffusers") if name in sys.modules]
    switches = [importlib.import_module(f"{name}.utils.logging") for name in used]
    shown = [switch for switch in switches if switch.is_progress_bar_enabled()]
    for switch in shown:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        for switch in shown:
            switch.enable_progress_bar()


@contextmanager
def loading(path: str, resolved: str) -> Iterator[None]:
    """Run a library's `from_pretrained` without its progress bars; its failures become one clear `UserError`."""
    try:
        with without_progress_bars():
            yield
    except UserError:
        raise
    except Exception as error:  # a damaged file shows in many ways, SafetensorError and TypeError among them
        raise UserError(_load_message(path, resolved, error)) from error


def check_complete(path: str, found: Mapping[str, Any]) -> None:
    """Refuse weight files that lack parameters of the model: the library only warns, and fills them with random numbers.

    Args:
        path: `model.path`.
        found: the loading info of transformers' `from_pretrained`.

    Raises:
        UserError: naming some of what is missing.
    """
    missing = sorted(found.get("missing_keys") or ())
    if missing:
        names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise UserError(
            f"the weight files of model.path {path!r} lack {len(missing)} parameters of the model ({names}); they would start at "
            "random. Copy the folder again, or give the folder that save_pretrained wrote"
        )


def _load_message(path: str, resolved: str, error: Exception) -> str:
    reason = f"{textwrap.shorten(str(error), 240) or 'no message'} ({type(error).__name__})"
    if Path(resolved).is_dir():
        return f"cannot load model.path {path!r} from {resolved!r}: {reason}"
    from huggingface_hub.constants import HF_HUB_CACHE

    return (
        f"cannot load model.path {path!r}: there is no folder {str(Path(path).resolve())!r}, and the hub model is neither "
        f"in the cache {HF_HUB_CACHE!r} nor could be fetched ({reason}). Fetch it once on a machine with network "
        f"(`hf download {path}`; a gated model needs `hf auth login`), or give the path of a folder."
    )
