"""The report of a run: one HTML file that opens offline, from what the run folder holds."""

from __future__ import annotations

from pathlib import Path

from visual_grpo.run_folder import RunFolder, write_atomic

__all__ = ["write_report"]


def write_report(folder: Path | str) -> Path:
    """Write `report.html` into a run folder; the run may be unfinished, without evaluations, or have no step yet.

    Raises:
        UserError: the folder holds no config.yaml, or a file of it is broken.
        RunError: the report cannot be written.
    """
    from visual_grpo.report.data import load_run
    from visual_grpo.report.page import render

    run = RunFolder(folder)
    write_atomic(run.report, render(load_run(run)))
    return run.report
