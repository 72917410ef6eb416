"""The held-out evaluations of a run: under which weights, what is written down, and what follows from the figures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visual_grpo.evaluation import Evaluation, evaluate_policy
from visual_grpo.hacking import hacking_message
from visual_grpo.selection import BEST, Selection, common_samples

if TYPE_CHECKING:
    from visual_grpo.alarms import Alarm, Alarms
    from visual_grpo.config import RunConfig
    from visual_grpo.data import PromptRow
    from visual_grpo.distributed import Ranks
    from visual_grpo.policy import Policy
    from visual_grpo.scoring import RewardSuite
    from visual_grpo.writer import RunWriter

EMA = "ema"


def weights_to_measure(policy: Policy) -> str | None:
    """The set of weights that stands for the present step: the averaged weights where there are any; None: the trained ones."""
    return EMA if EMA in policy.sets else None


def weights_to_export(policy: Policy, config: RunConfig) -> str | None:
    """The set of weights that the last evaluation measures and `model/` holds; None: the trained ones."""
    return BEST if config.eval.final == "best" and BEST in policy.sets else weights_to_measure(policy)


@dataclass(kw_only=True)
class HeldOut:
    """Evaluates a policy and keeps its best weights."""

    config: RunConfig
    policy: Policy
    suite: RewardSuite
    prompts: Sequence[PromptRow]
    sampling: Any
    ranks: Ranks
    writer: RunWriter
    alarms: Alarms
    selection: Selection
    first: Evaluation | None = None
    """before the first step."""

    def evaluate(self, step: int, samples: int, *, final: bool = False) -> tuple[Evaluation, list[Alarm]]:
        """Score held-out samples of the present step, write them down, keep the weights if they are the best so far.

        Args:
            step: iterations done.
            samples: how many.
            final: whether this is the last evaluation of the run.

        Raises:
            UserError: the first evaluation lacks a figure that the config names; nothing is written then.
        """
        name = weights_to_measure(self.policy)
        found = self._measured(samples, name)
        alarms: list[Alarm] = []
        if self.first is None:
            self.selection.check(found)
        else:
            count = common_samples(self.config)
            alarms = self.alarms.evaluated(
                step, hacking_message(self.config, self.first.rows[:count], found.rows[:count])
            )
        for alarm in alarms:  # before the evaluation: a final one that is on record has told everything
            self.writer.alarm(alarm)
        best = self.selection.observe(step, found.rows, last=final or step >= self.config.train.steps)
        self.writer.evaluation(step, found, self.selection.marks(step) | ({"final": True} if final else {}))
        if best:
            self._keep(name)
        return found, alarms

    def final(self, step: int) -> Evaluation:
        """The last evaluation of a run that ended at `step`: of its best weights or the last ones, as `eval.final` says."""
        samples = self.config.eval.final_samples
        if weights_to_export(self.policy, self.config) != BEST:
            return self.evaluate(step, samples, final=True)[0]
        found, step = self._measured(samples, BEST), self.selection.measured(step)
        self.writer.evaluation(step, found, self.selection.marks(step) | {"final": True})
        return found

    def recall(self, step: int, last: Evaluation | None) -> None:
        """After a resumption that found the `last` evaluation of a finished run: it may have been the best."""
        if last is None or self.config.eval.final == "best":
            return
        if self.selection.observe(step, last.rows, last=True):
            self._keep(weights_to_measure(self.policy))

    def _keep(self, name: str | None) -> None:
        """Store the weights that were measured as the best."""
        with nullcontext() if name is None else self.policy.weights(name):
            self.policy.snapshot(BEST)

    def _measured(self, samples: int, name: str | None) -> Evaluation:
        config = self.config.eval
        with self.writer.watchdog.phase("evaluate"), nullcontext() if name is None else self.policy.weights(name):
            return evaluate_policy(
                self.policy, self.suite, self.prompts, samples=samples, batch=config.batch, sampling=self.sampling,
                seed=config.seed, ranks=self.ranks, keep_images=config.grid, group_size=config.group_size,
                features=config.features,
            )  # fmt: skip
