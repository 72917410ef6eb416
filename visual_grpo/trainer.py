"""The one training loop.

select prompts -> rollout -> score -> shape rewards -> after score -> filter groups -> advantages -> unit weights -> for each
micro-batch: surrogate -> live weights -> aggregate + regularise -> backward -> optimizer step -> after_step -> log, evaluate,
checkpoint. Everything a step draws depends on (seed, step, row) alone, so a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_grpo.aggregation import Totals
from visual_grpo.alarms import Alarm, Alarms
from visual_grpo.batching import check_geometry, micro_batches, split_updates
from visual_grpo.checkpointer import Checkpointer, Progress
from visual_grpo.config import RunConfig
from visual_grpo.data import PromptRow, PromptSource, prompt_batch, task_tag
from visual_grpo.distributed import Ranks
from visual_grpo.errors import RunError
from visual_grpo.evaluation import Evaluation, reward_request
from visual_grpo.held_out import EMA, HeldOut
from visual_grpo.loss import SCALE_STEP, LossInputs, fixed_weights, loss_scale, passes, settle_old, step_totals
from visual_grpo.method import LoopState
from visual_grpo.metrics import Stats, flat_rows, group_figures, reward_figures, step_histograms
from visual_grpo.normalise import Normalisers
from visual_grpo.objectives import Metrics
from visual_grpo.optimizer import Optimizer
from visual_grpo.out_of_memory import memory_errors
from visual_grpo.policy import Policy
from visual_grpo.schedules import ema_decay, ema_is_due
from visual_grpo.scoring import RewardSuite
from visual_grpo.selection import Best, Selection
from visual_grpo.selftest import engine_agrees, require, self_test
from visual_grpo.stack import MethodStack
from visual_grpo.types import PromptBatch, RewardBatch, RewardStatus, RolloutBatch
from visual_grpo.watchdog import Watchdog
from visual_grpo.writer import RunWriter

OLD = "old"


@dataclass(kw_only=True)
class Result:
    """What a run gives back."""

    folder: str
    step: int
    before: Evaluation | None
    after: Evaluation | None
    stopped: str | None = None
    """why the run ended before its last step."""
    best: Best | None = None
    """the best evaluation, where `checkpoint.best` names its figure."""
    measured: int | None = None
    """the step whose weights `after` measures and `model/` holds."""


class Trainer:
    """Runs one config from its first (or resumed) step to its last."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: Policy,
        stack: MethodStack,
        suite: RewardSuite,
        train_prompts: Sequence[PromptRow],
        eval_prompts: Sequence[PromptRow],
        sampling: Any,
        eval_sampling: Any,
        ranks: Ranks,
        writer: RunWriter,
    ) -> None:
        """Wire the parts; raises `UserError` on a batch geometry that does not divide."""
        self.config, self.policy, self.stack, self.suite = config, policy, stack, suite
        self.ranks, self.writer = ranks, writer
        self.geometry = check_geometry(config.train, ranks.world, stack.needs)
        self.source = PromptSource(train_prompts, config.data, config.train.seed)
        self.optimizer = Optimizer(policy.trainable, config.train.optimizer, self.geometry.optimizer_steps)
        self.normalisers = Normalisers(config.rewards)
        self.alarms = Alarms(config.alarms, compares_rewards=stack.needs.compares_rewards)
        self.selection = Selection(config)
        self.watchdog: Watchdog = writer.watchdog
        self.state = LoopState(
            config=config, policy=policy, ranks=ranks, sampling=sampling, tasks=tuple(config.data.sources),
            prompt_tasks=task_tag(train_prompts).get("task"),
        )  # fmt: skip
        self.state.generate, self.state.score, self.state.draw = self._generate, self._shaped_score, self._draw
        self._drawn = 0  # prompts drawn in this step, over all processes: numbers its groups and rows
        self.progress = Progress()
        self.checkpointer = Checkpointer(
            progress=self.progress, policy=policy, optimizer=self.optimizer, source=self.source, stack=stack,
            normalisers=self.normalisers, alarms=self.alarms, selection=self.selection, ranks=ranks, writer=writer,
            keep=config.checkpoint.keep,
        )  # fmt: skip
        self.held_out = HeldOut(
            config=config, policy=policy, suite=suite, prompts=eval_prompts, sampling=eval_sampling, ranks=ranks,
            writer=writer, alarms=self.alarms, selection=self.selection,
        )  # fmt: skip
        self.tested = not config.self_test.enabled
        self.last: Evaluation | None = None  # found by `resume` where the run had ended
        if config.kl.beta > 0 or stack.needs.reference:
            policy.keep_reference()
        for method in stack.methods.values():
            method.setup(self.state)

    # -- the run ----------------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Train to the last step; a stop alarm or a failure leaves a checkpoint or the last one intact."""
        try:
            with memory_errors():
                return self._run()
        except RunError:
            self.checkpointer.save_after_failure()
            raise

    @property
    def step(self) -> int:
        """Iterations done."""
        return self.progress.step

    def save(self) -> None:
        """Write a checkpoint now."""
        self.checkpointer.save()

    def resume(self) -> None:
        """Go back to the newest checkpoint, or to the start if there is none."""
        self.held_out.first, self.last = self.checkpointer.resume()
        self.held_out.recall(self.step, self.last)

    def _run(self) -> Result:
        config = self.config
        if self.step == 0 and self.held_out.first is None:
            self.held_out.first = self.evaluate(config.eval.final_samples)
        stopped = None
        while self.step < config.train.steps and (stopped := self._reason()) is None:
            self.iteration()
            if config.eval.every and self.step % config.eval.every == 0 and self.step < config.train.steps:
                self.evaluate(config.eval.samples)
            if self.step % config.checkpoint.every == 0:
                self.save()
        if config.eval.final == "best" and self.selection.step != self.step:  # the last weights may be the best ones
            self.evaluate(config.eval.samples)
            self.save()
        if self.step != self.progress.saved:
            self.save()
        last = self.last or self.held_out.final(self.step)
        return Result(
            folder=str(self.writer.folder.path), step=self.step, before=self.held_out.first, after=last, stopped=stopped,
            best=self.selection.best, measured=self.selection.measured(self.step),
        )  # fmt: skip

    def _reason(self) -> str | None:
        """Why no further step is made; None: there is none."""
        limit = self.config.train.max_minutes
        if limit is not None and self.progress.trained_s >= 60 * limit:
            return f"train.max_minutes ({limit:g}) reached"
        return self.selection.reason

    def iteration(self) -> None:
        """One rollout batch and its updates."""
        started = time.perf_counter()
        self.state.step, self.state.on_policy, self._drawn = self.step, True, 0
        stats = Stats()
        self.state.log, self.state.kl_scale = stats.update, 1.0
        self.checkpointer.mark()
        with self.watchdog.phase("rollout"):
            rollouts, rewards = self.collect(self._draw())
        with self.watchdog.phase("score"):
            rewards = self.normalisers.observe(rewards, self.ranks)
            scored = rollouts, self.stack.shaped(rewards, rollouts, self.state)
            rollouts, rewards = self.stack.after_score(*scored, self.state)
        if not self.tested and (rollouts.num_units > 0 or not self.stack.needs.idle_steps):
            with self.watchdog.phase("self-test"):
                self._self_test(rollouts if len(rollouts) else scored[0], *scored)
        elif self.state.sampling.uses_engine:
            self._confirm_engine(scored[0])
        stats.update(reward_figures(rewards, rollouts))
        rows, advantages = self.prepare(rollouts, rewards, stats)
        with self.watchdog.phase("train"):
            self.checkpointer.unmark()  # from here to the end of the step the weights are those of no step
            if OLD in self.stack.needs.weight_sets:
                self.policy.snapshot(OLD)
            self.update(rows, stats)
        self.progress.step += 1
        metrics = stats.reduce(self.ranks) | {"lr": self.optimizer.lr}
        for method in self.stack.methods.values():
            method.after_step(metrics, self.state)
        self.progress.trained_s += self.ranks.broadcast(time.perf_counter() - started)  # all stop at the same step
        histograms = step_histograms(self.ranks, advantages, rewards.total(), stats)
        self.writer.step(self.step, metrics, histograms, samples=self.geometry.rows_per_step)
        self.checkpointer.mark()
        alarms = self.alarms.check(self.step, metrics)
        for alarm in alarms:
            self.writer.alarm(alarm)
        self._stop_at(alarms)

    # -- rollout and scores -----------------------------------------------------------------------------------------------------

    def _draw(self) -> PromptBatch:
        """This process's share of the next `prompts_per_step` prompts, as the stack changes them."""
        train = self.config.train
        weights = self.stack.chain("select_prompts", torch.ones(len(self.source.rows), dtype=torch.float64), self.state)
        chosen = self.source.draw(train.prompts_per_step, weights)
        mine = self.ranks.share(len(chosen), "train.prompts_per_step")
        index = [chosen[i] for i in mine]
        rows = [self.source.rows[i] for i in index]
        batch = prompt_batch(rows, train.group_size, first_group=self._drawn + mine.start, index=index)
        self._drawn += len(chosen)
        # Here and not in `collect`, so that prompts drawn later in the step (a refill) have passed these hooks too.
        prompts: PromptBatch = self.stack.chain("before_rollout", batch, self.state)
        return prompts

    def _generate(self, prompts: PromptBatch) -> RolloutBatch:
        return self.stack.chain("after_rollout", self.stack.rollout(prompts, self.state), self.state)

    def _score(self, rollouts: RolloutBatch) -> RewardBatch:
        def rewards(rows: RolloutBatch) -> RewardBatch:
            return self.suite.score(reward_request(rows))

        with self.watchdog.phase("score"):
            return self.stack.score(rollouts, rewards, self.state)

    def _shaped_score(self, rollouts: RolloutBatch) -> RewardBatch:
        return self.stack.shaped(self.normalisers(self._score(rollouts)), rollouts, self.state)

    def collect(self, prompts: PromptBatch) -> tuple[RolloutBatch, RewardBatch]:
        """Sample and score whole groups, `rollout_batch` rows at a time; scoring overlaps the sampling of the next rows."""
        size = self.config.train.rollout_batch or len(prompts)
        group = self.config.train.group_size
        chunks = torch.arange(len(prompts)).split(max(size // group, 1) * group)
        parts, scores = [], []
        overlap = len(chunks) > 1 and not self.stack.provides("score")
        for index in chunks:
            self.watchdog.beat()
            rollouts = self._generate(prompts.select(index))
            parts.append(rollouts)
            scores.append(self.suite.submit(reward_request(rollouts)) if overlap else self._score(rollouts))
        with self.watchdog.phase("score"):
            done = [s.result() if isinstance(s, Future) else s for s in scores]
        return RolloutBatch.concat(parts), RewardBatch.concat(done)

    def prepare(self, rollouts: RolloutBatch, rewards: RewardBatch, stats: Stats) -> tuple[LossInputs, Tensor]:
        """Filter, then advantages and unit weights over complete groups: (rows to train, advantages of all kept rows)."""
        keep = ~(rewards.status == RewardStatus.FAILED).any(1)
        keep = self.stack.chain("filter_groups", keep, rewards, rollouts, self.state)
        if not bool(keep.all()):
            rollouts, rewards = (
                rollouts.select(torch.nonzero(keep).flatten()),
                rewards.select(torch.nonzero(keep).flatten()),
            )
        advantages = self.stack.adjusted(
            self.stack.advantages(rewards, rollouts, self.state), rewards, rollouts, self.state
        )
        trained = torch.ones(len(rewards), dtype=torch.bool)
        trained = self.stack.chain("filter_rows", trained, advantages, rewards, rollouts, self.state)
        flat = flat_rows(rewards, rollouts.group_ids, self.state, stats)
        weights = torch.ones(rollouts.unit_mask.shape)
        weights = self.stack.chain("unit_weights", weights, rewards, rollouts, self.state)
        rows = fixed_weights(
            LossInputs(rollouts=rollouts, advantages=advantages, weights=weights), self.stack, self.state
        )
        self.state.kl_scale = self.stack.chain("kl_scale", 1.0, rewards, rollouts, self.state)
        if self.config.advantage.drop_flat:
            trained = trained & ~flat
        if not bool(trained.all()):
            live = torch.nonzero(trained).flatten()
            rows, rewards = rows.select(live), rewards.select(live)
        rows = self.stack.chain("before_updates", rows, rewards, self.state)
        stats.update(group_figures(rows, advantages, self.ranks.world))
        return rows, advantages

    # -- update -----------------------------------------------------------------------------------------------------------------

    def update(self, rows: LossInputs, stats: Stats) -> None:
        """`updates_per_step` optimizer steps, `epochs_per_step` times over the rollout batch."""
        train, whole_groups, ids = self.config.train, self.stack.needs.whole_groups, rows.rollouts.group_ids
        for epoch in range(train.epochs_per_step):
            parts = split_updates(
                ids, train.updates_per_step, whole_groups=whole_groups, key=(train.seed, self.step, epoch)
            )
            if epoch == 0:
                batches = (p[i] for p in parts for i in self._passes(rows.select(p)))
                rows = settle_old(rows, batches, self.state, self.watchdog.beat)
            for part in parts:
                self.optimizer_step(rows.select(part), stats)
                self.state.on_policy = False

    def _passes(self, rows: LossInputs) -> list[Tensor]:
        """Row indices of each micro-batch."""
        tokens = None if self.stack.passes_matter(self.config) else self.policy.adapter.tokens_to_read(rows.rollouts)
        ids = rows.rollouts.group_ids
        return micro_batches(ids, self.config.train.micro_batch, self.stack.needs.whole_groups, tokens)

    def optimizer_step(self, rows: LossInputs, stats: Stats) -> None:
        """Accumulate the micro-batches of all processes, then one step; nothing to train leaves the weights untouched."""
        micros = self._passes(rows)
        totals = step_totals(rows, len(micros), self.ranks)
        if totals.units == 0:
            stats.update({"grad_norm": (torch.tensor(0.0), torch.tensor(1.0))})
            return
        none, one = torch.tensor(0.0), torch.tensor(1.0 / self.ranks.world)
        scale = loss_scale(self.stack, rows, totals, self.state)
        norm, figures = self._gradient(rows, micros, totals, scale)
        while scale > 1 and not torch.isfinite(norm):  # the same on all processes
            scale = max(scale / SCALE_STEP, 1.0)
            self.optimizer.zero_grad()
            norm, figures = self._gradient(rows, micros, totals, scale)
        for part in figures:
            stats.update(part)
        stats.update({"grad_norm": (norm, torch.tensor(1.0)), "loss": (none, one)})
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()  # the alarm decides whether the run goes on; the weights stay as they were
            return
        self.optimizer.step(norm)
        ema = self.config.train.ema
        if ema is not None and ema_is_due(self.optimizer.steps_done - 1, ema.every):
            self.policy.average_into(EMA, ema_decay(self.optimizer.steps_done - 1, ema.decay))

    def _gradient(
        self, rows: LossInputs, micros: Sequence[Tensor], totals: Totals, scale: float
    ) -> tuple[Tensor, list[Metrics]]:
        """Accumulate the gradient over all processes, the loss multiplied by `scale` on the way: (its norm, figures)."""
        found: list[Metrics] = []
        none = torch.tensor(0.0)
        for index in micros:
            self.watchdog.beat()
            inputs = rows.select(index).to(self.policy.device)
            for loss, figures in passes(self.stack, inputs, totals, self.state):
                (loss if scale == 1 else loss * scale).backward()
                found.append({"loss": (loss.detach(), none), **figures})
        parameters = list(self.policy.trainable.values())
        self.ranks.reduce_gradients(parameters)
        for gradient in [p.grad for p in parameters if p.grad is not None] if scale != 1 else ():
            gradient.div_(scale)
        return self.optimizer.gradient_norm(), found

    # -- before, between, after -------------------------------------------------------------------------------------------------

    def _self_test(self, rows: RolloutBatch, rollouts: RolloutBatch, rewards: RewardBatch) -> None:
        """`rows` of the batch are replayed; all `rollouts` and their rewards are as sampled, before groups were dropped."""
        checks = self_test(self.stack, rows, rollouts, rewards, self.state, lr=self.config.train.optimizer.lr)
        self.writer.self_test(checks)
        require(checks)
        self.tested = True

    def _confirm_engine(self, rollouts: RolloutBatch) -> None:
        """Once, with the first weights that an optimizer step made: the engine must have received them."""
        engine = self.policy.adapter.engine
        if engine is None or engine.unconfirmed in (None, engine.synced) or len(rollouts) == 0:
            return
        with self.watchdog.phase("self-test"):
            checks = [engine_agrees(rollouts, self.state)[0]]
        self.writer.checks("self-test after the first step", checks)
        require(checks, "after the first step")
        engine.unconfirmed = None

    def evaluate(self, samples: int) -> Evaluation:
        """Score held-out samples at this step, see `HeldOut.evaluate`."""
        found, alarms = self.held_out.evaluate(self.step, samples)
        self.checkpointer.mark()
        self._stop_at(alarms)
        return found

    def _stop_at(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            if alarm.action == "stop":
                self.save()
                raise RunError(f"{alarm.message} (stopped; a checkpoint was written, go on with --resume)")
