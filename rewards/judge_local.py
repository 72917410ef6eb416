"""A judge in this process: a language or vision-language model of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.judge import Failure, JudgeSettings, Question
from visual_grpo.rewards.loading import load_weights

__all__ = ["LocalJudge", "word_ids"]


class LocalJudge:
    """Greedy replies and first-token probabilities of one model; loaded when it is made."""

    def __init__(self, settings: JudgeSettings, name: str) -> None:
        """Load the model.

        Raises:
            UserError: it cannot be loaded, or has no chat template.
        """
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoProcessor,
            AutoTokenizer,
        )
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        self.settings, self.name = settings, name
        remote = {"trust_remote_code": settings.trust_remote_code}
        config = load_weights(f"{name}'s config", settings.model, AutoConfig.from_pretrained, **remote)
        self.sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        processor_class = AutoProcessor if self.sees else AutoTokenizer
        self.processor = load_weights(f"{name}'s processor", settings.model, processor_class.from_pretrained, **remote)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        if getattr(self.processor, "chat_template", None) is None and self.tokenizer.chat_template is None:
            raise UserError(f"{name}: {settings.model!r} has no chat template; take an instruction-tuned model.")
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        default = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        dtype = default if settings.dtype is None else getattr(torch, settings.dtype)
        model_class = AutoModelForImageTextToText if self.sees else AutoModelForCausalLM
        model = load_weights(f"{name}'s model", settings.model, model_class.from_pretrained, dtype=dtype, **remote)
        self.model = model.to(self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def generate(self, questions: Sequence[Question]) -> list[str | Failure]:
        """Reply to each question, at most `max_new_tokens` long."""
        replies: list[str | Failure] = []
        for inputs in self._batches(questions):
            ids = self._greedy(inputs, self.settings.max_new_tokens).sequences
            replies += self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return replies

    @torch.no_grad()
    def first_words(self, questions: Sequence[Question], words: Sequence[Sequence[str]]) -> list[list[float] | Failure]:
        """Log-probabilities of first words over the whole vocabulary, see `Judge`."""
        ids = word_ids(self.tokenizer, words, self.name)
        found: list[list[float] | Failure] = []
        for inputs in self._batches(questions):
            logits = self._greedy(inputs, 1).logits[0].double()
            log_probs = logits - logits.logsumexp(-1, keepdim=True)
            columns = torch.stack([log_probs[:, tokens].logsumexp(-1) for tokens in ids], dim=1).tolist()
            found += [row if not any(map(math.isnan, row)) else Failure("the logits are NaN") for row in columns]
        return found

    def close(self) -> None:
        """The weights go with the object."""

    def _batches(self, questions: Sequence[Question]) -> list[dict[str, Tensor]]:
        if not self.sees and any(question.images for question in questions):
            raise UserError(f"{self.name}: {self.settings.model!r} reads no images; take a vision-language model.")
        size = self.settings.batch_size
        return [self._inputs(questions[i : i + size]) for i in range(0, len(questions), size)]

    def _greedy(self, inputs: dict[str, Tensor], new_tokens: int) -> Any:
        """`generate` also numbers the positions of padded rows as each family wants them; `logits` are unprocessed."""
        return self.model.generate(
            **inputs,
            do_sample=False,
            num_beams=1,
            max_new_tokens=new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=None,
            top_p=None,
            top_k=None,
            return_dict_in_generate=True,
            output_logits=new_tokens == 1,
        )

    def _inputs(self, questions: Sequence[Question]) -> dict[str, Tensor]:
        texts = [
            self.processor.apply_chat_template(
                self._chat(question),
                tokenize=False,
                add_generation_prompt=not question.prefix,
                continue_final_message=bool(question.prefix),
                **self.settings.chat_template_kwargs,
            )
            for question in questions
        ]
        # The template has written every special token.
        options: dict[str, Any] = {"padding": True, "return_tensors": "pt", "add_special_tokens": False}
        if self.sees and questions[0].images:
            options["images"] = [list(question.images) for question in questions]
        inputs = self.processor(text=texts, **options)
        dtype = self.model.dtype
        return {
            key: value.to(self.device, dtype) if value.is_floating_point() else value.to(self.device)
            for key, value in inputs.items()
        }

    def _chat(self, question: Question) -> list[dict[str, Any]]:
        content: Any = question.text
        if self.sees:
            content = [{"type": "image", "image": image} for image in question.images]
            content.append({"type": "text", "text": question.text})
        chat = [{"role": "user", "content": content}]
        if question.prefix:
            prefix: Any = [{"type": "text", "text": question.prefix}] if self.sees else question.prefix
            chat.append({"role": "assistant", "content": prefix})
        return chat


def word_ids(tokenizer: Any, words: Sequence[Sequence[str]], name: str) -> list[list[int]]:
    """First token ids of the spellings of each word, each id once; an id that two words share tells them apart in neither.

    Raises:
        UserError: a word has no token of its own.
    """
    firsts = [
        {token for spelling in one for token in tokenizer(spelling, add_special_tokens=False)["input_ids"][:1]}
        for one in words
    ]
    own = [sorted(ids.difference(*(other for other in firsts if other is not ids))) for ids in firsts]
    for ids, spellings in zip(own, words, strict=True):
        if not ids:
            raise UserError(
                f"{name}: the tokenizer begins {spellings[0]!r} as it begins another answer word, so their probabilities cannot "
                f"be told apart; take another model."
            )
    return own
