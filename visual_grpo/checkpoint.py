"""Complete, atomic checkpoints, and exports that the plain libraries read.

A checkpoint is a folder that appears whole or not at all (written aside, flushed, renamed). It holds the trained weights, the
named sets, the optimizer, every random generator, the place in the data and the state of the methods: what a resumed run needs
to go on bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from visual_grpo.errors import RunError, UserError

if TYPE_CHECKING:
    from visual_grpo.policy import Policy

NAME = re.compile(r"step-(\d{6,})")
TENSOR = "__tensor__"
STATE = frozenset({"step", "rng", "cursor", "optimizer_steps", "trained_s", "metrics_size", "methods", "alarms"})
"""What every checkpoint's state.json holds."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` iterations lies."""
    return folder / f"step-{step:06d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run; leftovers of an interrupted write do not count."""
    if not folder.is_dir():
        return None
    found = [p for p in folder.iterdir() if NAME.fullmatch(p.name) and (p / "state.json").is_file()]
    return max(found, key=lambda p: int(p.name.removeprefix("step-")), default=None)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Create folder `target` atomically: `fill` writes into a folder aside, which is flushed and renamed.

    Raises:
        RunError: the disk refuses; what was there before is untouched.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        fill(aside)
        for path in [*aside.rglob("*"), aside]:
            _flush(path)
        remove_folder(target)
        os.replace(aside, target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot write {str(target)!r}: {reason}. Free space or change the rights, then --resume"
        ) from None


def _flush(path: Path) -> None:
    """Have the system write a file's content, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Delete a folder that may be there; a kill on the way leaves no half of it under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; an empty dict writes none."""
    if tensors:
        save_file({k: v.detach().contiguous().cpu().clone() for k, v in tensors.items()}, str(path))


def load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; a missing file is an empty dict."""
    return load_file(str(path), device=str(device)) if path.is_file() else {}


def split_tensors(value: Any, tensors: dict[str, Tensor], key: str = "") -> Any:
    """`value` with every tensor moved into `tensors` and replaced by its name, so that the rest is JSON."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {TENSOR: key}
    if isinstance(value, dict):
        return {str(k): split_tensors(v, tensors, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [split_tensors(v, tensors, f"{key}.{i}") for i, v in enumerate(value)]
    return value


def join_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Undo `split_tensors`."""
    if isinstance(value, dict):
        if set(value) == {TENSOR}:
            return tensors[value[TENSOR]]
        return {k: join_tensors(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [join_tensors(v, tensors) for v in value]
    return value


def rng_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators (rewards of third parties may use them)."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (a third party's reward may use it)
    state: dict[str, Any] = {
        "python": [random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    policy: Policy,
    optimizer: dict[str, Tensor],
    state: dict[str, Any],
    rng: list[Any],
    keep: int,
) -> Path:
    """Write the checkpoint after `step` iterations and delete all but the newest `keep`.

    Args:
        folder: the run's checkpoint folder.
        step: iterations done.
        policy: its trained weights and named sets are written.
        optimizer: tensors of `Optimizer.tensors`.
        state: everything else, JSON values and tensors.
        rng: `rng_state()` of every process.
        keep: complete checkpoints to leave.
    """
    target = checkpoint_path(folder, step)

    def fill(path: Path) -> None:
        save_tensors(path / "weights.safetensors", {k: p.data for k, p in policy.trainable.items()})
        for name, stored in policy.sets.items():
            save_tensors(path / f"set-{name}.safetensors", stored)
        save_tensors(path / "optimizer.safetensors", optimizer)
        tensors: dict[str, Tensor] = {}
        plain = split_tensors({**state, "step": step, "rng": rng}, tensors)
        save_tensors(path / "state.safetensors", tensors)
        plain["files"] = sorted(file.name for file in path.iterdir())
        (path / "state.json").write_text(json.dumps(plain), encoding="utf-8")

    write_folder(target, fill)
    prune_checkpoints(folder, keep)
    return target


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what an interrupted write has left."""
    complete = sorted((p for p in folder.iterdir() if NAME.fullmatch(p.name)), key=lambda p: int(p.name[5:]))
    for old in complete[:-keep]:
        remove_folder(old)
    for leftover in folder.glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def load_checkpoint(path: Path, policy: Policy) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put weights and named sets back into `policy`; return (state, optimizer tensors).

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    try:
        plain = json.loads((path / "state.json").read_text(encoding="utf-8"))
        # A file that is gone is no empty one: without its moments the optimizer would start again in silence.
        gone = [name for name in plain.get("files", ()) if not (path / name).is_file()]
        if gone:
            raise FileNotFoundError(f"{gone[0]} is gone")
        weights = load_tensors(path / "weights.safetensors")
        state = join_tensors(plain, load_tensors(path / "state.safetensors"))
        optimizer = load_tensors(path / "optimizer.safetensors")
        sets = {
            file.stem.removeprefix("set-"): load_tensors(file, policy.device) for file in path.glob("set-*.safetensors")
        }
        absent = sorted(STATE - state.keys())
        if absent:
            raise KeyError(f"state.json has no {absent[0]}")
    except Exception as error:
        raise UserError(
            f"checkpoint {str(path)!r} is damaged ({error}); delete this folder to resume from the one before"
        ) from None
    shapes = {name: parameter.shape for name, parameter in policy.trainable.items()}
    if {name: value.shape for name, value in weights.items()} != shapes:
        raise UserError(
            f"checkpoint {str(path)!r} holds other trained parameters than this model; resume with the run's own config and "
            f"the model that it began with (model.path {policy.config.path!r})"
        )
    with torch.no_grad():
        for name, parameter in policy.trainable.items():
            parameter.copy_(weights[name])
    policy.sets.update(sets)
    return state, optimizer


def export_model(policy: Policy, target: Path) -> Path:
    """Write the trained model for the plain libraries: a LoRA that diffusers or peft load, else `save_pretrained`."""

    def fill(path: Path) -> None:
        if policy.config.lora is None:
            policy.adapter.save(str(path))
        else:
            export_lora(policy, path)

    write_folder(target, fill)
    return target


def export_lora(policy: Policy, path: Path) -> None:
    """Write the LoRA alone in the format of the adapter's library."""
    from peft import PeftConfig, get_peft_model_state_dict

    module: Any = policy.module
    # peft's default asks the hub whether the vocabulary was resized, which nothing here does
    layers = get_peft_model_state_dict(module, adapter_name="default", save_embedding_layers=False)
    config: PeftConfig = module.peft_config["default"]
    if policy.adapter.library == "diffusers":
        from diffusers.loaders.lora_base import LoraBaseMixin
        from diffusers.utils.peft_utils import set_adapter_layers  # noqa: F401  (fails early where diffusers has no peft backend)

        part = policy.adapter.component
        metadata = {f"{part}.{k}": v for k, v in config.to_dict().items()}
        tensors = {f"{part}.{k}": v.detach().cpu().contiguous() for k, v in layers.items()}
        LoraBaseMixin.write_lora_layers(
            state_dict=tensors,
            save_directory=str(path),
            is_main_process=True,
            weight_name="pytorch_lora_weights.safetensors",
            save_function=None,
            safe_serialization=True,
            lora_adapter_metadata=_plain(metadata),
        )
        return
    save_tensors(path / "adapter_model.safetensors", {f"base_model.model.{k}": v for k, v in layers.items()})
    config.base_model_name_or_path = policy.config.path
    config.save_pretrained(str(path))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON values only: peft's config holds sets and enums."""
    return {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in values.items()}
