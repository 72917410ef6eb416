"""The loss of one micro-batch: replay, surrogate, weights, aggregation, regularisers.

Every aggregation is linear (see `aggregation`), so the losses of all micro-batches, unit chunks and processes of an optimizer
step add up to the step's loss whatever the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visual_grpo.aggregation import Totals, expand_units, reduce_map
from visual_grpo.distributed import Ranks
from visual_grpo.divergences import gaussian_kl, kl_estimate, velocity_mse
from visual_grpo.errors import UserError
from visual_grpo.importance import SAMPLER_LOG_PROB, correction_weights, micro_difference, sampled_log_prob
from visual_grpo.method import LoopState
from visual_grpo.objectives import (
    Metrics,
    entropy_threshold,
    importance_log_ratio,
    off_policy_sequence_mask,
    top_entropy_mask,
)
from visual_grpo.stack import MethodStack
from visual_grpo.types import LogProb, MicroBatch, RolloutBatch, Span

RATIO_BINS = torch.cat([torch.tensor([0.0]), torch.exp(torch.linspace(-0.5, 0.5, 42)), torch.tensor([1e9])])
"""Edges of the histogram of ratios: fine around 1, which lies in the middle of a bin, and open at both ends."""
ENTROPY_TIE = 1e-5
"""Nats below which entropies count as equal."""
UNIT_SCALE, SCALE_STEP = 2.0**-10, 2.0**8
"""Least coefficient of a unit in float16, and by how much less is tried where a gradient overflows."""


@dataclass(kw_only=True)
class LossInputs:
    """Rows of one optimizer step with what was fixed before it."""

    rollouts: RolloutBatch
    """`n` rows; `unit_mask` is final (truncated rows already masked)."""
    advantages: Tensor
    """[n], [n, T], or [n, T, *map] with T = 1 where all units share a map."""
    weights: Tensor
    """[n, T] unit weights."""

    def __len__(self) -> int:
        return len(self.rollouts)

    def select(self, index: Tensor) -> LossInputs:
        """Rows `index` ([m] int64)."""
        return LossInputs(
            rollouts=self.rollouts.select(index), advantages=self.advantages[index], weights=self.weights[index]
        )

    def to(self, device: torch.device) -> LossInputs:
        """On the training device."""
        return LossInputs(
            rollouts=self.rollouts.to(device), advantages=self.advantages.to(device), weights=self.weights.to(device)
        )


def step_totals(rows: LossInputs, micro_batches: int, ranks: Ranks | None = None) -> Totals:
    """Denominators of one optimizer step over all processes (without `ranks`, this one); groups are whole on theirs."""
    mask = rows.rollouts.unit_mask
    groups = len(torch.unique(rows.rollouts.group_ids))
    live = int((rows.advantages.reshape(len(rows), -1) != 0).any(1).sum()) if len(rows) else 0
    counts = torch.tensor([len(rows), int(mask.sum()), micro_batches, groups, live], dtype=torch.float64)
    spans = rows.rollouts.unit_tags.get("span")
    if spans is not None:
        counts = torch.cat([counts, torch.bincount(spans[mask], minlength=len(Span)).double().cpu()])
    found = (counts if ranks is None else ranks.sum(counts)).tolist()
    return Totals(
        rows=found[0],
        units=found[1],
        micro_batches=found[2],
        groups=found[3],
        live_rows=found[4],
        spans=tuple(found[5:]),
    )


def loss_scale(stack: MethodStack, rows: LossInputs, totals: Totals, state: LoopState) -> float:
    """Power of two that the loss of a float16 model is multiplied by on the way through the network.

    In a mean over the units of a large step each has a coefficient that float16 rounds to 0, and so its gradient. The same on all
    processes; 1 in wider types.
    """
    if state.config.model.dtype != "float16":
        return 1.0
    coefficients = stack.aggregate(rows.rollouts.unit_mask.double(), totals, rows.rollouts, state)
    kept = coefficients[coefficients > 0]
    least = kept.min() if len(kept) else coefficients.new_full((), math.inf)
    smallest = float(state.ranks.gather(least.double().cpu()[None]).min())
    return 1.0 if math.isinf(smallest) else max(2.0 ** math.floor(math.log2(UNIT_SCALE / smallest)), 1.0)


def couples_units(stack: MethodStack, state: LoopState) -> bool:
    """True where the loss of a unit depends on the log-probs of other units of its row."""
    ratio, loss = state.config.ratio, state.config.loss
    by_row = ratio.level != "token" or loss.surrogate == "vespo" or loss.off_policy_max is not None
    corrected = state.sampling.uses_engine and ratio.correction.startswith("sequence")
    return stack.needs.couples_units or by_row or corrected


def passes(stack: MethodStack, rows: LossInputs, totals: Totals, state: LoopState) -> Iterator[tuple[Tensor, Metrics]]:
    """Yield (loss with gradient, figures) of a micro-batch, one forward pass at a time; the caller runs `backward` on each.

    With `train.units_per_pass` the units are replayed in chunks, so that memory does not grow with their number. A loss that
    couples units is first evaluated without gradient; its exact derivative with respect to each log-prob then weights the
    chunks, at the price of a second forward pass.
    """
    everything = torch.arange(rows.rollouts.num_units, device=rows.weights.device)
    limit = state.config.train.units_per_pass or max(len(everything), 1)
    chunks = list(everything.split(limit))
    mask = rows.rollouts.unit_mask.double()
    coefficients = stack.aggregate(mask, totals, rows.rollouts, state)
    terms = stack.chain("regulariser_coefficients", coefficients, mask, totals, rows.rollouts, state)
    if len(chunks) > 1 and couples_units(stack, state):
        yield from _coupled_passes(stack, rows, coefficients, terms, everything, chunks, state)
        return
    for units in chunks:
        log_prob = state.policy.log_prob(rows.rollouts, units)
        micro = make_micro(stack, rows, units, log_prob, state)
        loss, metrics = surrogate_loss(stack, micro, rows, coefficients, state)
        extra, more = regularisers(stack, micro, rows, terms, state)
        yield loss + extra, metrics | more


def _coupled_passes(
    stack: MethodStack,
    rows: LossInputs,
    coefficients: Tensor,
    terms: Tensor,
    everything: Tensor,
    chunks: list[Tensor],
    state: LoopState,
) -> Iterator[tuple[Tensor, Metrics]]:
    with torch.no_grad():
        values = torch.cat([state.policy.log_prob(rows.rollouts, units).value for units in chunks], dim=1)
    leaf = values.requires_grad_()
    micro = make_micro(stack, rows, everything, LogProb(value=leaf), state, reference=False)
    loss, metrics = surrogate_loss(stack, micro, rows, coefficients, state)
    (slope,) = torch.autograd.grad(loss, leaf)
    for units in chunks:
        log_prob = state.policy.log_prob(rows.rollouts, units)
        micro = make_micro(stack, rows, units, log_prob, state)
        extra, more = regularisers(stack, micro, rows, terms, state)
        linear = (log_prob.value * slope[:, units]).sum()
        share = loss.detach() if units is chunks[0] else torch.zeros_like(loss)
        # The value is the true loss, the gradient that of the linear form.
        yield linear - linear.detach() + share + extra, (metrics if units is chunks[0] else {}) | more


def settle_old(rows: LossInputs, batches: Iterable[Tensor], state: LoopState, beat: Callable[[], None]) -> LossInputs:
    """Old log-probs of tokens from the pass that trains, where those of the sampler are too coarse for a clip range.

    In half precision a sampler with a KV cache and a pass over the whole text differ by up to 0.06 a token and 0.008 in the
    mean of a short row (tiny LM, bfloat16): GSPO's range of 3e-4 would cut off most rows before any weight has moved. An engine
    of its own differs in every precision. Only for more than one update a rollout batch, since the first one needs no old
    log-probs, and for `ratio.old=auto`.

    Args:
        rows: of all updates.
        batches: row indices of each pass that will train: rounding depends on the batch too (0.002 in the mean of a row).
        state: before the first update.
        beat: called once a forward pass.
    """
    rollouts, train = rows.rollouts, state.config.train
    several = train.updates_per_step * train.epochs_per_step > 1
    half = state.config.model.dtype in ("float16", "bfloat16") and rollouts.unit_kind == "token"
    coarse = half or SAMPLER_LOG_PROB in rollouts.data
    # Rows of another training context keep the ratio to the context that they were sampled under.
    same_context = "training" not in rollouts.prompts.contexts
    wanted = several and coarse and same_context and state.config.ratio.old == "auto"
    if not wanted or rollouts.old_log_prob is None:
        return rows
    units = torch.arange(rollouts.num_units)
    old = rollouts.old_log_prob.float().clone()
    with torch.no_grad():
        for index in batches:
            beat()
            part = rollouts.select(index).to(state.policy.device)
            old[index] = state.policy.log_prob(part, units).value.to(old)
    return replace(rows, rollouts=replace(rollouts, old_log_prob=old))


def make_micro(
    stack: MethodStack, rows: LossInputs, units: Tensor, log_prob: LogProb, state: LoopState, *, reference: bool = True
) -> MicroBatch:
    """Bundle one pass for the hooks; runs the reference only where a regulariser needs it."""
    rollouts = rows.rollouts
    detached = log_prob.value.detach()
    fresh = state.on_policy and state.config.ratio.old == "auto" and state.sampling.replays_the_sampler
    if rollouts.old_log_prob is None or fresh:
        old = detached
    else:
        old = rollouts.old_log_prob[:, units].to(detached.dtype)
    ref = None
    if reference and (state.config.kl.beta > 0 or stack.needs.reference):
        with torch.no_grad(), state.policy.reference():
            ref = state.policy.log_prob(rollouts, units)
    shared = rows.advantages.ndim == 1 or rows.advantages.shape[1] == 1
    advantages = rows.advantages if shared else rows.advantages[:, units]
    return MicroBatch(
        rollouts=rollouts,
        units=units,
        advantages=expand_units(advantages, detached, "advantages").to(detached.dtype),
        mask=rollouts.unit_mask[:, units].to(detached.dtype),
        log_prob=log_prob,
        old_log_prob=old,
        reference=ref,
    )


def surrogate_loss(
    stack: MethodStack, micro: MicroBatch, rows: LossInputs, coefficients: Tensor, state: LoopState
) -> tuple[Tensor, Metrics]:
    """Aggregate the weighted surrogate of one pass: (scalar, figures)."""
    unit_loss, metrics = stack.surrogate(micro, state)
    figures = dict(metrics)
    limit = state.config.loss.off_policy_max
    if limit is not None:
        stays = off_policy_sequence_mask(
            micro.log_prob.value, sampled_log_prob(micro), micro.advantages, micro.mask, threshold=limit
        )
        unit_loss = torch.where(stays, unit_loss, 0.0)
        figures["off_policy_fraction"] = ((~stays * micro.mask).sum(), micro.mask.sum())
    unit_loss = reduce_map(unit_loss)
    weights = stack.chain("live_weights", rows.weights[:, micro.units], micro, state)
    correction, corrected = sampler_correction(stack, micro, state)
    figures |= corrected
    scale = (weights * coefficients[:, micro.units]).to(unit_loss.dtype)
    loss = (unit_loss * scale * correction).sum()
    ratio = (micro.log_prob.value.detach() - micro.old_log_prob).clamp(-20, 20).exp()
    kept = expand_units(micro.mask, ratio, "mask").expand_as(ratio) > 0
    if kept.any():
        figures["ratio_max"] = (ratio[kept].max(), torch.tensor(1.0))
        bins = torch.bucketize(ratio[kept].cpu().float(), RATIO_BINS[1:-1])
        figures["hist/ratio"] = (torch.bincount(bins, minlength=len(RATIO_BINS) - 1), torch.tensor(1.0))
    return loss, figures


def sampler_correction(stack: MethodStack, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
    """Factors [n, u] or [n, 1] of the unit losses for rows of an engine, and how far it lies from the network; 1 for others."""
    ratio, one = state.config.ratio, micro.mask.new_ones(())
    difference = micro_difference(micro)
    if difference is None:
        return one, {}
    kept = micro.mask != 0
    figures: Metrics = {"sampler/log_prob_difference": (difference.abs().sum(), kept.sum())}
    if kept.any():
        figures["sampler/log_prob_difference_max"] = (difference.abs().max(), torch.tensor(1.0))
    if ratio.correction == "none":
        return one, figures
    weights, outside = correction_weights(
        difference, mode=ratio.correction, upper=ratio.correction_max, lower=ratio.correction_min
    )
    where = kept if ratio.correction.startswith("token") else kept.any(1, keepdim=True)
    figures["sampler/correction"] = (weights[where].sum(), where.sum())
    figures["sampler/truncated"] = ((outside & where).sum(), where.sum())
    # VESPO's core surrogate has it in its own exponent.
    inside = state.config.loss.surrogate == "vespo" and not stack.provides("surrogate")
    return one if inside else weights.to(micro.mask.dtype), figures


def regularisers(
    stack: MethodStack, micro: MicroBatch, rows: LossInputs, coefficients: Tensor, state: LoopState
) -> tuple[Tensor, Metrics]:
    """The pull to the reference and the stack's own terms: (scalar to add, figures)."""
    scale = coefficients[:, micro.units].to(micro.log_prob.value.dtype)
    weights = rows.weights[:, micro.units]
    total = scale.new_zeros(())
    figures: Metrics = {}
    kl = state.config.kl
    if kl.beta > 0:
        unit = reference_divergence(micro, state)
        weighted = unit * weights.to(unit.dtype) if kl.weighted else unit
        total = total + kl.beta * state.kl_scale * (weighted * scale).sum()
        figures["kl"] = ((unit.detach() * micro.mask).sum(), micro.mask.sum())
    for name, term in stack.regularise(micro, scale, weights, state).items():
        total = total + term
        figures[f"loss/{name}"] = (term.detach(), torch.tensor(0.0))  # the trainer counts optimizer steps
    return total, figures


