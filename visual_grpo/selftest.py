"""The checks that every run makes before its first step; they change nothing that the run computes later."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visual_grpo.advantages import flat_groups
from visual_grpo.batching import micro_batches
from visual_grpo.combination import judged, on_all_processes, signal
from visual_grpo.errors import RunError
from visual_grpo.loss import LossInputs, passes, step_totals
from visual_grpo.method import LoopState
from visual_grpo.rollouts.agreement import SIGNAL, follows, measure
from visual_grpo.rollouts.agreement import TOLERANCE as ENGINE_TOLERANCE
from visual_grpo.stack import MethodStack
from visual_grpo.types import RewardBatch, RewardStatus, RolloutBatch

TOLERANCE = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 1e-1, "float16": 3e-2}
"""How far a ratio may lie from 1 before the first update, by the dtype of the frozen weights."""


class SelfTestError(RunError):
    """The run could not have learned; nothing was trained."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: `ok`, `warn` or `failed`."""

    name: str
    status: str
    detail: str

    def record(self) -> dict[str, Any]:
        """For self_test.json."""
        return asdict(self)


def self_test(
    stack: MethodStack, rows: RolloutBatch, rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState, *, lr: float
) -> list[Check]:
    """Run all checks on the first rollout batch; the caller prints them and stops on `failed`.

    Weights, gradients and the methods' states are bit-identical afterwards and no random state is used.

    Args:
        stack: of the run.
        rows: what would be trained; replayed.
        rollouts: the whole batch as it was scored.
        rewards: of `rollouts`.
        state: of the loop.
        lr: of the trial step.
    """
    few = micro_batches(rows.group_ids, state.config.train.micro_batch, stack.needs.whole_groups)[0]
    probe = rows.select(few).to(state.policy.device)
    methods = copy.deepcopy(stack.state_dict())
    by_engine = state.sampling.uses_engine and bool(probe.unit_mask.any())
    replays, apart = engine_agrees(probe, state) if by_engine else (_ratio(probe, state), 0.0)
    checks = [Check(name="trainable parameters", status="ok", detail=f"{state.policy.num_trainable:,}"), replays]
    if stack.needs.compares_rewards:
        checks += [_rewards_apply(rewards, state), _unequal_rewards(rewards, rollouts, state)]
    if bool(probe.unit_mask.any()):
        gradient = _gradient(stack, probe, state)
        checks.append(gradient)
        if gradient.status != "failed":
            follower = partial(_engine_follows, noise=apart) if by_engine else _sampler_follows
            checks.append(follower(probe, state, lr))
    for parameter in state.policy.trainable.values():
        parameter.grad = None
    stack.load_state_dict(methods)
    return checks


def _ratio(probe: RolloutBatch, state: LoopState) -> Check:
    name = "ratio = 1 before the first update"
    if not bool(probe.unit_mask.any()):
        return Check(
            name=name,
            status="failed",
            detail="no unit may be trained; check sampling (solver, steps) and the training window",
        )
    if not state.sampling.replays_the_sampler:
        return Check(name=name, status="ok", detail="exempt: log-probs leave guidance out (sampling.logprob_mode=cond)")
    if "training" in probe.prompts.contexts:
        return Check(
            name=name,
            status="ok",
            detail="exempt: the rows are trained under another prompt than they were sampled with",
        )
    units = torch.arange(probe.num_units)
    with torch.no_grad():
        new = state.policy.log_prob(probe, units).value
        old = state.policy.log_prob(probe, units).value if probe.old_log_prob is None else probe.old_log_prob.to(new)
    mask = probe.unit_mask.reshape(*probe.unit_mask.shape, *([1] * (new.ndim - 2))).expand_as(new)
    worst = float((new - old)[mask].abs().max().clamp(max=50).expm1())
    limit = state.config.self_test.ratio_tolerance or TOLERANCE[state.config.model.dtype]
    detail = f"largest |ratio - 1| {worst:.2e}, limit {limit:.0e}"
    if worst <= limit:
        return Check(name=name, status="ok", detail=detail)
    return Check(
        name=name,
        status="failed",
        detail=f"{detail}: sampling and replay disagree. Turn dropout off, use the same guidance, temperature and dtype in both, "
        "or raise self_test.ratio_tolerance if the model's precision explains it",
    )


