"""Sampling of tokens: against transformers' `generate`, row by row, and in distribution."""

import copy
from typing import Any

import pytest
import torch

from visual_grpo.adapters import generation
from visual_grpo.adapters.generation import CachedModel, generate, pick_tokens, row_uniforms, token_log_prob
from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.errors import RunError


def test_a_row_does_not_depend_on_its_batch(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    together = tiny_text.sampled(adapter)
    for row in range(len(together)):
        alone = adapter.sample(together.prompts.select(torch.tensor([row])), seed=3, sampling=tiny_text.SHORT)
        length = int(alone.data["lengths"][0])
        assert length == int(together.data["lengths"][row])
        assert torch.equal(alone.data["completion_ids"][0], together.data["completion_ids"][row, :length])
        assert alone.old_log_prob is not None
        assert together.old_log_prob is not None
        assert (alone.old_log_prob[0] - together.old_log_prob[row, :length]).abs().max() < 1e-5
    other = adapter.sample(tiny_text.batch(), seed=4, sampling=tiny_text.SHORT)
    assert not torch.equal(other.data["completion_ids"][:, :3], together.data["completion_ids"][:, :3])


def test_rows_of_one_prompt_differ_and_uniforms_belong_to_the_row(tiny_text: Any) -> None:
    uniforms = row_uniforms(7, torch.tensor([5, 2, 5]), 6)
    assert uniforms.dtype == torch.float64
    assert torch.equal(uniforms[0], uniforms[2])
    assert not torch.equal(uniforms[0], uniforms[1])
    assert torch.equal(uniforms[1:2], row_uniforms(7, torch.tensor([2]), 6))
    rollouts = tiny_text.sampled(tiny_text.make_adapter())
    assert len({tuple(ids) for ids in rollouts.data["completion_ids"][:3].tolist()}) == 3


@pytest.mark.parametrize(
    "prompts", [["abc", "abc", "a longer deed 12+3=?", "a longer deed 12+3=?", "9", "9"], ["abcd"] * 9 + ["dcba"] * 7]
)
def test_shared_prefill_and_compaction_change_nothing(
    tiny_text: Any, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    ids = adapter.encode(prompts, [{}] * len(prompts), tiny_text.SHORT)
    uniforms = row_uniforms(0, torch.arange(len(ids)), 24)
    options: dict[str, Any] = {"eos_ids": [tiny_text.EOS], "pad_id": tiny_text.PAD, "temperature": 0.9}
    selections: list[int] = []
    select = CachedModel.select
    monkeypatch.setattr(CachedModel, "select", lambda self, rows: (selections.append(len(rows)), select(self, rows))[1])
    shared = generate(adapter.model, ids, uniforms, **options)
    assert selections[0] == len(ids)
    assert min(selections) < len(ids), "no finished row left the batch"
    selections.clear()
    monkeypatch.setattr(generation, "COMPACT_SHARE", 2.0)
    alone = generate(adapter.model, ids, uniforms, share_prompts=False, **options)
    monkeypatch.setattr(CachedModel, "can_select", False)
    fallback = generate(adapter.model, ids, uniforms, **options)
    assert selections == []
    for other in (alone, fallback):
        assert torch.equal(shared.token_ids, other.token_ids)
        assert torch.equal(shared.lengths, other.lengths)
        assert torch.allclose(shared.log_prob, other.log_prob, rtol=0, atol=1e-6)


def test_greedy_equals_transformers_generate(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = adapter.sample(tiny_text.batch(), seed=0, sampling=TextSampling(max_new_tokens=20, temperature=0))
    nearly = adapter.sample(tiny_text.batch(), seed=1, sampling=TextSampling(max_new_tokens=20, temperature=1e-6))
    assert torch.equal(rollouts.data["completion_ids"], nearly.data["completion_ids"])
    for row, prompt in enumerate(rollouts.data["prompt_ids"]):
        ids = prompt[None]
        output = adapter.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=tiny_text.PAD
        )
        expected = output[0, len(prompt) :]
        assert torch.equal(rollouts.data["completion_ids"][row, : len(expected)], expected)
        assert int(rollouts.data["lengths"][row]) == len(expected)
    replay = adapter.log_prob(rollouts, tiny_text.units_of(rollouts)).value
    assert torch.allclose(replay, rollouts.old_log_prob, rtol=0, atol=1e-5)  # scored at temperature 1


def test_end_tokens_masks_and_truncation(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    rollouts = tiny_text.sampled(adapter)
    assert rollouts.truncated is not None
    ended = 0
    for row in range(len(rollouts)):
        length = int(rollouts.data["lengths"][row])
        ids = rollouts.data["completion_ids"][row]
        assert rollouts.unit_mask[row].tolist() == [i < length for i in range(rollouts.num_units)]
        assert tiny_text.EOS not in ids[: length - 1]
        assert (ids[length:] == tiny_text.PAD).all()
        assert bool(rollouts.truncated[row]) == (ids[length - 1] != tiny_text.EOS)
        ended += int(ids[length - 1] == tiny_text.EOS)
    assert ended > 0
    short = adapter.sample(tiny_text.batch(), seed=3, sampling=tiny_text.SHORT.model_copy(update={"max_new_tokens": 2}))
    assert short.truncated is not None
    assert torch.equal(short.truncated, (short.data["completion_ids"] != tiny_text.EOS).all(1))
    assert short.truncated.any()
    endless = adapter.sample(
        tiny_text.batch(), seed=3, sampling=tiny_text.SHORT.model_copy(update={"stop_on_eos": False})
    )
    assert endless.unit_mask.all()
    assert endless.num_units == 24


def test_every_end_token_of_the_generation_config_ends_a_row(tiny_text: Any) -> None:
    model = tiny_text.make_model()
    model.generation_config.eos_token_id = [7, 8]
    adapter = TextLMAdapter(model, tiny_text.make_tokenizer())
    assert adapter.eos_ids == [tiny_text.EOS, 7, 8]
    rollouts = adapter.sample(tiny_text.batch(["abc"] * 12), seed=0, sampling=tiny_text.SHORT)
    last = rollouts.data["completion_ids"].gather(1, rollouts.data["lengths"][:, None] - 1).squeeze(1)
    assert len(set(last.tolist()) & {7, 8, tiny_text.EOS}) > 1


def test_sampling_has_the_right_distribution() -> None:
    """Chi-square of 40,000 draws over 6 tokens; with 5 degrees of freedom 20.5 is the 0.1 % bound."""
    torch.manual_seed(0)
    logits, count = torch.tensor([[0.3, -1.0, 2.0, 0.0, 1.1, -2.5]]), 40_000
    uniforms = torch.rand(count, dtype=torch.float64)
    for temperature in (1.0, 0.6):
        picked, log_prob = pick_tokens(logits.expand(count, -1), uniforms, temperature=temperature)
        probs = (logits[0] / temperature).softmax(-1)
        expected = probs.double() * count
        counts = torch.bincount(picked, minlength=6)
        assert float(((counts - expected) ** 2 / expected).sum()) < 20.5
        assert torch.allclose(log_prob, probs.log()[picked], atol=1e-5)


def test_top_k_and_top_p_renormalise_and_leave_the_log_prob_alone() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    uniforms = torch.linspace(0, 1 - 1e-12, 1001, dtype=torch.float64)
    rows = logits.expand(len(uniforms), -1)
    full = logits[0].log_softmax(-1)
    for options, kept in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.65}, 2),
        ({"top_k": 3, "top_p": 0.5}, 2),
        ({"top_p": 1e-9}, 1),
    ):
        picked, log_prob = pick_tokens(rows, uniforms, temperature=1.0, **options)
        shares = torch.bincount(picked, minlength=4).double() / len(uniforms)
        expected = torch.tensor([0.4, 0.3, 0.2, 0.1][:kept]).double()
        assert torch.allclose(shares[:kept], expected / expected.sum(), atol=2e-3)
        assert (shares[kept:] == 0).all()
        assert torch.allclose(log_prob, full[picked])


