"""The colocated engine against `Imitation`, an object with the methods of `vllm.LLM` 0.32 that it calls. No vLLM runs here.

The imitation samples with the transformers model of `stand_in`, and really loads the LoRAs and folders that it is given.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from stand_in import StandIn

from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.config import LoraConfig, ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.policy import Policy
from visual_grpo.rollouts.agreement import follows, measure
from visual_grpo.rollouts.connect import start
from visual_grpo.rollouts.vllm_colocated import ColocatedVllm
from visual_grpo.types import PromptBatch

LORA = LoraConfig(rank=8, alpha=16, init="default")


class Imitation:
    """Answers the calls of `ColocatedVllm` as documented."""

    resets = True
    """what `reset_prefix_cache` says."""

    def __init__(self, **options: Any) -> None:
        if options["gpu_memory_utilization"] > 0.9:
            raise ValueError("no available memory\nfor the cache blocks")
        Imitation.last = self
        self.options = options
        self.inner = StandIn(options["model"])
        self.asleep = False
        self.calls: list[str] = []

    def generate(self, prompts: list[Any], params: list[Any], *, lora_request: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        assert not use_tqdm
        self.calls.append("generate")
        name = self.inner.name
        if lora_request is not None:
            name = lora_request.lora_name
            self.inner.loras[name] = lora_request.lora_path
        outputs = []
        for prompt, param in zip(prompts, params, strict=True):
            body = {**param, "model": name, "prompt": prompt["prompt_token_ids"]}
            choice = self.inner._complete(body)[1]["choices"][0]
            pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            told = None if param["logprobs"] is None else [{t: SimpleNamespace(logprob=v)} for t, v in pairs]
            output = SimpleNamespace(
                token_ids=choice["token_ids"], logprobs=told, finish_reason=choice["finish_reason"]
            )
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        assert not self.asleep
        self.calls.append(method)
        self.inner.reload(kwargs["weights_path"])
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets

    def sleep(self, level: int) -> None:
        assert level == 1
        assert not self.asleep
        self.asleep = True

    def wake_up(self) -> None:
        assert self.asleep
        self.asleep = False


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[Imitation]:
    module, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    module.LLM = Imitation  # type: ignore[attr-defined]
    module.SamplingParams = dict  # type: ignore[attr-defined]

    def made(name: str, number: int, path: str) -> Any:
        assert number > 0
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)

    request.LoRARequest = made  # type: ignore[attr-defined]
    for name, part in (("vllm", module), ("vllm.lora", lora), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.setattr(Imitation, "resets", True)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return Imitation


def options(**settings: Any) -> TextSampling:
    return TextSampling(max_new_tokens=4, engine="vllm", vllm={"mode": "colocate", **settings})


def engine(folder: Path, model: ModelConfig, **settings: Any) -> ColocatedVllm:
    return ColocatedVllm(options(**settings).vllm, model, folder=folder / "sync")


def prompts() -> PromptBatch:
    rows = torch.arange(2)
    return PromptBatch(prompts=["1+1=", "12-5="], metadata=[{}, {}], group_ids=rows, row_ids=rows)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full weights"])
def test_it_samples_with_the_weights_it_is_given(tmp_path, vllm, lora):
    model = ModelConfig(adapter="text_lm", path="testbed/lm_tiny", lora=lora)
    policy = Policy(TextLMAdapter.load(model, device=torch.device("cpu"), sampling=TextSampling()), model)
    for parameter in policy.trainable.values():
        parameter.grad = torch.ones_like(parameter)
    with closing(engine(tmp_path, model, sleep=True, options={"max_model_len": 64})) as made:
        inner = vllm.last
        start(made, policy, options())
        apart = measure(policy, prompts(), options())
        found = follows(policy, prompts(), options(), noise=apart.mean, step=1e-2)
        assert inner.asleep
    assert apart.mean < 1e-5
    assert found.to_moved < 1e-5 < 1e-3 < found.to_before
    if lora is None:
        assert inner.calls[:2] == ["reload_weights", "reset_prefix_cache"]
    assert not (tmp_path / "sync").exists()
    expected = {
        "dtype": "float32", "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "enable_sleep_mode": True,
        "gpu_memory_utilization": 0.3, "max_model_len": 64,
    }  # fmt: skip
    assert expected.items() <= inner.options.items()
    assert inner.options.get("max_lora_rank") == (8 if lora else None)


def test_what_it_cannot_do_is_told(tmp_path, vllm, monkeypatch):
    model = ModelConfig(adapter="text_lm", path="testbed/lm_tiny")
    with pytest.raises(UserError, match=r"does not start .*: ValueError: no available memory for the cache blocks\. "):
        engine(tmp_path, model, memory=0.95)
    with pytest.raises(UserError, match=r"model.lora.rank 600 is above vLLM's limit of 512"):
        engine(tmp_path, model.model_copy(update={"lora": LoraConfig(rank=600)}))
    policy = Policy(TextLMAdapter.load(model, device=torch.device("cpu"), sampling=TextSampling()), model)
    with closing(engine(tmp_path, model)) as made:
        monkeypatch.setattr(vllm, "resets", False)
        with pytest.raises(UserError, match=r"reset_prefix_cache does not succeed"):
            start(made, policy, options())
        monkeypatch.setattr(vllm, "collective_rpc", lambda *_, **__: 1 / 0)
        with pytest.raises(UserError, match=r"reload_weights failed: ZeroDivisionError"):
            start(made, policy, options())
    policy.adapter.engine = None


def test_without_vllm_the_message_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(UserError, match=r"pip install 'visual-grpo\[vllm\]'"):
        engine(tmp_path, ModelConfig(adapter="text_lm", path="testbed/lm_tiny"))
