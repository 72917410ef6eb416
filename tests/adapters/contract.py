"""The contract of `PolicyAdapter`: checks that hold for every family, called by each family's test file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.adapters.protocol import MemoryPlan, PolicyAdapter, SamplingConfig
from visual_grpo.types import PromptBatch, RolloutBatch

LIBRARIES = {"diffusers", "transformers", "torch"}
KINDS = {"diffusion", "autoregressive", "next_scale"}
UNIT_KINDS = {"token", "transition", "noise_pair"}


def prompts_of(texts: Sequence[str], group_size: int = 2) -> PromptBatch:
    """`group_size` rows of each text; row ids do not start at 0, as on a second process."""
    rows = [text for text in texts for _ in range(group_size)]
    return PromptBatch(
        prompts=rows,
        metadata=[{} for _ in rows],
        group_ids=torch.arange(len(texts)).repeat_interleave(group_size),
        row_ids=torch.arange(len(rows)) + 7,
    )


def check_declaration(cls: type[PolicyAdapter]) -> None:
    """The class says what it is, and its sampling options refuse unknown keys."""
    assert cls.kind in KINDS
    assert cls.library in LIBRARIES
    assert cls.unit_kinds
    assert cls.unit_kinds <= UNIT_KINDS
    assert issubclass(cls.Sampling, SamplingConfig)
    assert cls.Sampling.model_config["extra"] == "forbid"
    assert cls.lora_targets


def check_rollout(rollouts: RolloutBatch, prompts: PromptBatch) -> None:
    """Shapes fit: rows first in all replay data, units second in masks, tags and log-probs."""
    count, units = len(prompts), rollouts.num_units
    assert rollouts.unit_mask.shape == (count, units)
    assert rollouts.unit_mask.dtype == torch.bool
    assert all(value.shape == (count, units) for value in rollouts.unit_tags.values())
    assert all(value.dtype == torch.int64 for value in rollouts.unit_tags.values())
    assert all(len(value) == count for value in rollouts.data.values())
    if rollouts.old_log_prob is not None:
        assert rollouts.old_log_prob.shape[:2] == (count, units)
        assert not rollouts.old_log_prob.requires_grad
        assert rollouts.old_log_prob.dtype in (torch.float32, torch.float64)


def check_ratio_is_one(adapter: PolicyAdapter, rollouts: RolloutBatch, tolerance: float = 1e-5) -> None:
    """Replay with unchanged weights gives the log-probs of sampling on every trainable unit."""
    assert rollouts.old_log_prob is not None
    assert rollouts.unit_mask.any()
    with torch.no_grad():
        value = adapter.log_prob(rollouts, torch.arange(rollouts.num_units)).value
    assert value.shape == rollouts.old_log_prob.shape
    log_ratio = (value - rollouts.old_log_prob)[rollouts.unit_mask]
    assert log_ratio.exp().sub(1).abs().max() <= tolerance


def check_one_seed_one_sample(adapter: PolicyAdapter, prompts: PromptBatch, sampling: SamplingConfig) -> None:
    """One seed gives one sample, whatever the global random state; another seed another."""
    torch.manual_seed(0)
    first = adapter.sample(prompts, seed=3, sampling=sampling)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    second = adapter.sample(prompts, seed=3, sampling=sampling)
    assert torch.equal(state, torch.get_rng_state()), "sampling used the global generator"
    other = adapter.sample(prompts, seed=4, sampling=sampling)
    assert _same(first, second, 0.0)
    assert not _same(first, other, 0.0)


def check_rows_stand_alone(
    adapter: PolicyAdapter, prompts: PromptBatch, sampling: SamplingConfig, tolerance: float = 1e-5
) -> None:
    """A row sampled alone, or in another order, is the row sampled in the batch."""
    everything = adapter.sample(prompts, seed=3, sampling=sampling)
    backwards = torch.arange(len(prompts)).flip(0)
    for index in (*backwards.split(1), backwards):
        alone = adapter.sample(prompts.select(index), seed=3, sampling=sampling)
        assert _same(alone, everything.select(index), tolerance)


def check_subsets(adapter: PolicyAdapter, rollouts: RolloutBatch, tolerance: float = 1e-5) -> None:
    """Some units, or some rows, give the same log-probs as all of them."""
    everything = torch.arange(rollouts.num_units)
    with torch.no_grad():
        full = adapter.log_prob(rollouts, everything).value
        for units in (everything[-1:], everything[::2], everything.flip(0)):
            part = adapter.log_prob(rollouts, units).value
            assert part.shape == (len(rollouts), len(units), *full.shape[2:])
            keep = rollouts.unit_mask[:, units]
            assert torch.allclose(part[keep], full[:, units][keep], atol=tolerance, rtol=0)
        rows = torch.arange(len(rollouts)).flip(0)[: max(1, len(rollouts) // 2)]
        part = adapter.log_prob(rollouts.select(rows), everything).value
        keep = rollouts.unit_mask[rows]
        assert torch.allclose(part[keep], full[rows][keep], atol=tolerance, rtol=0)


def check_gradients(adapter: PolicyAdapter, rollouts: RolloutBatch, name_part: str) -> None:
    """Only the parameters that were declared trainable (name holds `name_part`) get a gradient, and each of them does."""
    module = adapter.trainable_module
    assert not any(p.requires_grad for p in module.parameters()), "an adapter hands out a frozen network"
    chosen = {name: p for name, p in module.named_parameters() if name_part in name}
    assert chosen
    try:
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        log_prob = adapter.log_prob(rollouts, torch.arange(rollouts.num_units))
        log_prob.value[rollouts.unit_mask].sum().backward()
        for name, parameter in module.named_parameters():
            assert (parameter.grad is not None) == (name in chosen), name
        assert all(bool(p.grad.isfinite().all()) for p in chosen.values() if p.grad is not None)
        assert any(bool((p.grad != 0).any()) for p in chosen.values() if p.grad is not None)
        with torch.no_grad():
            assert not adapter.log_prob(rollouts, torch.arange(1)).value.requires_grad
    finally:
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None


def check_decode(adapter: PolicyAdapter, rollouts: RolloutBatch) -> None:
    """`decode` fills pictures in [0, 1] or texts, one a row."""
    decoded = adapter.decode(rollouts)
    assert (decoded.images is None) != (decoded.texts is None)
    if decoded.images is not None:
        assert decoded.images.shape[:2] == (len(rollouts), 3)
        assert decoded.images.dtype == torch.float32
        assert decoded.images.min() >= 0
        assert decoded.images.max() <= 1
    if decoded.texts is not None:
        assert len(decoded.texts) == len(rollouts)
        assert all(isinstance(text, str) for text in decoded.texts)


def check_concat(adapter: PolicyAdapter, prompts: PromptBatch, sampling: SamplingConfig) -> None:
    """Batches that were sampled apart can be joined and replayed."""
    half = len(prompts) // 2
    parts = [torch.arange(half), torch.arange(half, len(prompts))]
    joined = RolloutBatch.concat([adapter.sample(prompts.select(i), seed=3, sampling=sampling) for i in parts])
    check_rollout(joined, prompts)
    check_ratio_is_one(adapter, joined)


def check_plan(plan: MemoryPlan) -> None:
    """A memory plan is whole, non-negative bytes that add up."""
    assert plan.parts
    assert all(isinstance(size, int) and size >= 0 for size in plan.parts.values())
    assert plan.total == sum(plan.parts.values())
    assert plan.total > 0


def check_adapter(adapter: PolicyAdapter, prompts: PromptBatch, sampling: SamplingConfig, *, trained: str) -> None:
    """Everything above on a sampler that has trainable units; `trained` is a part of the names of parameters to train."""
    check_declaration(type(adapter))
    rollouts = adapter.sample(prompts, seed=3, sampling=sampling)
    check_rollout(rollouts, prompts)
    check_ratio_is_one(adapter, rollouts)
    check_one_seed_one_sample(adapter, prompts, sampling)
    check_rows_stand_alone(adapter, prompts, sampling)
    check_subsets(adapter, rollouts)
    check_gradients(adapter, rollouts, trained)
    check_concat(adapter, prompts, sampling)
    check_decode(adapter, rollouts)


def _same(first: RolloutBatch, second: RolloutBatch, tolerance: float) -> bool:
    """Equal samples: masks, log-probs on trainable units, and replay data (widths may be padded apart).

    `tolerance` is relative to the largest value of a tensor, or to 1: rounding grows with the values, and latents reach 5.
    """
    width = min(first.num_units, second.num_units)
    if first.unit_mask[:, width:].any() or second.unit_mask[:, width:].any():
        return False
    keep = first.unit_mask[:, :width]
    if not torch.equal(keep, second.unit_mask[:, :width]):
        return False
    pairs: list[tuple[Tensor, Tensor]] = []
    if first.old_log_prob is not None and second.old_log_prob is not None:
        pairs.append((first.old_log_prob[:, :width][keep], second.old_log_prob[:, :width][keep]))
    for name, value in first.data.items():
        other = second.data[name]
        if isinstance(value, Tensor) and value.shape == other.shape:
            pairs.append((value, other))
    return all(_distance(a.double(), b.double()) <= tolerance for a, b in pairs)


def _distance(first: Tensor, second: Tensor) -> float:
    if first.numel() == 0:
        return 0.0
    return float((first - second).abs().max() / second.abs().max().clamp(min=1))
