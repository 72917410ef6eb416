"""Sampling options of text models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from visual_grpo.adapters.protocol import SamplingConfig
from visual_grpo.errors import UserError
from visual_grpo.rollouts.settings import VllmConfig

LEAST_TEMPERATURE = 1e-6


class TextSampling(SamplingConfig):
    """Sampling options of text models."""

    max_new_tokens: Annotated[int, Field(gt=0)] = 512
    temperature: Annotated[float, Field(ge=0)] = Field(1.0, description="0 = greedy, for evaluations")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(gt=0)] | None = Field(None, description="null = all tokens")
    stop_on_eos: bool = Field(True, description="false = every completion runs to max_new_tokens")
    chat_template: Literal["auto", "none"] = Field("auto", description="auto: the tokenizer's template, if it has one")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="for example enable_thinking: false")
    engine: Literal["model", "vllm"] = Field(
        "model", description="what samples: the model that is trained, or a vLLM engine that is given its weights"
    )
    vllm: VllmConfig = VllmConfig()
    logits_chunk: Annotated[int, Field(gt=0)] | None = Field(
        None,
        description="tokens whose logits exist at once in training; null = all: faster, but memory grows with the vocabulary",
    )

    @field_validator("temperature")
    @classmethod
    def _no_tiny_temperature(cls, value: float) -> float:
        """Logits over a tiny number overflow."""
        if 0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}")
        return value

    @property
    def uses_engine(self) -> bool:
        """See `SamplingConfig.uses_engine`."""
        return self.engine != "model"


def check_systems(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
    """Refuse system prompts that are no text: a column of that name may hold something else.

    Raises:
        UserError: naming the prompt.
    """
    for text, row in zip(prompts, metadata, strict=True):
        if not isinstance(row.get("system"), str | None):
            raise UserError(
                f"the column 'system' of a prompt is its system prompt and must be a text, but that of {text[:80]!r} is "
                f"{str(row['system'])[:80]!r}: rename the column, or set data.system_prompt"
            )


def check_template_options(tokenizer: Any, sampling: TextSampling) -> None:
    """Refuse `chat_template_kwargs` that no template would read.

    Raises:
        UserError: naming the option.
    """
    template = None if sampling.chat_template == "none" else tokenizer.chat_template
    known = inspect.signature(tokenizer.apply_chat_template).parameters
    for key in sampling.chat_template_kwargs:
        if not template:
            raise UserError(
                f"sampling.chat_template_kwargs has {key!r}, but prompts go without a chat template: leave it out"
            )
        if key not in known and not re.search(rf"\b{re.escape(key)}\b", str(template)):
            raise UserError(
                f"sampling.chat_template_kwargs has {key!r}, which the model's chat template does not read: check its spelling, "
                "or leave it out"
            )
