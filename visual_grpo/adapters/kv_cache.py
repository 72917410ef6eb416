"""Key-value caches for models whose layers all attend to everything before them, as transformers' attention asks for them.

transformers' own cache joins old and new tensors at every token, which costs more than the attention over them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128
"""Tokens by which a buffer grows."""


class KeyValueCache(ABC):
    """What transformers' attention layers and mask builders ask of a cache; layers are numbered from 0."""

    is_sliding = (False,)
    is_compileable = False

    def __init__(self) -> None:
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the [n, heads, S, d] keys and values of the tokens read now; returns those to attend to."""

    @abstractmethod
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those that are read now."""

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first token that is read now."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the keys for `query_length` tokens."""
        return self.get_seq_length(layer_idx) + query_length, 0


class PromptCache(KeyValueCache):
    """Keeps the keys and values of prompts, before which nothing stands.

    A layer may write twice: activation checkpointing makes it again.
    """

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store and hand back."""
        self.states[layer_idx] = keys, values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """None."""
        return 0


class CompletionCache(KeyValueCache):
    """Puts the keys and values of each row's prompt before its own, and keeps nothing."""

    def __init__(self, prompts: PromptCache, owner: Tensor) -> None:
        """`owner` [n] int64: the prompt of each row."""
        super().__init__()
        self.states, self._owner = dict(prompts.states), owner

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[n, heads, P + S, d] keys and values."""
        before = [state[self._owner] for state in self.states[layer_idx]]
        return torch.cat([before[0], keys], dim=-2), torch.cat([before[1], values], dim=-2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The padded length of the prompts."""
        return self.states[layer_idx][0].shape[-2]


class GrowingCache(KeyValueCache):
    """Keys and values of a batch that is sampled, in buffers that grow by blocks; rows can be repeated and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[int, int] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append; returns views of all that was read."""
        start = self._read.get(layer_idx, 0)
        stop = self._read[layer_idx] = start + keys.shape[-2]
        if start == 0:
            self.states[layer_idx] = keys, values
            return keys, values
        if stop > self.states[layer_idx][0].shape[-2]:
            self.states[layer_idx] = self._moved(layer_idx, start, stop + BLOCK, slice(None))
        for buffer, new in zip(self.states[layer_idx], (keys, values), strict=True):
            buffer[:, :, start:stop] = new
        old_keys, old_values = self.states[layer_idx]
        return old_keys[:, :, :stop], old_values[:, :, :stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far."""
        return self._read.get(layer_idx, 0)

    def batch_select_indices(self, rows: Tensor) -> None:
        """Keep rows `rows` ([m] int64, repeats allowed), in this order."""
        for layer, read in self._read.items():
            self.states[layer] = self._moved(layer, read, read + BLOCK, rows)

    def _moved(self, layer: int, read: int, capacity: int, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        moved = []
        for old in self.states[layer]:
            kept = old[:, :, :read][rows]
            new = kept.new_empty(*kept.shape[:2], capacity, kept.shape[3])
            new[:, :, :read] = kept
            moved.append(new)
        return moved[0], moved[1]


def cache_name(body: nn.Module) -> str:
    """How a model's `forward` calls its cache: transformers renamed the argument."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


def has_plain_layers(body: Any) -> bool:
    """Whether every layer of a transformers model caches all keys and values (no sliding window, no recurrent state)."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return {type(layer) for layer in DynamicCache(config=body.config).layers} <= {DynamicLayer}