def reference_divergence(micro: MicroBatch, state: LoopState) -> Tensor:
    """Divergence from the reference per unit, [n, u], by `kl.estimator`.

    Raises:
        UserError: the estimator does not fit the units of the adapter.
    """
    estimator, now, ref = state.config.kl.estimator, micro.log_prob, micro.reference
    assert ref is not None
    if estimator == "gaussian":
        if now.mean is None or ref.mean is None or now.kl_std is None:
            raise UserError(
                "kl.estimator=gaussian needs denoising transitions; use k3 for tokens, prediction for noise pairs"
            )
        unit = gaussian_kl(now.mean.flatten(0, 1), ref.mean.flatten(0, 1), now.kl_std.flatten())
        return unit.view(now.mean.shape[:2])
    if estimator == "prediction":
        if now.prediction is None or ref.prediction is None:
            raise UserError("kl.estimator=prediction needs a denoising model; use kl.estimator=k3 for tokens")
        return velocity_mse(now.prediction.flatten(0, 1), ref.prediction.flatten(0, 1)).view(now.prediction.shape[:2])
    if estimator == "velocity":
        if now.velocity is None or ref.velocity is None:
            raise UserError("kl.estimator=velocity needs a denoising model; use kl.estimator=k3 for tokens")
        return velocity_mse(now.velocity.flatten(0, 1), ref.velocity.flatten(0, 1)).view(now.velocity.shape[:2])
    unit = kl_estimate(estimator, now.value, ref.value, mask=micro.mask)
    if state.config.kl.importance:
        unit = unit * importance_log_ratio(now.value, micro.old_log_prob, micro.mask).exp().to(unit.dtype)
    return reduce_map(unit)


