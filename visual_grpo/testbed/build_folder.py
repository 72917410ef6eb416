"""The folder of a build: nothing but an earlier build is written over."""

from __future__ import annotations

import tempfile
from pathlib import Path

from visual_grpo.errors import UserError

LOG = "build_log.jsonl"


def build_folder(out: Path | str) -> Path:
    """Make sure, before minutes of training, that a build may be written to `out`.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    path = Path(out).resolve()
    try:
        if path.is_dir() and any(path.iterdir()) and not (path / LOG).is_file():
            raise UserError(
                f"{str(path)!r} holds files that no build has written, and this one would replace them: use another --out"
            )
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path), tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write a build to {str(path)!r}: {error.strerror or error}; use another --out"
        ) from None
    return path