def test_the_extremes_of_the_uniform_find_a_possible_token() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.5, -torch.inf]]).expand(2, -1)
    picked, log_prob = pick_tokens(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), temperature=1.0)
    assert picked.tolist() == [1, 2]
    assert torch.isfinite(log_prob).all()


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(5)
    value, _ = token_log_prob(logits, ids, torch.ones(5))
    assert value.dtype == torch.float32
    assert torch.allclose(value, logits.float().log_softmax(-1)[ids, ids], atol=1e-6)


def test_logits_that_are_not_finite_stop_the_run(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    adapter.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RunError, match=r"not finite at new token 0 of batch row\(s\) 0, 1"):
        adapter.sample(tiny_text.batch(), seed=0, sampling=tiny_text.SHORT)


def test_evaluation_mode_for_sampling_is_restored_after_an_error(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter()
    adapter.model.train()
    broken = copy.deepcopy(adapter.model.model.norm.weight)
    adapter.model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(RunError):
        adapter.sample(tiny_text.batch(), seed=0, sampling=tiny_text.SHORT)
    assert adapter.model.training
    adapter.model.model.norm.weight.data.copy_(broken)


def test_words_that_are_ruled_out_add_nothing_to_the_entropy() -> None:
    """A model may give them a logit of -inf."""
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    _, entropy = token_log_prob(logits, torch.tensor([0]), torch.ones(1), entropy=True)
    _, without = token_log_prob(logits[:, [0, 2]], torch.tensor([0]), torch.ones(1), entropy=True)
    assert torch.equal(entropy, without)
