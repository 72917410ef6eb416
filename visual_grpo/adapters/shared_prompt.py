"""Log-prob passes that read a prompt once, whatever the number of its rows.

The distinct prompts run through the body and leave their keys and values; the completions of all rows then attend to those of
their own prompt. Both passes belong to one graph, so the gradient through the shared part is exact: 8 rows of 108 + 64 tokens
cost 108 + 8 x 64. A tree mask over one packed sequence counts the same tokens, but its attention also scores every pair of rows
that may not see each other, and it needs a kernel that takes the mask.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.kv_cache import CompletionCache, KeyValueCache, PromptCache, cache_name, has_plain_layers
from visual_grpo.adapters.token_rows import TokenRows

logger = logging.getLogger(__name__)


class SharedPromptReader:
    """Hidden states of rows whose prompts repeat."""

    def __init__(self, body: nn.Module) -> None:
        self._body, self._cache_name = body, cache_name(body)

    def predicting_states(self, rows: TokenRows) -> Tensor:
        """[M, D] states that predict the wanted tokens: a completion's first token stands behind its prompt."""
        prompts, owner = rows.distinct_prompts
        token_ids, lengths = rows.padded(prompts), rows.lengths(prompts)
        completions = rows.completions[:, : max(int(rows.read.max()) - 1, 0)]
        states = self.read(token_ids, lengths, owner, completions)
        behind = owner * token_ids.shape[1] + lengths[owner] - 1
        within = token_ids.numel() + rows.row * completions.shape[1] + rows.unit - 1
        return states.index_select(0, torch.where(rows.unit == 0, behind[rows.row], within))

    def read(self, prompt_ids: Tensor, prompt_lengths: Tensor, owner: Tensor, completions: Tensor) -> Tensor:
        """One state for each token of the distinct prompts, then for each token of the completions.

        Args:
            prompt_ids: [m, P] int64, padded on the right.
            prompt_lengths: [m] int64.
            owner: [n] int64, the prompt of each row.
            completions: [n, S] int64, padded on the right; S may be 0.

        Returns:
            [m * P + n * S, D], with gradient.
        """
        prompts = PromptCache()
        width, device = prompt_ids.shape[1], prompt_ids.device
        with cached_recomputation(self._body):
            states = [self._states(prompt_ids, prompts)]
            if completions.shape[1] > 0:
                rows = CompletionCache(prompts, owner)
                columns = torch.arange(completions.shape[1], device=device)
                lengths = prompt_lengths[owner, None]
                options = {"position_ids": lengths + columns}
                if bool((prompt_lengths < width).any()):
                    before = torch.arange(width, device=device) < lengths
                    options["attention_mask"] = torch.cat([before, before.new_ones(completions.shape)], dim=1).long()
                states.append(self._states(completions, rows, **options))
        return torch.cat([state.flatten(0, 1) for state in states])

    def _states(self, token_ids: Tensor, cache: KeyValueCache, **options: Tensor) -> Tensor:
        states: Tensor = self._body(input_ids=token_ids, use_cache=False, **{self._cache_name: cache}, **options)[0]
        return states


@contextmanager
def cached_recomputation(body: nn.Module) -> Iterator[None]:
    """Let checkpointed layers keep the cache, which transformers takes away from layers that may write it twice."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in body.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    for layer in layers:
        layer._can_checkpoint_with_cache = True
    try:
        yield
    finally:
        for layer in layers:
            del layer._can_checkpoint_with_cache


@torch.no_grad()
def shared_prompt_reader(model: Any) -> SharedPromptReader | None:
    """A reader for a model that takes the caches of `kv_cache`; None, and a line in the log, for another.

    Which models can is measured, on two short prompts of different lengths.
    """
    body = model.base_model
    reason = _obstacle(body)
    if reason is None:
        reader = SharedPromptReader(body)
        reason = _difference(body, reader)
    if reason is None:
        return reader
    logger.info(
        "log-probs read the prompt of a group once a row, and the sampler joins its cache at every token: %s", reason
    )
    return None


def _obstacle(body: Any) -> str | None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    parameters = inspect.signature(body.forward).parameters
    if not {"position_ids", "attention_mask", cache_name(body)} <= parameters.keys():
        return f"{type(body).__name__} takes no positions, mask or cache"
    if not has_plain_layers(body):
        return f"{type(body).__name__} has layers without a plain key-value cache"
    checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in body.modules())
    if checkpointed and not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache"):
        return "this version of transformers cannot keep the cache of a checkpointed layer (5.24 can)"
    return None


def _difference(body: Any, reader: SharedPromptReader) -> str | None:
    """None where the shared pass gives the states of the plain one."""
    training = body.training
    body.eval()
    device, words = body.get_input_embeddings().weight.device, body.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 11, device=device) % words
    prompt_ids = torch.stack([ids[:4], ids[3:7]])
    lengths, owner = torch.tensor([4, 2], device=device), torch.tensor([1, 0, 1], device=device)
    completions = torch.stack([ids[4:7], ids[5:8], ids[6:9]])
    try:
        found = reader.read(prompt_ids, lengths, owner, completions)[8:].view(3, 3, -1)
        for row, prompt in enumerate(owner.tolist()):
            length = int(lengths[prompt])
            whole = torch.cat([prompt_ids[prompt, :length], completions[row]])[None]
            plain = body(input_ids=whole, use_cache=False)[0][0, length:]
            scale = 1e-4 if plain.dtype in (torch.float32, torch.float64) else 0.1
            if not torch.allclose(found[row], plain, rtol=scale, atol=scale * float(plain.abs().max())):
                return f"{type(body).__name__} gives other states then"
    except Exception as error:  # a model of another author may fail in any way; the plain pass does not need this one
        return f"{type(error).__name__}: {error}"
    finally:
        body.train(training)
    return None
