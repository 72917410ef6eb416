"""What held-out evaluations decide: whose weights are the best so far, and whether the run ends early.

Evaluations of different sizes are compared on the samples that all of them have, the first `min(eval.samples,
eval.final_samples)`: the same prompts and noises each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from visual_grpo.config import RunConfig
from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.evaluation import DIVERSITY, Evaluation, summarise

__all__ = ["BEST", "Best", "Selection", "check_selection", "common_samples"]

BEST = "best"
"""The named set of weights."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best evaluation of a run so far."""

    step: int
    metric: str
    value: float
    """on the samples that all evaluations have."""

    def __str__(self) -> str:
        return f"step {self.step}, {self.metric} {self.value:.4f}"


def common_samples(config: RunConfig) -> int:
    """How many samples every evaluation of a run has."""
    return min(config.eval.samples, config.eval.final_samples)


def _watched(config: RunConfig) -> dict[str, str]:
    """Config key -> the metric that it names."""
    found = {"checkpoint.best": config.checkpoint.best, "train.early_stop.metric": config.train.early_stop}
    return {key: section.metric for key, section in found.items() if section is not None}


def check_selection(config: RunConfig, *, media: str) -> None:
    """Refuse, before anything is loaded, what no evaluation of this run can decide.

    Args:
        config: of the run.
        media: what the model makes, `images` or `texts`.

    Raises:
        UserError: naming the key and what fits.
    """
    evaluation, rewards = config.eval, list(config.rewards)
    diverse = evaluation.group_size > 1 and media == "images"
    if diverse and DIVERSITY in rewards:
        raise UserError(
            f"rewards.{DIVERSITY}: this is the name of a figure of eval.group_size > 1; give the reward another key"
        )
    if evaluation.features != "pixels" and not diverse:
        raise UserError(
            f"eval.features={evaluation.features} is of the figure diversity, which this run does not have: it needs pictures "
            "and eval.group_size=4 or so"
        )
    for key, metric in _watched(config).items():
        head = metric.removesuffix("/by_tag")
        if head == DIVERSITY and DIVERSITY not in rewards:
            if not diverse:
                need = "eval.group_size=4 or so" if media == "images" else "a model that makes images"
                raise UserError(f"{key}={metric}: diversity compares several pictures of a prompt; it needs {need}")
        elif not any(head == name or head.startswith(f"{name}/") for name in rewards):
            known = [*rewards, *(f"{name}/by_tag" for name in rewards), *([DIVERSITY] if diverse else [])]
            raise UserError(
                f"{key}: no figure {metric!r} in this run's evaluations.{did_you_mean(metric, known)} It begins with a reward of "
                f"the run ({', '.join(rewards)}) or is diversity, for example {known[0]}/by_tag"
            )
    if config.train.early_stop is not None and evaluation.every == 0:
        raise UserError("train.early_stop reads the evaluations during training; set eval.every (now 0) to some steps")
    if evaluation.final == "best" and config.checkpoint.best is None:
        raise UserError("eval.final=best measures the weights of checkpoint.best: set it too, such as NAME/by_tag")
    if config.alarms.hacking == "stop" and not diverse and not any(r.eval_only for r in config.rewards.values()):
        raise UserError(
            "alarms.hacking=stop has nothing to watch: add a reward with eval_only: true, or eval.group_size=4 for the diversity "
            "of pictures"
        )


class Selection:
    """Follows the evaluations of a run; its state is part of the checkpoint."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.best: Best | None = None
        self.step: int | None = None
        """of the newest evaluation seen."""
        self._record: float | None = None
        self._record_step = 0
        self._waited = 0

    @property
    def reason(self) -> str | None:
        """Why the run should end here; None: it should go on."""
        stop = self.config.train.early_stop
        if stop is None or self._waited < stop.patience:
            return None
        word, times = "risen" if stop.mode == "max" else "fallen", f"{self._waited} evaluation{'s'[: self._waited > 1]}"
        if self._record is None:
            return f"train.early_stop: no value of {stop.metric} in {times}"
        more = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
        record = f"{self._record:.4f} of step {self._record_step}"
        return f"train.early_stop: {stop.metric} has not {word}{more} from the {record} in {times}"

    def measured(self, step: int) -> int:
        """The step whose weights the last evaluation measures, of a run that ends at `step`."""
        return step if self.best is None or self.config.eval.final == "last" else self.best.step

    def check(self, found: Evaluation) -> None:
        """Refuse a name that the first evaluation lacks.

        Raises:
            UserError: with the nearest name.
        """
        for key, metric in _watched(self.config).items():
            if metric not in found.metrics:
                known = sorted(found.metrics)
                raise UserError(
                    f"{key}: the evaluation has no figure {metric!r}.{did_you_mean(metric, known)} It has: {', '.join(known)}"
                )
            count = common_samples(self.config)
            if metric not in summarise(found.rows[:count])[0]:
                raise UserError(
                    f"{key}: {metric!r} has no value on the first {count} samples, which are all that the evaluations share: "
                    "raise eval.samples (and eval.final_samples), so that they hold prompts of every task and kind"
                )

    def observe(self, step: int, rows: Sequence[dict[str, Any]], *, last: bool = False) -> bool:
        """Take in the evaluation of a step; True where its weights are the best so far.

        Args:
            step: iterations done.
            rows: of the evaluation, see `Evaluation`.
            last: whether no step follows, so that there is nothing to stop.
        """
        metrics = summarise(rows[: common_samples(self.config)])[0]
        self.step = step
        stop, best = self.config.train.early_stop, self.config.checkpoint.best
        if stop is not None and not last:
            value = metrics.get(stop.metric)
            if _improves(value, self._record, stop.mode, stop.min_delta):
                self._record, self._record_step, self._waited = value, step, 0
            else:
                self._waited += 1
        if best is None:
            return False
        value = metrics.get(best.metric)
        record = None if self.best is None else self.best.value
        if value is None or not _improves(value, record, best.mode, 0.0):
            return False
        self.best = Best(step=step, metric=best.metric, value=value)
        return True

    def marks(self, step: int) -> dict[str, Any]:
        """What the record of the evaluation at `step` says beside its figures."""
        found: dict[str, Any] = {}
        if self.best is not None and self.best.step == step:
            found["best"] = {"metric": self.best.metric, "value": self.best.value}
        if self.reason is not None and self.step == step:
            found["stop"] = self.reason
        return found

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: JSON values."""
        stop = self.config.train.early_stop
        return {
            "step": self.step,
            "best": None if self.best is None else {"step": self.best.step, "value": self.best.value},
            "early_stop": None
            if stop is None
            else {
                "watched": [stop.metric, stop.mode],
                "record": self._record,
                "record_step": self._record_step,
                "waited": self._waited,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; an early stop that watches another figure than before begins to count anew."""
        self.step = state.get("step")
        best, kept = self.config.checkpoint.best, state.get("best")
        self.best = None if best is None or kept is None else Best(metric=best.metric, **kept)
        stop, counted = self.config.train.early_stop, state.get("early_stop")
        self._record, self._record_step, self._waited = None, 0, 0
        if stop is not None and counted is not None and counted["watched"] == [stop.metric, stop.mode]:
            self._record, self._record_step = counted["record"], int(counted["record_step"])
            self._waited = int(counted["waited"])


def _improves(value: float | None, record: float | None, mode: Literal["max", "min"], margin: float) -> bool:
    """Whether `value` is better than `record` by more than `margin`; no value, or one that is not finite, never is."""
    if value is None or not math.isfinite(value):
        return False
    if record is None:
        return True
    return value > record + margin if mode == "max" else value < record - margin
