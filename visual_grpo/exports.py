"""Exported weights read back: into the trained parameters of a policy, or averaged into a new export."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from visual_grpo.adapters.paths import TESTBED, packaged_folder
from visual_grpo.checkpoint import write_folder
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from visual_grpo.policy import Policy

LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_folder(path: str, what: str) -> Path:
    """The folder of an export: a folder here, testbed/NAME, or a repository of the hub, fetched if it is not in the cache.

    Raises:
        UserError: neither; `what` names the setting.
    """
    packaged = path.startswith(TESTBED)
    # Not Path.expanduser: it raises for a user that does not exist.
    folder = packaged_folder(path.removeprefix(TESTBED)) if packaged else Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder
    if packaged or folder.exists() or not _HUB_ID.fullmatch(path):
        raise UserError(f"{what} {path!r} is no folder here; give the folder `model` of a finished run, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the network, the name, the rights
        raise UserError(
            f"{what} {path!r} is no folder here, and the hub does not give it: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no detail'}"
        ) from None


def read_weights(policy: Policy, path: str, what: str) -> dict[str, Tensor]:
    """The trained parameters of `policy` by name, as the export in `path` holds them.

    Args:
        policy: says which parameters are trained, and their shapes.
        path: an exported LoRA (of diffusers or peft) for a policy with LoRA, a whole model for one without; folder or hub id.
        what: the setting that names the path, for messages.

    Raises:
        UserError: the export is of the other kind, lacks parameters, or has other shapes.
    """
    folder = local_folder(path, what)
    lora = policy.config.lora
    found = next((folder / name for name in LORA_FILES if (folder / name).is_file()), None)
    if (found is None) == (lora is not None):
        have, need = ("a LoRA", "all weights") if lora is None else ("no LoRA", "a LoRA")
        raise UserError(f"{what} {path!r} holds {have}, but this run trains {need} (model.lora): give the same kind")
    if lora is not None and found is not None:
        _check_scale(found, lora.rank, lora.alpha, f"{what} {path!r}")
        stored = _read([found])
        prefix = "base_model.model." if found.name == LORA_FILES[1] else f"{policy.adapter.component}."
        names = {name: prefix + re.sub(r"\.default(?=\.|$)", "", name) for name in policy.trainable}
    else:
        part = folder / policy.adapter.component if policy.adapter.library == "diffusers" else folder
        stored = _read(sorted(part.glob("*.safetensors")))
        names = {name: name for name in policy.trainable}
    missing = [key for key in names.values() if key not in stored]
    if missing:
        raise UserError(
            f"{what} {path!r} lacks {len(missing)} of the {len(names)} trained parameters, for example {missing[0]!r}; it holds "
            f"{len(stored)} tensors, for example {next(iter(stored), 'none')!r}"
        )
    other = [name for name, key in names.items() if stored[key].shape != policy.trainable[name].shape]
    if other:
        name = other[0]
        raise UserError(
            f"{what} {path!r}: {name} has shape {list(stored[names[name]].shape)}, but {list(policy.trainable[name].shape)} in "
            "this run: it is of another model or rank"
        )
    return {name: stored[key].to(policy.trainable[name]) for name, key in names.items()}


def load_into(policy: Policy, path: str, what: str) -> None:
    """Put an export into the trained parameters; see `read_weights`."""
    values = read_weights(policy, path, what)
    with torch.no_grad():
        for name, parameter in policy.trainable.items():
            parameter.copy_(values[name])


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The tensors of a file; UserError where it is damaged or gone."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"weights {str(file)!r} cannot be read ({error}): the file is damaged or gone; export them again, or give another"
        ) from None


def _read(files: Iterable[Path]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for file in files:
        with _opened(file) as tensors:
            out |= {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 (no mapping)
    return out


def _check_scale(file: Path, rank: int, alpha: int, what: str) -> None:
    """Refuse a LoRA that was trained with another alpha / rank: its layers would be scaled otherwise."""
    if file.name == LORA_FILES[1]:
        config = file.with_name("adapter_config.json")
        values = _json(config.read_text(encoding="utf-8"), config) if config.is_file() else {}
    else:
        with _opened(file) as tensors:
            values = _json((tensors.metadata() or {}).get("lora_adapter_metadata", "{}"), file)
        values = {key.rpartition(".")[2]: value for key, value in values.items()}
    given = values.get("r"), values.get("lora_alpha")
    if None not in given and given != (rank, alpha):
        raise UserError(
            f"{what} was trained with rank {given[0]} and alpha {given[1]}, this run has rank {rank} and alpha {alpha}: set "
            f"model.lora.rank={given[0]} model.lora.alpha={given[1]}"
        )


def _json(text: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"the settings of the LoRA in {str(file)!r} are no valid JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def merge_exports(sources: Mapping[str, float], target: Path, folders: Mapping[str, Path]) -> Path:
    """Write the weighted mean of several exports, tensor by tensor, as one more export.

    LoRA factors A and B are averaged each by itself. Everything that is no floating-point tensor is that of the first source.

    Args:
        sources: weight of each source, > 0; divided by their sum.
        target: the folder to write.
        folders: the export of each source.

    Raises:
        UserError: the sources hold different tensors (named), or tensors of different shapes.
    """
    first, *others = sources
    for name in sources:
        if not _tensor_files(folders[name]):
            raise UserError(f"cannot merge {name!r}: there are no weights in {str(folders[name])!r}")
    files = {name: _tensor_files(folders[name]) for name in sources}
    keys = {name: {key for file in files[name] for key in _keys(folders[name] / file)} for name in sources}
    for name in others:
        different = sorted(keys[first] ^ keys[name])
        if different:
            listing = ", ".join(map(repr, different[:4])) + (", ..." if len(different) > 4 else "")
            raise UserError(
                f"cannot merge {first!r} and {name!r}: {len(different)} tensors are in one of them only ({listing}); merge "
                "exports of the same model and the same LoRA layers"
            )
        if files[name] != files[first]:
            raise UserError(f"cannot merge {first!r} and {name!r}: their tensors lie in different files")
    total = sum(sources.values())
    shares = {name: weight / total for name, weight in sources.items()}

    def fill(path: Path) -> None:
        shutil.copytree(folders[first], path, dirs_exist_ok=True)
        for file in files[first]:
            _mean_file(path / file, {folders[name] / file: share for name, share in shares.items()})

    write_folder(target, fill)
    return target


def _tensor_files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))


def _keys(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


def _mean_file(target: Path, shares: Mapping[Path, float]) -> None:
    with ExitStack() as stack:
        opened: list[tuple[Any, float]] = [
            (stack.enter_context(_opened(file)), share) for file, share in shares.items()
        ]
        first = opened[0][0]
        out = {key: _mean(key, [(tensors.get_tensor(key), share) for tensors, share in opened]) for key in first.keys()}  # noqa: SIM118
        metadata = first.metadata()
    save_file(out, str(target), metadata=metadata)


def _mean(key: str, parts: list[tuple[Tensor, float]]) -> Tensor:
    """The weighted mean in float64; equal tensors come back bit for bit."""
    first = parts[0][0]
    if any(tensor.shape != first.shape for tensor, _ in parts):
        shapes = " and ".join(str(list(tensor.shape)) for tensor, _ in parts)
        raise UserError(f"cannot merge tensors {key!r} of shapes {shapes}")
    if not first.is_floating_point() or all(torch.equal(tensor, first) for tensor, _ in parts):
        return first
    mean = sum((share * tensor.double() for tensor, share in parts), torch.zeros((), dtype=torch.float64))
    return mean.to(first.dtype)
