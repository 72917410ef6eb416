"""What rewards that ask a model have in common: questions, settings, stored prompts, replies and their failures.

A judge is a model of transformers in this process (`judge_local`) or behind an OpenAI-compatible endpoint (`judge_endpoint`:
vLLM, SGLang, ...). It decodes greedily. A reply that cannot be read, or that never came, makes its row failed (NaN), never a
low score: a policy would learn to break the parser.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Protocol

from PIL import Image

from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.option_types import check_types
from visual_grpo.pictures import to_rgb
from visual_grpo.reward import Reward, RewardError, RewardRequest

__all__ = ["Failure", "Judge", "JudgeReward", "JudgeSettings", "LazyJudge", "Question", "Scale", "render", "row_image"]

logger = logging.getLogger(__name__)

NUMBERS = ("timeout_s", "concurrency", "batch_size", "max_new_tokens", "top_logprobs", "retries", "retry_wait_s")
_FIELD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One user message."""

    text: str
    images: tuple[Image.Image, ...] = ()
    prefix: str = ""
    """beginning of the reply, which the model goes on with."""


@dataclass(frozen=True)
class Failure:
    """A question without a usable reply."""

    reason: str
    transport: bool = False
    """the judge could not be reached or broke down, as against a reply that makes no sense."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How a judge is reached and run; each field may be given among the parameters of a judge reward.

    Evaluations have `judge`, `judge_model` and `judge_options` for them (docs/evaluation.md).
    """

    model: str
    """hub id or folder; with an endpoint the name under which it is served there."""
    endpoint: str | None = None
    """base URL such as http://host:8000/v1; None: the model is loaded here."""
    prompt_file: str | None = None
    """text file in place of the stored prompt, with the same {fields}; trained judges need the wording of their training."""
    device: Any = None
    """of a local model; None: CUDA if there is one, else the CPU."""
    dtype: str | None = None
    """of a local model; None: bfloat16 on CUDA, float32 on the CPU. Probabilities are computed in float64."""
    batch_size: int = 8
    """questions that a local model reads at a time."""
    trust_remote_code: bool = False
    max_new_tokens: int = 512
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """further variables of the chat template, such as {enable_thinking: false}."""
    api_key_env: str | None = None
    """environment variable with the endpoint's key; the key itself never stands in a config."""
    timeout_s: float = 30.0
    """wall-clock limit of one request to the endpoint."""
    retries: int = 2
    """further tries of a request that timed out, was refused or met a server error."""
    retry_wait_s: float = 0.5
    """wait before the first of them, doubled each time, at most 10 s."""
    concurrency: int = 16
    """requests under way at a time."""
    top_logprobs: int = 20
    """first tokens whose probabilities the endpoint is asked for; words beyond them count as 0."""

    @classmethod
    def read(cls, name: str, given: Mapping[str, Any]) -> JudgeSettings:
        """Settings from parameters by name; None stands for the default.

        Args:
            name: of the reward or the option, in messages.
            given: the parameters.

        Raises:
            UserError: an unknown parameter, or a value out of range.
        """
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                raise UserError(
                    f"{name}: no parameter {key!r}.{did_you_mean(str(key), known)} Of the judge: {', '.join(known)}."
                )
        stated = {key: value for key, value in given.items() if value is not None}
        check_types(cls, {k: v for k, v in stated.items() if k not in NUMBERS}, name)
        made = cls(**stated).check(name)
        check_types(cls, stated, name)  # after the ranges: whole numbers, and no truth values among them
        return made

    def check(self, name: str) -> JudgeSettings:
        """Refuse values out of range; `name` is the reward's."""
        positive = ("timeout_s", "concurrency", "batch_size", "max_new_tokens", "top_logprobs")
        limits = {key: getattr(self, key) for key in NUMBERS}
        wrong = {
            key: value
            for key, value in limits.items()
            if not isinstance(value, (int, float)) or value < 0 or (value == 0 and key in positive)
        }
        if wrong:
            raise UserError(f"{name}: {wrong} must be numbers above 0 (retries and retry_wait_s: 0 or more).")
        if self.dtype not in (None, "float32", "float16", "bfloat16"):
            raise UserError(f"{name}: dtype is {self.dtype!r}; give float32, float16 or bfloat16.")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise UserError(f"{name}: endpoint is {self.endpoint!r}; give a URL such as http://localhost:8000/v1.")
        return self


class Judge(Protocol):
    """A model that is asked; replies come in the order of the questions."""

    def generate(self, questions: Sequence[Question]) -> list[str | Failure]:
        """Reply to each question, greedily."""

    def first_words(self, questions: Sequence[Question], words: Sequence[Sequence[str]]) -> list[list[float] | Failure]:
        """For each question and each of `words`, a tuple of spellings: log-probability that the reply's first token is one."""

    def close(self) -> None:
        """Let go of models and connections."""


class LazyJudge:
    """The judge of some settings: the model is loaded, or the client made, at the first question; safe to share by threads."""

    def __init__(self, settings: JudgeSettings, name: str) -> None:
        """Keep the settings; `name` stands in messages."""
        self.settings, self.name = settings, name
        self._judge: Judge | None = None
        self._lock = threading.Lock()

    def _opened(self) -> Judge:
        with self._lock:
            if self._judge is None:
                if self.settings.endpoint is not None:
                    from visual_grpo.rewards.judge_endpoint import EndpointJudge

                    self._judge = EndpointJudge(self.settings, self.name)
                else:
                    from visual_grpo.rewards.judge_local import LocalJudge

                    self._judge = LocalJudge(self.settings, self.name)
            return self._judge

    def generate(self, questions: Sequence[Question]) -> list[str | Failure]:
        """See `Judge`."""
        return self._opened().generate(questions)

    def first_words(self, questions: Sequence[Question], words: Sequence[Sequence[str]]) -> list[list[float] | Failure]:
        """See `Judge`."""
        return self._opened().first_words(questions, words)

    def close(self) -> None:
        """Let go of the model or the connections; the next question takes them up again."""
        with self._lock:
            if self._judge is not None:
                self._judge.close()
                self._judge = None