def engine_agrees(rows: RolloutBatch, state: LoopState) -> tuple[Check, float]:
    """(whether the engine's log-probs are those of the network, their mean |difference|), on samples of the prompts of `rows`."""
    name = "rollout engine and model agree"
    engine: Any = state.policy.adapter.engine
    found = measure(state.policy, rows.prompts, state.sampling)
    limit = engine.settings.tolerance or ENGINE_TOLERANCE[state.config.model.dtype]
    detail = (
        f"log-probs differ by {found.mean:.2e} on average, at most {found.largest:.2e}, over {found.tokens} tokens (limit of the "
        f"mean {limit:.0e}); weights {engine.synced}"
    )
    if found.mean <= limit:
        engine.unconfirmed = engine.synced
        return Check(name=name, status="ok", detail=detail), found.mean
    hint = (
        f"{engine.name} has other weights or scores another distribution. Serve the model of model.path in model.dtype, with "
        "--logprobs-mode processed_logprobs, or raise sampling.vllm.tolerance if its precision explains it"
    )
    return Check(name=name, status="failed", detail=f"{detail}: {hint}"), found.mean


def _engine_follows(probe: RolloutBatch, state: LoopState, lr: float, noise: float) -> Check:
    """An engine is asked again after the weights were moved: its log-probs must be those of the moved weights."""
    name = "rollout engine follows the weights"
    found = follows(state.policy, probe.prompts, state.sampling, noise=noise, step=max(lr, 1e-3))
    detail = (
        f"a trial step moved the model's log-probs by {found.moved:.2e}; the engine then lies {found.to_moved:.2e} from the "
        f"moved weights and {found.to_before:.2e} from those before; weights put back"
    )
    if found.to_moved < found.to_before / 10:
        return Check(name=name, status="ok", detail=detail)
    engine: Any = state.policy.adapter.engine
    if found.moved <= SIGNAL * noise and found.to_moved < found.to_before:
        return Check(name=name, status="warn", detail=f"{detail}: too small a change to tell")
    what = "some old weights" if found.to_moved < found.to_before else "old weights, whatever it is sent"
    return Check(name=name, status="failed", detail=f"{detail}: {engine.name} samples with {what} (docs/rollouts.md)")


def _rewards_apply(rewards: RewardBatch, state: LoopState) -> Check:
    """A reward that says nothing about any row (`None`) reads something that the prompt set does not hold."""
    clean = rewards if rewards.clean is None else rewards.clean
    status = state.ranks.gather(clean.status)
    idle = [name for k, name in enumerate(clean.names) if bool((status[:, k] == RewardStatus.NOT_APPLICABLE).all())]
    # A reward of another task than those of this step has its turn later.
    idle = [name for name in idle if len(idle) == len(clean.names) or not _of_a_task(state, name)]
    name = "every reward applies to some row"
    if not idle:
        return Check(name=name, status="ok", detail=", ".join(clean.names))
    return Check(
        name=name,
        status="failed" if len(idle) == len(clean.names) else "warn",
        detail=f"{' and '.join(map(repr, idle))} gave None for each of the {len(status)} rows: the prompts lack what it reads, "
        "such as an answer. Set data.answer_column, or take other prompts or another reward",
    )


def _of_a_task(state: LoopState, reward: str) -> bool:
    """Whether the config gives a reward to some of the tasks only."""
    own = state.config.rewards.get(reward)
    return bool(state.tasks) and own is not None and "task" in (own.applies or {})