def fixed_weights(rows: LossInputs, stack: MethodStack, state: LoopState) -> LossInputs:
    """Mask truncated rows and weigh certain tokens out where asked; done before the totals are counted."""
    rollouts = rows.rollouts
    if state.config.loss.mask_truncated and rollouts.truncated is not None:
        mask = rollouts.unit_mask & ~rollouts.truncated.to(rollouts.unit_mask.device)[:, None]
        rows = replace(rows, rollouts=replace(rollouts, unit_mask=mask))
    share = state.config.loss.top_entropy
    return rows if share is None else replace(rows, weights=rows.weights * uncertain_units(rows.rollouts, share, state))


@torch.no_grad()
def uncertain_units(rollouts: RolloutBatch, share: float, state: LoopState) -> Tensor:
    """Flags [N, T] of the `share` most uncertain kept units of all processes, under the present weights.

    Units that samples of a prompt begin with have one entropy but for rounding: ties stay together, or the choice would depend on
    the micro-batches.

    Raises:
        UserError: the adapter gives no entropies.
    """
    units = torch.arange(rollouts.num_units)
    entropy = torch.zeros(rollouts.unit_mask.shape, dtype=torch.float64)
    size = state.config.train.micro_batch
    for start in range(0, len(rollouts), size):  # none where no row is left
        index = torch.arange(start, min(start + size, len(rollouts)))
        part = rollouts.select(index).to(state.policy.device)
        found = state.policy.log_prob(part, units.to(state.policy.device), entropy=True).entropy
        if found is None:
            raise UserError(
                "loss.top_entropy needs the entropy of each token, which this adapter does not give: leave it out"
            )
        entropy[index] = found.cpu().double()
    kept = rollouts.unit_mask.cpu()
    everywhere = state.ranks.gather(entropy[kept])[None]
    limit = entropy_threshold(everywhere, torch.ones_like(everywhere), share)
    if everywhere.numel():
        state.figure("top_entropy/threshold", limit)
    return top_entropy_mask(entropy, kept, share, threshold=limit - ENTROPY_TIE).to(rollouts.unit_mask.device)
