"""Sampling of tokens from a causal language model with a KV cache, and the log-probs of given tokens.

A row's sample is a function of its prompt, the weights and its own uniforms, never of the batch it is sampled in: the prompts
of a group are prefilled once, finished rows leave the batch, and neither changes what the other rows draw.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visual_grpo.adapters.kv_cache import GrowingCache, cache_name
from visual_grpo.adapters.noise import row_seed
from visual_grpo.adapters.shared_decoding import SharedPromptCache, is_worth_sharing, shared_attention
from visual_grpo.errors import RunError, UserError

logger = logging.getLogger(__name__)

COMPACT_SHARE = 1 / 8
"""Share of finished rows that makes copying the cache cheaper than carrying them along."""
CacheKind = Literal["own", "plain", "shared"]
"""The model's own cache; one of `kv_cache`, which is faster; or that and the prompts' kept once (`shared_decoding`)."""
_SELECTABLE_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})


@dataclass(kw_only=True)
class Generated:
    """What `generate` returns; `T` is the longest completion of the batch."""

    token_ids: Tensor
    """[N, T] int64, the pad id after a row's end."""
    log_prob: Tensor
    """[N, T] log-prob of each sampled token under the full distribution at the sampling temperature, 0 after a row's end."""
    lengths: Tensor
    """[N] int64, tokens up to and including the end token."""
    ended: Tensor
    """[N] bool, False where the row ran into the limit."""


def row_uniforms(seed: int, row_ids: Tensor, count: int) -> Tensor:
    """Uniform numbers in [0, 1) for each row, from a generator seeded by (`seed`, row id) alone.

    Args:
        seed: of the sampling pass.
        row_ids: [N] int64.
        count: numbers a row.

    Returns:
        [N, count] float64 on the CPU, so that every device samples the same tokens.
    """
    uniforms = torch.empty(len(row_ids), count, dtype=torch.float64)
    generator = torch.Generator()
    for slot, row in zip(uniforms, row_ids.tolist(), strict=True):
        slot.uniform_(generator=generator.manual_seed(row_seed(seed, row, "tokens")))
    return uniforms


def upcast(logits: Tensor) -> Tensor:
    """Half-precision logits as float32; float64 stays."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def token_log_prob(
    logits: Tensor, token_ids: Tensor, temperature: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `token_ids` and the entropy of their distributions.

    Args:
        logits: [M, V].
        token_ids: [M] int64.
        temperature: [M], the logits are divided by it.
        entropy: whether the entropy is wanted too.

    Returns:
        ([M] log-probs, [M] entropies in nats or None), float32 or wider, with gradient.
    """
    log_softmax = torch.log_softmax(upcast(logits) / temperature[:, None], dim=-1)
    value = log_softmax.gather(1, token_ids[:, None]).squeeze(1)
    if not entropy:
        return value, None
    probs = log_softmax.exp()
    # A logit of -inf (a word that the model rules out) adds nothing, and 0 * -inf would be NaN.
    return value, -(probs * torch.where(probs > 0, log_softmax, 0.0)).sum(1)


