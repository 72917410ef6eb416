"""The engine that runs rewards: bounded retries, wall-clock limits, three states a row, overlap with sampling.

Rules (card rewards, section 0): a failed row is never given a number. A call that raises is repeated `retries` times for the
whole batch and then row by row, so that one bad row does not lose the others; rows that come back NaN are repeated on their
own. What still fails is dropped (`on_failed: drop`) or ends the run (`stop`); a reward that fails on every row always does.
A call that hangs is not repeated: its thread is given up and its rows have failed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardError, RewardOutput, RewardRequest
from visual_grpo.reward_runner import HangError, RewardCounts, RewardRunner, RewardSpec, device_of
from visual_grpo.types import RewardBatch, RewardStatus
from visual_grpo.workers import DaemonWorkers

__all__ = ["RewardCounts", "RewardFailure", "RewardSpec", "RewardSuite"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """One row that a reward could not score."""

    reward: str
    row: int
    prompt: str
    error: str


class RewardSuite:
    """The rewards of a run.

    >>> suite = RewardSuite({"red": {"reward": lambda images: images[:, 0].mean((1, 2)), "weight": 2.0}})
    >>> suite.score(RewardRequest.build(["a", "b"], images=torch.ones(2, 3, 4, 4))).total()
    tensor([2., 2.])
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: torch.device | str = "cpu",
        workers: int = 1,
        gate: Mapping[str, float] | None = None,
        closed: float = 0.0,
        combine: Callable[[RewardBatch], Tensor] | None = None,
    ) -> None:
        """Resolve and build every reward (a mistake in the config is an error here); engines load at the first call.

        Args:
            config: {name or "package.module:Name": weight, mapping of `RewardSpec` fields, or a reward}.
            device: for rewards that take a `device` and are not given one.
            workers: requests that `submit` scores at a time; calls of one reward never overlap.
            gate: {reward: least value}: in training the other rewards are computed only on rows that reach all of these (a
                gate that does not apply to a row is open there); in evaluations every reward is computed on every row.
            closed: value of the other rewards on rows that do not.
            combine: makes `RewardBatch.total` of several rewards; None: the weighted sum.
        """
        if not config:
            raise UserError("no rewards are configured; give at least one, such as rewards: {geneval: 1.0}.")
        specs = [RewardSpec.parse(name, given) for name, given in config.items()]
        self._runners = [RewardRunner(spec, device_of(device)) for spec in specs]
        self._gate, self._closed, self._combine = dict(gate or {}), closed, combine
        self._workers = workers
        self._pool: DaemonWorkers | None = None
        self._failures: deque[RewardFailure] = deque(maxlen=200)

    @property
    def specs(self) -> tuple[RewardSpec, ...]:
        """The settings, in the order of the config."""
        return tuple(runner.spec for runner in self._runners)

    @property
    def counts(self) -> dict[str, RewardCounts]:
        """Running totals by reward."""
        return {runner.spec.name: runner.counts for runner in self._runners}

    @property
    def failures(self) -> tuple[RewardFailure, ...]:
        """The latest rows that could not be scored."""
        return tuple(self._failures)

    def names(self, *, evaluation: bool = False) -> tuple[str, ...]:
        """Return the rewards that `score` runs."""
        return tuple(runner.spec.name for runner in self._chosen(evaluation))

    def check_media(self, produced: Sequence[str], *, model: str = "this model") -> None:
        """Refuse rewards that read what the model does not make.

        Args:
            produced: of "images" and "texts".
            model: what to call the model in the message.
        """
        for runner in self._runners:
            missing = sorted(runner.reward.needs - set(produced))
            if missing:
                raise UserError(
                    f"reward {runner.spec.name!r} reads {' and '.join(missing)}, but {model} makes "
                    f"{' and '.join(produced) or 'neither'}; take another reward or another model."
                )

    def score(self, request: RewardRequest, *, evaluation: bool = False) -> RewardBatch:
        """Run every reward (those that are `eval_only` only if `evaluation`) on every row.

        Raises:
            RewardError: a wrong length or type, a failure under `on_failed: stop`, or no row of a reward could be scored.
        """
        runners = self._chosen(evaluation)
        produced = [name for name in ("images", "texts") if getattr(request, name) is not None]
        self.check_media(produced, model="this request")
        gate = {} if evaluation else self._gate
        found: dict[str, RewardOutput] = {}
        is_open = torch.ones(len(request), dtype=torch.bool)
        for runner in sorted(runners, key=lambda r: r.spec.name not in gate):  # gates first
            name = runner.spec.name
            behind = bool(gate) and name not in gate
            rows = torch.nonzero(is_open).flatten().tolist() if behind else list(range(len(request)))
            output = self._run(runner, request, rows)
            if name in gate:
                is_open &= (output.status == RewardStatus.NOT_APPLICABLE) | (output.values >= gate[name])
            found[name] = spread(output, rows, len(request), self._closed) if behind else output
        outputs = [found[runner.spec.name] for runner in runners]
        names = tuple(runner.spec.name for runner in runners)
        return RewardBatch(
            names=names,
            values=torch.stack([output.values for output in outputs], dim=1),
            status=torch.stack([output.status for output in outputs if output.status is not None], dim=1),
            weights=torch.tensor([runner.spec.weight for runner in runners], dtype=torch.float32),
            details={f"{name}/{k}": v for name, o in zip(names, outputs, strict=True) for k, v in o.details.items()},
            combine=self._combine,
        )

    def _run(self, runner: RewardRunner, request: RewardRequest, rows: list[int]) -> RewardOutput:
        """One reward on `rows`; failures are logged, or end the run."""
        if not rows:
            return RewardOutput(values=torch.zeros(0), status=torch.zeros(0, dtype=torch.int8))
        output, errors = runner.run(request.take(rows))
        self._report(runner.spec, request, rows, output, {rows[i]: error for i, error in errors.items()})
        return output

    def submit(self, request: RewardRequest, *, evaluation: bool = False) -> Future[RewardBatch]:
        """Score in the background, so that the next prompts can be sampled meanwhile."""
        if self._pool is None:
            self._pool = DaemonWorkers("score", self._workers)
        return self._pool.submit(lambda: self.score(request, evaluation=evaluation))

    def close(self) -> None:
        """End the background threads; the suite can still be used."""
        for runner in self._runners:
            runner.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> RewardSuite:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, evaluation: bool) -> list[RewardRunner]:
        chosen = [runner for runner in self._runners if evaluation or not runner.spec.eval_only]
        if not chosen:
            raise UserError("every reward is eval_only, so there is nothing to train on; unset it for one of them.")
        return chosen

    def _report(
        self,
        spec: RewardSpec,
        request: RewardRequest,
        asked: Sequence[int],
        output: RewardOutput,
        errors: Mapping[int, BaseException],
    ) -> None:
        """Log failed rows, or end the run over them: `output` is that of the rows `asked`, `errors` goes by row of `request`."""
        if not errors:
            return
        failures = [
            RewardFailure(reward=spec.name, row=r, prompt=request.prompts[r], error=f"{type(e).__name__}: {e}")
            for r, e in sorted(errors.items())
        ]
        self._failures.extend(failures)
        first = failures[0]
        cause = errors[first.row]
        reason = str(cause) if isinstance(cause, HangError) else first.error
        assert output.status is not None
        scored = int((output.status == RewardStatus.OK).sum())
        rows = ", ".join(str(failure.row) for failure in failures[:8]) + (", ..." if len(failures) > 8 else "")
        prompt = first.prompt if len(first.prompt) <= 80 else first.prompt[:77] + "..."
        where = f"row(s) {rows} of {len(request)} (row {first.row}: {prompt!r}): {reason}"
        # One bad sample is no broken reward: alone behind a gate, or the last of an evaluation whose others were scored.
        counts = self.counts[spec.name]
        lone = len(asked) == 1 and (len(request) > 1 or counts.rows > counts.failed + counts.not_applicable)
        if scored == 0 and not lone:
            raise RewardError(f"reward {spec.name!r} failed on every row that it applies to, {where}.") from cause
        if spec.on_failed == "stop":
            raise RewardError(
                f"reward {spec.name!r} failed on {where}. To leave such rows out instead, set "
                f"rewards.{spec.name}.on_failed: drop."
            ) from cause
        logger.warning("reward %r failed on %s; these rows are left out.", spec.name, where)


def spread(output: RewardOutput, rows: Sequence[int], count: int, closed: float) -> RewardOutput:
    """Scores of the open `rows` among `count`; the others have the value `closed`.

    Details: `open`, 1 where the reward was computed, and `scored`, its value there.
    """
    at = torch.tensor(rows, dtype=torch.long)
    values, status = torch.full((count,), float(closed)), torch.zeros(count, dtype=torch.int8)
    opened, scored = torch.zeros(count), torch.full((count,), torch.nan)
    assert output.status is not None
    values[at], status[at] = output.values, output.status
    opened[at], scored[at] = 1.0, output.values
    details = {"open": opened, "scored": scored}
    for key, figure in output.details.items():
        details[key] = torch.full((count,), torch.nan).index_copy(0, at, figure)
    return RewardOutput(values=values, status=status, details=details)
