"""Experiment trackers (tensorboard, wandb, ...), through accelerate's tracker classes. With none, every call does nothing."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

from visual_grpo.config import TrackConfig
from visual_grpo.errors import UserError
from visual_grpo.run_folder import RunFolder

__all__ = ["Tracker", "check_trackers", "flat_metrics"]

# tracker -> modules of which one must be there, and what installs it
_PACKAGES = {
    "tensorboard": (("tensorboard", "tensorboardX"), "visual-grpo[track]"),
    "wandb": (("wandb",), "visual-grpo[track]"),
    "mlflow": (("mlflow",), "mlflow"),
    "comet_ml": (("comet_ml",), "comet_ml"),
    "aim": (("aim",), "aim"),
    "clearml": (("clearml",), "clearml"),
    "dvclive": (("dvclive",), "dvclive"),
    "swanlab": (("swanlab",), "swanlab"),
}


class Tracker:
    """Sends the records of metrics.jsonl to the trackers of `config`.

    Construct it on the main process, and before the model is loaded: a package that is missing is an error here.

    Args:
        config: `config.track`.
        folder: the run; trackers that write files write into it, and its name is the name of the experiment.
        settings: the resolved config, stored with the experiment.
        tell: gets one message about a tracker that fails later on; it is left out from then on, and the run goes on.

    Raises:
        UserError: the package of a tracker is missing, or a tracker refuses to start (not logged in, no server).
    """

    def __init__(
        self,
        config: TrackConfig,
        folder: RunFolder,
        settings: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._trackers: list[Any] = []
        self._tell = tell
        names = list(dict.fromkeys(config.trackers))
        check_trackers(config)
        for name in names:
            try:
                self._trackers.append(_start(name, config, folder))
            except Exception as error:  # each tracker has its own kinds of errors
                self.close()
                raise UserError(f"track.trackers: {name} did not start: {type(error).__name__}: {error}") from error
        if settings and not folder.resumed:
            self._store(settings)

    def log(self, record: Mapping[str, Any]) -> None:
        """Send one record: `train/...`, `eval/...` and `time/...` at the record's step. Other kinds are not figures."""
        if self._trackers and record.get("kind") in {"train", "eval"}:
            values = flat_metrics(record)
            self._each(lambda tracker: tracker.log(values, step=int(record["step"])))

    def close(self) -> None:
        """Finish every tracker; a second call does nothing."""
        self._each(lambda tracker: tracker.finish())
        self._trackers = []

    def _each(self, call: Callable[[Any], None]) -> None:
        """A server that is away must not cost the run what it has learned: its tracker is dropped, and that is told."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # each tracker has its own kinds of errors
                self._trackers.remove(tracker)
                self._tell(
                    f"tracker {tracker.name} failed and gets no more records ({type(error).__name__}: {error}); metrics.jsonl "
                    "has them all"
                )

    def _store(self, settings: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            # accelerate writes tensorboard's settings as a second experiment beside the run: the run folder has config.yaml
            if tracker.name != "tensorboard":
                tracker.store_init_configuration(dict(settings))


def check_trackers(config: TrackConfig) -> None:
    """Raise `UserError` where the package of a tracker is missing; starts none."""
    for name in config.trackers:
        modules, package = _PACKAGES[name]
        if not any(importlib.util.find_spec(module) for module in modules):
            raise UserError(f'track.trackers: {name} is not installed; run: pip install "{package}"')


def flat_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record under one name each; those that are not finite are left out.

    >>> flat_metrics({"kind": "train", "step": 1, "metrics": {"loss": 0.5}, "time": {"total": 2.0}})
    {'train/loss': 0.5, 'time/train/total': 2.0}
    """
    kind = record["kind"]
    out = {f"{kind}/{key}": value for key, value in record.get("metrics", {}).items()}
    out |= {f"time/{kind}/{key}": value for key, value in record.get("time", {}).items()}
    for tag, metrics in record.get("by_tag", {}).items():
        out |= {f"{kind}/{tag}/{key}": value for key, value in metrics.items()}
    out |= {f"memory_gb/{key}": value for key, value in record.get("memory_gb", {}).items()}
    return {k: float(v) for k, v in out.items() if isinstance(v, int | float) and math.isfinite(v)}


def _start(name: str, config: TrackConfig, folder: RunFolder) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    cls = LOGGER_TYPE_TO_CLASS[name]
    run = folder.path.resolve().name
    if name == "tensorboard":
        tracker = cls("tensorboard", str(folder.path))
    elif name == "wandb":
        tracker = cls(config.project, name=run, dir=str(folder.path), id=_wandb_id(folder), resume="allow")
    elif name == "mlflow":
        tracker = cls(config.project, logging_dir=str(folder.path), run_name=run)
    elif cls.requires_logging_directory:
        tracker = cls(config.project, logging_dir=str(folder.path))
    else:
        tracker = cls(config.project)
    # Older releases of accelerate start a tracker in its constructor and have no `start`.
    if hasattr(tracker, "start"):
        tracker.start()
    return tracker


def _wandb_id(folder: RunFolder) -> str:
    """An id that is kept in the run folder, so that a resumed run goes on in the same experiment."""
    path = folder.path / "wandb_id.txt"
    if not path.exists():
        import uuid

        from visual_grpo.run_folder import write_atomic

        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8").strip()