def render(template: str, **values: str) -> str:
    """Fill the {fields} of a template; braces inside a value are left alone.

    >>> render("Is it {prompt}? {x}", prompt="a {x}")
    'Is it a {x}? {x}'
    """
    filled = _FIELD.sub(lambda found: values.get(found[1], found[0]), template)
    return filled.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse half a surrogate pair


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a mark is read from a reply."""

    pattern: str
    """regular expression whose first group is the mark."""
    low: float
    high: float
    last: bool = False
    """the last match counts and not the first."""
    zero_based: bool = False
    """value (mark - low) / (high - low) and not mark / high."""

    def read(self, reply: str) -> float | Failure:
        """The value, in [0, 1].

        >>> Scale(pattern=r"Score: ([0-9.]+)", low=1, high=5).read("Score: 4")
        0.8
        """
        found = re.findall(self.pattern, reply)
        mark = found[-1 if self.last else 0] if found else ""
        try:
            number = float(mark[0] if isinstance(mark, tuple) else mark)
        except ValueError:
            return Failure(f"no mark in the reply {_excerpt(reply)}")
        if not self.low <= number <= self.high:
            return Failure(f"mark {number:g} is outside {self.low:g}..{self.high:g} in the reply {_excerpt(reply)}")
        return (number - self.low) / (self.high - self.low) if self.zero_based else number / self.high


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 160 else text[:80] + " ... " + text[-75:])


def row_image(request: RewardRequest, row: int, key: str) -> Image.Image:
    """Image of a row: the generated one, else that of metadata column `key` (PIL, path, or {"bytes", "path"} of `datasets`)."""
    if request.images is not None:
        return request.pil_images[row]
    given = request.metadata[row].get(key)
    if isinstance(given, (list, tuple)) and given:
        given = given[0]
    if isinstance(given, Mapping):
        given = BytesIO(given["bytes"]) if given.get("bytes") else given.get("path")
    if isinstance(given, Image.Image):
        return to_rgb(given)
    if not isinstance(given, (str, Path, BytesIO)):
        raise RewardError(
            f"row {row} has no image: the request holds none, and metadata column {key!r} holds {type(given).__name__}; give a "
            f"PIL image or a path there, or set image_key."
        )
    with Image.open(given) as image:
        return to_rgb(image)


class JudgeReward(Reward):
    """Base of the rewards that ask a judge; the model is loaded, or the endpoint called, at the first use."""

    rows_per_call = 16  # one round of requests at the default concurrency
    label: ClassVar[str] = "judge"
    """name in messages."""
    default_model: ClassVar[str] = "Qwen/Qwen2.5-VL-7B-Instruct"
    prompt_name: ClassVar[str] = ""
    """file of the stored prompt in rewards/prompts, without .txt."""
    prompt_fields: ClassVar[tuple[str, ...]] = ()
    """{fields} that a prompt must hold."""

    def __init__(self, *, device: Any = None, prompt_name: str | None = None, **judge: Any) -> None:
        """Read the settings.

        Args:
            device: of a local model.
            prompt_name: stored prompt in place of the class's own.
            judge: fields of `JudgeSettings`.
        """
        name = self.label
        judge = {"model": self.default_model, **{key: value for key, value in judge.items() if value is not None}}
        self.settings = JudgeSettings.read(name, {"device": device, **judge})
        self.template = self._template(prompt_name or self.prompt_name)
        self.judge: Judge = LazyJudge(self.settings, name)

    def _template(self, stored: str) -> str:
        if self.settings.prompt_file is not None:
            try:
                text = Path(self.settings.prompt_file).read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{self.label}: prompt_file cannot be read: {error}.") from error
        else:
            text = (resources.files("visual_grpo.rewards") / "prompts" / f"{stored}.txt").read_text(encoding="utf-8")
        missing = [key for key in self.prompt_fields if f"{{{key}}}" not in text]
        if missing:
            raise UserError(
                f"{self.label}: the prompt file has no {', '.join(f'{{{key}}}' for key in missing)}; put it in."
            )
        return text.strip()

    def close(self) -> None:
        """Let go of the model or the connections; the next call takes them up again."""
        self.judge.close()

    def report(self, failures: Sequence[Failure], count: int) -> None:
        """Log why questions of a call failed.

        Raises:
            RuntimeError: the judge could not be reached for any of the `count` questions.
        """
        if not failures:
            return
        transport = [failure for failure in failures if failure.transport]
        if len(transport) == count:
            raise RuntimeError(transport[0].reason)
        first = (transport or list(failures))[0]
        logger.warning(
            "%s: %d of %d questions have no usable reply; %s", self.label, len(failures), count, first.reason
        )

    def marks(self, questions: Sequence[Question], scale: Scale) -> list[float]:
        """Ask and read one mark a question; NaN where there is none."""
        replies = self.judge.generate(questions)
        read = [reply if isinstance(reply, Failure) else scale.read(reply) for reply in replies]
        self.report([value for value in read if isinstance(value, Failure)], len(read))
        return [float("nan") if isinstance(value, Failure) else value for value in read]
