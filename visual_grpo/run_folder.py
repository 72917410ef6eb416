"""The folder of a run: config.yaml, metrics.jsonl, samples/, eval/, checkpoints/, report.html.

Only the main process writes; another process opens the same path with `RunFolder(path)`. Every file is written whole or not at
all (a temporary file that is renamed), except metrics.jsonl, whose lines are appended one by one and flushed to the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.config_text import load_yaml, parse_yaml
from visual_grpo.errors import RunError, UserError
from visual_grpo.json_lines import finite, json_line, read_jsonl
from visual_grpo.resumption import MAY_CHANGE, changed_keys

__all__ = ["RunFolder", "read_jsonl", "read_metrics", "write_atomic"]

# Locks that this process holds: a second run of the same process (train, then resume) may take the folder again.
_HELD: dict[Path, int] = {}

_WRITTEN = (
    "config.yaml",
    "metrics.jsonl",
    "self_test.json",
    "report.html",
    "samples",
    "eval",
    "checkpoints",
    "model",
    "best",
)


class RunFolder:
    """Paths and writers of one run.

    Attributes:
        path: the folder.
        resumed: whether `create` found a run to go on with.
        config: the resolved config.
        metrics: one JSON record a line.
        samples: picture grids and text pages of evaluations.
        eval: one file an evaluation, one line a sample.
        checkpoints: complete states to resume from.
        report: the report, one HTML file.
        self_test: results of the checks before step 1.
        log: what the run printed.
        stacks: where the watchdog writes the stacks of a hung run.
    """

    def __init__(self, path: Path | str, *, resumed: bool = False) -> None:
        self.path = Path(path)
        self.resumed = resumed
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.eval = self.path / "eval"
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"
        self.self_test = self.path / "self_test.json"
        self.log = self.path / "log.txt"
        self.stacks = self.path / "stacks.txt"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        root: Path | str,
        name: str,
        *,
        config_yaml: str,
        resume: bool = False,
        out: Path | str | None = None,
        may_change: Sequence[str] = MAY_CHANGE,
        stages_may_change: Callable[[Path], Iterable[str]] | None = None,
    ) -> RunFolder:
        """Make or find the folder of a run and write its config.yaml.

        Without `resume` the folder is `root/name`, or the first free one of `root/name-2`, `root/name-3`, ... when that holds a
        run already. With `resume` it is the newest of these that holds a run, and its config must agree (see `MAY_CHANGE`).

        Args:
            root: the folder of all runs.
            name: `config.name`.
            config_yaml: the resolved config.
            resume: go on with a run that exists.
            out: exactly this folder, in place of `root` and `name`.
            may_change: keys that may differ on a resume.
            stages_may_change: of a pipeline, whose stages have folders of their own in this one: given the folder, the keys
                that may differ, in place of `may_change`.

        Raises:
            UserError: `out` holds a run and `resume` is off, or files of yours that a run would write over; nothing to resume;
                another config; another process at work there.
            RunError: the folder cannot be written or looked into.
        """
        wrong = re.search(r"[/\\:\0-\x1f\x7f\ud800-\udfff]", name) or name.startswith(".") or len(name.encode()) > 200
        if out is None and (not name.strip() or wrong):
            raise UserError(f"name {name!r} cannot name a folder: use letters, digits, '-' and '_', or give --out DIR")
        if out is not None and "\0" in str(out):
            raise UserError(f"--out {str(out)!r} holds a zero byte and names no folder: use another --out")
        try:
            place = None if out is None else Path(out)
            return cls._create(Path(root), name, config_yaml, resume, place, tuple(may_change), stages_may_change)
        except OSError as error:  # a folder on the way that may not be looked into, a name that is too long
            raise _write_error(Path(root) / name if out is None else Path(out), error) from None

    @classmethod
    def _create(
        cls,
        root: Path,
        name: str,
        config_yaml: str,
        resume: bool,
        out: Path | None,
        may_change: Sequence[str],
        stages_may_change: Callable[[Path], Iterable[str]] | None,
    ) -> RunFolder:
        if resume:
            folder = cls(out if out is not None else _newest(root, name), resumed=True)
            own = may_change if stages_may_change is None else tuple(stages_may_change(folder.path))
            folder._check_resume(config_yaml, own, pipeline=stages_may_change is not None)
        elif out is not None:
            folder = cls(out)
            if _holds_run(out):
                raise UserError(f"{str(out)!r} already holds a run: use --resume to go on with it, or another --out")
            if foreign := _foreign(out):
                raise UserError(
                    f"{str(out)!r} holds {' and '.join(foreign)}, which no run wrote and this one would write over: use another "
                    "--out"
                )
            _make(folder.path)
        else:
            folder = cls(_next_free(root, name))
        if not _lock(folder.path):
            raise UserError(f"another process is training in {str(folder.path)!r}: stop it first, or use another --out")
        if resume:
            _sweep(folder.path)
        for sub in (folder.samples, folder.eval, folder.checkpoints) if stages_may_change is None else ():
            _guard(sub, lambda sub=sub: sub.mkdir(exist_ok=True))  # type: ignore[misc]
        write_atomic(folder.config, config_yaml)
        return folder

    def _check_resume(self, config_yaml: str, may_change: Sequence[str], *, pipeline: bool) -> None:
        if not self.config.is_file():
            raise UserError(f"nothing to resume: {str(self.path)!r} has no config.yaml; start it without --resume")
        stored, given = load_yaml(self.config), parse_yaml(config_yaml, "the config") or {}
        if ("stages" in stored) != ("stages" in given):
            kind = "a pipeline" if "stages" in stored else "a single run"
            raise UserError(f"cannot resume {str(self.path)!r} as something else: it holds {kind}; use another --out")
        changed = changed_keys(stored, given, may_change)
        if changed:
            lines = "\n".join(f"  {key}: {old!r} in the run, {new!r} now" for key, (old, new) in changed.items())
            raise UserError(
                f"cannot resume {str(self.path)!r} with another config:\n{lines}\n"
                f"Set these back, or start a new run without --resume. Only "
                f"{', '.join(MAY_CHANGE if pipeline else may_change)} may change"
                f"{' (of finished stages not their length), and all of stages that have not begun' if pipeline else ''}."
            )

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one record to metrics.jsonl and flush it to the disk.

        Keys are sorted and numbers written in full, so equal records are equal bytes. JSON has no NaN or infinity: such a value
        becomes null and its dotted key is listed under `non_finite`.

        Raises:
            RunError: the file cannot be written.
        """
        line = json_line(record)

        def write() -> None:
            with self.metrics.open("a", encoding="utf-8", newline="\n") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

        _guard(self.metrics, write)

    def read_metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, of `kinds` only where given; a torn last line is left out."""
        return [r for r in read_metrics(self.path) if not kinds or r.get("kind") in kinds]

    @property
    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl, for the checkpoint: everything behind them was written later."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Drop what was written after metrics.jsonl had `size` bytes, so that a resumed run writes it once.

        Raises:
            UserError: the file is shorter, so records of the run are gone.
        """
        if self.metrics_size < size:
            raise UserError(
                f"{str(self.metrics)!r} holds fewer records than at the last checkpoint: it was changed since; restore it"
            )
        if self.metrics_size > size:
            _guard(self.metrics, lambda: os.truncate(self.metrics, size))

    def discard(self) -> None:
        """Take a folder back in which nothing was recorded, because the input was wrong."""
        if self.resumed or _holds_run(self.path):
            return
        for file in (self.config, self.log, self.path / ".lock"):
            file.unlink(missing_ok=True)
        for folder in (self.samples, self.eval, self.checkpoints, self.path):
            with contextlib.suppress(OSError):  # not empty: something of the user's
                folder.rmdir()

    def eval_path(self, step: int) -> Path:
        """`eval/step-000010.jsonl`."""
        return self.eval / f"step-{step:06d}.jsonl"

    def samples_path(self, step: int, suffix: str) -> Path:
        """`samples/step-000010.png` or `.txt`."""
        return self.samples / f"step-{step:06d}{suffix}"

    def write_eval(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write the samples of one evaluation, one a line."""
        path = self.eval_path(step)
        write_atomic(path, "".join(json_line(row) for row in rows))
        return path

    def read_eval(self, step: int) -> list[dict[str, Any]]:
        """The samples of the evaluation at `step`; none where it was not written."""
        path = self.eval_path(step)
        return read_jsonl(path) if path.is_file() else []

    def write_json(self, path: Path, value: Any) -> None:
        """Write one JSON document, indented."""
        clean, _ = finite(value)
        write_atomic(path, json.dumps(clean, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text_samples(self, step: int, prompts: Sequence[str], texts: Sequence[str], marks: Sequence[Any]) -> Path:
        """Write `samples/step-000010.txt`: prompt, completion and score of each sample."""
        parts = [
            f"[{i}] score {'-' if mark is None else f'{mark:.4g}'}\nprompt: {prompt}\n{text}\n"
            for i, (prompt, text, mark) in enumerate(zip(prompts, texts, marks, strict=True))
        ]
        path = self.samples_path(step, ".txt")
        write_atomic(path, "\n".join(parts))
        return path

    def close(self) -> None:
        """Let go of the lock; a second call does nothing."""
        handle = _HELD.pop(self.path.resolve(), None)
        if handle is not None:
            os.close(handle)


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a run folder or of a metrics.jsonl; a torn last line is left out, a missing file has none.

    Raises:
        UserError: a line in the middle is no record.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    return read_jsonl(path, torn_end=True) if path.exists() else []


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: readers see the old content or the new.

    Raises:
        RunError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def write() -> None:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    _guard(path, write)


def _holds_run(path: Path) -> bool:
    """Whether a run has written here: a folder with only a config is a start that failed before its first record."""
    metrics = path / "metrics.jsonl"
    checkpoints = path / "checkpoints"
    recorded = (metrics.is_file() and metrics.stat().st_size > 0) or (
        checkpoints.is_dir() and any(checkpoints.iterdir())
    )
    return recorded or any(path.glob("*/metrics.jsonl")) or any(path.glob("*/result.json"))  # stages of a pipeline


def _foreign(path: Path) -> list[str]:
    """What a run would write over in a folder that no run has begun in: somebody's own config.yaml or model."""
    return [] if (path / ".lock").exists() else [name for name in _WRITTEN if (path / name).exists()]


def _next_free(root: Path, name: str) -> Path:
    """Make the first folder that holds no run, and lock it: two processes that start together get two folders."""
    number = 0
    while True:
        number += 1
        path = root / (name if number == 1 else f"{name}-{number}")
        if (path.exists() and not path.is_dir()) or _holds_run(path) or _foreign(path):
            continue
        _make(path)
        if _lock(path):
            return path


def _sweep(path: Path) -> None:
    """Delete what a killed process was writing."""
    for leftover in [*path.glob(".*.tmp"), *path.glob("*/.*.tmp")]:
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _make(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{str(path)!r} is a file, not a folder: use another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{str(path)!r} cannot be made: a part of the path is a file; use another --out") from None
    except OSError as error:
        raise _write_error(path, error) from None


def _newest(root: Path, name: str) -> Path:
    """The run with the highest number among `root/name`, `root/name-2`, ..."""
    pattern = re.compile(re.escape(name) + r"(?:-([1-9][0-9]*))?")
    runs = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and (path / "config.yaml").is_file():
            runs[int(match[1] or 1)] = path
    if not runs:
        raise UserError(
            f"nothing to resume: no run {name!r} in {str(root)!r}; start it without --resume, or give --out DIR"
        )
    return runs[max(runs)]


def _lock(path: Path) -> bool:
    """Take the folder for this process; False when another process has it. The system drops the lock when a process dies."""
    key = path.resolve()
    if key in _HELD:
        return True
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        handle = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise _write_error(path, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    except OSError:  # a network file system without locks
        os.close(handle)
        return True
    _HELD[key] = handle
    return True


def _guard(path: Path, write: Callable[[], Any]) -> None:
    try:
        write()
    except OSError as error:
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write {str(path)!r}: {error.strerror or error}. Free space or change the rights and go on with --resume, "
        "or use another --out"
    )
