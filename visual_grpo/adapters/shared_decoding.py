"""Sampling of many answers to few prompts: the keys and values of a prompt are kept once, and attended to once for all its rows.

A row attends to its prompt and to its own tokens apart; both are joined by their sums of exponentials, so the result is that of
attention over all ("Hydragen", arXiv 2402.05099). A product of all queries of a prompt with its keys is much faster than as many
reads of repeated keys, and a prompt of 1,024 tokens with 16 answers takes a sixteenth of the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.kv_cache import GrowingCache, cache_name

logger = logging.getLogger(__name__)

ATTENTION = "visual_grpo_shared_prompts"
"""Name of `attend` among transformers' attention functions."""
LEAST_SAVED = 2048
"""Prompt tokens of repeated rows below which reading them costs less than the further operations do."""
_CHANGES_SCORES = ("softcap", "position_bias", "s_aux", "sliding_window")


@dataclass(frozen=True)
class PromptPart:
    """Prompts of one layer, and which rows are theirs."""

    keys: Tensor
    """[m, heads, P, d], padded on the left."""
    values: Tensor
    bias: Tensor | None
    """[m, 1, 1, P], -inf at the padding; None without any."""
    slots: Tensor
    """[m, r] int64, the rows of each prompt; of prompts with fewer than r rows the last are any rows."""
    place: Tensor
    """[n] int64, where each row stands in the flattened slots."""

    def gather(self, rows: Tensor) -> Tensor:
        """[n, heads, group, d] queries -> [m, heads, r * group, d]."""
        return rows[self.slots].transpose(1, 2).flatten(2, 3)

    def spread(self, found: Tensor, group: int) -> Tensor:
        """[m, heads, r * group, x] -> [n, heads, group, x]."""
        return found.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1)[self.place]


class SharedPromptCache(GrowingCache):
    """Keys and values of the rows' own tokens in growing buffers, and of their prompts once."""

    def __init__(self, prompts: GrowingCache, lengths: Tensor, owner: Tensor) -> None:
        """`prompts` has read m left-padded prompts of `lengths` [m]; `owner` [n] int64 is the prompt of each row."""
        super().__init__()
        self._prompts = dict(prompts.states)
        self._width = prompts.get_seq_length()
        columns = torch.arange(self._width, device=lengths.device)
        absent = (columns < self._width - lengths[:, None])[:, None, None]
        dtype = self._prompts[0][0].dtype
        self._bias = torch.zeros_like(absent, dtype=dtype).masked_fill_(absent, -torch.inf) if absent.any() else None
        self._arrange(owner)

    def _arrange(self, owner: Tensor) -> None:
        present, owner = owner.unique(return_inverse=True)
        if len(present) < len(self._prompts[0][0]):  # a prompt whose rows have all ended
            self._prompts = {layer: (k[present], v[present]) for layer, (k, v) in self._prompts.items()}
            self._bias = None if self._bias is None else self._bias[present]
        self._owner = owner
        counts = owner.bincount()
        order = owner.argsort(stable=True)
        rank = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner[order]]
        self._slots = owner.new_zeros(len(counts), int(counts.max()))
        self._slots[owner[order], rank] = order
        self._place = torch.empty_like(owner)
        self._place[order] = owner[order] * self._slots.shape[1] + rank

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append; returns the rows' own keys and values, and with the keys what `attend` needs of the prompts."""
        keys, values = super().update(keys, values, layer_idx)
        keys = keys.view(keys.shape)  # so that nothing is attached to the buffer itself
        keys.prompts = PromptPart(*self._prompts[layer_idx], self._bias, self._slots, self._place)  # type: ignore[attr-defined]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, the padded prompts among them."""
        return self._width + super().get_seq_length(layer_idx)

    def batch_select_indices(self, rows: Tensor) -> None:
        """Keep rows `rows` ([m] int64, repeats allowed), in this order."""
        super().batch_select_indices(rows)
        self._arrange(self._owner[rows])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: one new token a row, over its prompt and its own tokens.

    Args:
        module: the layer, which is not read.
        query: [n, heads, 1, d].
        key, value: [n, key heads, S, d], as `SharedPromptCache` returns them.
        attention_mask: not read: a row's own tokens all stand before the new one.
        scaling: of the scores; None = 1 / sqrt(d).
        options: those that change scores are refused, the others not read.

    Returns:
        ([n, 1, heads, d], None).
    """
    given = [name for name in _CHANGES_SCORES if options.get(name) is not None]
    if given or query.shape[2] != 1:
        raise NotImplementedError(f"attention over shared prompts with {', '.join(given) or 'several new tokens'}")
    prompts: PromptPart = key.prompts  # type: ignore[attr-defined]
    heads = key.shape[1]
    group = query.shape[1] // heads
    query = query.flatten(1, 2).unflatten(1, (heads, group)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    first = [
        prompts.spread(part, group) for part in _part(prompts.gather(query), prompts.keys, prompts.values, prompts.bias)
    ]
    top, total, sums = _part(query, key, value, None)
    highest = torch.maximum(first[0], top)
    before, own = (first[0] - highest).exp_(), (top - highest).exp_()
    found = (before * first[2] + own * sums) / (before * first[1] + own * total)
    return found.flatten(1, 2)[:, None], None


def _part(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Largest score [..., q, 1], sum of exp(score - largest) [..., q, 1], sum of the values with these weights [..., q, d]."""
    scores = query @ keys.transpose(-1, -2)
    if bias is not None:
        scores += bias
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return top, weights.sum(-1, keepdim=True), weights @ values


