"""Reward servers in processes of their own, for tests."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from visual_grpo.reward import GroupReward


def named(metadata, texts):
    """A value that belongs to its row and to no other."""
    return [
        None if row["id"] % 10 == 9 else row["id"] + len(text) / 1000 for row, text in zip(metadata, texts, strict=True)
    ]


def picky(metadata):
    """NaN or an exception where the row says so."""
    if any(row.get("raise") for row in metadata):
        raise RuntimeError("a row that nobody can score")
    return [float("nan") if row.get("nan") else 1.0 for row in metadata]


def wrong_length(metadata):
    """Breaks its contract if asked to."""
    return [1.0] * (len(metadata) + any(row.get("long") for row in metadata))


def slow(metadata):
    """Half a second a call."""
    time.sleep(0.5)
    return [1.0] * len(metadata)


class Grouped(GroupReward):
    """Rank within the group: wrong if a group is cut, or joined with another."""

    def __call__(self, request):
        scores = torch.tensor([float(row["score"]) for row in request.metadata])
        return scores.argsort().argsort().float()


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["serving", "visual_grpo.cli", "visual_grpo.reward_server", "uvicorn", "fastapi"])


def _serve(args: tuple[str, ...], token: str | None, told: Any) -> None:
    from visual_grpo.cli import main

    os.dup2(told.fileno(), 1)
    torch.set_num_threads(1)
    os.environ.pop("VISUAL_GRPO_REWARD_TOKEN", None)
    if token is not None:
        os.environ["VISUAL_GRPO_REWARD_TOKEN"] = token
    sys.exit(main(["serve-rewards", *args]))


class Server:
    """`visual-grpo serve-rewards` in a process forked from one that has imported torch, so a start is cheap."""

    def __init__(self, *args: str, token: str | None = None) -> None:
        reading, writing = FORKS.Pipe(duplex=False)
        port = () if "--port" in args else ("--port", "0")
        self.process = FORKS.Process(target=_serve, args=((*args, *port), token, writing), daemon=True)
        self.process.start()
        writing.close()
        with os.fdopen(os.dup(reading.fileno())) as stream:
            line = stream.readline()
        reading.close()
        assert line.startswith("serving "), "the server did not start"
        self.url = line.rpartition(" on ")[2].strip()
        self.port = int(self.url.rpartition(":")[2])

    def alive(self) -> bool:
        """Whether it answers."""
        import httpx

        return (
            self.process.is_alive() and httpx.get(f"{self.url}/health", trust_env=False, timeout=30).status_code == 200
        )

    def kill(self) -> None:
        """As the system would, without a word."""
        self.process.kill()
        self.process.join()


@contextmanager
def serving(*args: str, token: str | None = None) -> Iterator[Server]:
    """A server for the time of a block."""
    server = Server(*args, token=token)
    try:
        yield server
    finally:
        server.kill()
