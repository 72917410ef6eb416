"""A reward on a server (`visual-grpo serve-rewards`, or anything that speaks docs/reward_server.md), given as `http://...`.

Range and meaning are those of the reward on the server. Every request has a deadline within the reward's `timeout_s`; a request
that fails is sent to the next replica, then again after a pause that doubles, until the deadline. Rows whose request could not be
answered have failed; if none could be, the servers are gone and the run ends with that message.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import random
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, register_reward
from visual_grpo.reward_wire import ScoreAnswer, WireError, decode_output, encode_request
from visual_grpo.types import RewardStatus
from visual_grpo.workers import DaemonWorkers

__all__ = ["Remote"]

logger = logging.getLogger(__name__)

RETRIED = (408, 429, 500, 502, 503, 504)
CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
MARGIN = 0.9
"""share of `timeout_s` in which the servers must answer, so that this message is told and not the runner's."""


class Unreachable(Exception):
    """No replica answered a request in time."""


def _split(url: str) -> tuple[str, str | None]:
    """Base address and the reward's name, the last part of the path; `/score` is understood too."""
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise UserError(f"{url!r} is no address of a reward server; give http://HOST:PORT or http://HOST:PORT/REWARD.")
    head, _, last = parts.path.rstrip("/").rpartition("/")
    name = last if last and last != "score" else None
    return f"{parts.scheme}://{parts.netloc}{head}", name