def _unequal_rewards(rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Check:
    ids = state.ranks.gather(rollouts.group_ids)
    flat = flat_groups(signal(on_all_processes(judged(rewards), state.ranks), ids, state.config), ids)
    live = int((~flat).sum())
    status, hint = (
        ("ok", "")
        if live
        else (
            "warn",
            ": nothing to learn from yet. Raise train.group_size, use easier prompts or a reward with finer steps",
        )
    )
    return Check(name="groups with unequal rewards", status=status, detail=f"{live} of {len(flat)}{hint}")


def _probe_inputs(probe: RolloutBatch) -> LossInputs:
    """Alternating advantages: a gradient flows whatever the rewards were."""
    signs = torch.ones(len(probe), device=probe.unit_mask.device)
    signs[1::2] = -0.5
    return LossInputs(rollouts=probe, advantages=signs, weights=torch.ones_like(probe.unit_mask, dtype=torch.float32))


def _probe_rewards(count: int) -> RewardBatch:
    """Every row was scored."""
    return RewardBatch(
        names=("probe",),
        values=torch.zeros(count, 1),
        status=torch.zeros(count, 1, dtype=torch.int8),
        weights=torch.ones(1),
    )


def _gradient(stack: MethodStack, probe: RolloutBatch, state: LoopState) -> Check:
    name = "finite gradient of every trainable parameter"
    fixed = replace(state, on_policy=True, log=lambda _: None)
    inputs = stack.chain("before_updates", _probe_inputs(probe), _probe_rewards(len(probe)), fixed)
    with torch.random.fork_rng():
        for loss, _ in passes(stack, inputs, step_totals(inputs, 1), fixed):
            if not torch.isfinite(loss):
                return Check(name=name, status="failed", detail=f"the loss is {loss.item()}; use a wider model.dtype")
            loss.backward()
    grads = {n: p.grad for n, p in state.policy.trainable.items()}
    bad = [n for n, g in grads.items() if g is not None and not bool(torch.isfinite(g).all())]
    unused = [n for n, g in grads.items() if g is None]
    if bad:
        return Check(
            name=name,
            status="failed",
            detail=f"not finite in {len(bad)} of {len(grads)}, first {bad[0]!r}; use a wider model.dtype",
        )
    norm = float(sum(g.double().square().sum() for g in grads.values() if g is not None)) ** 0.5
    if norm == 0.0:
        return Check(
            name=name,
            status="failed",
            detail="the gradient is zero everywhere: the loss does not depend on the trained weights",
        )
    if unused:
        return Check(
            name=name,
            status="warn",
            detail=f"{len(unused)} of {len(grads)} are not used by the loss, first {unused[0]!r}",
        )
    return Check(name=name, status="ok", detail=f"{len(grads)} tensors, norm {norm:.3g}")


def _sampler_follows(probe: RolloutBatch, state: LoopState, lr: float) -> Check:
    """One signed gradient step (AdamW's first) must change what sampling gives; the weights are put back."""
    name = "an optimizer step changes the sampler's weights"
    few = probe.prompts.select(torch.arange(min(2, len(probe))))
    before = _fingerprint(few, state)
    kept = {n: p.data.clone() for n, p in state.policy.trainable.items()}
    size = max(lr, 1e-3)
    with torch.no_grad():
        for parameter in state.policy.trainable.values():
            if parameter.grad is not None:
                parameter.sub_(size * parameter.grad.sign())
    after = _fingerprint(few, state)
    with torch.no_grad():
        for key, parameter in state.policy.trainable.items():
            parameter.copy_(kept[key])
    same = len(before) == len(after) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True)
    )
    if same:
        return Check(
            name=name,
            status="failed",
            detail="samples are bit-identical after a step: the sampler uses other weights than those that are trained "
            "(a copy, a merged LoRA, or a server that was not synchronised)",
        )
    return Check(name=name, status="ok", detail="samples differ after a step; weights put back")


def _fingerprint(prompts: Any, state: LoopState) -> list[Tensor]:
    rollouts = state.policy.sample(prompts, seed=7, sampling=state.sampling)
    tensors = [v for v in rollouts.data.values() if isinstance(v, Tensor)]
    return [*tensors, *([rollouts.old_log_prob] if rollouts.old_log_prob is not None else [])]


def require(checks: list[Check], when: str = "before the first step") -> None:
    """Stop on a failed check.

    Raises:
        SelfTestError: naming each failed check and what to change.
    """
    failed = [c for c in checks if c.status == "failed"]
    if failed:
        raise SelfTestError(f"self-test failed {when}:\n" + "\n".join(f"  {c.name}: {c.detail}" for c in failed))


Printer = Callable[[list[Check]], None]
