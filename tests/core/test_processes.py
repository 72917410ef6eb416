"""Two processes compute what one computes (float64, 1e-10), and a failure of one ends both with its message."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

sys.path.insert(0, str(Path(__file__).parent))
from killed_run import KILLED, exported, finish, output, records, start
from toy_run import toy_config

from visual_grpo.api import plan
from visual_grpo.config import merge
from visual_grpo.distributed import FAILURE, Ranks
from visual_grpo.errors import RunError
from visual_grpo.method import LoopState, Method, MethodConfig

BASE: dict[str, Any] = {"model": {"dtype": "float64"}, "rewards": {"killed_run:digits": 1.0}, "train": {"steps": 4}}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "two updates": {
        "train": {"updates_per_step": 2},
        "kl": {"beta": 0.05},
        "ratio": {"clip_low": 0.01, "clip_high": 0.01},
    },
    "two epochs, token mean": {"train": {"epochs_per_step": 2}, "loss": {"aggregation": "token_mean"}},
    "batch scope": {"advantage": {"scope": "batch"}},
    "uncertain tokens, near answers": {
        "loss": {"top_entropy": 0.5, "off_policy_max": 1e-3},
        "train": {"updates_per_step": 2},
    },
    "flat groups dropped": {"rewards": {"test_processes:rarely": 1.0}, "advantage": {"drop_flat": True}},
    "rows of one process only": {
        "rewards": {"test_processes:first_prompts": 1.0},
        "method": ["test_processes:Winners"],
    },
    "dapo": {"rewards": {"test_processes:rarely": 1.0}, "method": [{"dapo": {"max_tries": 3, "overlong_cache": 2}}]},
    "degrpo": {"method": ["degrpo"], "kl": {"beta": 0.05}},
    "lens": {"rewards": {"test_processes:rarely": 1.0}, "method": ["lens"]},
    "real": {
        "rewards": {"test_processes:rarely": 1.0},
        "method": ["real"],
        "kl": {"beta": 0.05},
        "train": {"updates_per_step": 2},
    },
    "microcoder_grpo": {
        "method": [
            {
                "microcoder_grpo": {
                    "mask_share": 0.5,
                    "repeat_window": 1,
                    "diversity_target": 0.95,
                    "temperatures": [0.3, 1.0, 1.5],
                    "stage": 1,
                    "patience": 1,
                    "low_share": 1.0,
                }
            }
        ]
    },
    "dr_grpo": {"method": ["dr_grpo"], "train": {"updates_per_step": 2}},
    "rloo": {"rewards": {"test_processes:rarely": 1.0}, "method": ["rloo"]},
    "gspo": {"method": ["gspo"], "train": {"updates_per_step": 2}, "kl": {"beta": 0.05}},
    "best of n": {"method": [{"best_of_n": {"keep": 4}}], "train": {"updates_per_step": 2}},
    "averaged weights, uneven evaluations": {
        "train": {"ema": {"decay": 0.5, "every": 1}},
        "eval": {"samples": 1, "final_samples": 7, "batch": 2},
    },
    "redit, tmn_reweight, balanced_aggregation": {
        "method": ["redit", "tmn_reweight", "balanced_aggregation"],
        "train": {"updates_per_step": 2},
        "kl": {"beta": 0.05},
    },
    "fg_expo": {"method": [{"fg_expo": {"decay": 0.3}}]},
    "s_grpo, seed_grpo, lambda_grpo": {
        "rewards": {"test_processes:rarely": 1.0},
        "method": ["s_grpo", {"seed_grpo": {"strength": 0.7}}, "lambda_grpo"],
        "kl": {"beta": 0.05},
    },
    "sft": {"method": [{"sft": {"column": "answer"}}], "train": {"group_size": 1, "micro_batch": 1}},
    "best weights, early stop": {
        "checkpoint": {"best": "killed_run:digits/by_tag"},
        "eval": {"every": 1, "final": "best", "samples": 5, "final_samples": 7},
        "train": {"early_stop": {"metric": "killed_run:digits", "patience": 2, "min_delta": 1.0}},
    },
}


def rarely(prompts: list[str], completions: list[str]) -> list[float]:
    """Most groups are flat."""
    return [float(text[:2] in {"12", "34", "56"}) for text in completions]


def first_prompts(prompts: list[str], completions: list[str]) -> list[float]:
    """Groups of odd prompts are flat."""
    return [len(text) * float(int(prompt.split()[1]) % 2) for prompt, text in zip(prompts, completions, strict=True)]


class Winners(Method[MethodConfig]):
    """Keeps the rows of the first half of the prompts, which one process of two holds."""

    def filter_groups(self, keep: Any, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        """The first groups."""
        return keep & (rollouts.group_ids < state.config.train.prompts_per_step // 2)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def pair(config: dict[str, Any], out: Path, **options: Any) -> list[int]:
    """Run `config` in two processes that talk over gloo: their exit statuses. The output of rank 1 is in `out`-1.log."""
    port = free_port()
    started = []
    for rank in range(2):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        log = str(out) + f"-{rank}.log"
        started.append(start(config, out, env=env, log=log, **options))
    deadline = time.monotonic() + 120
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert None not in codes, f"a process hangs: {codes}"
    return codes  # type: ignore[return-value]


def close(a: Any, b: Any, tolerance: float = 1e-10, key: str = "") -> None:
    """Equal structures, numbers to `tolerance`."""
    if isinstance(a, float) and isinstance(b, float):
        assert a == pytest.approx(b, abs=tolerance, rel=tolerance), key
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), key
        for name in a:
            close(a[name], b[name], tolerance, f"{key}.{name}")
    elif isinstance(a, list):
        assert len(a) == len(b), key
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, tolerance, f"{key}.{i}")
    else:
        assert a == b, key


def assert_close_runs(two: Path, one: Path, tolerance: float = 1e-10) -> None:
    close([json.loads(r) for r in records(two)], [json.loads(r) for r in records(one)], tolerance)
    for name, value in exported(one).items():
        torch.testing.assert_close(exported(two)[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_compute_what_one_computes(variant: str, tmp_path: Path) -> None:
    config = toy_config(tmp_path, **merge(BASE, VARIANTS[variant]))
    assert finish(config, tmp_path / "one") == 0, output(tmp_path / "one")
    assert pair(config, tmp_path / "two") == [0, 0], (tmp_path / "two-0.log").read_text() + (
        tmp_path / "two-1.log"
    ).read_text()
    assert_close_runs(tmp_path / "two", tmp_path / "one")


def test_two_processes_compute_grails_weights(tmp_path: Path) -> None:
    """Its gradients of the inputs need a real language model, whose norms round to single precision whatever its dtype."""
    small = {"prompts_per_step": 4, "group_size": 4, "micro_batch": 8, "steps": 1}
    over = {
        **{f"train.{key}": value for key, value in small.items()},
        "model.dtype": "float64",
        "eval.every": 0,
        "eval.final_samples": 8,
        "self_test.enabled": False,
    }
    config = plan("grail_text_tiny", over).config.model_dump(mode="json")
    assert finish(config, tmp_path / "one") == 0, output(tmp_path / "one")
    assert pair(config, tmp_path / "two") == [0, 0], (tmp_path / "two-0.log").read_text()
    assert_close_runs(tmp_path / "two", tmp_path / "one", 1e-6)


def test_two_processes_run_a_pipeline(tmp_path: Path) -> None:
    """They share one process group over the stages; a kill in the second stage resumes there."""
    run = {k: v for k, v in toy_config(tmp_path, **BASE).items() if k != "name"}
    later = {**run, "model": {**run["model"], "path": "stage://mean"}}
    config = {"name": "pipe", "stages": {"first": run, "mean": {"merge": ["first"]}, "second": later}}
    assert finish(config, tmp_path / "one") == 0, output(tmp_path / "one")
    two = tmp_path / "two"
    codes = pair(config, two, kill_in=str(two / "second/checkpoints/.step-000004"), kill_at=3)
    assert codes == [KILLED, 1]
    assert pair(config, two) == [0, 0], (tmp_path / "two-0.log").read_text() + (tmp_path / "two-1.log").read_text()
    for name in ("first", "second"):
        assert_close_runs(two / name, tmp_path / "one" / name)


def test_two_processes_resume(tmp_path: Path) -> None:
    """Both killed in the second checkpoint; and once more with one process in place of two."""
    config = toy_config(tmp_path, **BASE)
    assert finish(config, tmp_path / "one") == 0
    for name, again in (("two", pair), ("changed", finish)):
        run = tmp_path / name
        codes = pair(config, run, kill_in=str(run / "checkpoints/.step-000004"), kill_at=3)
        assert codes == [KILLED, 1]
        assert "process 1 lost the others: one has ended without a word" in (tmp_path / f"{name}-1.log").read_text()
        assert again(config, run) in (0, [0, 0])
        assert_close_runs(run, tmp_path / "one")


def test_prompts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    config = toy_config(tmp_path, train={"prompts_per_step": 5})
    assert pair(config, tmp_path / "run") == [2, 2]
    for rank in range(2):
        told = (tmp_path / f"run-{rank}.log").read_text()
        assert "train.prompts_per_step (5) must be a multiple of the 2 processes" in told
        assert "use 4 or 6" in told
    assert not (tmp_path / "run").exists()


def fails_on_rank_1(prompts: list[str], completions: list[str]) -> list[float]:
    if os.environ["RANK"] == "1":
        raise ConnectionError("the reward server is away")
    return [0.0] * len(prompts)


def fails_on_rank_0(prompts: list[str], completions: list[str]) -> list[float]:
    if os.environ["RANK"] == "0":
        raise ConnectionError("the reward server is away")
    return [0.0] * len(prompts)


HELD: list[Any] = []


def fails_and_holds_the_group(prompts: list[str], completions: list[str]) -> list[float]:
    """While anything refers to the process group, its sockets stay open, and the other process waits in its collective."""
    HELD.append(torch.distributed.group.WORLD)
    return fails_on_rank_0(prompts, completions)


def dies_on_rank_1(prompts: list[str], completions: list[str]) -> list[float]:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.0] * len(prompts)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_one_process_ends_both_with_its_message(tmp_path: Path, rank: int) -> None:
    reward = {f"test_processes:fails_on_rank_{rank}": {"retries": 0}}
    assert pair(toy_config(tmp_path, rewards=reward), tmp_path / "run") == [1, 1]
    logs = [(tmp_path / f"run-{r}.log").read_text() for r in range(2)]
    assert all("the reward server is away" in log for log in logs), "\n".join(logs)
    assert f"Error: process {rank} failed: reward" in logs[1 - rank]
    assert "Traceback" not in logs[0] + logs[1]


def test_a_group_that_outlives_its_end_delays_nothing(tmp_path: Path) -> None:
    reward = {"test_processes:fails_and_holds_the_group": {"retries": 0}}
    assert pair(toy_config(tmp_path, rewards=reward), tmp_path / "run") == [1, 1]
    told = (tmp_path / "run-1.log").read_text()
    assert "Error: process 0 failed: reward" in told
    assert "the reward server is away" in told


class LateStore:
    """A client of a store whose `set` is on its way until the same client waits for an answer, as torch's TCP store does it."""

    def __init__(self) -> None:
        self.store, self.sent = HashStore(), {}

    def set(self, key: str, value: str) -> None:
        self.sent[key] = value

    def check(self, keys: list[str]) -> bool:
        self.arrive()
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        self.arrive()
        return self.store.get(key)

    def arrive(self) -> None:
        for key, value in self.sent.items():
            self.store.set(key, value)
        self.sent.clear()


