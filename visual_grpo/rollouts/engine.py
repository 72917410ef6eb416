"""What an inference engine offers: completions with their log-probs, under weights that follow those of the policy.

An engine keeps a copy of the weights, so the copy is checked for what it holds and not for when it was sent: every sampling pass
compares the fingerprint of the policy's trained tensors with that of the last weights sent, and sends them where it differs
(after an optimizer step, under averaged weights, after a resumption).
"""

from __future__ import annotations

import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.generation import Generated
from visual_grpo.adapters.noise import row_seed
from visual_grpo.checkpoint import export_model
from visual_grpo.errors import RunError, UserError

if TYPE_CHECKING:
    from visual_grpo.adapters.text_lm import TextLMAdapter
    from visual_grpo.adapters.text_sampling import TextSampling
    from visual_grpo.policy import Policy

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine gives for one row."""

    token_ids: list[int]
    """its new tokens, with the end token if it drew one."""
    log_probs: list[float]
    """of each token, at the sampling temperature."""
    finish_reason: str | None
    """`stop` or `length`."""


def weights_fingerprint(policy: Policy) -> str:
    """16 hex digits that differ where a trained tensor differs, in any process that holds equal ones.

    Made of the sums of the tensors' bit patterns, so that nothing is copied off the accelerator.

    Raises:
        RunError: a LoRA that is switched off: an engine would go on sampling with it.
    """
    if policy.config.lora is not None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        if any(isinstance(m, BaseTunerLayer) and m.disable_adapters for m in policy.module.modules()):
            raise RunError("an engine cannot sample with the LoRA switched off; set sampling.engine=model")
    found = hashlib.sha256(f"{policy.config.path} {policy.config.lora}".encode())
    sums = []
    for name, parameter in policy.trainable.items():
        value = parameter.data.contiguous()
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        bits = value.view(_BITS[value.element_size()])
        # The second sum tells a matrix from one with its rows in another order.
        places = torch.arange(1, len(bits) + 1, device=bits.device) if bits.dim() else bits.new_ones(()).long()
        rows = bits.flatten(1).sum(1, dtype=torch.int64) if bits.dim() > 1 else bits.long()
        sums.append(torch.stack([rows.sum(), (rows * places).sum()]))
    found.update(str(torch.stack(sums).tolist()).encode())
    return found.hexdigest()[:16]


class RolloutEngine(ABC):
    """One engine. `follow` before `generate`; `Policy.sample` sees to it."""

    def __init__(self, name: str, folder: Path) -> None:
        """`name` is what messages call it; `folder` holds the weights on their way."""
        self.name = name
        self.folder = folder
        self.synced: str | None = None
        """fingerprint of the weights that the engine holds."""
        self.syncs = 0
        """how many times weights were sent."""
        self.unconfirmed: str | None = None
        """fingerprint at the self-test, until the weights of an optimizer step were found in the engine too."""
        self._proven = False

    # -- what an engine fills -------------------------------------------------------------------------------------------------

    def check(self, adapter: TextLMAdapter, sampling: TextSampling) -> None:  # noqa: B027 - an engine may have nothing to check
        """Refuse an engine that serves another model, before the first sample.

        Raises:
            UserError: what does not fit.
        """

    @abstractmethod
    def load(self, policy: Policy, fingerprint: str) -> None:
        """Give the engine the present weights of `policy`, and make it forget what it computed with others.

        Raises:
            UserError, RunError: see `problem`.
        """

    @abstractmethod
    def complete(
        self, prompts: list[list[int]], seeds: list[int], sampling: TextSampling, eos_ids: Sequence[int]
    ) -> list[Completion]:
        """One completion a prompt; `seeds` one each. Errors as `load`."""

    def close(self) -> None:
        """Take back what was put into the engine, and delete the weights on their way."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what all share ---------------------------------------------------------------------------------------------------------

    def problem(self, message: str) -> Exception:
        """An error to raise: of the user's settings until the engine has worked once, of the run from then on."""
        if not self._proven:
            return UserError(f"{self.name}: {message} (docs/rollouts.md)")
        return RunError(f"{self.name}: {message}; then go on with --resume (docs/rollouts.md)")

    def follow(self, policy: Policy) -> None:
        """Send the present weights unless the engine has them."""
        fingerprint = weights_fingerprint(policy)
        if fingerprint == self.synced:
            return
        self.synced = None  # a failure on the way leaves the engine with neither
        self.load(policy, fingerprint)
        self.synced = fingerprint
        self.syncs += 1

    def generate(
        self, adapter: TextLMAdapter, prompt_ids: Sequence[Tensor], seed: int, row_ids: Tensor, sampling: TextSampling
    ) -> Generated:
        """Sample one completion a row; see `generation.generate`. A row's seed depends on (`seed`, its id) alone.

        Raises:
            UserError, RunError: the engine is gone, or what it gives is no completion with log-probs.
        """
        prompts = [ids.tolist() for ids in prompt_ids]
        seeds = [row_seed(seed, row, "tokens") for row in row_ids.tolist()]
        eos = adapter.eos_ids if sampling.stop_on_eos else []
        found = self.complete(prompts, seeds, sampling, eos)
        words = _vocabulary(adapter.model)
        for row, completion in enumerate(found):
            fault = _fault(completion, sampling.max_new_tokens, eos, words)
            if fault is not None:
                raise self.problem(f"row {row}: {fault}")
        self._proven = True
        lengths = torch.tensor([len(c.token_ids) for c in found])

        def padded(values: list[Any], fill: float, dtype: torch.dtype) -> Tensor:
            rows = [torch.tensor(value, dtype=dtype) for value in values]
            return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill).to(adapter.device)

        return Generated(
            token_ids=padded([c.token_ids for c in found], adapter.pad_id, torch.int64),
            log_prob=padded([c.log_probs for c in found], 0.0, torch.float32),
            lengths=lengths.to(adapter.device),
            ended=torch.tensor([c.finish_reason == "stop" for c in found], device=adapter.device),
        )

    def export(self, policy: Policy, fingerprint: str) -> Path:
        """Write the present weights into a folder of the engine's, which is there whole or not at all."""
        return export_model(policy, self.folder / fingerprint).resolve()

    def forget(self, path: Path | None) -> None:
        """Delete weights that the engine needs no more."""
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _fault(completion: Completion, limit: int, eos_ids: Sequence[int], words: int) -> str | None:
    """What is wrong with a completion; None: nothing."""
    ids, log_probs = completion.token_ids, completion.log_probs
    if not ids or len(ids) > limit:
        return f"{len(ids)} new tokens came back, asked for 1 to {limit}"
    if len(log_probs) != len(ids):
        return f"{len(ids)} tokens came back with {len(log_probs)} log-probs"
    if any(not isinstance(value, int | float) or value != value or value > 1e-3 for value in log_probs):
        return "a token came back without a log-prob, or with a number that is none: the weights may have diverged"
    if min(ids) < 0 or max(ids) >= words:
        return f"token {max(ids)} came back, but model.path has {words} tokens: the engine serves another model"
    if completion.finish_reason not in ("stop", "length"):
        return f"it ended with {completion.finish_reason!r}, not with stop or length"
    if (completion.finish_reason == "stop") != (ids[-1] in eos_ids):
        return (
            f"it ended with {completion.finish_reason!r} at token {ids[-1]}, but the model's end tokens are {list(eos_ids)}: run "
            "the engine with --generation-config vllm, so that it stops where the model does"
        )
    if completion.finish_reason == "length" and len(ids) < limit:
        return f"it was cut after {len(ids)} of {limit} tokens: raise the engine's --max-model-len"
    return None
