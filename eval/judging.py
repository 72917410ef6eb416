"""Judges: a language or vision-language model behind one call, asked many questions, resumable and in order.

A judge is a model of `visual_grpo.rewards.judge` (judge=URL or vlm), or any callable `judge(prompt, image=None) -> str` (the
image is RGB, `PIL.Image`); it should answer the same question the same way (temperature 0). What it said is kept in a file by a
key of the question, so an interrupted evaluation asks only what is missing, and nothing depends on the order or the number of
workers. An answer that cannot be read is asked for again a bounded number of times and then counts as failed: never as a score.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from PIL import Image

from visual_grpo.errors import RunError, UserError
from visual_grpo.json_lines import read_jsonl
from visual_grpo.pictures import to_rgb
from visual_grpo.rewards.vqa_models import VlmJudge, build_judge, judge_name
from visual_grpo.run_folder import write_atomic

__all__ = ["Answers", "Judge", "Question", "ask", "load_judge", "parse_json", "track"]

T = TypeVar("T")
MAX_NEW_TOKENS = 2048
"""Default of a model's reply: the units of a long caption as JSON."""


class Judge(Protocol):
    """Answers one question; called from several threads at a time."""

    def __call__(self, prompt: str, image: Image.Image | None = None) -> str:
        """Return the model's text."""


@dataclass(frozen=True, kw_only=True)
class Question(Generic[T]):
    """One question and how its answer is read."""

    prompt: str
    read: Callable[[str], T]
    """raises ValueError where the answer cannot be read."""
    image: Path | None = None

    def key(self, judge: str) -> str:
        """Changes with everything that the answer depends on."""
        content = [judge, self.prompt, None if self.image is None else _digest(self.image)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def load_judge(
    given: Any, judge_model: str | None = None, judge_options: Mapping[str, Any] | None = None
) -> Judge | VlmJudge:
    """The judge of texts that the options of `build_judge` name: a model, or a callable.

    Raises:
        UserError: nothing given, or what is given cannot be called.
    """
    if given is None:
        raise UserError(
            "this protocol needs a judge: judge=http://HOST:8000/v1 judge_model=NAME, judge=vlm judge_model=HUB_ID, or "
            "judge=package.module:function, called with (prompt, image) and returning a text"
        )
    judge: Judge | VlmJudge = build_judge(given, judge_model, judge_options, max_new_tokens=MAX_NEW_TOKENS)
    if not callable(judge):
        raise UserError(
            f"judge {given!r} is {type(judge).__name__}, which cannot be called with a prompt and an image."
        )
    return judge


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Go through `items` with a progress bar on stderr, so that what a command prints stays clean."""
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=description, total=total, console=Console(stderr=True), disable=total == 0)


class Answers:
    """JSON lines of {"key", ...}; appended and flushed one by one. A line that was cut off by a kill is dropped."""

    def __init__(self, path: Path | None) -> None:
        """Read what is there; None keeps nothing on disk."""
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            records = read_jsonl(path, torn_end=True)
            self._found = {str(record["key"]): record for record in records if "key" in record}
            if not path.read_bytes().endswith(b"\n"):
                write_atomic(path, "".join(json.dumps(record) + "\n" for record in self._found.values()))

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under `key`."""
        return self._found.get(key)

    def put(self, key: str, **record: Any) -> None:
        """Keep a record."""
        self._found[key] = {"key": key, **record}
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._found[key]) + "\n")


