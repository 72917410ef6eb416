"""What rewards with downloaded weights share: where the files are, one model for all who ask for it, batches, devices.

Every weight is named by a local path or a Hub id; what is not there ends in one message that says which file, where it was
looked for and how to get it. Range: no reward of its own.
"""

from __future__ import annotations

import re
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from visual_grpo.adapters.paths import without_progress_bars
from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest
from visual_grpo.types import RewardStatus

__all__ = [
    "ModelReward",
    "clip_image_features",
    "eight_bit",
    "features",
    "find_file",
    "load_clip",
    "load_strict",
    "load_weights",
    "read_state",
    "resident",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_RESIDENT: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
_LOADING = threading.RLock()  # one lock for all: loading switches state of the libraries that is global


def resident(key: Hashable, build: Callable[[], Any]) -> Any:
    """Return the object under `key`, built once for the process; it goes when the last reward lets go of it."""
    with _LOADING:
        found = _RESIDENT.get(key)
        if found is None:
            found = build()
            _RESIDENT[key] = found
        return found


def load_weights(what: str, source: str, load: Any, **options: Any) -> Any:
    """Run a library's `from_pretrained` on `source`; failure becomes one message that says what is missing and how to get it."""
    try:
        with without_progress_bars():
            return load(source, **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = _first_line(error)
        if Path(source).is_dir():
            raise UserError(f"{what} could not be loaded from the folder {source!r}: {reason}") from error
        raise UserError(
            f"{what} could not be loaded from {source!r}: it is no folder, and as a Hub id it is neither in the cache "
            f"{_cache()!r} nor could be fetched ({reason}). Fetch it once where there is network (`hf download OWNER/NAME`) "
            f"and copy the cache, or give the path of a folder that holds it."
        ) from error


def find_file(what: str, source: str, file: str) -> Path:
    """Find one file of weights.

    Args:
        what: what to call it in messages ("hps_v2's weights").
        source: path of the file itself, of a folder that holds `file`, or a Hub id.
        file: its published name.

    Raises:
        UserError: it is in none of these places.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / file).is_file():
            return path / file
        raise UserError(
            f"{what}: the folder {source!r} holds no {file!r}. Put the file there, or give the path of the file itself."
        )
    if not _HUB_ID.fullmatch(source):
        raise UserError(
            f"{what}: {file!r} was looked for at {str(path.resolve())!r}, where there is neither a file nor a folder, and "
            f"{source!r} is no Hub id (owner/name). Give the path of the file, of a folder that holds it, or a Hub id."
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, file))
    except (OSError, ValueError, RuntimeError) as error:  # its own errors and those of its client are kinds of OSError
        raise UserError(
            f"{what}: {file!r} of the Hub repository {source!r} is neither in the cache {_cache()!r} nor could be fetched "
            f"({_first_line(error)}). Fetch it once where there is network (`hf download {source} {file}`) and copy the "
            f"cache, or give the path of the file."
        ) from error


def read_state(what: str, path: Path) -> dict[str, Tensor]:
    """Read a state dict, `.safetensors` or `.pt` / `.pth` (tensors only: no pickled code is run).

    A checkpoint that keeps it under "state_dict" beside optimizer state is unpacked.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file raises errors of the zip, pickle and safetensors readers
        raise UserError(f"{what}: {str(path)!r} could not be read as weights ({_first_line(error)}).") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{what}: {str(path)!r} holds no state dict of tensors.")
    return dict(content)


def load_strict(what: str, module: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load `state` into `module`; any missing, unknown or wrongly shaped parameter is an error that names it."""
    wanted = module.state_dict()
    missing = [key for key in wanted if key not in state]
    extra = [key for key in state if key not in wanted]
    shapes = [
        f"{key} {list(state[key].shape)} instead of {list(wanted[key].shape)}"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    ]
    faults = [
        f"{label} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for label, names in (("without", missing), ("unknown", extra), ("wrong shape:", shapes))
        if names
    ]
    if faults:
        raise UserError(f"{what}: {str(path)!r} is not this model's checkpoint ({'; '.join(faults)}).")
    module.load_state_dict(dict(state), strict=True, assign=True)


def features(output: Any) -> Tensor:
    """Projected features [N, D] of unit length (zero stays zero), float32; transformers 4 gives a tensor and 5 an object."""
    raw: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return torch.nn.functional.normalize(raw.float(), dim=-1)


def eight_bit(images: Tensor) -> Tensor:
    """Round images in [0, 1] to what an 8-bit file can hold, so that a saved image gets the same score."""
    return (images.float() * 255).round().clamp(0, 255) / 255


def load_clip(what: str, model: str, processor: str, device: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a `CLIPModel` and its processor, shared by all rewards that name the same ones."""
    from transformers import CLIPModel, CLIPProcessor

    def build() -> Any:
        loaded = load_weights(f"{what}'s model", model, CLIPModel.from_pretrained, dtype=dtype)
        return loaded.to(device).eval().requires_grad_(False)

    read = resident(
        ("CLIPProcessor", processor),
        lambda: load_weights(f"{what}'s processor", processor, CLIPProcessor.from_pretrained),
    )
    return resident(("CLIPModel", model, str(device), dtype), build), read


def clip_image_features(model: Any, processor: Any, request: RewardRequest) -> Tensor:
    """Unit features [N, D] of the images, by the processor's own resize and crop."""
    pixels = processor.image_processor(images=request.pil_images, return_tensors="pt")["pixel_values"]
    return features(model.get_image_features(pixel_values=pixels.to(model.device, model.dtype)))


class ModelReward(Reward):
    """A reward that is a model: loaded at the first call, resident until `close`, run in batches without gradient."""

    needs = frozenset({"images"})
    label: ClassVar[str]
    """its name, in messages."""

    def __init__(self, *, device: Any = None, dtype: str = "float32", batch_size: int = 32) -> None:
        """Choose where and how it runs.

        Args:
            device: where it runs; None: CUDA if there is one, else the CPU.
            dtype: of the networks; halves make ties within a group. The last similarity or head is always float32.
            batch_size: rows run at a time.
        """
        if dtype not in ("float32", "float16", "bfloat16"):
            raise UserError(f"{self.label}: dtype is {dtype!r}; give float32, float16 or bfloat16.")
        if batch_size < 1:
            raise UserError(f"{self.label}: batch_size must be above 0; it is {batch_size}.")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.batch_size = batch_size
        self._loaded: Any = None
        self._lock = threading.Lock()

    @abstractmethod
    def load(self) -> Any:
        """Load what `score` needs; called once."""

    @abstractmethod
    def score(self, loaded: Any, request: RewardRequest) -> dict[str, Tensor]:
        """Score at most `batch_size` rows: "values" [N], details [N] by name, and "applicable" [N] if not all rows are."""

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> RewardOutput:
        with self._lock:
            if self._loaded is None:
                self._loaded = self.load()
            loaded = self._loaded
        parts = [
            self.score(loaded, request.take(range(start, min(start + self.batch_size, len(request)))))
            for start in range(0, len(request), self.batch_size)
        ]
        columns = {key: torch.cat([part[key].float().cpu() for part in parts]) for key in parts[0]}
        values, applicable = columns.pop("values"), columns.pop("applicable", None)
        if applicable is None:
            return RewardOutput(values=values, details=columns)
        status = torch.where(torch.isfinite(values), int(RewardStatus.OK), int(RewardStatus.FAILED))
        status = status.masked_fill(applicable == 0, int(RewardStatus.NOT_APPLICABLE)).to(torch.int8)
        return RewardOutput(values=values, status=status, details=columns)

    def close(self) -> None:
        """Let go of the model; the next call loads it again."""
        with self._lock:
            self._loaded = None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)
