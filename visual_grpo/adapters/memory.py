"""Memory arithmetic shared by the adapters: bytes of one process, computed from shapes alone (`train --dry-run`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from visual_grpo.config import ModelConfig

BLOCK_WIDTHS = 25
LORA_BLOCK_WIDTHS = 14
"""Values that the backward pass of one MMDiT block keeps, per token, in units of the network's width: measured on
`SD3Transformer2DModel` with saved-tensor hooks (tests/adapters/test_sd3.py repeats it). With LoRA the frozen layers keep no
inputs. No L x L attention matrix: fused kernels do not keep it."""
EXTRA_ATTENTION_WIDTHS = 10
LORA_EXTRA_ATTENTION_WIDTHS = 6
"""The same for a second, image-only attention in a block (SD3.5-medium)."""


def dtype_size(dtype: str) -> int:
    """Bytes of one value of `float32`, `bfloat16`, ..."""
    return torch.empty((), dtype=getattr(torch, dtype)).element_size()


def training_parts(module: nn.Module, config: ModelConfig) -> dict[str, int]:
    """Weights, gradients and AdamW's two states, in bytes.

    Trained parameters, their gradients and their optimizer states are float32 or wider whatever `config.dtype`, as `Policy`
    keeps them.

    Args:
        module: the network, on the meta device too, with its LoRA if it has one.
        config: `train_layers` decides what is trained where there is no LoRA.
    """
    frozen = trained = 0
    for name, parameter in module.named_parameters():
        if config.lora is not None:
            chosen = "lora_" in name
        else:
            chosen = config.train_layers is None or any(part in name for part in config.train_layers)
        if chosen:
            trained += parameter.numel() * max(parameter.element_size(), 4)
        else:
            frozen += parameter.numel() * parameter.element_size()
    return {
        "frozen weights": frozen,
        "LoRA weights" if config.lora else "trained weights": trained,
        "gradients": trained,
        "optimizer states": 2 * trained,
    }


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Sizes that decide a transformer's activations."""

    layers: int
    width: int
    image_tokens: int
    text_tokens: int = 0
    extra_attention: int = 0
    """blocks with a second attention over the image tokens."""


def transformer_activation_bytes(
    shape: BlockShape, *, sequences: int, element_size: int, checkpointing: bool, lora: bool
) -> tuple[int, str]:
    """Estimate what the backward pass keeps.

    Without checkpointing `sequences * width * (layers * tokens * W + extra * image_tokens * E)` values, with W and E the
    constants above; with it those of one block, and the input of each block (`layers * tokens * width`).

    Args:
        shape: of the network and its input.
        sequences: in one network call, branches of guidance counted apart.
        element_size: bytes of a value in the forward pass.
        checkpointing: whether blocks are recomputed.
        lora: whether only low-rank adapters are trained.

    Returns:
        Bytes, and the formula with its numbers for the plan's notes.
    """
    tokens = shape.image_tokens + shape.text_tokens
    per_block, per_extra = (
        (LORA_BLOCK_WIDTHS, LORA_EXTRA_ATTENTION_WIDTHS) if lora else (BLOCK_WIDTHS, EXTRA_ATTENTION_WIDTHS)
    )
    blocks, extra = (1, min(shape.extra_attention, 1)) if checkpointing else (shape.layers, shape.extra_attention)
    widths = (
        tokens * (blocks * per_block + (shape.layers if checkpointing else 0)) + extra * shape.image_tokens * per_extra
    )
    counted = (
        f"({shape.layers} block inputs + {per_block} in one block)"
        if checkpointing
        else f"{blocks} blocks x {per_block}"
    )
    note = f"activations (estimate) = {sequences} sequences x {tokens} tokens x {counted} x width {shape.width}"
    note += f" x {element_size} bytes"
    if extra:
        note += f", and {per_extra} widths for each second attention"
    return sequences * shape.width * widths * element_size, note


def measured_activation_bytes(module: nn.Module, call: Mapping[str, Any], *, recomputed: Sequence[str] = ()) -> int:
    """Measure what the backward pass of one call keeps, without weights: nothing is computed on the meta device.

    Attention counts as its fused kernels do: query, key, value and output, no matrix of tokens by tokens.

    Args:
        module: on the meta device; what its `requires_grad` flags train decides what is kept.
        call: its arguments, tensors on the meta device.
        recomputed: class names of the parts that gradient checkpointing computes again; of those the inputs are kept, and the
            whole of the largest one.

    Returns:
        Bytes beside weights and arguments.
    """
    kept = _Kept({p.untyped_storage()._cdata for p in module.parameters()})
    hooks = [
        hook
        for part in module.modules()
        if type(part).__name__ in recomputed
        for hook in (part.register_forward_pre_hook(kept.enter), part.register_forward_hook(kept.leave))
    ]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.add, lambda x: x), _FusedAttention():
            module(**call)
    finally:
        for hook in hooks:
            hook.remove()
    return kept.outside + sum(kept.inputs) + max(kept.parts, default=0)


class _Kept:
    """Counts storages that autograd saves, each once: outside the recomputed parts, and inside each of them."""

    def __init__(self, weights: set[int]) -> None:
        self.seen: dict[int, Tensor] = {}  # the tensors too: a freed storage's address may come back
        self.weights = weights
        self.outside, self.inputs, self.parts = 0, [0], [0]
        self.inside = False

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen and storage._cdata not in self.weights:
            self.seen[storage._cdata] = tensor
            if self.inside:
                self.parts[-1] += storage.nbytes()
            else:
                self.outside += storage.nbytes()
        return tensor

    def enter(self, part: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.inside = True
        self.inputs.append(arguments[0].nbytes)
        self.parts.append(0)

    def leave(self, part: nn.Module, arguments: Any, output: Any) -> None:
        self.inside = False


class _FusedAttention(TorchFunctionMode):
    """Attention as its fused kernels save it; the meta device has only the plain one, which keeps the matrix."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            given = dict(kwargs or {}) | dict(zip(("query", "key", "value"), args, strict=False))
            return _Attention.apply(given["query"], given["key"], given["value"])
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Shapes of attention and what it saves; it has no values and no backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out)
        return out


def diffusion_rollout_bytes(rows: int, units: int, latent_elements: int, *, element_size: int = 4) -> int:
    """Bytes of the stored transitions (two latents a unit) and the finished latents of `rows` rows."""
    return rows * (2 * units + 1) * latent_elements * element_size


def folder_elements(folder: str | Path) -> int:
    """Count the values in a folder's safetensors files from their headers; 0 where there are none."""
    total = 0
    root = Path(folder)
    for file in sorted(root.glob("*.safetensors")) if root.is_dir() else []:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total