def ask(
    judge: Any,
    questions: Sequence[Question[T]],
    *,
    name: str | None = None,
    answers: Answers | None = None,
    workers: int = 8,
    retries: int = 2,
    description: str = "judging",
) -> list[T | None]:
    """Ask every question once, in parallel; equal questions share one answer.

    Args:
        judge: see `load_judge`.
        questions: all with an image or all without.
        name: of the judge in the keys of its answers.
        answers: what is known already, and where answers are kept.
        workers: questions under way; a model in this process reads its `batch_size` at a time instead.
        retries: of a question whose answer could not be had or read; a model in this process would only repeat itself.
        description: of the progress bar.

    Returns:
        What was read of each answer, in order; None where the judge failed or could not be read.

    Raises:
        RunError: the judge failed on every question, or an endpoint could not be reached.
        UserError: numbers out of range.
    """
    if workers < 1 or retries < 0:
        raise UserError(
            f"workers is {workers} and retries {retries}; give workers of 1 or more, and retries of 0 or more."
        )
    call = load_judge(judge)
    name = name or judge_name(judge, call)
    store = answers or Answers(None)
    keys = [question.key(name) for question in questions]
    missing = {k: q for k, q in zip(keys, questions, strict=True) if store.get(k) is None}
    size = 1
    if isinstance(call, VlmJudge) and call.settings.endpoint is None:
        size, workers, retries = call.settings.batch_size, 1, 0
    errors: list[str] = []

    items = list(missing.items())
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    with ThreadPoolExecutor(workers) as pool:
        try:
            rounds = pool.map(lambda part: _attempts(call, part, retries + 1), parts)
            for said, failed in track(rounds, description, len(parts)):
                errors += failed.values()  # not kept: the next run asks again
                for key, text in said.items():
                    store.put(key, answer=text)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    found = [store.get(key) for key in keys]
    if questions and all(record is None for record in found):
        raise RunError(f"judge {name!r} failed on all of {len(questions)} questions; the first: {errors[0]}")
    return [None if r is None else q.read(r["answer"]) for r, q in zip(found, questions, strict=True)]


def _attempts(
    judge: Judge | VlmJudge, part: Sequence[tuple[str, Question[T]]], most: int
) -> tuple[dict[str, str], dict[str, str]]:
    """(reply by key, reason by key of what could not be had or read in `most` attempts)."""
    said: dict[str, str] = {}
    failed = dict.fromkeys((key for key, _ in part), "")
    for _ in range(most):
        left = [(key, question) for key, question in part if key in failed]
        for (key, question), reply in zip(left, _replies(judge, [q for _, q in left]), strict=True):
            try:
                if isinstance(reply, Exception):
                    raise reply
                question.read(reply)
            except (UserError, RunError):
                raise
            except Exception as raised:  # a judge may raise anything
                failed[key] = f"{type(raised).__name__}: {raised}"
            else:
                said[key] = reply
                del failed[key]
        if not failed:
            break
    return said, failed


def _replies(judge: Judge | VlmJudge, questions: Sequence[Question[T]]) -> list[str | Exception]:
    images = [_open(question.image) for question in questions]
    if isinstance(judge, VlmJudge):
        return list(judge.replies([question.prompt for question in questions], images))
    found: list[str | Exception] = []
    for question, image in zip(questions, images, strict=True):
        try:
            found.append(judge(question.prompt, image))
        except Exception as raised:  # told apart where it is read
            found.append(raised)
    return found


def _open(path: Path | None) -> Image.Image | None:
    if path is None:
        return None
    try:
        with Image.open(path) as opened:
            return to_rgb(opened)
    except Exception as error:  # Pillow's formats raise SyntaxError, ValueError, struct.error and more
        raise UserError(f"cannot read the image {str(path)!r}: {error}.") from error


def _digest(image: Path) -> str:
    """Another picture under the same name is another question."""
    try:
        return hashlib.sha256(image.read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise UserError(f"cannot read the image {str(image)!r}: {error.strerror or error}.") from error


def parse_json(text: str) -> Any:
    """The first JSON list or object of an answer, with or without a fence or words around it.

    >>> parse_json('Sure:\\n```json\\n[1, null]\\n```')
    [1, None]
    """
    decoder = json.JSONDecoder()
    for start, character in enumerate(text):
        if character in "[{":
            try:
                return decoder.raw_decode(text, start)[0]
            except (ValueError, RecursionError):  # also a number of too many digits
                continue
    raise ValueError(f"no JSON in {text[:80]!r}")
