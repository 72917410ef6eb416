"""The reward server: rewards of this package, or of anybody's, behind HTTP (`visual-grpo serve-rewards`).

Imports neither transformers nor any other model library, so that it also runs in an environment of a reward's own
(docs/reward_server.md). The form of the messages is in `reward_wire`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from visual_grpo import __version__
from visual_grpo.errors import RunError, UserError
from visual_grpo.reward_batcher import Batcher
from visual_grpo.reward_runner import RewardRunner, RewardSpec, device_of
from visual_grpo.reward_wire import ScoreRequest, WireError, decode_request, encode_output

__all__ = ["RewardService", "ServerLimits", "build_app", "serve"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a client may ask for."""

    body_mb: int = 64
    rows: int = 1024
    """of one request."""
    pixels: int = 1 << 26
    """of one request's images together; a pixel takes 12 bytes."""
    waiting: int = 256
    """requests in the queue of a reward; more are told to come back (503)."""
    read_s: float = 60.0
    """for a request's body to arrive."""
    batch_rows: int = 64
    batch_wait_ms: float = 2.0


class Refusal(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RewardService:
    """The rewards of a server and their queues; knows nothing of HTTP but the status of a refusal."""

    def __init__(self, rewards: Mapping[str, Any], *, device: str = "cpu", limits: ServerLimits | None = None) -> None:
        """Build the rewards; engines load at the first request.

        Raises:
            UserError: an unknown name or a wrong parameter.
        """
        specs = [RewardSpec.parse(name, given) for name, given in rewards.items()]
        if not specs:
            raise UserError("serve-rewards needs at least one reward; `visual-grpo list rewards` prints the names.")
        self.limits = limits or ServerLimits()
        self.runners = {spec.name: RewardRunner(spec, device_of(device)) for spec in specs}
        self.batchers: dict[str, Batcher] = {}
        self.refused = 0
        self.bytes_held = 0

    def start(self) -> None:
        """Start the queues; needs a running event loop."""
        wait_s = self.limits.batch_wait_ms / 1000
        self.batchers = {
            name: Batcher(runner, max_rows=self.limits.batch_rows, wait_s=wait_s)
            for name, runner in self.runners.items()
        }

    async def close(self) -> None:
        """End the queues."""
        for batcher in self.batchers.values():
            await batcher.close()

    async def score(self, body: bytes) -> dict[str, Any]:
        """Answer one request.

        Raises:
            Refusal: with a status and a message for the client.
        """
        try:
            # Decoding takes a processor's time, which must not hold up the others.
            message: ScoreRequest = await asyncio.to_thread(ScoreRequest.read, body)
            runner = self._chosen(message)
            limits = self.limits
            request = await asyncio.to_thread(decode_request, message, max_rows=limits.rows, max_pixels=limits.pixels)
        except WireError as error:
            raise Refusal(400, str(error)) from None
        name = runner.spec.name
        for part in sorted(runner.reward.needs):
            if getattr(request, part) is None:
                raise Refusal(422, f"reward {name!r} reads {part}, but the request has none")
        if len(self.batchers[name].waiting) >= self.limits.waiting:
            raise Refusal(503, f"reward {name!r} has {self.limits.waiting} requests waiting; come back later")
        try:
            output, errors = await self.batchers[name].score(request)
        except (UserError, RunError) as error:
            raise Refusal(422, str(error)) from None
        return encode_output(output, errors, id=message.id, reward=name)

    def _chosen(self, message: ScoreRequest) -> RewardRunner:
        known = ", ".join(self.runners)
        if message.reward is None and len(self.runners) > 1:
            raise Refusal(422, f"this server has several rewards; name one of {known} (the last part of the URL)")
        name = message.reward if message.reward is not None else next(iter(self.runners))
        if name not in self.runners:
            raise Refusal(404, f"this server has no reward {name[:100]!r}; it has {known}")
        runner = self.runners[name]
        if runner.reward.whole_groups and not message.whole_groups:
            raise Refusal(422, f"reward {name!r} compares the samples of a prompt: set params.whole_groups: true")
        return runner

    def health(self) -> dict[str, Any]:
        """What the server has."""
        rows = [
            {"name": name, "needs": sorted(runner.reward.needs), "whole_groups": runner.reward.whole_groups}
            for name, runner in self.runners.items()
        ]
        return {"status": "ok", "version": __version__, "rewards": rows}

    def metrics(self) -> str:
        """Totals in the text form of Prometheus."""
        lines = ["# TYPE visual_grpo_refused_total counter", f"visual_grpo_refused_total {self.refused}"]
        for key in ("requests", "rows", "failed_rows", "batches", "seconds"):
            lines.append(f"# TYPE visual_grpo_reward_{key}_total counter")
            for name, batcher in self.batchers.items():
                value = getattr(batcher.counts, key)
                lines.append(f'visual_grpo_reward_{key}_total{{reward="{name}"}} {value}')
        lines.append("# TYPE visual_grpo_reward_waiting gauge")
        lines += [f'visual_grpo_reward_waiting{{reward="{n}"}} {len(b.waiting)}' for n, b in self.batchers.items()]
        return "\n".join(lines) + "\n"

    async def read_body(self, request: Any) -> bytes:
        """Read a bounded body.

        Raises:
            Refusal: too large, compressed, too slow, or the server holds too much already.
        """
        from starlette.requests import ClientDisconnect

        limit = self.limits.body_mb << 20
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "send the body as it is: compressed bodies are not unpacked")
        length = request.headers.get("content-length", "0")
        too_large = f"the body is larger than the server's limit of {self.limits.body_mb} MB; send fewer rows at a time"
        if not length.isdigit() or int(length) > limit:
            raise Refusal(413, too_large)
        body, held = bytearray(), 0
        try:
            async with asyncio.timeout(self.limits.read_s):
                async for part in request.stream():
                    held += len(part)
                    self.bytes_held += len(part)
                    if held > limit:
                        raise Refusal(413, too_large)
                    if self.bytes_held > 8 * limit:
                        raise Refusal(503, "the server is receiving too much at once; come back later")
                    body += part
        except ClientDisconnect:
            raise Refusal(400, "the client went away before its body had arrived") from None
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self.limits.read_s:g} s") from None
        finally:
            self.bytes_held -= held
        return bytes(body)


