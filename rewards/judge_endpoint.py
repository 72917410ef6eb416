"""A judge behind an OpenAI-compatible endpoint (POST {endpoint}/chat/completions), with time limits and bounded retries."""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any, TypeVar

from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.rewards.judge import Failure, JudgeSettings, Question

__all__ = ["EndpointJudge"]

MAX_BYTES = 32 * 2**20
"""Longest answer that is read."""
MAX_WAIT_S = 10.0
ROUNDING = 1e-3
"""How far a server's log-probability may pass 0."""

T = TypeVar("T")


class _TryAgainError(Exception):
    """A request that may succeed later."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class EndpointJudge:
    """Client of one endpoint; requests run side by side, replies keep the order of the questions."""

    def __init__(self, settings: JudgeSettings, name: str) -> None:
        """Make the client; nothing is sent yet.

        Raises:
            UserError: httpx is missing, or the variable of the key is not set.
        """
        try:
            import httpx
        except ImportError as error:
            raise UserError(
                f"{name}: an endpoint needs the package httpx; install it with: pip install 'visual-grpo[serve]'"
            ) from error
        headers = {}
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise UserError(
                    f"{name}: api_key_env names {settings.api_key_env!r}, which is not set in the environment."
                )
            headers["Authorization"] = f"Bearer {key}"
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line a request
        assert settings.endpoint is not None
        self.settings, self.name = settings, name
        self.url = f"{settings.endpoint.rstrip('/')}/chat/completions"
        self._transport_error = httpx.HTTPError  # also a body that is compressed wrongly
        self._client = httpx.Client(
            headers=headers,
            timeout=settings.timeout_s,
            limits=httpx.Limits(max_connections=settings.concurrency),
        )
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix=f"{name}-judge")
        self._closing = threading.Event()

    def generate(self, questions: Sequence[Question]) -> list[str | Failure]:
        """Reply to each question."""
        return self._ask_all(questions, {"max_tokens": self.settings.max_new_tokens}, _content)

    def first_words(self, questions: Sequence[Question], words: Sequence[Sequence[str]]) -> list[list[float] | Failure]:
        """Log-probabilities of first words, see `Judge`; -inf for a word that is not among the `top_logprobs` most likely."""

        def read(choice: dict[str, Any]) -> list[float]:
            top = choice["logprobs"]["content"][0]["top_logprobs"]
            # A text may stand there twice, as two tokens: each of its probabilities counts.
            found = [(str(entry["token"]), float(entry["logprob"])) for entry in top]
            if any(not value <= ROUNDING for _, value in found):
                raise ValueError("a log-probability is NaN or above 0")
            return [_log_sum([p for token, p in found if token in set(spellings)]) for spellings in words]

        options = {"max_tokens": 1, "logprobs": True, "top_logprobs": self.settings.top_logprobs}
        return self._ask_all(questions, options, read)

    def close(self) -> None:
        """Close the connections; requests under way are not waited for."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _ask_all(
        self, questions: Sequence[Question], options: dict[str, Any], read: Callable[[dict[str, Any]], T]
    ) -> list[T | Failure]:
        return list(self._pool.map(lambda question: self._ask(question, options, read), questions))

    def _ask(self, question: Question, options: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T | Failure:
        body = json.dumps(self._body(question, options)).encode()
        wait = self.settings.retry_wait_s
        for attempt in range(self.settings.retries + 1):
            try:
                return self._post(body, read)
            except _TryAgainError as error:
                reason = f"{self.url}: {error}, {attempt + 1} tries"
                if attempt < self.settings.retries:
                    self._closing.wait(min(max(wait, error.wait_s), MAX_WAIT_S))
                    wait *= 2
        return Failure(reason, transport=True)

    def _body(self, question: Question, options: dict[str, Any]) -> dict[str, Any]:
        content: Any = question.text
        if question.images:
            content = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in question.images]
            content.append({"type": "text", "text": question.text})
        messages = [{"role": "user", "content": content}]
        body = {"model": self.settings.model, "messages": messages, "temperature": 0, **options}
        if question.prefix:
            messages.append({"role": "assistant", "content": question.prefix})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.settings.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.settings.chat_template_kwargs)
        return body

    def _post(self, body: bytes, read: Callable[[dict[str, Any]], T]) -> T | Failure:
        deadline = time.monotonic() + self.settings.timeout_s
        try:
            headers = {"Content-Type": "application/json"}
            with self._client.stream("POST", self.url, content=body, headers=headers) as response:
                # The client's own limit is one of each read; a server that drips must not hold a row for ever.
                answer = bytearray()
                for part in response.iter_bytes():
                    answer += part
                    if time.monotonic() > deadline or len(answer) > MAX_BYTES:
                        raise _TryAgainError(
                            f"the answer was not complete within {self.settings.timeout_s:g} s or too long"
                        )
                status, after = response.status_code, response.headers.get("retry-after", "")
        except self._transport_error as error:
            raise _TryAgainError(f"{type(error).__name__} ({error or 'no answer'})") from error
        text = answer[:300].decode("utf-8", "replace")
        if status in (401, 403, 404):
            hint = "set api_key_env" if status != 404 else "check endpoint (it mostly ends in /v1) and model"
            raise UserError(
                f"{self.name}: {self.url} answered {status} for model {self.settings.model!r}: {text!r}; {hint}."
            )
        if status in (408, 409, 425, 429) or status >= 500:
            raise _TryAgainError(
                f"status {status}: {text!r}", float(after) if after.isascii() and after.isdigit() else 0.0
            )
        if status != 200:
            return Failure(f"{self.url}: status {status}: {text!r}")
        try:
            return read(json.loads(answer)["choices"][0])
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
            raise _TryAgainError(f"the answer is no chat completion with what was asked for: {text!r}") from error


def _content(choice: dict[str, Any]) -> str:
    content = choice["message"]["content"]
    return content if isinstance(content, str) else ""


def _log_sum(values: Sequence[float]) -> float:
    top = max(values, default=-math.inf)
    return top if top == -math.inf else top + math.log(sum(math.exp(value - top) for value in values))


def _data_url(image: Image.Image) -> str:
    """PNG, since a lossy format would change the score."""
    buffer = BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
