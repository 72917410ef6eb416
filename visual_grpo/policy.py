"""The policy: an adapter, what of it is trained, and its named sets of weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visual_grpo.config import LoraConfig, ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.types import LogProb, PromptBatch, RolloutBatch

if TYPE_CHECKING:
    from visual_grpo.adapters.protocol import Leaf, PolicyAdapter, SamplingConfig

REFERENCE = "reference"


def inject_lora(module: nn.Module, lora: LoraConfig, default_targets: tuple[str, ...]) -> nn.Module:
    """Add LoRA layers (peft) to `module` in place.

    Raises:
        UserError: a target matches no module; the message lists the linear layers there are.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    targets = list(lora.targets if lora.targets is not None else default_targets)

    def found(target: str) -> list[nn.Module]:
        return [m for n, m in module.named_modules() if target and (n == target or n.endswith(f".{target}"))]

    linear = sorted({n.rpartition(".")[2] for n, m in module.named_modules() if isinstance(m, nn.Linear)})
    hint = f"its linear layers end in: {', '.join(linear)}. Set model.lora.targets to some of them."
    unmatched = [t for t in targets if not found(t)]
    if unmatched or not targets:
        raise UserError(f"model.lora.targets {unmatched or targets} match no module of {type(module).__name__}; {hint}")
    config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
    )
    try:
        return inject_adapter_in_model(config, module, "default")
    except ValueError as error:  # a layer of a kind that peft has no LoRA for
        kinds = sorted({type(m).__name__ for t in targets for m in found(t)})
        raise UserError(
            f"model.lora.targets {targets}: peft has no LoRA for one of the kinds {', '.join(kinds)}; {hint}"
        ) from error


def apply_lora(adapter: PolicyAdapter, path: Path) -> None:
    """Put an exported LoRA on a loaded model, to sample from it.

    Raises:
        UserError: `path` holds no LoRA for this model.
    """
    try:
        if adapter.library == "diffusers":
            pipeline: Any = adapter.pipeline  # type: ignore[attr-defined]
            pipeline.load_lora_weights(str(path))
            if adapter.component not in pipeline.get_list_adapters():  # told in a log line only
                raise ValueError("none of its layers belongs to this model")
            return
        from peft import PeftModel

        with warnings.catch_warnings():  # the layers would stay as they were
            warnings.filterwarnings("error", message=".*Found missing adapter keys")
            PeftModel.from_pretrained(adapter.trainable_module, str(path))
    except Exception as error:
        raise UserError(f"cannot put the LoRA {str(path)!r} on this model: {type(error).__name__}: {error}") from error


def choose_trainable(module: nn.Module, config: ModelConfig) -> dict[str, nn.Parameter]:
    """Set `requires_grad` on what `config` trains and nothing else; return those parameters by name.

    Raises:
        UserError: nothing would be trained.
    """
    for name, parameter in module.named_parameters():
        if config.lora is not None:
            wanted = "lora_" in name
        else:
            wanted = config.train_layers is None or any(part in name for part in config.train_layers)
        parameter.requires_grad_(wanted and parameter.is_floating_point())
    chosen = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not chosen:
        raise UserError(
            f"nothing to train: model.train_layers {config.train_layers} matches no parameter name, for example "
            f"{next((n for n, _ in module.named_parameters()), 'none')!r}"
        )
    return chosen


