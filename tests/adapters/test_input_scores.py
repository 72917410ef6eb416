"""How much tokens depend on their inputs: against a model whose gradient follows on paper, and against single rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from visual_grpo.adapters.text_lm import TextLMAdapter
from visual_grpo.pipelines.text.grail import boxed_span
from visual_grpo.types import RolloutBatch


class Body(nn.Module):
    """The hidden state is the running sum of the embeddings."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, dtype=torch.float64)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, use_cache: bool = False
    ) -> tuple[Tensor]:
        return ((self.embed(input_ids) if inputs_embeds is None else inputs_embeds).cumsum(1),)


class RunningSum(nn.Module):
    """Logits are linear in the running sum."""

    def __init__(self, vocabulary: int, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base_model, self.head = Body(vocabulary, width), nn.Linear(width, vocabulary, dtype=torch.float64)
        self.config = SimpleNamespace(max_position_embeddings=64)

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.base_model(**inputs)[0]))


def test_gradient_on_paper(tiny_text: Any) -> None:
    """-log p of tokens [2, 5): each input up to the one that predicts token 4 gets the slopes of all predictions after it."""
    adapter = TextLMAdapter(RunningSum(len(tiny_text.WORDS)), tiny_text.make_tokenizer(None))
    prompts = tiny_text.batch(["ab", "abcde"])
    rollouts = adapter.rows_from_texts(prompts, ["xyz12345", "pq+rs"], tiny_text.SHORT)
    chosen = torch.zeros(2, rollouts.num_units, dtype=torch.bool)
    chosen[:, 2:5] = True
    scores = adapter.input_scores(rollouts, chosen, leaf="embeddings")
    weight, temperature = adapter.model.head.weight.detach(), float(rollouts.data["temperature"][0])
    for row in range(2):
        prompt, length = rollouts.data["prompt_ids"][row], int(rollouts.data["lengths"][row])
        ids = torch.cat([prompt, rollouts.data["completion_ids"][row, :length]])
        embedded = adapter.model.base_model.embed.weight.detach()[ids]
        hidden = embedded.cumsum(0)
        slopes = torch.zeros_like(embedded)
        for token in range(2, 5):
            place = len(prompt) + token - 1
            share = (adapter.model.head(hidden[place]).detach() / temperature).softmax(0)
            share[ids[place + 1]] -= 1
            slopes[place] = weight.T @ share / temperature
        gradient = slopes.flip(0).cumsum(0).flip(0)
        expected = (gradient * embedded).norm(dim=1)[len(prompt) - 1 :]
        torch.testing.assert_close(scores[row, : length + 1], expected, rtol=1e-6, atol=1e-9)
        assert bool((scores[row, 5:] == 0).all()), "the last of them and what follows has no influence"
        assert bool((scores[row, :4] > 0).all())


@pytest.mark.parametrize("leaf", ["embeddings", "first", "middle", "last"])
def test_a_batch_of_unequal_prompts_scores_each_row_as_alone(tiny_text: Any, leaf: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    chosen = torch.rand(rollouts.unit_mask.shape, generator=torch.Generator().manual_seed(2)) < 0.3
    units = tiny_text.units_of(rollouts)
    before = adapter.log_prob(rollouts, units).value
    adapter.model.requires_grad_(True)
    together = adapter.input_scores(rollouts, chosen, leaf=leaf)
    assert together.shape == (len(rollouts), rollouts.num_units + 1)
    assert not together.requires_grad
    assert all(p.grad is None for p in adapter.model.parameters())
    for row in range(len(rollouts)):
        alone = adapter.input_scores(rollouts.select(torch.tensor([row])), chosen[row : row + 1], leaf=leaf)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-6, atol=1e-10)
    used = chosen & rollouts.unit_mask
    last = torch.where(used.any(1), used.shape[1] - 1 - used.flip(1).long().argmax(1), -1)
    after = torch.arange(together.shape[1]) > last[:, None]
    assert bool((together[after] == 0).all())
    assert bool((together[~after] > 0).any())
    adapter._split = False  # the path of models whose logits are more than the output embedding
    torch.testing.assert_close(adapter.input_scores(rollouts, chosen, leaf=leaf), together, rtol=1e-6, atol=1e-10)
    adapter._split = True
    torch.testing.assert_close(adapter.log_prob(rollouts, units).value.detach(), before, rtol=0, atol=1e-9)
    assert not any(module._forward_hooks for module in adapter.model.modules())


def test_leaves_differ_and_nothing_chosen_is_zero(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    chosen = rollouts.unit_mask & (torch.arange(rollouts.num_units) == 3)
    found = [adapter.input_scores(rollouts, chosen, leaf=leaf) for leaf in ("embeddings", "first", "last")]
    assert not torch.allclose(found[0], found[1])
    assert not torch.allclose(found[1], found[2])
    nothing = adapter.input_scores(rollouts, torch.zeros_like(chosen), leaf="embeddings")
    assert bool((nothing == 0).all())


def test_gradients_that_are_there_stay(tiny_text: Any) -> None:
    adapter = tiny_text.make_adapter(torch.float64)
    rollouts = tiny_text.sampled(adapter)
    adapter.model.requires_grad_(True)
    for parameter in adapter.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    adapter.input_scores(rollouts, rollouts.unit_mask, leaf="embeddings")
    assert all(bool((p.grad == 0.5).all()) for p in adapter.model.parameters())


def test_tokens_of_a_span_of_characters(tiny_text: Any) -> None:
    """A token belongs to the part that holds its first character; special tokens have none."""
    tokens = ["<pad>", "<eos>", "so", " \\box", "ed{", "1", "2}", "."]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    adapter = TextLMAdapter(RunningSum(len(tokens)), tokenizer)
    ids = torch.tensor([[2, 3, 4, 5, 6, 7, 1, 0]])
    rollouts = RolloutBatch(
        prompts=tiny_text.batch(["ab"]),
        unit_kind="token",
        unit_mask=torch.arange(8)[None] < 7,
        data={"completion_ids": ids, "lengths": torch.tensor([7])},
    )
    adapter.decode(rollouts)
    assert rollouts.texts == ["so \\boxed{12}."]
    span = boxed_span(rollouts.texts[0])
    assert span == (3, 10, 12, 13)
    assert adapter.first_units(rollouts, 0, span) == [2, 3, 5, 5]
    assert adapter.first_units(rollouts, 0, [0, 2, 14, 15]) == [0, 1, 6, 7]
