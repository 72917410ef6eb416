"""Memory arithmetic shared by the adapters: bytes of one process, computed from shapes alone (`train --dry-run`)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

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