class Policy:
    """Sampling and replay under the present weights, or for a while under a named set of weights.

    Named sets hold copies of the trained parameters only: `reference` (for a LoRA that began fresh the disabled adapter, without
    a copy), `old`, `ema`, teachers.
    """

    def __init__(self, adapter: PolicyAdapter, config: ModelConfig, *, seed: int = 0) -> None:
        """Inject LoRA where asked, choose the trained parameters and put them in float32 (or wider).

        Raises:
            UserError: LoRA matches no module, or nothing is trained.
        """
        self.adapter = adapter
        self.config = config
        module = adapter.trainable_module
        if config.lora is not None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                inject_lora(module, config.lora, adapter.lora_targets)
        self.trainable = choose_trainable(module, config)
        for parameter in self.trainable.values():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        self.sets: dict[str, dict[str, Tensor]] = {}
        self._fixed: dict[str, dict[str, Tensor]] = {}

    @property
    def module(self) -> nn.Module:
        """The trained network."""
        return self.adapter.trainable_module

    @property
    def device(self) -> torch.device:
        """Where the trained parameters live."""
        return next(iter(self.trainable.values())).device

    @property
    def num_trainable(self) -> int:
        """Count of trained parameters."""
        return sum(p.numel() for p in self.trainable.values())

    def _autocast(self) -> Any:
        half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(self.config.dtype)
        return torch.autocast(self.device.type, dtype=half or torch.bfloat16, enabled=half is not None)

    @torch.no_grad()
    def sample(
        self,
        prompts: PromptBatch,
        *,
        seed: int,
        sampling: SamplingConfig,
        units: Tensor | None = None,
        batch: int | None = None,
    ) -> RolloutBatch:
        """Sample and decode all rows, `batch` rows at a time (None = all at once); see `PolicyAdapter.sample`.

        An engine that samples is given the present weights first.
        """
        self.module.eval()
        if sampling.uses_engine and self.adapter.engine is not None:
            self.adapter.engine.follow(self)
        chunks = torch.arange(len(prompts)).split(batch or len(prompts))
        parts = []
        with self._autocast():
            for index in chunks:
                rows = self.adapter.sample(prompts.select(index), seed=seed, sampling=sampling, units=units)
                parts.append(self.adapter.decode(rows))
        return RolloutBatch.concat(parts)

    def log_prob(self, rollouts: RolloutBatch, units: Tensor, *, entropy: bool = False) -> LogProb:
        """Replay under the present weights; see `PolicyAdapter.log_prob`. Gradient as the caller's grad mode says."""
        self.module.train(torch.is_grad_enabled())
        with self._autocast():
            return self.adapter.log_prob(rollouts, units, entropy=entropy)

    def input_scores(self, rollouts: RolloutBatch, chosen: Tensor, *, leaf: Leaf = "embeddings") -> Tensor:
        """How much the log-prob of `chosen` units depends on each input; see `PolicyAdapter.input_scores`."""
        with self._autocast():
            return self.adapter.input_scores(rollouts, chosen, leaf=leaf)

    def snapshot(self, name: str) -> None:
        """Store the present trained weights as set `name`, over what was there."""
        stored = self.sets.get(name)
        if stored is None:
            self.sets[name] = {k: p.detach().clone() for k, p in self.trainable.items()}
            return
        for key, parameter in self.trainable.items():
            stored[key].copy_(parameter.detach())

    def keep(self, name: str, values: dict[str, Tensor]) -> None:
        """Make `values`, one for each trained parameter, the set `name`: given from outside, never changed, in no checkpoint."""
        self._fixed[name] = {key: values[key].detach() for key in self.trainable}

    @torch.no_grad()
    def average_into(self, name: str, decay: float) -> None:
        """`set = decay * set + (1 - decay) * present`; a set that does not exist starts as the present weights."""
        if name not in self.sets:
            self.snapshot(name)
            return
        for key, parameter in self.trainable.items():
            self.sets[name][key].lerp_(parameter.detach(), 1.0 - decay)

    def keep_reference(self) -> None:
        """Make `reference()` mean the present weights: free with a fresh LoRA, else one copy of the trained weights."""
        if self.config.lora is None or self.config.init is not None:
            self.snapshot(REFERENCE)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block, the start weights: a LoRA that began fresh switched off, else the stored copy."""
        if self.config.lora is None or self.config.init is not None:
            with self.weights(REFERENCE):
                yield
            return
        with self.base():
            yield

    @contextmanager
    def base(self) -> Iterator[None]:
        """Within the block, a LoRA switched off: the weights of `model.path`."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [m for m in self.module.modules() if isinstance(m, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Within the block, the named set; the present weights come back bit-identical, also after an error.

        Raises:
            KeyError: no such set.
        """
        everything = self._fixed | self.sets
        if name not in everything:
            raise KeyError(f"no set of weights named {name!r}; there are {sorted(everything)}")
        stored = everything[name]
        present = {k: p.data for k, p in self.trainable.items()}
        for key, parameter in self.trainable.items():
            parameter.data = stored[key]
        try:
            yield
        finally:
            for key, parameter in self.trainable.items():
                parameter.data = present[key]
