"""Rows that share the keys and values of their prompt sample what rows with a copy each sample."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel

from visual_grpo.adapters import shared_decoding
from visual_grpo.adapters.generation import generate, row_uniforms
from visual_grpo.adapters.kv_cache import GrowingCache
from visual_grpo.adapters.shared_decoding import SharedPromptCache, attend, is_worth_sharing
from visual_grpo.adapters.text_lm import TextLMAdapter


def sampled(adapter: TextLMAdapter, ids: list[torch.Tensor], cache: Any) -> Any:
    return generate(
        adapter.model, ids, row_uniforms(0, torch.arange(len(ids)), 24), eos_ids=adapter.eos_ids, pad_id=0, cache=cache
    )


@pytest.mark.parametrize("lengths", [(9, 4, 7), (6, 6, 6)], ids=["padded", "of one length"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_samples_are_those_of_repeated_prompts(
    tiny_text: Any, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], family: str
) -> None:
    """Groups of unequal size, one row alone, and rows that end at different tokens, whole groups among them."""
    monkeypatch.setattr(shared_decoding, "LEAST_SAVED", 0)
    adapter = tiny_text.make_adapter(torch.float64)
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=len(tiny_text.WORDS), n_embd=32, n_layer=2, n_head=2, n_positions=96, initializer_range=0.2,
            bos_token_id=tiny_text.BOS, eos_token_id=tiny_text.EOS,
        )  # fmt: skip
        torch.manual_seed(0)
        adapter = TextLMAdapter(GPT2LMHeadModel(config).double().eval(), tiny_text.make_tokenizer())
    adapter.eos_ids = [2, 5, 9]
    assert adapter._cache == "shared"
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, len(tiny_text.WORDS), (length,), generator=generator) for length in lengths]
    ids = [prompts[i] for i in (1, 0, 0, 2, 1, 0, 0, 1, 0)]
    made: list[SharedPromptCache] = []
    arrange = SharedPromptCache._arrange
    monkeypatch.setattr(SharedPromptCache, "_arrange", lambda self, owner: (made.append(self), arrange(self, owner))[1])
    shared = sampled(adapter, ids, "shared")
    assert len(made) > 1, "rows were dropped"
    plain = sampled(adapter, ids, "plain")
    assert len(shared.lengths.unique()) > 1
    assert torch.equal(shared.token_ids, plain.token_ids)
    assert torch.equal(shared.lengths, plain.lengths)
    torch.testing.assert_close(shared.log_prob, plain.log_prob, rtol=0, atol=1e-6)  # Qwen3's norms compute in float32
    assert adapter.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_is_that_over_prompt_and_own_tokens(scaling: float | None) -> None:
    torch.manual_seed(0)
    lengths, owner = torch.tensor([5, 3]), torch.tensor([1, 0, 1, 1])
    prompts = GrowingCache()
    keys, values = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64)
    prompts.update(keys, values, 0)
    cache = SharedPromptCache(prompts, lengths, owner)
    assert cache.get_seq_length() == 5
    own = torch.randn(2, 4, 2, 3, 8, dtype=torch.float64)
    query = 40 * torch.randn(4, 6, 1, 8, dtype=torch.float64)  # large scores: nothing may overflow
    for step in range(3):
        key, value = cache.update(*(part[:, :, step : step + 1] for part in own), 0)
    assert cache.get_seq_length() == 8
    found, _ = attend(torch.nn.Identity(), query, key, value, None, scaling=scaling)
    for row, prompt in enumerate(owner.tolist()):
        start = 5 - int(lengths[prompt])
        whole = [
            torch.cat([before[prompt, :, start:], part[row]], dim=1).repeat_interleave(3, 0)[None]
            for before, part in zip((keys, values), own, strict=True)
        ]
        expected = scaled_dot_product_attention(query[row][None], *whole, scale=scaling)
        torch.testing.assert_close(found[row], expected[0].transpose(0, 1), rtol=0, atol=1e-12)


def test_prompts_are_kept_once_and_dropped_with_their_last_row() -> None:
    prompts = GrowingCache()
    prompts.update(torch.randn(3, 1, 4, 2), torch.randn(3, 1, 4, 2), 0)
    cache = SharedPromptCache(prompts, torch.tensor([4, 4, 2]), torch.tensor([0, 0, 1, 2, 2, 2]))
    cache.update(torch.randn(6, 1, 1, 2), torch.randn(6, 1, 1, 2), 0)
    kept = cache._prompts[0][0]
    assert kept.shape == (3, 1, 4, 2)
    cache.batch_select_indices(torch.tensor([1, 3, 5]))
    assert torch.equal(cache._prompts[0][0], kept[[0, 2]])
    assert cache._slots.tolist() == [[0, 0], [1, 2]]
    assert cache._place.tolist() == [0, 2, 3]


def test_few_tokens_or_half_precision_are_not_worth_it() -> None:
    def prompts(tokens: int, dtype: torch.dtype = torch.float32) -> GrowingCache:
        cache = GrowingCache()
        cache.update(*torch.zeros(2, 2, 1, tokens, 2, dtype=dtype), 0)
        return cache

    assert is_worth_sharing(prompts(1024), 4)
    assert not is_worth_sharing(prompts(1024), 3)
    assert not is_worth_sharing(prompts(1024, torch.bfloat16), 64)


def test_a_model_that_attends_otherwise_keeps_its_attention(
    tiny_text: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotImplementedError, match="with softcap"):
        attend(torch.nn.Identity(), torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.zeros(1), None, softcap=30.0)
    model = tiny_text.make_model()
    for module in model.modules():
        if type(module).__name__ == "Qwen3Attention":
            # As a model whose layers do not ask for the attention function: they would see the rows' own tokens only.
            monkeypatch.setattr(module, "config", module.config.__class__(**module.config.to_dict()))
            module.config._attn_implementation = "sdpa"
    with caplog.at_level(logging.INFO):
        adapter = TextLMAdapter(model, tiny_text.make_tokenizer())
    assert adapter._cache == "plain"
    assert "the sampler repeats the cache of a prompt for each of its rows: other states then" in caplog.text
    assert model.config._attn_implementation == "sdpa"
