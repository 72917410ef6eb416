"""Where the engine is and how it is run (`sampling.vllm`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from visual_grpo.config_section import Positive, Section


class VllmConfig(Section):
    """A vLLM engine, read with `sampling.engine=vllm`."""

    mode: Literal["server", "colocate"] = Field("server", description="server: `vllm serve`; colocate: in this process")
    url: str = Field("http://localhost:8000", description="server: its address")
    model: str | None = Field(
        None, description="server: the name it serves the model under; null = the only one it names"
    )
    folder: str | None = Field(
        None,
        description="folder of the synced weights, under this path for trainer and engine; null = sync/ of the run folder",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="server: limit of one request")
    connections: Positive = Field(64, description="server: requests at a time, one a row")
    token_env: str = Field("VLLM_API_KEY", description="server: environment variable with its API key; unset = none")
    tolerance: Annotated[float, Field(gt=0)] | None = Field(
        None, description="self-test: largest mean |difference| of log-probs, in nats; null = by model.dtype"
    )
    memory: Annotated[float, Field(gt=0, le=1)] = Field(0.3, description="colocate: share of the accelerator's memory")
    sleep: bool = Field(False, description="colocate: the engine's memory is free while the model trains")
    options: dict[str, Any] = Field(
        default_factory=dict, description="colocate: further arguments of vllm.LLM, such as max_model_len: 4096"
    )