@contextmanager
def shared_attention(model: Any) -> Iterator[None]:
    """Within the block the layers of a transformers model attend by `attend`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = before


def is_worth_sharing(cache: GrowingCache, rows: int) -> bool:
    """Whether `rows` rows share the prompts of `cache` rather than each having a copy.

    On a CPU in single precision or wider: elsewhere it was not measured, and scores would be rounded to the half precision.
    """
    keys = cache.states[0][0]
    wide = keys.dtype in (torch.float32, torch.float64)
    return keys.device.type == "cpu" and wide and (rows - len(keys)) * keys.shape[2] >= LEAST_SAVED


@torch.no_grad()
def can_share_prompts(model: Any) -> bool:
    """Whether a model that takes the caches of `kv_cache` gives the same states with `SharedPromptCache`, which is measured."""
    body = model.base_model
    name, training = cache_name(body), body.training
    body.eval()
    embeddings = body.get_input_embeddings().weight
    ids = torch.arange(1, 9, device=embeddings.device) % embeddings.shape[0]
    prompts, owner = torch.stack([ids[:4], ids[2:6]]), torch.tensor([1, 0, 1], device=ids.device)
    try:
        cache = GrowingCache()
        body(input_ids=prompts, use_cache=True, **{name: cache})
        lengths = torch.full((2,), 4, device=ids.device)
        shared = SharedPromptCache(cache, lengths, owner)
        with shared_attention(model):
            for step in (5, 6):
                tokens = ids[[step, step - 2, step + 1]]
                found = body(
                    input_ids=tokens[:, None],
                    position_ids=lengths[owner, None] + step - 5,
                    use_cache=True,
                    **{name: shared},
                )[0][:, -1]
        answers = torch.stack([ids[[5, 3, 6]], ids[[6, 4, 7]]], dim=1)
        plain = body(input_ids=torch.cat([prompts[owner], answers], dim=1), use_cache=False)[0][:, -1]
        scale = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 0.1
        same = torch.allclose(found, plain, rtol=scale, atol=scale * float(plain.abs().max()))
        reason = None if same else "other states then"
    except Exception as error:  # a model of another author may fail in any way; its own attention does not need this
        reason = f"{type(error).__name__}: {error}"
    finally:
        body.train(training)
    if reason is not None:
        logger.info("the sampler repeats the cache of a prompt for each of its rows: %s", reason)
    return reason is None
