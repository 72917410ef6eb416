"""Judges: models that answer questions about an image, for evaluations and rewards that ask.

A judge gives probabilities of answers and answers in words; `load_judge` finds one by name. What a published figure was made with
stands in the evaluation's docstring: figures of different judges never share a table column.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object
from visual_grpo.rewards.loading import load_weights

__all__ = ["BlipJudge", "Judge", "VlmJudge", "accepted_forms", "load_judge"]

JUDGES = {
    "testbed": "visual_grpo.testbed.judge:SceneJudge",
    "blip": "visual_grpo.rewards.vqa_models:BlipJudge",
    "vlm": "visual_grpo.rewards.vqa_models:VlmJudge",
}
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


def load_judge(given: Any, **options: Any) -> Judge:
    """Return the judge named in `JUDGES` or "package.module:Name" (built with `options`), or `given`.

    Raises:
        UserError: it is no judge.
    """
    if isinstance(given, str):
        given = load_object(JUDGES.get(given, given), "judge")
    if isinstance(given, type):
        try:
            given = given(**options)
        except TypeError as error:
            raise UserError(f"the judge {given.__name__} cannot be built with {options}: {error}.") from error
    if not callable(getattr(given, "probability", None)) or not callable(getattr(given, "answer", None)):
        raise UserError(f"the judge {given!r} needs the methods probability(images, questions, forms) and answer(...).")
    found: Judge = given
    return found


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


def _first_tokens(tokenizer: Any, forms: Sequence[str]) -> list[int]:
    """Ids of the first tokens, each once: a doubled id would be counted twice."""
    firsts = (tokenizer.encode(form, add_special_tokens=False)[:1] for form in forms)
    return sorted({token for ids in firsts for token in ids})


class _Loaded:
    """Weights on first use."""

    def __init__(self, model: str, device: str | None, dtype: str) -> None:
        self.model_name = model
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = getattr(torch, dtype)
        self._pair: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def load(self, what: str, model_class: Any) -> tuple[Any, Any]:
        with self._lock:
            if self._pair is None:
                from transformers import AutoProcessor

                processor = load_weights(f"the processor of {what}", self.model_name, AutoProcessor.from_pretrained)
                model = load_weights(what, self.model_name, model_class.from_pretrained, dtype=self.dtype)
                self._pair = model.to(self.device).eval().requires_grad_(False), processor
            return self._pair


class BlipJudge(_Loaded):
    """BLIP-VQA (T2I-CompBench's judge of attributes): probability of the answer's first token."""

    def __init__(
        self,
        *,
        model: str = "Salesforce/blip-vqa-base",
        device: str | None = None,
        dtype: str = "float32",
        batch: int = 16,
    ) -> None:
        super().__init__(model, device, dtype)
        self.batch = batch

    def _models(self) -> tuple[Any, Any]:
        from transformers import BlipForQuestionAnswering

        return self.load("the judge blip", BlipForQuestionAnswering)

    @torch.no_grad()
    def probability(
        self, images: Sequence[Image.Image], questions: Sequence[str], forms: Sequence[Sequence[str]]
    ) -> Tensor:
        """See `Judge`."""
        model, processor = self._models()
        parts = []
        for start in range(0, len(questions), self.batch):
            rows = slice(start, start + self.batch)
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
            parts.append(_chosen(logits, [_first_tokens(processor.tokenizer, f) for f in forms[rows]]))
        return torch.cat(parts) if parts else torch.zeros(0)

    @torch.no_grad()
    def answer(self, images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
        """See `Judge`."""
        model, processor = self._models()
        answers: list[str] = []
        for start in range(0, len(questions), self.batch):
            rows = slice(start, start + self.batch)
            given = processor(images=list(images[rows]), text=list(questions[rows]), padding=True, return_tensors="pt")
            made = model.generate(**given.to(self.device), max_new_tokens=10)
            answers += [text.strip() for text in processor.batch_decode(made, skip_special_tokens=True)]
        return answers


class VlmJudge(_Loaded):
    """A chat model that sees (Qwen3-VL and others): probability of the first generated token, greedy answers."""

    def __init__(
        self, *, model: str = "Qwen/Qwen3-VL-8B-Instruct", device: str | None = None, dtype: str = "bfloat16"
    ) -> None:
        super().__init__(model, device, dtype)

    def _inputs(self, image: Image.Image, question: str) -> tuple[Any, Any, Any]:
        from transformers import AutoModelForImageTextToText

        model, processor = self.load("the judge vlm", AutoModelForImageTextToText)
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        given = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return model, processor, given.to(self.device)

    @torch.no_grad()
    def probability(
        self, images: Sequence[Image.Image], questions: Sequence[str], forms: Sequence[Sequence[str]]
    ) -> Tensor:
        """See `Judge`; one question at a time, so that no padding changes another's answer."""
        parts = []
        for image, question, accepted in zip(images, questions, forms, strict=True):
            model, processor, given = self._inputs(image, question)
            parts.append(_chosen(model(**given).logits[:, -1], [_first_tokens(processor.tokenizer, accepted)]))
        return torch.cat(parts) if parts else torch.zeros(0)

    @torch.no_grad()
    def answer(self, images: Sequence[Image.Image], questions: Sequence[str]) -> list[str]:
        """See `Judge`."""
        answers = []
        for image, question in zip(images, questions, strict=True):
            model, processor, given = self._inputs(image, question)
            made = model.generate(**given, max_new_tokens=16, do_sample=False)
            text = processor.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)[0]
            answers.append(text.strip())
        return answers


def _chosen(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Sum of the probabilities of each row's tokens: [n, V] -> [n] on the CPU."""
    probabilities = logits.float().softmax(-1)
    return torch.stack([row[list(ids)].sum() for row, ids in zip(probabilities, tokens, strict=True)]).cpu()