def build_app(service: RewardService, *, token: str | None = None) -> Any:
    """The web application; with `token`, /score and /metrics want it as `Authorization: Bearer TOKEN`."""
    from fastapi import FastAPI
    from fastapi.responses import PlainTextResponse, Response

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    def answer(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Any:
        text = json.dumps(content, allow_nan=False)
        return Response(text, status_code=status, media_type="application/json", headers=headers)

    def check_token(request: Any) -> None:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise Refusal(401, "the token is missing or wrong: set VISUAL_GRPO_REWARD_TOKEN to the server's")

    async def refuse(_: Any, error: Exception) -> Any:
        assert isinstance(error, Refusal)
        service.refused += 1
        # The rest of a refused body is never read, so the connection cannot be used again.
        headers = {"connection": "close"} if error.status in (401, 408, 413, 415) else {}
        return answer({"error": str(error)}, error.status, headers)

    async def score(request: Any) -> Any:
        check_token(request)  # before the body is read
        return answer(await service.score(await service.read_body(request)))

    async def health(_: Any) -> Any:
        return answer(service.health())

    async def metrics(request: Any) -> Any:
        check_token(request)
        return PlainTextResponse(service.metrics())

    app = FastAPI(
        lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, exception_handlers={Refusal: refuse}
    )
    app.add_route("/score", score, methods=["POST"])
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/metrics", metrics, methods=["GET"])
    return app


def serve(service: RewardService, *, host: str, port: int, token: str | None, announce: Any) -> None:
    """Serve until interrupted.

    Args:
        service: the rewards.
        host: address to listen on.
        port: 0 takes a free one.
        token: see `build_app`.
        announce: called with the URL when the port is open.

    Raises:
        UserError: the package is missing, or the port cannot be had.
    """
    try:
        import uvicorn

        app = build_app(service, token=token)
    except ImportError as error:
        raise UserError(
            f"serving rewards needs fastapi and uvicorn: pip install 'visual-grpo[serve]' ({error})"
        ) from None
    try:
        listener = socket.create_server(
            (host, port), backlog=2048, family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host."
        ) from None
    with listener:
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=10)
        announce(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        uvicorn.Server(config).run(sockets=[listener])
