"""Toy runs in processes of their own that can be killed: forked from a server that has imported torch, so a start is cheap."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from visual_grpo.method import LoopState, Method, MethodConfig

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "killed_run",
        "visual_grpo.build",
        "visual_grpo.report.page",
        "matplotlib.figure",
        "matplotlib.backends.backend_svg",
        "peft",
        "torch._dynamo",
    ]
)
KILLED = -signal.SIGKILL


class Drifting(Method[MethodConfig]):
    """A method with state: a tensor and a number that shift the rewards, so a run that loses them ends elsewhere."""

    def __init__(self, config: MethodConfig) -> None:
        super().__init__(config)
        self.seen, self.mean = 0, torch.zeros(3, dtype=torch.float64)

    def adjust_advantages(self, advantages: Any, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        """Weight the rows by the state."""
        return advantages * (1 + self.mean[rollouts.prompts.row_ids % 3].float() + 0.1 * self.seen)

    def after_step(self, metrics: Mapping[str, float], state: LoopState) -> None:
        """Move the state."""
        self.seen += 1
        self.mean = (
            0.5 * self.mean + torch.tensor([metrics["reward/total"], metrics["length"], self.seen]).double() / 10
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.seen, self.mean = values["seen"], values["mean"]


def digits(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that almost always differs within a group."""
    return [sum(map(int, text)) / 27 for text in completions]


def start(config: dict[str, Any], out: Path, **options: Any) -> BaseProcess:
    """Run `config` in a fork, resuming what lies in `out`; its output goes to `out`.log."""
    process = FORKS.Process(target=_child, args=(config, str(out), options), daemon=True)
    process.start()
    return process


def finish(config: dict[str, Any], out: Path, *, seconds: float = 60, **options: Any) -> int:
    """`start`, and wait: the exit status, negative for a signal."""
    process = start(config, out, **options)
    process.join(seconds)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def output(out: Path) -> str:
    """What the children of `out` printed."""
    return out.with_suffix(".log").read_text()


def _child(config: dict[str, Any], out: str, options: dict[str, Any]) -> None:
    log = os.open(options.get("log", Path(out).with_suffix(".log")), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.update(options.get("env", {}))
    torch.set_num_threads(1)
    import visual_grpo as vg
    from visual_grpo.errors import RunError, UserError

    if "kill_at" in options:
        kill_at(options.get("kill_in", out), options["kill_at"])
    if "before" in options:
        options["before"]()
    resume = options.get("resume", (Path(out) / "config.yaml").exists())
    try:
        vg.train(config, out=out, resume=resume)
    except (RunError, UserError) as error:
        print(f"Error: {error}", flush=True)
        sys.exit(error.exit_status)


def kill_at(path: str, number: int) -> None:
    """SIGKILL this process just before it opens, renames or removes a file or folder named `path...` for the `number`-th time."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        watched = event in {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
        if watched and any(path in str(a) for a in args[:2]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def records(out: Path) -> list[str]:
    """The lines of metrics.jsonl without what depends on the clock and the machine."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(line).items() if k not in {"time", "memory_gb"}} for line in lines]
    return [json.dumps(record, sort_keys=True) for record in kept]


def exported(out: Path) -> dict[str, torch.Tensor]:
    """The weights in `model/`."""
    (file,) = (out / "model").glob("*.safetensors")
    return load_file(file)


def assert_same_run(out: Path, reference: Path) -> None:
    """Equal records, byte for byte, equal weights, and nothing left lying about."""
    assert records(out) == records(reference)
    mine, theirs = exported(out), exported(reference)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert files(out) == files(reference)


def files(out: Path) -> list[str]:
    """Names of all files of a run, hidden ones too."""
    return sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
