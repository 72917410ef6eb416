"""What a model family must offer so that every method can train it.

An adapter knows one family of generators: how to encode prompts, sample, replay log-probs and decode. It holds no LoRA, EMA,
distribution or checkpoint code: `Policy` adds those for all families alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from visual_grpo.config import ModelConfig, Section
from visual_grpo.types import LogProb, PromptBatch, RolloutBatch, RowTokens, UnitKind

if TYPE_CHECKING:
    from visual_grpo.rollouts.engine import RolloutEngine

Kind = Literal["diffusion", "autoregressive", "next_scale"]
Leaf = Literal["embeddings", "first", "middle", "last"]


class SamplingConfig(Section):
    """Base of each family's sampling options (`sampling:` in a config). Unknown keys are refused."""

    @property
    def replays_the_sampler(self) -> bool:
        """Whether `log_prob` scores the distribution that was sampled; if not, the first ratio is not 1."""
        return True

    @property
    def uses_engine(self) -> bool:
        """Whether an inference engine samples in place of the trained network (`PolicyAdapter.engine`)."""
        return False

    def check_use(self, unit_kinds: Collection[str]) -> None:
        """Refuse options that nothing reads in a training on units of these kinds.

        Raises:
            UserError: naming the key.
        """

    def check_evaluation(self, given: Mapping[str, Any]) -> None:
        """Refuse what `given` (the keys of `eval.sampling`) asks for and these options, those of evaluations, do not do.

        Raises:
            UserError: naming the key.
        """


@dataclass(kw_only=True)
class MemoryPlan:
    """Bytes that one process needs, by part, computed without weights (`train --dry-run`)."""

    parts: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Sum of the parts, in bytes."""
        return sum(self.parts.values())


class PolicyAdapter(ABC):
    """One model family.

    Class attributes state what the family is; `load` builds it from weights, `load_meta` builds its trainable network without
    weights or network access (meta device) from a folder's configs or from published config values.
    """

    kind: ClassVar[Kind]
    library: ClassVar[Literal["diffusers", "transformers", "torch"]]
    """Which plain library must be able to read an exported LoRA or model."""
    component: ClassVar[str] = "transformer"
    """In a diffusers pipeline: name of the trained network, and prefix of its layers in an exported LoRA."""
    unit_kinds: ClassVar[frozenset[UnitKind]]
    """The units that `log_prob` can replay."""
    Sampling: ClassVar[type[SamplingConfig]]
    eval_sampling: ClassVar[dict[str, Any]] = {}
    """Sampling options that `visual-grpo eval` starts from, where those of training are no way to judge a model."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Module-name suffixes that get LoRA by default."""

    input_gradients: ClassVar[bool] = False
    """Whether it has `input_scores` and `first_units`."""
    given_rows: ClassVar[bool] = False
    """Whether it has `rows_from_texts`."""
    engine: RolloutEngine | None = None
    """What samples where `SamplingConfig.uses_engine`; connected after the model is loaded, kept in step by `Policy.sample`."""

    @classmethod  # noqa: B027 - most families take every option
    def check_sampling(cls, sampling: Any, where: str) -> None:
        """Refuse options that no model of the family has, before weights are loaded; `where` is their section.

        Raises:
            UserError: naming the key.
        """

    @classmethod
    @abstractmethod
    def load(cls, config: ModelConfig, *, device: torch.device, sampling: SamplingConfig) -> PolicyAdapter:
        """Build from `config.path` (a folder, a hub id or `testbed/NAME`), frozen and in `config.dtype`.

        Raises:
            UserError: the path holds no such model; the message says where it was looked for and how to get it.
        """

    @classmethod
    @abstractmethod
    def load_meta(cls, config: ModelConfig) -> nn.Module:
        """The trainable network on the meta device, in its real size."""

    @classmethod
    @abstractmethod
    def plan_memory(cls, config: ModelConfig, module: nn.Module, *, sampling: Any, rows: int, units: int) -> MemoryPlan:
        """Bytes a process needs to train `rows` rows and `units` units a pass; `module` comes from `load_meta` with its LoRA."""

    @property
    @abstractmethod
    def trainable_module(self) -> nn.Module:
        """The network that is trained; `Policy` injects LoRA into it in place and never replaces it."""

    def check_prompts(  # noqa: B027 - most models take any prompt
        self, prompts: Sequence[str], metadata: Sequence[dict[str, Any]], sampling: SamplingConfig
    ) -> None:
        """Refuse prompts that the model cannot take, before the first step and not when one is drawn.

        Raises:
            UserError: naming a prompt and what to change.
        """

    @abstractmethod
    def sample(
        self, prompts: PromptBatch, *, seed: int, sampling: SamplingConfig, units: Tensor | None = None
    ) -> RolloutBatch:
        """One sampling pass over the `N` rows with the present weights, without gradient.

        Every random number of a row depends on (`seed`, `row_ids[i]`) alone, so a row's sample does not depend on the batch, the
        rank or the process count. `units` limits the stochastic, stored units of a diffusion sampler (a training window);
        None = all that may be trained. Prompts are `prompts.context("behaviour")`. Reads `sampling` afresh at each call.
        """

    @abstractmethod
    def log_prob(self, rollouts: RolloutBatch, units: Tensor, *, entropy: bool = False) -> LogProb:
        """Replay units `units` ([u] int64) of all rows under the present weights, with gradient where grad mode is on.

        Prompts are `rollouts.prompts.context("training")`. Only these units are recomputed.
        """

    def tokens_to_read(self, rollouts: RolloutBatch) -> RowTokens | None:
        """What `log_prob` reads for each row, where rows have different lengths; None: all cost the same."""
        return None

    def input_scores(self, rollouts: RolloutBatch, chosen: Tensor, *, leaf: Leaf) -> Tensor:
        """How much the log-prob of the `chosen` ([n, T] bool) units depends on each input: |gradient * activation|, [n, T + 1].

        Column t is the input that predicts unit t, column t + 1 the input that unit t becomes; 0 beyond a row's end. `leaf` is
        where the network is entered: the input embeddings or a block's output. No parameter's gradient is touched.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no input_gradients")

    def first_units(self, rollouts: RolloutBatch, row: int, characters: Sequence[int]) -> list[int]:
        """For each character position of `texts[row]`, the first unit that starts there or later."""
        raise NotImplementedError(f"{type(self).__name__} declares no input_gradients")

    def rows_from_texts(self, prompts: PromptBatch, texts: Sequence[str], sampling: Any) -> RolloutBatch:
        """Rows whose completions are given (data of fine-tuning, edited answers): `texts` [N], each closed with the end token."""
        raise NotImplementedError(f"{type(self).__name__} declares no given_rows")

    @abstractmethod
    def decode(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Fill `images` ([N, 3, H, W] float32 in [0, 1]) or `texts`."""

    @abstractmethod
    def save(self, path: str) -> None:
        """Write the whole model with the family's `save_pretrained` (safetensors), readable by the plain library."""
