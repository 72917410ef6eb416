"""One forward pass of a causal language model over rows, and how much chosen tokens depend on each of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.generation import token_log_prob
from visual_grpo.adapters.protocol import Leaf
from visual_grpo.adapters.token_rows import TokenRows
from visual_grpo.errors import UserError


def input_scores(
    model: Any, head: nn.Module | None, rows: TokenRows, chosen: Tensor, temperature: Tensor, leaf: Leaf
) -> Tensor:
    """`|gradient * activation|` of minus the log-prob of chosen tokens, as GRAIL (arXiv 2606.04889) takes it.

    Args:
        model: a causal language model of transformers.
        head: its output embedding where logits are that of the body's last state; None = ask the model for logits.
        rows: with all units wanted.
        chosen: [n, T] bool.
        temperature: [n], divides the logits.
        leaf: where the gradient is taken: the input embeddings, or the output of the first, the middle or the last but one block.

    Returns:
        [n, T + 1] float32 or wider, column t for the position that predicts token t; 0 beyond the last position that
        is read. Parameters' `.grad` stay as they are.
    """
    token_ids, places = rows.whole()
    chosen = chosen & rows.wanted
    picked = chosen[rows.wanted]  # of the wanted tokens, row by row
    length = token_ids.shape[1]
    columns = torch.arange(chosen.shape[1] + 1, device=chosen.device)
    positions = rows.starts[:, None] - 1 + columns
    real = (columns <= rows.wanted.sum(1)[:, None]) & (positions < length)
    embed = model.get_input_embeddings()
    wide = torch.promote_types(embed.weight.dtype, torch.float32)
    if not bool(chosen.any()):
        return torch.zeros(real.shape, dtype=wide, device=chosen.device)
    with torch.enable_grad():
        embeddings = embed(token_ids).detach().requires_grad_()
        with _leaf_of(model, leaf, embeddings) as leaves:
            # Whole logits would be [n, S, V].
            output = (model if head is None else model.base_model)(inputs_embeds=embeddings, use_cache=False)
        predicting = (output.logits if head is None else output[0]).flatten(0, 1)[places[picked]]
        logits = predicting if head is None else head(predicting)
        scale = temperature[:, None].expand(chosen.shape)[chosen]
        log_prob, _ = token_log_prob(logits, rows.targets[picked], scale)
        (gradient,) = torch.autograd.grad(-log_prob.sum(), leaves[-1])
    size = (gradient.to(wide) * leaves[-1].detach().to(wide)).norm(dim=-1)
    return torch.where(real, size.gather(1, positions.clamp(max=length - 1)), 0.0)


@contextmanager
def _leaf_of(model: Any, leaf: Leaf, embeddings: Tensor) -> Iterator[list[Tensor]]:
    """The tensor to differentiate by, last in the list once the model has run: a block's output is cut off and made a leaf."""
    leaves = [embeddings]
    if leaf == "embeddings":
        yield leaves
        return
    blocks = _blocks(model)
    block = blocks[{"first": 0, "middle": max(len(blocks) // 2 - 1, 0), "last": max(len(blocks) - 2, 0)}[leaf]]

    def cut(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        leaves.append(hidden.detach().requires_grad_())
        return (leaves[-1], *output[1:]) if isinstance(output, tuple) else leaves[-1]

    hook = block.register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()


def _blocks(model: Any) -> nn.ModuleList:
    """The list of transformer blocks."""
    count = getattr(model.config, "num_hidden_layers", None)
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(model).__name__} has no list of blocks to take a gradient at; use leaf=embeddings")