def chunked_log_prob(
    source: Tensor,
    head: nn.Module,
    token_ids: Tensor,
    temperature: Tensor,
    *,
    chunk: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`token_log_prob` of the logits `head(source)`.

    Args:
        source: [M, D], what `head` turns into logits [M, V].
        head: the output embedding.
        token_ids, temperature, entropy: see `token_log_prob`.
        chunk: tokens whose logits exist at once, made again for the gradient; None = all.
    """
    from torch.utils.checkpoint import checkpoint

    def score(part: Tensor, ids: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_log_prob(head(part), ids, scale, entropy=entropy)

    if chunk is None or len(source) <= chunk:
        return score(source, token_ids, temperature)
    parts = zip(source.split(chunk), token_ids.split(chunk), temperature.split(chunk), strict=True)
    if torch.is_grad_enabled():
        scored = [checkpoint(score, *part, use_reentrant=False) for part in parts]
    else:
        scored = [score(*part) for part in parts]
    spread = [part for _, part in scored if part is not None]
    return torch.cat([value for value, _ in scored]), torch.cat(spread) if entropy else None


def pick_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution at the row's uniform number.

    Args:
        logits: [n, V] of the next token.
        uniforms: [n] float64 in [0, 1).
        temperature: of the softmax; 0 takes the most likely token (log-probs are then at temperature 1).
        top_k: sample among the `top_k` most likely tokens; None = all.
        top_p: sample among the fewest tokens that hold this probability, after `top_k`.

    Returns:
        (token ids [n] int64, log-probs [n] under the full distribution: `top_k` and `top_p` do not enter).
    """
    log_softmax = torch.log_softmax(upcast(logits) / (temperature or 1.0), dim=-1)
    if temperature == 0:
        picked = log_softmax.argmax(1, keepdim=True)
    else:
        cumulative = _truncated(log_softmax.exp(), top_k, top_p).cumsum(1, dtype=torch.float64)
        total = cumulative[:, -1:]
        # Below the total whatever the rounding, so that the token found has a probability above 0.
        target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        # The clamp only matters for NaN, which the caller reports: no token can be found there.
        picked = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    return picked.squeeze(1), log_softmax.gather(1, picked).squeeze(1)


def _truncated(probs: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """`probs` [n, V] with 0 outside the nucleus; not renormalised."""
    if top_k and top_k < probs.shape[1]:
        probs = torch.where(probs < probs.topk(top_k, dim=1).values[:, -1:], 0.0, probs)
    if top_p < 1.0:
        ordered, order = probs.sort(dim=1, descending=True)
        before = ordered.cumsum(1) - ordered
        outside = before >= top_p * ordered.sum(1, keepdim=True)
        outside[:, 0] = False  # the most likely token stays, whatever top_p
        probs = torch.where(outside.scatter(1, order, outside), 0.0, probs)
    return probs


class CachedModel:
    """A causal model with the KV cache of a left-padded batch, advanced one token a row at a time."""

    def __init__(self, model: nn.Module, pad_id: int, *, kind: CacheKind = "own") -> None:
        """`kind`: the best cache that the model takes."""
        self._model, self._kind = model, kind
        self._pad_id = pad_id
        self._device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model)  # of the output too; the old name warns where the new one exists
        self._takes_positions = "position_ids" in parameters
        self._keep_last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cache: Any = None
        self._mask: Tensor | None = None
        self._lengths = torch.empty(0)

    def prefill(self, prompt_ids: Sequence[Tensor]) -> Tensor:
        """Read the prompts (each [L_i] int64) into a fresh cache; returns the next token's logits [n, V]."""
        lengths = torch.tensor([len(ids) for ids in prompt_ids])
        width = int(lengths.max())
        token_ids = torch.full((len(prompt_ids), width), self._pad_id)
        for row, ids in enumerate(prompt_ids):
            token_ids[row, width - len(ids) :] = ids
        self._cache = GrowingCache() if self._kind != "own" else None
        self._lengths = lengths.to(self._device)
        # Without padding no mask: the attention kernels are faster then.
        padded = bool((lengths < width).any())
        self._mask = (torch.arange(width) >= width - lengths[:, None]).long().to(self._device) if padded else None
        positions = (torch.arange(width) - (width - lengths[:, None])).clamp_(min=0).to(self._device)
        return self._forward(token_ids.to(self._device), positions)

    def step(self, token_ids: Tensor) -> Tensor:
        """Append one token a row ([n] int64); returns the next token's logits [n, V]."""
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(token_ids), 1)], dim=1)
        logits = self._forward(token_ids[:, None], self._lengths[:, None])
        self._lengths = self._lengths + 1
        return logits

    def _forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": token_ids, "use_cache": True, **self._keep_last}
        if self._mask is not None:
            inputs["attention_mask"] = self._mask
        shared = isinstance(self._cache, SharedPromptCache)
        if self._takes_positions and (self._mask is not None or shared):
            inputs["position_ids"] = positions
        if self._cache is not None:
            inputs[self._cache_name] = self._cache
        with shared_attention(self._model) if shared else nullcontext():
            output = self._model(**inputs)
        self._cache = getattr(output, self._cache_name, None)
        if self._cache is None:
            raise UserError(f"{type(self._model).__name__} returns no key-value cache; text_lm cannot sample from it.")
        logits: Tensor = output.logits[:, -1]
        return logits

    @property
    def can_select(self) -> bool:
        """Whether rows of the cache can be repeated and dropped (not so for recurrent states)."""
        if self._kind != "own":
            return True
        layers = getattr(self._cache, "layers", None)
        return layers is not None and all(type(layer).__name__ in _SELECTABLE_LAYERS for layer in layers)

    def repeat(self, owner: Tensor) -> None:
        """After the prefill: row i goes on from prompt `owner[i]` ([n] int64)."""
        if self._kind == "shared" and is_worth_sharing(self._cache, len(owner)):
            self._cache = SharedPromptCache(self._cache, self._lengths, owner)
            self._lengths, self._mask = self._lengths[owner], None
        else:
            self.select(owner)

    def select(self, rows: Tensor) -> None:
        """Keep rows `rows` ([m] int64, repeats allowed), in this order."""
        self._cache.batch_select_indices(rows)
        self._lengths = self._lengths[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]


