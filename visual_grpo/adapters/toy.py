"""A generator that fits on a page: words of digits from a table of logits.

It is the smallest complete adapter: tests of the loop run on it in seconds, and a new family can be written by changing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from visual_grpo.adapters.protocol import MemoryPlan, PolicyAdapter, SamplingConfig
from visual_grpo.config import ModelConfig
from visual_grpo.seeding import seeded_generator
from visual_grpo.types import LogProb, PromptBatch, RolloutBatch

CONTEXTS = 64
"""Rows of the table: a prompt's bytes are summed modulo this."""
DIGITS = 10
STOP = DIGITS
"""The token that ends a word."""


class ToySampling(SamplingConfig):
    """Options of the toy's sampler."""

    max_new_tokens: int = Field(3, ge=1, description="longest word, with its end")
    temperature: float = Field(1.0, gt=0)


class ToyModel(nn.Module):
    """Logits of each position given the prompt and the token before: [CONTEXTS, width] -> [T, DIGITS + 1]."""

    def __init__(self, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.context = nn.Parameter(torch.randn(CONTEXTS, width, generator=generator))
        self.previous = nn.Parameter(torch.randn(DIGITS + 2, width, generator=generator))
        self.head = nn.Linear(width, DIGITS + 1)
        with torch.no_grad():
            self.head.weight.copy_(0.3 * torch.randn(DIGITS + 1, width, generator=generator))
            self.head.bias.zero_()

    def forward(self, contexts: Tensor, previous: Tensor) -> Tensor:
        """Logits [N, T, DIGITS + 1] for contexts [N] and the tokens before each position [N, T]."""
        return self.head(torch.tanh(self.context[contexts][:, None] + self.previous[previous]))


class ToyAdapter(PolicyAdapter):
    """Token units, no dependency but torch; `model.path` is an exported folder, or any other name for a fixed random start."""

    kind: ClassVar = "autoregressive"
    library: ClassVar = "torch"
    unit_kinds: ClassVar = frozenset({"token"})
    given_rows: ClassVar = True
    Sampling: ClassVar[type[SamplingConfig]] = ToySampling
    lora_targets: ClassVar[tuple[str, ...]] = ("head",)

    def __init__(self, model: ToyModel, sampling: ToySampling) -> None:
        self.model = model
        self.sampling = sampling

    @classmethod
    def load(cls, config: ModelConfig, *, device: torch.device, sampling: SamplingConfig) -> ToyAdapter:
        """A fixed random start, or what `save` wrote to `config.path`."""
        assert isinstance(sampling, ToySampling)
        model = ToyModel().to(device, getattr(torch, config.dtype))
        if (Path(config.path) / "model.safetensors").is_file():
            from safetensors.torch import load_model

            load_model(model, Path(config.path) / "model.safetensors")
        return cls(model, sampling)

    @classmethod
    def load_meta(cls, config: ModelConfig) -> nn.Module:
        """The table on the meta device."""
        with torch.device("cpu"):
            return ToyModel().to("meta")

    @classmethod
    def plan_memory(cls, config: ModelConfig, module: nn.Module, *, sampling: Any, rows: int, units: int) -> MemoryPlan:
        """A few kilobytes."""
        return MemoryPlan(parts={"weights": 4 * sum(p.numel() for p in module.parameters())})

    @property
    def trainable_module(self) -> nn.Module:
        """The table."""
        return self.model

    def _contexts(self, texts: list[str]) -> Tensor:
        return torch.tensor([sum(t.encode()) % CONTEXTS for t in texts], device=self.model.head.weight.device)

    @torch.no_grad()
    def sample(
        self, prompts: PromptBatch, *, seed: int, sampling: SamplingConfig, units: Tensor | None = None
    ) -> RolloutBatch:
        """Sample each row from its own generator, by inverse CDF."""
        assert isinstance(sampling, ToySampling)
        contexts = self._contexts(prompts.context("behaviour"))
        length = sampling.max_new_tokens
        uniform = torch.stack([torch.rand(length, generator=seeded_generator(seed, int(r))) for r in prompts.row_ids])
        tokens = torch.full((len(prompts), length + 1), DIGITS + 1, device=contexts.device)
        log_probs = []
        for t in range(length):
            logits = self.model(contexts, tokens[:, t : t + 1])[:, 0] / sampling.temperature
            log_prob = logits.log_softmax(-1)
            drawn = (log_prob.exp().cumsum(-1) < uniform[:, t : t + 1].to(log_prob)).sum(-1).clamp(max=DIGITS)
            tokens[:, t + 1] = drawn
            log_probs.append(log_prob.gather(1, drawn[:, None]))
        words = tokens[:, 1:]
        ended = (words == STOP).cumsum(1)
        mask = (ended - (words == STOP).long()) == 0
        return RolloutBatch(
            prompts=prompts,
            unit_kind="token",
            unit_mask=mask.cpu(),
            old_log_prob=torch.cat(log_probs, 1) * mask,
            data={
                "completion_ids": words,
                # By row, as a method may change it between rollouts.
                "temperature": torch.full((len(words),), sampling.temperature, dtype=torch.float64),
            },
            truncated=(ended[:, -1] == 0).cpu(),
        )

    def rows_from_texts(self, prompts: PromptBatch, texts: Sequence[str], sampling: Any) -> RolloutBatch:
        """Digits of each text, then the end; see `PolicyAdapter.rows_from_texts`."""
        width = max(len(text) for text in texts) + 1
        words = torch.tensor([[int(d) for d in text] + [STOP] * (width - len(text)) for text in texts])
        lengths = torch.tensor([len(text) + 1 for text in texts])
        return RolloutBatch(
            prompts=prompts,
            unit_kind="token",
            unit_mask=torch.arange(width) < lengths[:, None],
            data={
                "completion_ids": words.to(self.model.head.weight.device),
                "temperature": torch.full((len(words),), sampling.temperature, dtype=torch.float64),
            },
        )

    def log_prob(self, rollouts: RolloutBatch, units: Tensor, *, entropy: bool = False) -> LogProb:
        """Replay the tokens at `units`."""
        words = rollouts.data["completion_ids"]
        start = torch.full_like(words[:, :1], DIGITS + 1)
        previous = torch.cat([start, words[:, :-1]], 1)[:, units]
        logits = self.model(self._contexts(rollouts.prompts.context("training")), previous)
        log_prob = (logits / rollouts.data["temperature"].to(logits)[:, None, None]).log_softmax(-1)
        value = log_prob.gather(2, words[:, units, None])[..., 0]
        return LogProb(value=value, entropy=-(log_prob.exp() * log_prob).sum(-1) if entropy else None)

    def decode(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Digits up to the end of the word."""
        words = rollouts.data["completion_ids"].tolist()
        rollouts.texts = ["".join(str(d) for d in (w[: w.index(STOP)] if STOP in w else w)) for w in words]
        return rollouts

    def save(self, path: str) -> None:
        """Safetensors of the table."""
        from safetensors.torch import save_model

        save_model(self.model, f"{path}/model.safetensors")
