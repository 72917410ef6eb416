"""Text models in and out of folders, in their published sizes, and the memory they need."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3ForCausalLM,
)

from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.adapters.text_meta import activation_bytes, published_configs
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError

PUBLISHED = published_configs()


def test_saved_models_are_plain_transformers_folders(tiny_text: Any, tmp_path: Path) -> None:
    adapter = tiny_text.make_adapter()
    adapter.save(str(tmp_path))
    assert list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.bin"))
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for name, weight in adapter.model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight)
    assert tokenizer.chat_template == tiny_text.TEMPLATE
    config = ModelConfig(adapter="text_lm", path=str(tmp_path), dtype="float64", gradient_checkpointing=True)
    loaded = TextLMAdapter.load(config, device=torch.device("cpu"), sampling=tiny_text.SHORT)
    assert loaded.device.type == "cpu"
    assert not any(p.requires_grad for p in loaded.trainable_module.parameters())
    assert loaded.model.dtype == torch.float64
    expected = tiny_text.sampled(adapter)
    assert torch.equal(
        loaded.sample(tiny_text.batch(), seed=3, sampling=tiny_text.SHORT).data["completion_ids"],
        expected.data["completion_ids"],
    )
    loaded.model.requires_grad_(True).train()
    value = loaded.log_prob(expected, tiny_text.units_of(expected)).value
    value.sum().backward()
    assert (value.detach() - expected.old_log_prob).abs().max() < 1e-5
    assert all(p.grad is not None for p in loaded.model.parameters())


def test_paths_without_a_model_are_explained(tiny_text: Any, tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(UserError, match=r"config\.json"):
            TextLMAdapter.load(
                ModelConfig(adapter="text_lm", path=path), device=torch.device("cpu"), sampling=tiny_text.SHORT
            )
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}')
    with pytest.raises(UserError, match=r"cannot load model\.path"):
        TextLMAdapter.load(
            ModelConfig(adapter="text_lm", path=str(tmp_path)), device=torch.device("cpu"), sampling=tiny_text.SHORT
        )
    with pytest.raises(UserError, match="no causal language model"):
        TextLMAdapter.load_meta(ModelConfig(adapter="text_lm", path=str(tmp_path)))
    with pytest.raises(UserError, match=r"Did you mean 'Qwen/Qwen3-8B'\?"):
        TextLMAdapter.load_meta(ModelConfig(adapter="text_lm", path="Qwen/Qwen3-8"))


def test_lora_targets_are_modules_of_the_model(tiny_text: Any) -> None:
    names = [name for name, _ in tiny_text.make_model().named_modules()]
    for target in TextLMAdapter.lora_targets:
        assert sum(name.endswith("." + target) for name in names) == 3


@pytest.mark.parametrize("name", sorted({entry["ids"][0]: None for entry in PUBLISHED.values()}))
def test_published_architectures_have_their_published_size(name: str) -> None:
    module = TextLMAdapter.load_meta(ModelConfig(adapter="text_lm", path=name, dtype="bfloat16"))
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert sum(p.numel() for p in module.parameters()) == PUBLISHED[name]["parameters"]
    names = [n for n, _ in module.named_modules()]
    assert all(any(n.endswith("." + target) for n in names) for target in TextLMAdapter.lora_targets)


def test_memory_plan_of_a_published_model() -> None:
    plans = {}
    for checkpointing in (False, True):
        config = ModelConfig(
            adapter="text_lm", path="Qwen/Qwen2.5-0.5B", dtype="bfloat16", gradient_checkpointing=checkpointing
        )
        module = TextLMAdapter.load_meta(config)
        options = TextSampling(logits_chunk=None if checkpointing else 100)
        plans[checkpointing] = TextLMAdapter.plan_memory(config, module, sampling=options, rows=2, units=256)
    parts = plans[False].parts
    count = PUBLISHED["Qwen/Qwen2.5-0.5B"]["parameters"]
    assert parts["trained weights"] == parts["gradients"] == parts["optimizer states"] / 2 == 4 * count
    assert parts["logits"] == 3 * 100 * 151936 * 4
    assert plans[True].parts["logits"] == 3 * 512 * 151936 * 4
    assert parts["key-value cache"] == 2 * 2 * 512 * 24 * 2 * 64 * 2
    assert plans[True].parts["activations"] < parts["activations"] / 5
    assert plans[False].total == sum(parts.values())


def test_planned_activations_are_those_of_a_real_forward_pass(tiny_text: Any) -> None:
    """Counted on the meta device within 15 % of what a real pass on the CPU keeps."""
    model = tiny_text.make_model().requires_grad_(True)
    with torch.device("meta"):
        meta = Qwen3ForCausalLM(model.config)
    parameters, seen, kept = {id(p) for p in model.parameters()}, {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in parameters:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(4, 60, dtype=torch.int64), use_cache=False)
    assert activation_bytes(meta, rows=4, tokens=60) == pytest.approx(sum(seen.values()), rel=0.15)


def test_the_shipped_model_answers_arithmetic(tiny_text: Any) -> None:
    config = ModelConfig(adapter="text_lm", path="testbed/lm_tiny")
    sampling = TextSampling(max_new_tokens=32)
    adapter = TextLMAdapter.load(config, device=torch.device("cpu"), sampling=sampling)
    rollouts = adapter.decode(
        adapter.sample(tiny_text.batch(["What is 27+45?"] * 24 + ["What is 59-7-1?"] * 8), seed=0, sampling=sampling)
    )
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    assert (replay - rollouts.old_log_prob).abs().max() < 1e-5
    assert rollouts.truncated is not None
    assert rollouts.truncated.float().mean() < 0.2
    assert rollouts.texts is not None
    assert sum("#### 72" in text for text in rollouts.texts[:24]) >= 6


def test_a_model_with_learned_positions_and_dropout(tiny_text: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tiny_text.WORDS),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=96,
        initializer_range=0.2,
        pad_token_id=tiny_text.PAD,
        bos_token_id=tiny_text.BOS,
        eos_token_id=tiny_text.EOS,
    )
    assert config.attn_pdrop > 0
    TextLMAdapter(GPT2LMHeadModel(config), tiny_text.make_tokenizer()).save(str(tmp_path))
    adapter = TextLMAdapter.load(
        ModelConfig(adapter="text_lm", path=str(tmp_path)), device=torch.device("cpu"), sampling=TextSampling()
    )
    adapter.model.train()
    rollouts = adapter.sample(tiny_text.batch(), seed=0, sampling=tiny_text.SHORT)
    assert adapter.model.training
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    assert (replay - rollouts.old_log_prob).abs().max() < 1e-5