def _prefill_shared(decoder: CachedModel, prompt_ids: Sequence[Tensor]) -> Tensor:
    """Prefill each distinct prompt once and repeat its cache; returns logits [N, V]."""
    first: dict[tuple[int, ...], int] = {}
    owner = [first.setdefault(tuple(ids.tolist()), len(first)) for ids in prompt_ids]
    if len(first) == len(owner):
        return decoder.prefill(prompt_ids)
    logits = decoder.prefill([torch.tensor(ids) for ids in first])
    if not decoder.can_select:
        logger.info("the model's cache cannot be repeated: every row's prompt is read on its own")
        return decoder.prefill(prompt_ids)
    rows = torch.tensor(owner, device=logits.device)
    decoder.repeat(rows)
    return logits[rows]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Sequence[Tensor],
    uniforms: Tensor,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    share_prompts: bool = True,
    cache: CacheKind = "own",
) -> Generated:
    """Sample one completion a row with the model as it is (the caller has put it into evaluation mode).

    Args:
        model: a transformers causal language model.
        prompt_ids: N tensors [L_i] int64, none empty.
        uniforms: [N, limit] float64, the randomness; `limit` is the largest number of new tokens.
        eos_ids: tokens that end a completion; none = every row runs to the limit.
        pad_id: fills the places before a prompt and after a completion.
        temperature, top_k, top_p: see `pick_tokens`.
        share_prompts: prefill equal prompts once.
        cache: the best that the model takes.

    Raises:
        RunError: logits that are not finite.
    """
    decoder = CachedModel(model, pad_id, kind=cache)
    logits = _prefill_shared(decoder, prompt_ids) if share_prompts else decoder.prefill(prompt_ids)
    device, (count, limit) = logits.device, uniforms.shape
    uniforms, eos = uniforms.to(device), torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
    token_ids = torch.full((count, limit), pad_id, device=device)
    log_prob = torch.zeros(count, limit, dtype=upcast(logits).dtype, device=device)
    lengths = torch.full((count,), limit, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    rows = torch.arange(count, device=device)  # rows of the batch that the model sees
    for step in range(limit):
        picked, value = pick_tokens(logits, uniforms[rows, step], temperature=temperature, top_k=top_k, top_p=top_p)
        running = ~ended[rows]
        token_ids[rows, step] = torch.where(running, picked, pad_id)
        log_prob[rows, step] = torch.where(running, value, 0.0)
        stops = running & torch.isin(picked, eos)
        lengths[rows] = torch.where(stops, step + 1, lengths[rows])
        ended[rows] |= stops
        running &= ~stops
        left, finite = torch.stack([running.sum(), torch.isfinite(value).all().long()]).tolist()  # the step's one wait
        if not finite:
            raise RunError(_not_finite(rows[~torch.isfinite(value)], step))
        if left == 0 or step + 1 == limit:
            break
        if left <= (1 - COMPACT_SHARE) * len(rows) and decoder.can_select:
            kept = running.nonzero().squeeze(1)
            decoder.select(kept)
            rows, picked = rows[kept], picked[kept]
        logits = decoder.step(picked)
    width = int(lengths.max())
    return Generated(token_ids=token_ids[:, :width], log_prob=log_prob[:, :width], lengths=lengths, ended=ended)


def _not_finite(rows: Tensor, step: int) -> str:
    some = ", ".join(str(row) for row in rows[:8].tolist())
    return (
        f"the model's logits are not finite at new token {step} of batch row(s) {some}: the weights have diverged "
        f"(lower train.optimizer.lr, or start from an earlier checkpoint) or overflow in model.dtype (use bfloat16 or float32)"
    )
