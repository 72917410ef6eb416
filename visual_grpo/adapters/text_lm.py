"""Text language models: any causal model of transformers, with its chat template or on plain text.

A unit is a token of the completion. `log_prob` reads prompt and completion in one pass without attention mask: rows are padded on
the right, where a causal model's real tokens never look, and only positions that predict a real token reach the output head.
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.generation import CacheKind, Generated, chunked_log_prob, generate, row_uniforms
from visual_grpo.adapters.input_scores import input_scores
from visual_grpo.adapters.paths import check_complete, loading, resolve_model_path, without_progress_bars
from visual_grpo.adapters.protocol import Leaf, MemoryPlan, PolicyAdapter, SamplingConfig
from visual_grpo.adapters.shared_decoding import can_share_prompts
from visual_grpo.adapters.shared_prompt import shared_prompt_reader
from visual_grpo.adapters.text_meta import checkpoint_activations, meta_model, plan_text_memory
from visual_grpo.adapters.text_sampling import TextSampling as TextSampling
from visual_grpo.adapters.text_sampling import check_systems, check_template_options
from visual_grpo.adapters.token_rows import TokenRows
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.importance import SAMPLER_LOG_PROB
from visual_grpo.types import LogProb, PromptBatch, RolloutBatch, RowTokens

logger = logging.getLogger(__name__)


class TextLMAdapter(PolicyAdapter):
    """A causal language model and its tokenizer."""

    kind = "autoregressive"
    library = "transformers"
    input_gradients = True
    given_rows = True
    unit_kinds = frozenset({"token"})
    Sampling = TextSampling
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, model: Any, tokenizer: Any, *, sampling: TextSampling | None = None) -> None:
        """Wrap a loaded model; `sampling` gives `logits_chunk`, and the encoding of rows that were not sampled here."""
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling or TextSampling()
        self.eos_ids = _eos_ids(model, tokenizer)
        first_eos = self.eos_ids[0] if self.eos_ids else 0
        self.pad_id: int = first_eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._split = _splits_into_body_and_head(model)
        self._reader = shared_prompt_reader(model)
        self._cache: CacheKind = "own"
        if self._reader is not None:
            self._cache = "shared" if can_share_prompts(model) else "plain"
        if not self.eos_ids:
            logger.warning("the model names no end-of-sequence token: every completion runs to sampling.max_new_tokens")

    @classmethod
    def load(cls, config: ModelConfig, *, device: torch.device, sampling: SamplingConfig) -> TextLMAdapter:
        """Load model and tokenizer, frozen, with every dropout at 0 (a replay must see the network that sampled)."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        assert isinstance(sampling, TextSampling)
        resolved = resolve_model_path(config.path, marker="config.json", what="causal language model")
        options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        with loading(config.path, resolved):
            settings = _without_dropout(AutoConfig.from_pretrained(resolved, **options))
            model, found = AutoModelForCausalLM.from_pretrained(
                resolved,
                config=settings,
                dtype=getattr(torch, config.dtype),
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
            check_complete(config.path, found)
            tokenizer = AutoTokenizer.from_pretrained(resolved, **options)
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        return cls(model.to(device).eval().requires_grad_(False), tokenizer, sampling=sampling)

    @classmethod
    def load_meta(cls, config: ModelConfig) -> nn.Module:
        """The network on the meta device, from a folder's or the hub cache's `config.json`, or from published values."""
        return meta_model(config)

    @classmethod
    def plan_memory(cls, config: ModelConfig, module: nn.Module, *, sampling: Any, rows: int, units: int) -> MemoryPlan:
        """Bytes for one training pass and the cache of sampling as many rows."""
        return plan_text_memory(config, module, logits_chunk=sampling.logits_chunk, rows=rows, units=units)

    @property
    def trainable_module(self) -> nn.Module:
        """The causal language model."""
        module: nn.Module = self.model
        return module

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.trainable_module.parameters()).device

    def encode(self, texts: Sequence[str], metadata: Sequence[dict[str, Any]], sampling: TextSampling) -> list[Tensor]:
        """Token ids of each prompt, [L_i] int64 on the CPU; `metadata["system"]` is the system prompt of a chat.

        Raises:
            UserError: a prompt without tokens, or one the chat template refuses.
        """
        known: dict[tuple[str, str | None], Tensor] = {}
        keys = [(text, row.get("system")) for text, row in zip(texts, metadata, strict=True)]
        for text, system in dict.fromkeys(keys):
            known[text, system] = torch.tensor(self._encode(text, system, sampling), dtype=torch.int64)
        return [known[key] for key in keys]

    def _encode(self, text: str, system: str | None, sampling: TextSampling) -> list[int]:
        if sampling.chat_template == "none" or not self.tokenizer.chat_template:
            ids: list[int] = self.tokenizer(text if system is None else f"{system}\n\n{text}")["input_ids"]
        else:
            messages = [{"role": "user", "content": text}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            try:
                rendered = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **sampling.chat_template_kwargs
                )
            except Exception as error:  # a template may raise whatever its author chose
                raise UserError(f"the model's chat template refuses prompt {text[:80]!r}: {error}") from error
            ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise UserError(
                f"prompt {text!r} has no tokens and the model no begin-of-sequence token; give it some text"
            )
        return ids

    def sample(
        self, prompts: PromptBatch, *, seed: int, sampling: SamplingConfig, units: Tensor | None = None
    ) -> RolloutBatch:
        """Sample one completion a row; `units` does not apply to tokens and is ignored. See `PolicyAdapter.sample`."""
        assert isinstance(sampling, TextSampling)
        prompt_ids = self.encode(prompts.context("behaviour"), prompts.metadata, sampling)
        self._check_length(prompt_ids, prompts.context("behaviour"), sampling)
        generated = self._generate(prompt_ids, seed, prompts.row_ids, sampling)
        rollouts = self._rollouts(
            prompts,
            sampling,
            prompt_ids=prompt_ids,
            completion_ids=generated.token_ids,
            lengths=generated.lengths,
            old_log_prob=generated.log_prob,
            truncated=~generated.ended,
        )
        if sampling.uses_engine:
            rollouts.data[SAMPLER_LOG_PROB] = generated.log_prob
        return rollouts

    def _generate(self, prompt_ids: list[Tensor], seed: int, row_ids: Tensor, sampling: TextSampling) -> Generated:
        if sampling.uses_engine:
            if self.engine is None:
                raise UserError("sampling.engine=vllm samples in training runs only: set sampling.engine=model here")
            return self.engine.generate(self, prompt_ids, seed, row_ids, sampling)
        training = self.model.training
        self.model.eval()
        try:
            return generate(
                self.model,
                prompt_ids,
                row_uniforms(seed, row_ids, sampling.max_new_tokens),
                eos_ids=self.eos_ids if sampling.stop_on_eos else (),
                pad_id=self.pad_id,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                cache=self._cache,
            )
        finally:
            self.model.train(training)

    def rows_from_texts(self, prompts: PromptBatch, texts: Sequence[str], sampling: Any) -> RolloutBatch:
        """See `PolicyAdapter.rows_from_texts`.

        Raises:
            UserError: prompt and text are longer than the model reads.
        """
        prompt_ids = self.encode(prompts.context("behaviour"), prompts.metadata, sampling)
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] + self.eos_ids[:1] for text in texts]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        for text, prompt, own in zip(texts, prompt_ids, ids, strict=True):
            if limit is not None and len(prompt) + len(own) > limit:
                raise UserError(
                    f"the given answer {text[:80]!r} has {len(own)} tokens and its prompt {len(prompt)}, more than the model's "
                    f"{limit} positions: shorten it or leave it out"
                )
        completions = nn.utils.rnn.pad_sequence(
            [torch.tensor(row, dtype=torch.int64) for row in ids], batch_first=True, padding_value=self.pad_id
        ).to(self.device)
        return self._rollouts(
            prompts,
            sampling,
            prompt_ids=prompt_ids,
            completion_ids=completions,
            lengths=torch.tensor([len(row) for row in ids], device=self.device),
        )

    def _rollouts(
        self,
        prompts: PromptBatch,
        sampling: TextSampling,
        *,
        prompt_ids: list[Tensor],
        completion_ids: Tensor,
        lengths: Tensor,
        old_log_prob: Tensor | None = None,
        truncated: Tensor | None = None,
    ) -> RolloutBatch:
        width = completion_ids.shape[1]
        return RolloutBatch(
            prompts=prompts,
            unit_kind="token",
            unit_mask=torch.arange(width, device=lengths.device) < lengths[:, None],
            old_log_prob=old_log_prob,
            data={
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                # Not the same as unit_mask: a token that is not trained is still read by those after it.
                "lengths": lengths,
                # By row, since batches of different temperatures may be joined; greedy samples are scored at 1.
                "temperature": torch.full(lengths.shape, sampling.temperature or 1.0, device=lengths.device),
            },
            shared={"sampling": sampling},
            truncated=None if truncated is None else truncated.cpu(),
        )

    def check_prompts(
        self, prompts: Sequence[str], metadata: Sequence[dict[str, Any]], sampling: SamplingConfig
    ) -> None:
        """Refuse prompts that leave no room for a completion, and what the chat template refuses or does not read."""
        assert isinstance(sampling, TextSampling)
        check_systems(prompts, metadata)
        check_template_options(self.tokenizer, sampling)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is None:
            return
        systems = {row.get("system") for row in metadata}
        template = max(
            len(ids) for ids in self.encode(["x"] * len(systems), [{"system": s} for s in systems], sampling)
        )
        # No tokenizer makes more tokens than bytes, so only long prompts have to be encoded.
        room = limit - sampling.max_new_tokens - template
        long = [i for i, text in enumerate(prompts) if len(text.encode()) > room]
        if long:
            texts = [prompts[i] for i in long]
            self._check_length(self.encode(texts, [metadata[i] for i in long], sampling), texts, sampling)

    def _check_length(self, prompt_ids: list[Tensor], prompts: Sequence[str], sampling: TextSampling) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        length = len(prompt_ids[longest])
        if limit is not None and length + sampling.max_new_tokens > limit:
            raise UserError(
                f"prompt {prompts[longest][:80]!r} has {length} tokens; with sampling.max_new_tokens "
                f"{sampling.max_new_tokens} that exceeds the model's {limit} positions. Shorten or filter the prompts, or "
                f"lower sampling.max_new_tokens to {max(limit - length, 0)}."
            )

    def log_prob(self, rollouts: RolloutBatch, units: Tensor, *, entropy: bool = False) -> LogProb:
        """Replay tokens `units` at the temperature they were sampled at; 0 where a row has no such token."""
        rows = self._token_rows(rollouts, units)
        temperature = rollouts.data["temperature"].to(self.device)[rows.row]
        source, head = self._predictions(rows)
        value, spread = chunked_log_prob(
            source, head, rows.targets, temperature, chunk=self.sampling.logits_chunk, entropy=entropy
        )

        def by_unit(flat: Tensor) -> Tensor:
            return flat.new_zeros(rows.wanted.shape).masked_scatter(rows.wanted, flat)

        return LogProb(value=by_unit(value), entropy=None if spread is None else by_unit(spread))

    def tokens_to_read(self, rollouts: RolloutBatch) -> RowTokens:
        """See `PolicyAdapter.tokens_to_read`; prompts are those of the sampler."""
        answers = rollouts.data["lengths"].cpu()
        prompts = torch.tensor([len(ids) for ids in rollouts.data["prompt_ids"]], dtype=torch.int64)
        if self._reader is None:
            return RowTokens(own=prompts + answers, context=torch.zeros_like(prompts))
        return RowTokens(own=answers, context=prompts)

    def _training_prompts(self, rollouts: RolloutBatch) -> list[Tensor]:
        """Prompt ids of the training context; stored ones where it is the text that was sampled under."""
        prompts = rollouts.prompts
        stored: list[Tensor] = rollouts.data["prompt_ids"]
        training, behaviour = prompts.context("training"), prompts.context("behaviour")
        if training == behaviour:
            return stored
        fresh = self.encode(training, prompts.metadata, rollouts.shared["sampling"])
        same = [t == b for t, b in zip(training, behaviour, strict=True)]
        return [old if keep else new for old, new, keep in zip(stored, fresh, same, strict=True)]

    def _token_rows(self, rollouts: RolloutBatch, units: Tensor) -> TokenRows:
        return TokenRows.of_units(
            units.to(self.device),
            prompt_ids=self._training_prompts(rollouts),
            completions=rollouts.data["completion_ids"].to(self.device),
            lengths=rollouts.data["lengths"].to(self.device),
            pad_id=self.pad_id,
        )

    def _head(self) -> nn.Module | None:
        """The output embedding, where it may be applied to chosen places only."""
        head: Any = self.model.get_output_embeddings()
        # Sharded weights are gathered by the model's own forward only.
        return head if self._split and type(head.weight).__name__ != "DTensor" else None

    def _predictions(self, rows: TokenRows) -> tuple[Tensor, nn.Module]:
        """What predicts the wanted tokens and the layer that makes logits of it: ([M, D], head), or ([M, V], identity)."""
        head = self._head()
        if head is not None and self._reader is not None and rows.repeats_prompts:
            return self._reader.predicting_states(rows), head
        token_ids, places = rows.whole()
        if head is not None:
            hidden = self.model.base_model(input_ids=token_ids, use_cache=False)[0]
            return hidden.flatten(0, 1).index_select(0, places), head
        length = token_ids.shape[1]
        # Counted from the end, as transformers does: the positions from the first wanted prediction on.
        keep = length - int((places % length).min()) if len(places) else 1
        options = (
            {"logits_to_keep": keep} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        )
        logits = self.model(input_ids=token_ids, use_cache=False, **options).logits
        kept = logits.shape[1]
        places = places // length * kept + places % length - (length - kept)
        return logits.flatten(0, 1).index_select(0, places), nn.Identity()

    def decode(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Fill `texts`, without special tokens."""
        lengths = rollouts.data["lengths"].tolist()
        ids = [row[:length] for row, length in zip(rollouts.data["completion_ids"].tolist(), lengths, strict=True)]
        rollouts.texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return rollouts

    def input_scores(self, rollouts: RolloutBatch, chosen: Tensor, *, leaf: Leaf) -> Tensor:
        """See `PolicyAdapter.input_scores`."""
        rows = self._token_rows(rollouts, torch.arange(rollouts.num_units))
        temperature = rollouts.data["temperature"].to(self.device)
        return input_scores(self.model, self._head(), rows, chosen.to(self.device), temperature, leaf)

    def first_units(self, rollouts: RolloutBatch, row: int, characters: Sequence[int]) -> list[int]:
        """See `PolicyAdapter.first_units`; a token starts where the text of those before it ends."""
        ids = rollouts.data["completion_ids"][row, : int(rollouts.data["lengths"][row])].tolist()
        return [
            bisect_left(range(len(ids)), place, key=lambda unit: len(self._text(ids[:unit]))) for place in characters
        ]

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def save(self, path: str) -> None:
        """Write model and tokenizer with `save_pretrained`."""
        with without_progress_bars():
            self.model.save_pretrained(path)
            self.tokenizer.save_pretrained(path)


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """All ids that end a completion: the generation config's and the tokenizer's, the tokenizer's first."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    given = given if isinstance(given, list) else [given]
    return list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *given] if i is not None))


@torch.no_grad()
def _splits_into_body_and_head(model: Any) -> bool:
    """Whether the logits are the output embedding of the body's last state and nothing more (no soft cap, no scale)."""
    body, head = model.base_model, model.get_output_embeddings()
    if head is None or body is model or "input_ids" not in inspect.signature(body.forward).parameters:
        return False
    training = model.training
    model.eval()
    # Several tokens, since the padding token's embedding may be zero, and so its logits.
    ids = torch.arange(8, device=head.weight.device)[None] % head.weight.shape[0]
    expected, logits = model(input_ids=ids, use_cache=False).logits, head(body(input_ids=ids, use_cache=False)[0])
    model.train(training)
    return torch.equal(expected, logits)  # a soft cap is nearly the identity on small logits: only equality tells


def _without_dropout(settings: Any) -> Any:
    """`settings` with every dropout rate at 0."""
    for key, value in settings.to_dict().items():
        if isinstance(value, float) and value > 0 and ("dropout" in key or key.endswith("pdrop")):
            logger.info("%s %g set to 0", key, value)
            setattr(settings, key, 0.0)
    return settings
