"""Sampling options of text models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from visual_grpo.adapters.protocol import SamplingConfig
from visual_grpo.rollouts.settings import VllmConfig


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

    @property
    def uses_engine(self) -> bool:
        """See `SamplingConfig.uses_engine`."""
        return self.engine != "model"