def test_the_reason_is_in_the_store_before_a_process_leaves() -> None:
    ranks = Ranks()
    ranks.store = store = LateStore()
    with pytest.raises(RunError), ranks:
        raise RunError("the reward server is away")
    assert store.store.check([FAILURE])  # a get would wait
    assert json.loads(store.store.get(FAILURE))["message"] == "the reward server is away"


def test_a_process_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    assert pair(toy_config(tmp_path, rewards={"test_processes:dies_on_rank_1": 1.0}), tmp_path / "run") == [1, KILLED]
    told = (tmp_path / "run-0.log").read_text()
    assert "process 0 lost the others: one has ended without a word (killed, or out of memory)" in told
    assert "--resume" in told


def test_wrong_input_is_told_by_every_process(tmp_path: Path) -> None:
    """Also what only the main process can see: that the folder holds a run."""
    config = toy_config(tmp_path, **BASE, eval={"every": 0, "final_samples": 1})
    assert finish(config, tmp_path / "run") == 0
    assert pair(config, tmp_path / "run", resume=False) == [2, 2]
    for rank in range(2):
        assert "already holds a run: use --resume" in (tmp_path / f"run-{rank}.log").read_text()


def test_torchrun(tmp_path: Path) -> None:
    """The real launcher and the real command."""
    import yaml

    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(toy_config(tmp_path, train={"steps": 2})))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    command += ["-m", "visual_grpo", "train", "toy.yaml", "--out", "run"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert done.stdout.count("held-out at step 2") + done.stderr.count("held-out at step 2") == 1
