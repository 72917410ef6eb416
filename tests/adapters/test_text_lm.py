"""Replay and encoding of the text adapter, against plain forward passes of each row."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
)

from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.api import plan
from visual_grpo.config import LoraConfig, ModelConfig
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState
from visual_grpo.pipelines.text.degrpo import DeGrpo, DeGrpoConfig, ModeRewards
from visual_grpo.policy import Policy, inject_lora
from visual_grpo.types import RolloutBatch


def test_replay_equals_the_sampler(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    rollouts = tiny_text.sampled(adapter)
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    assert rollouts.old_log_prob is not None
    assert replay.shape == rollouts.unit_mask.shape
    assert (replay - rollouts.old_log_prob).abs().max() < 1e-5
    assert (rollouts.old_log_prob[~rollouts.unit_mask] == 0).all()
    assert (rollouts.old_log_prob[rollouts.unit_mask] < 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_equal_a_plain_forward_of_each_row(tiny_text: Any, temperature: float) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter, TextSampling(max_new_tokens=24, temperature=temperature))
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts), entropy=True)
    assert replay.value.dtype == torch.float64
    assert replay.entropy is not None
    for row in range(len(rollouts)):
        expected = tiny_text.plain_log_prob(adapter.model, rollouts, row, temperature)
        for values in (replay.value, rollouts.old_log_prob):
            assert values is not None
            assert torch.allclose(values[row, : len(expected)], expected, rtol=0, atol=1e-6)
        assert (replay.value[row, len(expected) :] == 0).all()
        assert (replay.entropy[row, len(expected) :] == 0).all()
    assert (replay.entropy[rollouts.unit_mask] > 0).all()
    assert replay.entropy.max() <= math.log(len(tiny_text.WORDS))


def test_padding_never_leaks(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    rollouts = tiny_text.sampled(adapter)
    expected = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    ids = torch.where(rollouts.unit_mask, rollouts.data["completion_ids"], 9)
    changed = replace(rollouts, data=rollouts.data | {"completion_ids": ids})
    assert torch.equal(adapter.log_prob(changed, tiny_text.units_of(rollouts)).value, expected)
    adapter.pad_id = 11
    assert torch.equal(adapter.log_prob(changed, tiny_text.units_of(rollouts)).value, expected)
    again = adapter.sample(tiny_text.batch(), seed=3, sampling=tiny_text.SHORT)
    assert torch.equal(again.data["completion_ids"][again.unit_mask], rollouts.data["completion_ids"][again.unit_mask])
    assert torch.equal(again.old_log_prob, rollouts.old_log_prob)


def test_units_that_are_not_trained_are_still_read(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    expected = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    masked = replace(rollouts, unit_mask=rollouts.unit_mask & (torch.arange(rollouts.num_units) % 3 != 0))
    assert torch.equal(adapter.log_prob(masked, tiny_text.units_of(rollouts)).value, expected)


def test_a_subset_of_units_and_of_rows(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    whole = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    for units in (torch.tensor([5, 0, 2]), torch.tensor([rollouts.num_units - 1]), torch.tensor([], dtype=torch.int64)):
        part = adapter.log_prob(rollouts, units).value
        assert part.shape == (len(rollouts), len(units))
        assert torch.allclose(part, whole[:, units], rtol=0, atol=1e-6)
    rows = torch.tensor([6, 3])
    assert torch.allclose(
        adapter.log_prob(rollouts.select(rows), tiny_text.units_of(rollouts)).value, whole[rows], atol=1e-6
    )


def test_joined_batches_replay_at_their_own_temperatures(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    parts = [
        adapter.sample(tiny_text.batch(["abc", "9"]), seed=s, sampling=TextSampling(max_new_tokens=m, temperature=t))
        for s, m, t in ((0, 5, 0.5), (1, 12, 1.5))
    ]
    joined = RolloutBatch.concat(parts)
    replay = adapter.log_prob(joined, tiny_text.units_of(joined)).value
    assert torch.allclose(replay, joined.old_log_prob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_logits_give_the_same_values_and_gradients(tiny_text: Any, chunk: int) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    adapter.model.requires_grad_(True)
    weights = torch.randn(rollouts.unit_mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for size in (None, chunk):
        adapter.sampling = TextSampling(logits_chunk=size)
        replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts), entropy=True)
        assert replay.entropy is not None
        loss = (weights * (replay.value + replay.entropy)).sum()
        grads = torch.autograd.grad(loss, list(adapter.model.parameters()))
        results.append((replay.value.detach(), replay.entropy.detach(), *grads))
    for expected, given in zip(*results, strict=True):
        assert torch.allclose(expected, given, rtol=0, atol=1e-10)


def test_gradient_equals_that_of_the_plain_forward(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    adapter.model.requires_grad_(True)
    parameters = list(adapter.model.parameters())
    ours = torch.autograd.grad(adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value.sum(), parameters)
    total = sum(tiny_text.plain_log_prob(adapter.model, rollouts, row, 0.8).sum() for row in range(len(rollouts)))
    theirs = torch.autograd.grad(total, parameters)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()  # Qwen3's norms compute in float32 whatever the dtype
    assert any(g.abs().max() > 0 for g in ours)


def test_chat_template_system_prompt_and_plain_text(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    chat = adapter.encode(["ab", "ab"], [{}, {"system": "c"}], tiny_text.SHORT)
    text = adapter.tokenizer.decode
    assert text(chat[0]) == "<bos><user>ab<eos><assistant>"
    assert text(chat[1]) == "<bos><system>c<eos><user>ab<eos><assistant>"
    plain = TextSampling(chat_template="none")
    assert text(adapter.encode(["ab"], [{}], plain)[0]) == "ab"
    assert text(adapter.encode([""], [{}], plain)[0]) == "<bos>"
    assert text(tiny_text.make_adapter(template=None).encode(["ab"], [{}], tiny_text.SHORT)[0]) == "ab"
    adapter.tokenizer.bos_token = None
    with pytest.raises(UserError, match="has no tokens"):
        adapter.encode([""], [{}], plain)
    adapter.tokenizer.chat_template = "{{ raise_exception('users only') }}"
    with pytest.raises(UserError, match=r"refuses prompt 'ab': users only"):
        adapter.encode(["ab"], [{}], tiny_text.SHORT)


def test_decode_and_the_empty_completion(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    rollouts = adapter.rows_from_texts(tiny_text.batch(["abc", "9", "d"]), ["12", "", "p + a"], tiny_text.SHORT)
    assert rollouts.data["lengths"].tolist() == [3, 1, 6]
    assert rollouts.old_log_prob is None
    assert adapter.decode(rollouts).texts == ["12", "", "p + a"]
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    assert torch.allclose(replay[1, :1], tiny_text.plain_log_prob(adapter.model, rollouts, 1, 0.8), atol=1e-5)
    lengths = torch.tensor([0, 1, 6])  # a row without any token at all
    nothing = replace(rollouts, data=rollouts.data | {"lengths": lengths})
    assert (adapter.log_prob(nothing, tiny_text.units_of(rollouts)).value[0] == 0).all()
    none = replace(rollouts, data=rollouts.data | {"lengths": torch.zeros(3, dtype=torch.int64)})
    assert (adapter.log_prob(none, tiny_text.units_of(rollouts)).value == 0).all()
    adapter.eos_ids = []
    empty = adapter.rows_from_texts(tiny_text.batch(["abc"]), [""], tiny_text.SHORT)
    assert adapter.log_prob(empty, tiny_text.units_of(empty)).value.shape == (1, 0)


def test_training_context_replaces_the_prompt_that_was_sampled_under(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    prompts = tiny_text.batch(["abc", "9"], contexts={"behaviour": ["abc 12", "9"], "training": ["abc", "9"]})
    rollouts = adapter.sample(prompts, seed=0, sampling=tiny_text.SHORT)
    assert adapter.tokenizer.decode(rollouts.data["prompt_ids"][0]) == "<bos><user>abc 12<eos><assistant>"
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    fresh = adapter.encode(["abc", "9"], [{}, {}], tiny_text.SHORT)
    trained = replace(rollouts, data=rollouts.data | {"prompt_ids": fresh})
    expected = tiny_text.plain_log_prob(adapter.model, trained, 0, 0.8)
    assert torch.allclose(replay[0, : len(expected)], expected, rtol=0, atol=1e-5)
    assert rollouts.old_log_prob is not None
    assert (replay[0] - rollouts.old_log_prob[0]).abs().max() > 1e-3
    assert torch.allclose(replay[1], rollouts.old_log_prob[1], rtol=0, atol=1e-5)


def test_a_model_whose_logits_are_more_than_its_head(tiny_text: Any) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tiny_text.WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        final_logit_softcapping=3.0,
        initializer_range=0.2,
        pad_token_id=tiny_text.PAD,
        eos_token_id=tiny_text.EOS,
        bos_token_id=tiny_text.BOS,
    )
    adapter = TextLMAdapter(Gemma2ForCausalLM(config).eval(), tiny_text.make_tokenizer())
    assert not adapter._split
    assert tiny_text.make_adapter()._split
    rollouts = adapter.sample(tiny_text.batch(), seed=0, sampling=tiny_text.SHORT)
    for chunk in (None, 5):
        adapter.sampling = TextSampling(logits_chunk=chunk)
        replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
        assert torch.allclose(replay, rollouts.old_log_prob, rtol=0, atol=1e-5)
    part = adapter.log_prob(rollouts, torch.tensor([3, 1])).value
    assert torch.allclose(part, replay[:, [3, 1]], rtol=0, atol=1e-5)


def test_prompts_that_are_too_long_are_refused(tiny_text: Any) -> None:
    with pytest.raises(UserError, match=r"has 63 tokens; .* exceeds the model's 96 positions.* to 33"):
        tiny_text.make_adapter().sample(
            tiny_text.batch(["9", "a" * 59]), seed=0, sampling=TextSampling(max_new_tokens=34)
        )


def test_long_prompts_are_found_before_the_run(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    sampling = TextSampling(max_new_tokens=34)
    adapter.check_prompts(["9", "a" * 58], [{}, {}], sampling)
    with pytest.raises(UserError, match=r"has 63 tokens; .* exceeds the model's 96 positions.* to 33"):
        adapter.check_prompts(["9", "a" * 59], [{}, {}], sampling)
    with pytest.raises(UserError, match="has 64 tokens"):
        adapter.check_prompts(["a" * 56], [{"system": "ab"}], sampling)


def test_weight_files_that_lack_parameters_are_refused(tiny_text: Any, tmp_path: Path) -> None:
    """The library would fill them with random numbers and only warn."""
    model, tokenizer = tiny_text.make_model(), tiny_text.make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = ModelConfig(adapter="text_lm", path=str(tmp_path))
    assert TextLMAdapter.load(config, device=torch.device("cpu"), sampling=tiny_text.SHORT)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 parameters of the model \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        TextLMAdapter.load(config, device=torch.device("cpu"), sampling=tiny_text.SHORT)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"cannot load model\.path .*SafetensorError"):
        TextLMAdapter.load(config, device=torch.device("cpu"), sampling=tiny_text.SHORT)


def test_lora_on_layers_of_no_kind(tiny_text: Any) -> None:
    for target in ("layers", "input_layernorm"):
        with pytest.raises(UserError, match=rf"targets \['{target}'\]: peft has no LoRA for .* end in: down_proj"):
            inject_lora(tiny_text.make_model(), LoraConfig(targets=[target]), ("q_proj",))


def test_sampling_options_are_checked() -> None:
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": 0}, {"max_new_tokens": 0}, {"beams": 2}):
        with pytest.raises(ValidationError):
            TextSampling(**wrong)


def test_contract_of_every_adapter(tiny_text: Any, contract: Any) -> None:
    adapter = tiny_text.make_adapter()
    prompts = contract.prompts_of(["abc", "a longer deed 12+3=?"], group_size=3)
    contract.check_adapter(adapter, prompts, tiny_text.SHORT, trained="q_proj")


def test_given_answers_that_are_too_long_are_refused(tiny_text: Any) -> None:
    with pytest.raises(UserError, match=r"has 201 tokens and its prompt 5, more than the model's 96 positions"):
        tiny_text.make_adapter().rows_from_texts(tiny_text.batch(["a"]), ["b" * 200], tiny_text.SHORT)


@pytest.mark.parametrize("system", [5, ["Be brief."], {"text": "Be brief."}])
def test_a_system_prompt_is_a_text(tiny_text: Any, system: Any) -> None:
    adapter = tiny_text.make_adapter()
    adapter.check_prompts(["a", "b"], [{"system": "Be brief."}, {"system": None}], tiny_text.SHORT)
    with pytest.raises(UserError, match=r"column 'system' of a prompt .* must be a text, but that of 'b'"):
        adapter.check_prompts(["a", "b"], [{}, {"system": system}], tiny_text.SHORT)


def test_options_that_no_chat_template_reads_are_refused(tiny_text: Any) -> None:
    sampling = TextSampling(max_new_tokens=4, chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(UserError, match="'enable_thinkin', which the model's chat template does not read"):
        tiny_text.make_adapter().check_prompts(["a"], [{}], sampling)
    reads = tiny_text.make_adapter(template="{% if enable_thinking %}b{% endif %}" + tiny_text.TEMPLATE)
    reads.check_prompts(["a"], [{}], sampling.model_copy(update={"chat_template_kwargs": {"enable_thinking": True}}))
    with pytest.raises(UserError, match="'enable_thinkin', which"):
        reads.check_prompts(["a"], [{}], sampling)
    plain = sampling.model_copy(update={"chat_template": "none"})
    with pytest.raises(UserError, match="prompts go without a chat template"):
        tiny_text.make_adapter().check_prompts(["a"], [{}], plain)


def test_a_mode_cannot_start_with_a_special_token(tiny_text: Any) -> None:
    """Decoded answers leave special tokens out, so none would have this mode."""
    policy = Policy(tiny_text.make_adapter(), ModelConfig(adapter="text_lm", path="tiny"))
    state = LoopState(
        config=plan("degrpo_text_tiny").config, policy=policy, ranks=Ranks(), sampling=TextSampling(max_new_tokens=4)
    )

    def method(start: str) -> DeGrpo:
        return DeGrpo(DeGrpoConfig(mode_rewards=ModeRewards(short_start=start, think_start="")))

    method("12").setup(state)
    with pytest.raises(UserError, match=r"mode_rewards\.short_start is '<user>', a special token of this tokenizer"):
        method("<user>").setup(state)
