"""Text models without their weights: configs on the meta device and the memory that training them takes."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.memory import dtype_size, training_parts
from visual_grpo.adapters.paths import read_config, resolve_model_path
from visual_grpo.adapters.protocol import MemoryPlan
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError, did_you_mean

PLANNED_PROMPT = 256
"""Prompt tokens a row that memory plans assume: real prompts are not read for a plan."""


def published_configs() -> dict[str, dict[str, Any]]:
    """Hub ids of well-known models -> {"config": published config values, "parameters": their count}."""
    text = (resources.files("visual_grpo.adapters") / "published" / "text.json").read_text(encoding="utf-8")
    return {name: entry for entry in json.loads(text) for name in entry["ids"]}


def config_values(config: ModelConfig) -> dict[str, Any]:
    """Values for `AutoConfig.for_model` of `config.path`: its own `config.json`, else the published ones; no network.

    Raises:
        UserError: neither is at hand.
    """
    resolved = resolve_model_path(config.path, marker="config.json", what="causal language model")
    values = read_config(resolved, "config.json", revision=config.revision)
    if values is None:
        published = published_configs()
        if config.path not in published:
            raise UserError(
                f"the config of model.path {config.path!r} is neither in a folder, nor in the hub cache, nor among the published "
                f"ones.{did_you_mean(config.path, published)} Known: {', '.join(sorted(published))}."
            )
        values = published[config.path]["config"]
    if "model_type" not in values:
        raise UserError(
            f"config.json of model.path {config.path!r} names no model_type, so it is no transformers model"
        )
    return dict(values)


def meta_model(config: ModelConfig) -> nn.Module:
    """The causal language model of `config.path` on the meta device, frozen, in `config.dtype`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_values(config)
    try:
        settings = AutoConfig.for_model(**values)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, config.dtype))
    except Exception as error:  # a value of the wrong type is an error of the library's own kind
        reason = " ".join(str(error).split())
        raise UserError(f"model.path {config.path!r} is no causal language model: {reason}") from error
    return model.requires_grad_(False)


def checkpoint_activations(model: Any) -> None:
    """Make the blocks' activations again in the backward pass (transformers renamed the switch)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # the reentrant form gives LoRA no gradient below a frozen embedding


def activation_bytes(module: Any, *, rows: int, tokens: int) -> int:
    """Bytes that one forward pass of the body keeps for its backward pass, counted on the meta device.

    Args:
        module: a causal model on the meta device.
        rows: `n`.
        tokens: prompt and completion tokens a row.
    """
    parameters = {id(p) for p in module.parameters()}
    seen: dict[int, int] = {}
    kept: list[Tensor] = []  # keeps the storages' addresses from being reused while they are counted

    def pack(tensor: Tensor) -> Tensor:
        # The attention kernels in use make the [tokens, tokens] weights again; the meta device's does not.
        if id(tensor) not in parameters and tensor.shape[-2:] != (tokens, tokens):
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
    # Given whole, since transformers looks at values to make one.
    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool, device="meta")
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(seen.values())


def plan_text_memory(
    config: ModelConfig, module: Any, *, logits_chunk: int | None, rows: int, units: int
) -> MemoryPlan:
    """Bytes to train `rows` rows of `units` new tokens in one pass with AdamW; `module` is on the meta device."""
    for name, parameter in module.named_parameters():  # what is trained decides what the forward pass keeps
        layers = ("lora_",) if config.lora is not None else (config.train_layers or ("",))
        parameter.requires_grad_(any(part in name for part in layers))
    settings = module.config.get_text_config()
    heads = settings.num_attention_heads
    head_dim = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    key_values = (getattr(settings, "num_key_value_heads", None) or heads) * head_dim * settings.num_hidden_layers
    tokens, width = PLANNED_PROMPT + units, dtype_size(config.dtype)
    module.train()
    activations = activation_bytes(module, rows=rows, tokens=tokens)
    if config.gradient_checkpointing:
        checkpoint_activations(module)
        # The inputs of all blocks, and one block that is made again.
        activations = activation_bytes(module, rows=rows, tokens=tokens) + activations // settings.num_hidden_layers
    # Logits, their log-softmax and its gradient, in float32 or wider.
    scored = min(rows * units, logits_chunk or rows * units)
    return MemoryPlan(
        parts=training_parts(module, config)
        | {
            "activations": activations,
            "logits": 3 * scored * settings.vocab_size * max(width, 4),
            "key-value cache": 2 * rows * tokens * key_values * width,
        },
        notes=(
            f"prompts counted with {PLANNED_PROMPT} tokens",
            "the cache is that of sampling `rows` rows and is freed before training",
        ),
    )
