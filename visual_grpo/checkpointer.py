"""When a checkpoint is written and what it holds: on schedule, after a failure that left the weights whole, and back again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visual_grpo import checkpoint as ckpt
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from visual_grpo.alarms import Alarms
    from visual_grpo.data import PromptSource
    from visual_grpo.distributed import Ranks
    from visual_grpo.evaluation import Evaluation
    from visual_grpo.normalise import Normalisers
    from visual_grpo.optimizer import Optimizer
    from visual_grpo.policy import Policy
    from visual_grpo.selection import Selection
    from visual_grpo.stack import MethodStack
    from visual_grpo.writer import RunWriter


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    """iterations done."""
    saved: int = 0
    """iterations in the newest checkpoint."""
    trained_s: float = 0.0
    """seconds in iterations, without evaluations."""


@dataclass(kw_only=True)
class Checkpointer:
    """The parts of a run that a checkpoint holds, and their last state that is worth going on from."""

    progress: Progress
    policy: Policy
    optimizer: Optimizer
    source: PromptSource
    stack: MethodStack
    normalisers: Normalisers
    alarms: Alarms
    selection: Selection
    ranks: Ranks
    writer: RunWriter
    keep: int
    """complete checkpoints to leave."""

    def __post_init__(self) -> None:
        self._whole: dict[str, Any] | None = None

    def mark(self) -> None:
        """From here on a failure may keep the present state: the weights are those of `progress.step`."""
        self._whole = self._state()

    def unmark(self) -> None:
        """From here on the weights are those of no step."""
        self._whole = None

    def save(self) -> None:
        """Write a complete checkpoint (main process, with the generators of all)."""
        with self.writer.watchdog.phase("checkpoint"):
            rng = self.ranks.gather_objects([ckpt.rng_state()])
            if self.ranks.main:
                self._write(self._state(), rng)
            self.ranks.barrier()
        self.progress.saved = self.progress.step

    def save_after_failure(self) -> None:
        """Keep the steps since the last checkpoint if the failure left their weights whole (a reward server that is gone).

        Without collectives: the other processes may have ended.
        """
        if self._whole is not None and self.progress.step != self.progress.saved and self.ranks.main:
            self._write(self._whole, [self._whole["rng"]])
            self.progress.saved = self.progress.step

    def resume(self) -> tuple[Evaluation | None, Evaluation | None]:
        """Go back to the newest checkpoint, or to the start if there is none: the (first, last) evaluation found there.

        Raises:
            UserError: the checkpoint is damaged, or of another model or other prompts.
        """
        folder = self.writer.folder.checkpoints
        path = ckpt.latest_checkpoint(folder)
        size = 0
        if path is not None:
            state, tensors = ckpt.load_checkpoint(path, self.policy)
            if state.get("prompts", self.source.fingerprint) != self.source.fingerprint:
                raise UserError(
                    f"cannot resume {str(self.writer.folder.path)!r}: its training prompts are no longer those that the run "
                    "began with. Restore the prompt set (data.source), or start a new run"
                )
            self.progress.step = self.progress.saved = int(state["step"])
            self.progress.trained_s = float(state["trained_s"])
            size = int(state["metrics_size"])
            self.optimizer.load_tensors(tensors, int(state["optimizer_steps"]))
            self.source.cursor = int(state["cursor"])
            self.stack.load_state_dict(state["methods"])
            self.normalisers.load_state_dict(state.get("normalisers", {}))
            self.alarms.load_state_dict(state["alarms"])
            self.selection.load_state_dict(state.get("selection", {}))
            for rng in state["rng"][self.ranks.rank : self.ranks.rank + 1]:  # none where there were fewer processes
                ckpt.set_rng_state(rng)
        found = None
        if self.ranks.main:
            ckpt.prune_checkpoints(folder, self.keep)
            step = self.progress.step
            ended = step >= self.writer.config.train.steps or self.selection.reason is not None
            found = self.writer.rewind(step, size, final=self.selection.measured(step) if ended else None)
        evaluations: tuple[Evaluation | None, Evaluation | None] = self.ranks.broadcast(found)
        return evaluations

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside weights and optimizer, as it is now."""
        return {
            "cursor": self.source.cursor,
            "prompts": self.source.fingerprint,
            "optimizer_steps": self.optimizer.steps_done,
            "trained_s": self.progress.trained_s,
            "metrics_size": self.writer.folder.metrics_size,
            "methods": copy.deepcopy(self.stack.state_dict()),
            "normalisers": copy.deepcopy(self.normalisers.state_dict()),
            "alarms": self.alarms.state_dict(),
            "selection": self.selection.state_dict(),
            "rng": ckpt.rng_state(),
        }

    def _write(self, state: dict[str, Any], rng: list[Any]) -> None:
        ckpt.save_checkpoint(
            self.writer.folder.checkpoints,
            self.progress.step,
            policy=self.policy,
            optimizer=self.optimizer.tensors(),
            state={k: v for k, v in state.items() if k != "rng"},
            rng=rng,
            keep=self.keep,
        )
