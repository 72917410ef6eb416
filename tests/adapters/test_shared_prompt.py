"""A prompt is read once, and values and gradients are those of rows that each read their own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.adapters.text_meta import checkpoint_activations


def values_and_gradients(adapter: TextLMAdapter, rollouts: Any, units: torch.Tensor) -> tuple[torch.Tensor, ...]:
    value = adapter.log_prob(rollouts, units, entropy=True)
    weights = torch.randn(value.value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trained = [p for p in adapter.model.parameters() if p.requires_grad]
    assert value.entropy is not None
    gradients = torch.autograd.grad((weights * (value.value + value.entropy)).sum(), trained, allow_unused=True)
    return value.value.detach(), value.entropy.detach(), *(g for g in gradients if g is not None)


def tokens_read(adapter: TextLMAdapter, rollouts: Any, units: torch.Tensor) -> int:
    read = 0

    def count(_: Any, __: Any, options: dict[str, Any]) -> None:
        nonlocal read
        read += options["input_ids"].numel()

    handle = adapter.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    adapter.log_prob(rollouts, units)
    handle.remove()
    return read


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("wanted", [None, [0], [5, 2], [0, 7]])
def test_values_and_gradients_are_those_of_the_plain_pass(
    tiny_text: Any, checkpointed: bool, wanted: list[int] | None
) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    if checkpointed:
        checkpoint_activations(adapter.model)
    adapter.model.train().requires_grad_(True)
    units = tiny_text.units_of(rollouts) if wanted is None else torch.tensor(wanted)
    assert adapter._reader is not None
    shared = values_and_gradients(adapter, rollouts, units)
    adapter._reader = None
    for ours, plain in zip(shared, values_and_gradients(adapter, rollouts, units), strict=True):
        # Qwen3's norms compute in float32 whatever the dtype.
        assert (ours - plain).abs().max() <= 1e-6 * max(1.0, plain.abs().max())


def test_a_prompt_is_read_once(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    sampling = TextSampling(max_new_tokens=24, stop_on_eos=False)
    rollouts = adapter.sample(tiny_text.batch(["abc"] * 5), seed=0, sampling=sampling)
    prompt = len(rollouts.data["prompt_ids"][0])
    assert tokens_read(adapter, rollouts, tiny_text.units_of(rollouts)) == prompt + 5 * 23
    assert tokens_read(adapter, rollouts, torch.tensor([0])) == prompt
    different = adapter.sample(tiny_text.batch(["abc", "def"]), seed=0, sampling=sampling)
    assert tokens_read(adapter, different, tiny_text.units_of(different)) == 2 * (prompt + 23)


def test_other_positions(tiny_text: Any) -> None:
    """Learned positions in place of rotary ones."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tiny_text.WORDS), n_embd=32, n_layer=2, n_head=2, n_positions=96, initializer_range=0.2,
        bos_token_id=tiny_text.BOS, eos_token_id=tiny_text.EOS,
    )  # fmt: skip
    adapter = TextLMAdapter(GPT2LMHeadModel(config).double().eval(), tiny_text.make_tokenizer())
    rollouts = adapter.sample(tiny_text.batch(), seed=0, sampling=tiny_text.SHORT)
    assert adapter._reader is not None
    units = tiny_text.units_of(rollouts)
    shared = values_and_gradients(adapter, rollouts, units)
    adapter._reader = None
    for ours, plain in zip(shared, values_and_gradients(adapter, rollouts, units), strict=True):
        assert torch.allclose(ours, plain, rtol=0, atol=1e-9)


def test_a_model_that_cannot_share_says_so(tiny_text: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tiny_text.WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=4,
        pad_token_id=tiny_text.PAD, bos_token_id=tiny_text.BOS, eos_token_id=tiny_text.EOS,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        adapter = TextLMAdapter(MistralForCausalLM(config).eval(), tiny_text.make_tokenizer())
    assert adapter._reader is None
    assert "MistralModel has layers without a plain key-value cache" in caplog.text
    rollouts = adapter.sample(tiny_text.batch(), seed=0, sampling=tiny_text.SHORT)
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    assert torch.allclose(replay, rollouts.old_log_prob, rtol=0, atol=1e-5)
