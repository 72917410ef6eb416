"""A random Qwen3 of 3 layers with a word-level tokenizer, and what tests of text models share."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from visual_grpo.adapters.text_lm import TextLMAdapter, TextSampling
from visual_grpo.types import PromptBatch, RolloutBatch

PAD, BOS, EOS = 0, 1, 2
WORDS = [
    "<pad>",
    "<bos>",
    "<eos>",
    "<user>",
    "<system>",
    "<assistant>",
    "<unk>",
    *"abcdefghijklmnopqrstuvwxyz 0123456789+=?",
]
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["abc", "abc", "abc", "a longer deed 12+3=?", "a longer deed 12+3=?", "9", "9"]
SHORT = TextSampling(max_new_tokens=24, temperature=0.8)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<system>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(dtype: torch.dtype = torch.float32, **values: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        **{
            "vocab_size": len(WORDS),
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "max_position_embeddings": 96,
            "initializer_range": 0.15,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }
        | values
    )
    return Qwen3ForCausalLM(config).to(dtype).eval().requires_grad_(False)


def make_adapter(dtype: torch.dtype = torch.float32, template: str | None = TEMPLATE, **values: Any) -> TextLMAdapter:
    return TextLMAdapter(make_model(dtype, **values), make_tokenizer(template))


def batch(prompts: list[str] = PROMPTS, **fields: Any) -> PromptBatch:
    groups = {text: i for i, text in enumerate(dict.fromkeys(prompts))}
    return PromptBatch(
        prompts=prompts,
        metadata=[{} for _ in prompts],
        group_ids=torch.tensor([groups[text] for text in prompts]),
        row_ids=torch.arange(len(prompts)) + 10,
        **fields,
    )


def units_of(rollouts: RolloutBatch) -> torch.Tensor:
    return torch.arange(rollouts.num_units)


def sampled(adapter: TextLMAdapter, sampling: TextSampling = SHORT, **fields: Any) -> RolloutBatch:
    rollouts = adapter.sample(batch(**fields), seed=3, sampling=sampling)
    lengths = rollouts.data["lengths"]
    assert lengths.min() < lengths.max(), "the tests below need completions of different lengths"
    return rollouts


def plain_log_prob(model: nn.Module, rollouts: RolloutBatch, row: int, temperature: float) -> torch.Tensor:
    """[len] log-probs of one row by one plain forward pass."""
    prompt, length = rollouts.data["prompt_ids"][row], int(rollouts.data["lengths"][row])
    ids = torch.cat([prompt, rollouts.data["completion_ids"][row, :length]])
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None]).squeeze(1)
