"""Judges of evaluations: models that answer questions, found by name, URL or path.

`VlmJudge` is a chat model of `visual_grpo.rewards.judge`, in this process or behind an endpoint; `BlipJudge` is the one that
T2I-CompBench used. What a published figure was made with stands in the evaluation's docstring: figures of different judges never
share a table column.
"""

from __future__ import annotations

import inspect
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.errors import RunError, UserError
from visual_grpo.registry import load_object
from visual_grpo.rewards.judge import Failure, JudgeSettings, LazyJudge, Question
from visual_grpo.rewards.judge_local import word_ids
from visual_grpo.rewards.loading import load_weights

__all__ = ["BlipJudge", "Judge", "VlmJudge", "accepted_forms", "build_judge", "load_judge", "opened_judge"]

T = TypeVar("T")

JUDGES = {"testbed": "visual_grpo.testbed.judge:SceneJudge", "blip": "visual_grpo.rewards.vqa_models:BlipJudge"}
VLM = "Qwen/Qwen3-VL-8B-Instruct"
"""judge=vlm without judge_model; GenEval2's judge."""
MEANING = ("max_new_tokens", "chat_template_kwargs", "dtype", "top_logprobs")
"""settings on which answers depend: they are part of the judge's name."""
YES = ("Yes", "yes", " yes", " Yes")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Judge(Protocol):
    """Anything that answers questions about images."""

    def probability(
        self, images: Sequence[Image.Image], questions: Sequence[str], forms: Sequence[Sequence[str]]
    ) -> Tensor:
        """Probability [n] that the answer begins with a token of one of its accepted forms."""

    def answer(self, images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
        """Answers in words, greedy."""


def build_judge(
    given: Any,
    judge_model: str | None = None,
    judge_options: Mapping[str, Any] | None = None,
    *,
    max_new_tokens: int = 16,
) -> Any:
    """Return what the three options of an evaluation name.

    Args:
        given: a URL or "vlm" (a `VlmJudge`), a name of `JUDGES`, "package.module:Name", or an object, which is returned.
        judge_model: hub id or folder, or the name under which a URL serves it.
        judge_options: further fields of `JudgeSettings`; of another class the arguments that build it.
        max_new_tokens: default for a `VlmJudge`.

    Raises:
        UserError: there is no such judge, or it does not take these options.
    """
    if not isinstance(judge_options, (Mapping, type(None))):
        raise UserError(f"judge_options is {judge_options!r}; give a mapping such as '{{timeout_s: 120}}'.")
    options = dict(judge_options or {})
    at_url = isinstance(given, str) and given.startswith(("http://", "https://"))
    if at_url and judge_model is None:
        raise UserError(f"judge={given} needs judge_model=NAME, the name under which the model is served there.")
    if at_url or (isinstance(given, str) and given == "vlm"):
        for key in ("endpoint", "model", "prompt_file"):
            if key in options:
                raise UserError(f"judge_options takes no {key!r}: judge is the URL or vlm, and judge_model the model.")
        base = {"model": judge_model or VLM, "endpoint": given if at_url else None}
        # One question at a time by default: padding to another's length changes the last digits of a probability.
        defaults = {"max_new_tokens": max_new_tokens, "batch_size": 1}
        changed = {key: options[key] for key in MEANING if options.get(key) is not None}
        return VlmJudge(JudgeSettings.read("judge_options", {**defaults, **options, **base}), changed)
    found = load_object(JUDGES.get(given, given), "judge") if isinstance(given, str) else given
    if judge_model is not None:
        options["model"] = judge_model
    if inspect.isclass(found):
        try:
            return found(**options)
        except TypeError as error:
            raise UserError(f"the judge {found.__name__} cannot be built with {options}: {error}.") from error
    if options:
        raise UserError(f"judge_model and judge_options are for judge=URL, vlm, blip or a class, not for {given!r}.")
    return found


def load_judge(given: Any, judge_model: str | None = None, judge_options: Mapping[str, Any] | None = None) -> Judge:
    """The judge of images that the options of `build_judge` name.

    Raises:
        UserError: it is no judge.
    """
    found: Judge = build_judge(given, judge_model, judge_options)
    if not callable(getattr(found, "probability", None)) or not callable(getattr(found, "answer", None)):
        raise UserError(f"the judge {found!r} needs the methods probability(images, questions, forms) and answer(...).")
    return found


@contextmanager
def opened_judge(
    given: Any,
    judge_model: str | None = None,
    judge_options: Mapping[str, Any] | None = None,
    *,
    load: Callable[..., Any] = load_judge,
) -> Iterator[tuple[str, Any]]:
    """The judge and its name in summaries and stored answers; what was built here is closed at the end.

    Args:
        given, judge_model, judge_options: see `build_judge`.
        load: finds and checks the judge; that of `visual_grpo.eval.judging` for texts.
    """
    judge = load(given, judge_model, judge_options)
    name = judge_name(given if isinstance(given, str) else judge, judge)
    if not isinstance(judge, VlmJudge):
        options = {**({} if judge_model is None else {"model": judge_model}), **(judge_options or {})}
        name += f" {json.dumps(options, sort_keys=True, default=str)}" if options else ""
    try:
        yield name, judge
    finally:
        close = getattr(judge, "close", None)
        if judge is not given and callable(close):
            close()


def judge_name(given: Any, judge: Any = None) -> str:
    """What to call a judge: its own `name`, else the words it was given in, else those of its function or class."""
    own = getattr(given if judge is None else judge, "name", None)
    if isinstance(own, str):
        return own
    return given if isinstance(given, str) else str(getattr(given, "__qualname__", type(given).__qualname__))


def accepted_forms(question: str, answer: str) -> tuple[str, ...]:
    """Spellings of an answer whose first tokens count (GenEval2): a number's word and digits, else the forms of yes.

    >>> accepted_forms("How many cats are there?", "2")
    ('two', 'Two', ' two', ' Two', '2', ' 2')
    """
    if not question.lower().startswith("how many"):
        return YES
    text = answer.strip().lower()
    word = NUMBERS[int(text)] if text.isdigit() and int(text) < len(NUMBERS) else text
    digit = str(NUMBERS.index(word)) if word in NUMBERS else text
    capital = word.capitalize()
    return (word, capital, f" {word}", f" {capital}", digit, f" {digit}")


class BlipJudge:
    """BLIP-VQA (T2I-CompBench's judge of attributes): probability of the answer's first token; weights on first use."""

    def __init__(
        self,
        *,
        model: str = "Salesforce/blip-vqa-base",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
    ) -> None:
        self.model = model
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = getattr(torch, dtype)
        self.batch_size = batch_size
        self._pair: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def _models(self) -> tuple[Any, Any]:
        with self._lock:
            if self._pair is None:
                from transformers import AutoProcessor, BlipForQuestionAnswering

                load, what = BlipForQuestionAnswering.from_pretrained, "the judge blip"
                processor = load_weights(f"the processor of {what}", self.model, AutoProcessor.from_pretrained)
                model = load_weights(what, self.model, load, dtype=self.dtype)
                self._pair = model.to(self.device).eval().requires_grad_(False), processor
            return self._pair

    @torch.no_grad()
    def probability(
        self, images: Sequence[Image.Image], questions: Sequence[str], forms: Sequence[Sequence[str]]
    ) -> Tensor:
        """See `Judge`."""
        model, processor = self._models()
        parts = []
        for start in range(0, len(questions), self.batch_size):
            rows = slice(start, start + self.batch_size)
            given = processor(images=list(images[rows]), text=list(questions[rows]), padding=True, return_tensors="pt")
            given = given.to(self.device)
            seen = model.vision_model(pixel_values=given["pixel_values"].to(self.dtype))[0]
            asked = model.text_encoder(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                encoder_hidden_states=seen,
                return_dict=True,
            )[0]
            begin = torch.full((len(asked), 1), model.decoder_start_token_id, device=self.device)
            logits = model.text_decoder(
                input_ids=begin,
                encoder_hidden_states=asked,
                encoder_attention_mask=given["attention_mask"],
                return_dict=True,
            ).logits[:, -1]
            chances = logits.float().softmax(-1)
            for row, accepted in zip(chances, forms[rows], strict=True):
                parts.append(row[word_ids(processor.tokenizer, [accepted], "the judge blip")[0]].sum().cpu())
        return torch.stack(parts) if parts else torch.zeros(0)

    @torch.no_grad()
    def answer(self, images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
        """See `Judge`."""
        model, processor = self._models()
        answers: list[str] = []
        for start in range(0, len(questions), self.batch_size):
            rows = slice(start, start + self.batch_size)
            given = processor(images=list(images[rows]), text=list(questions[rows]), padding=True, return_tensors="pt")
            made = model.generate(**given.to(self.device), max_new_tokens=10)
            answers += [text.strip() for text in processor.batch_decode(made, skip_special_tokens=True)]
        return answers


class VlmJudge:
    """A chat model of `visual_grpo.rewards.judge`, here or behind an endpoint: probabilities, words, and replies to texts.

    An endpoint tells the probabilities of the first token's likeliest texts only, so a form counts there if it is one token.
    """

    def __init__(self, settings: JudgeSettings, changed: Mapping[str, Any] | None = None) -> None:
        """Keep the settings; `changed` are those to be named beside the model."""
        self.settings = settings
        self.name = f"{'vlm' if settings.endpoint is None else 'endpoint'}:{settings.model}"
        self.name += f" {json.dumps(changed, sort_keys=True)}" if changed else ""
        self._judge = LazyJudge(settings, f"judge {self.name}")

    def probability(
        self, images: Sequence[Image.Image], questions: Sequence[str], forms: Sequence[Sequence[str]]
    ) -> Tensor:
        """See `Judge`.

        Raises:
            RunError: a question has no usable reply.
        """
        asked = _with_images(images, questions)
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, accepted in enumerate(forms):
            alike[tuple(accepted)].append(row)
        chances = torch.zeros(len(asked))
        for same, rows in alike.items():
            found = self._judge.first_words([asked[row] for row in rows], [same])
            chances[rows] = torch.tensor([math.exp(min(self._usable(one)[0], 0.0)) for one in found])
        return chances

    def answer(self, images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
        """See `Judge`; a chat model must be told to answer in one word, and may end it with a full stop.

        Raises:
            RunError: a question has no usable reply.
        """
        texts = self._judge.generate(_with_images(images, [f"{text} Answer in one word." for text in questions]))
        return [self._usable(text).strip().removesuffix(".") for text in texts]

    def replies(self, prompts: Sequence[str], images: Sequence[Image.Image | None]) -> list[str | ValueError]:
        """Replies to texts, with or without an image each; an error in place of one that cannot be used.

        Raises:
            RunError: the judge could not be reached.
        """
        asked = [
            Question(text=text, images=() if image is None else (image,))
            for text, image in zip(prompts, images, strict=True)
        ]
        found = self._judge.generate(asked)
        return [
            ValueError(one.reason) if isinstance(one, Failure) and not one.transport else self._usable(one)
            for one in found
        ]

    def __call__(self, prompt: str, image: Image.Image | None = None) -> str:
        """One reply.

        Raises:
            ValueError: it cannot be used.
        """
        (reply,) = self.replies([prompt], [image])
        if isinstance(reply, ValueError):
            raise reply
        return reply

    def close(self) -> None:
        """Let go of the model or the connections."""
        self._judge.close()

    def _usable(self, reply: T | Failure) -> T:
        if isinstance(reply, Failure):
            raise RunError(
                f"judge {self.name}: {reply.reason}. What it has answered is kept in --out: the same command goes on there."
            )
        return reply


def _with_images(images: Sequence[Image.Image], questions: Sequence[str]) -> list[Question]:
    return [Question(text=text, images=(image,)) for image, text in zip(images, questions, strict=True)]