@register_reward("remote")
class Remote(Reward):
    """Scores on a server. Details: those that the server sends."""

    def __init__(
        self,
        *,
        url: str | Sequence[str],
        reward: str | None = None,
        timeout_s: float | None = 120.0,
        rows_per_request: int = 16,
        connections: int = 8,
        attempts: int = 30,
        attempt_s: float | None = None,
        encoding: Literal["png", "raw"] = "png",
        columns: Sequence[str] | None = None,
        whole_groups: bool = False,
        token_env: str = "VISUAL_GRPO_REWARD_TOKEN",
    ) -> None:
        """Name the servers; no connection is made before the first call.

        Args:
            url: http://HOST:PORT or http://HOST:PORT/REWARD; several are replicas of each other and share the work.
            reward: its name on the server; None: the one in the URL, or the server's only one.
            timeout_s: wall-clock limit of a call with all its attempts; a run's `timeout_s` unless given. None: an hour.
            rows_per_request, connections: a call is cut into requests, so many of which are sent at a time.
            attempts: rounds over all replicas before the deadline.
            attempt_s: limit of one attempt; None: the call's limit, shared out among the replicas.
            encoding: of images: "png" (8 bits, as almost every scorer reads them) or "raw" (float32).
            columns: metadata columns to send; None: all.
            whole_groups: the server's reward compares the samples of a prompt.
            token_env: environment variable with the server's token; unset: none is sent.
        """
        addresses = [url] if isinstance(url, str) else list(url)
        if not addresses or not all(isinstance(address, str) for address in addresses):
            raise UserError(f"remote: url is {url!r}; give http://HOST:PORT, or a list of them.")
        if encoding not in ("png", "raw"):
            raise UserError(f"remote: encoding is {encoding!r}; give png or raw.")
        for key, value in {"rows_per_request": rows_per_request, "connections": connections, "attempts": attempts,
                           "timeout_s": timeout_s or 1, "attempt_s": attempt_s or 1}.items():  # fmt: skip
            if value <= 0:
                raise UserError(f"remote: {key} is {value}; give a number above 0.")
        split = [_split(address) for address in addresses]
        names = {name for _, name in split if name is not None}
        if reward is None and len(names) > 1:
            raise UserError(
                f"remote: the URLs name different rewards ({', '.join(sorted(names))}); replicas serve one."
            )
        self.urls = list(dict.fromkeys(base for base, _ in split))
        self.reward = reward if reward is not None else next(iter(names), None)
        self.limit_s = MARGIN * timeout_s if timeout_s is not None else 3600.0
        self.attempt_s = attempt_s if attempt_s is not None else max(self.limit_s / len(self.urls), 1.0)
        self.rows_per_request, self.connections, self.attempts = rows_per_request, connections, attempts
        self.encoding, self.columns, self.token_env = encoding, columns, token_env
        self.whole_groups = whole_groups  # type: ignore[misc]  # declared on the class elsewhere
        self._turn = itertools.count()
        self._down: dict[str, float] = {}
        self._client: Any = None
        self._workers: DaemonWorkers | None = None
        self._lock = threading.Lock()

    def __call__(self, request: RewardRequest) -> RewardOutput:
        deadline = time.monotonic() + self.limit_s
        rows = self._sound_rows(request)
        size = len(request) if self.whole_groups else self.rows_per_request
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        client, workers = self._connect()
        ask = functools.partial(self._ask, client, deadline=deadline)
        sent = [(chunk, workers.submit(functools.partial(ask, request.take(chunk)))) for chunk in chunks]
        values = torch.full((len(request),), math.nan)
        status = torch.full((len(request),), int(RewardStatus.FAILED), dtype=torch.int8)
        details: dict[str, torch.Tensor] = {}
        problems: list[Exception] = []
        messages: dict[int, str] = {}
        for chunk, future in sent:
            try:
                output, errors = future.result()
            except Unreachable as error:
                problems.append(error)
                continue
            at = torch.tensor(chunk)
            values[at], status[at] = output.values, output.status
            for key, figure in output.details.items():
                details.setdefault(key, torch.full((len(request),), math.nan))[at] = figure
            messages |= {chunk[row]: message for row, message in errors.items() if row < len(chunk)}
        if problems and len(problems) == len(sent):
            raise RewardError(f"reward server{'s' if len(self.urls) > 1 else ''} gone: {problems[0]}")
        if problems:
            logger.warning("%d of %d requests to reward servers failed: %s", len(problems), len(sent), problems[0])
        if messages and bool((status == RewardStatus.FAILED).all()):
            raise RuntimeError(f"on the reward server: {next(iter(messages.values()))}")
        if messages:
            row, message = next(iter(messages.items()))
            logger.warning("%d rows failed on the reward server; row %d: %s", len(messages), row, message)
        return RewardOutput(values=values, status=status, details=details)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            if self._workers is not None:
                self._workers.close()
                self._workers = None

    @staticmethod
    def _sound_rows(request: RewardRequest) -> list[int]:
        """Rows that can be sent: an image of NaN pixels has no score."""
        if request.images is None:
            return list(range(len(request)))
        rows: list[int] = torch.isfinite(request.images).flatten(1).all(1).nonzero().flatten().tolist()
        return rows

    def _connect(self) -> tuple[Any, DaemonWorkers]:
        try:
            import httpx
        except ImportError as error:
            raise UserError("rewards on a server need the package httpx: pip install 'visual-grpo[serve]'") from error
        with self._lock:
            if self._client is None:
                limits = httpx.Limits(max_connections=self.connections + 2)
                # Proxies of the environment are for the internet; reward servers stand beside the run.
                self._client = httpx.Client(limits=limits, trust_env=False)
            if self._workers is None:
                self._workers = DaemonWorkers("remote", self.connections)
            return self._client, self._workers

    def _body(self, request: RewardRequest, id: str) -> bytes:
        message = encode_request(
            request,
            id=id,
            reward=self.reward,
            encoding=self.encoding,
            columns=self.columns,
            whole_groups=self.whole_groups,
        )
        try:
            return json.dumps(message).encode("utf-8", "replace")
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the metadata or columns of a row cannot be sent as JSON ({error}); name those that the reward reads in "
                f"params.columns."
            ) from None

    def _ask(self, client: Any, request: RewardRequest, deadline: float) -> tuple[RewardOutput, dict[int, str]]:
        """Get one request answered by any replica.

        Raises:
            Unreachable: none did before the deadline.
            RewardError: a server refused it, which another attempt would not change.
        """
        id = uuid.uuid4().hex
        body = self._body(request, id)
        failures: dict[str, str] = {}
        pause = FIRST_PAUSE
        for _ in range(self.attempts):
            for url in self._order():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    return self._attempt(client, url, body, id, len(request), min(left, self.attempt_s))
                except (Unreachable, WireError) as error:
                    failures[url] = str(error)
                    self._down[url] = time.monotonic() + LONGEST_PAUSE
            left = deadline - time.monotonic()
            if left <= pause:
                break
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)
        late = deadline - time.monotonic() <= pause
        within = f"within {self.limit_s:g} s" if late else f"in {self.attempts} rounds"
        told = "; ".join(f"{url}: {failures[url]}" for url in self.urls if url in failures) or "no attempt was possible"
        raise Unreachable(
            f"no answer {within} ({told}). Start the server again and go on with --resume, or raise "
            f"timeout_s of the reward"
        )

    def _order(self) -> list[str]:
        """Replicas in turn, those that failed lately last."""
        shift = next(self._turn) % len(self.urls)
        turned = self.urls[shift:] + self.urls[:shift]
        now = time.monotonic()
        return sorted(turned, key=lambda url: self._down.get(url, 0.0) > now)

    def _attempt(
        self, client: Any, url: str, body: bytes, id: str, rows: int, limit: float
    ) -> tuple[RewardOutput, dict[int, str]]:
        import httpx

        headers = {"content-type": "application/json"}
        if token := os.environ.get(self.token_env):
            headers["authorization"] = f"Bearer {token}"
        timeout = httpx.Timeout(limit, connect=min(limit, CONNECT_SECONDS))
        try:
            response = client.post(f"{url}/score", content=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unreachable(f"{type(error).__name__}: {error}"[:200]) from None
        if response.status_code in RETRIED:
            raise Unreachable(f"status {response.status_code}, {_told(response)}")
        if response.status_code != 200:
            raise RewardError(
                f"the reward server {url} refused a request (status {response.status_code}): {_told(response)}"
            )
        self._down.pop(url, None)
        answer: ScoreAnswer = ScoreAnswer.read(response.content)
        if self.reward is not None and answer.reward != self.reward:
            raise WireError(f"it answered for reward {answer.reward!r}, not {self.reward!r}")
        return decode_output(answer, id=id, rows=rows), answer.errors


def _told(response: Any) -> str:
    try:
        return str(response.json()["error"])[:500]
    except (ValueError, KeyError, TypeError):
        return str(response.text)[:200]
