"""vLLM in the training process, on the same accelerator: `vllm.LLM`, its V1 engine without a process of its own.

A LoRA goes along with every request (`LoRARequest`); full weights are read again from a folder, as on a server.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.adapters.paths import resolve_model_path
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.rollouts.engine import Completion, RolloutEngine
from visual_grpo.rollouts.settings import VllmConfig

if TYPE_CHECKING:
    from visual_grpo.adapters.text_sampling import TextSampling
    from visual_grpo.policy import Policy

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as its largest rank."""


class ColocatedVllm(RolloutEngine):
    """One engine of one training process."""

    def __init__(self, settings: VllmConfig, model: ModelConfig, *, folder: Path) -> None:
        """Start the engine with the weights of `model.path`.

        Raises:
            UserError: vLLM is not installed, refuses the model or finds no memory for it.
        """
        super().__init__("vLLM in this process", folder)
        self.settings = settings
        self._path: Path | None = None
        self._lora: Any = None
        self._vllm = _import_vllm()
        path = resolve_model_path(model.path, marker="config.json", what="causal language model")
        options: dict[str, Any] = {
            "model": path,
            "revision": model.revision,
            "dtype": model.dtype,
            "trust_remote_code": model.trust_remote_code,
            "gpu_memory_utilization": settings.memory,
            "enable_sleep_mode": settings.sleep,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        }
        if model.lora is not None:
            rank = next((r for r in LORA_RANKS if r >= model.lora.rank), None)
            if rank is None:
                raise UserError(f"model.lora.rank {model.lora.rank} is above vLLM's limit of {LORA_RANKS[-1]}")
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        try:
            self._llm = self._vllm.LLM(**options | settings.options)
        except Exception as error:  # vLLM and what it builds on have many
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"vLLM does not start with model.path {model.path!r}: {type(error).__name__}: {reason}. Its arguments are "
                "sampling.vllm.memory and sampling.vllm.options"
            ) from error
        self._asleep = False
        self._sleep()

    def load(self, policy: Policy, fingerprint: str) -> None:
        """See `RolloutEngine.load`."""
        self._wake()
        path = self.export(policy, fingerprint)
        if policy.config.lora is not None:
            # The name alone tells vLLM two LoRAs apart in its cache of prompts, the number in its cache of weights.
            self._lora = self._request()(f"visual-grpo-{fingerprint}", self.syncs + 1, str(path))
        else:
            self._call("reload_weights", weights_path=str(path))
            if not self._llm.reset_prefix_cache():
                raise self.problem(
                    "reset_prefix_cache does not succeed, so samples would come from keys of old weights"
                )
        if self._path != path:
            self.forget(self._path)
        self._path = path
        self._sleep()

    def _request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest

    def _call(self, method: str, **kwargs: Any) -> None:
        try:
            self._llm.collective_rpc(method, kwargs=kwargs)
        except Exception as error:
            raise self.problem(
                f"{method} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error

    def complete(
        self, prompts: list[list[int]], seeds: list[int], sampling: TextSampling, eos_ids: Sequence[int]
    ) -> list[Completion]:
        """See `RolloutEngine.complete`."""
        self._wake()
        params = [
            self._vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or 0,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(eos_ids),
                ignore_eos=not eos_ids,
                seed=seed,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        try:
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=self._lora, use_tqdm=False
            )
        except Exception as error:
            raise self.problem(
                f"generate failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error
        self._sleep()
        if len(outputs) != len(prompts):
            raise self.problem(f"{len(outputs)} completions came back for {len(prompts)} rows")
        return [self._completion(output.outputs[0]) for output in outputs]

    def _completion(self, output: Any) -> Completion:
        token_ids = list(output.token_ids)
        if output.logprobs is None:
            raise self.problem("a completion has no log-probs")
        log_probs = [at[token].logprob for at, token in zip(output.logprobs, token_ids, strict=False) if token in at]
        return Completion(token_ids=token_ids, log_probs=log_probs, finish_reason=output.finish_reason)

    def close(self) -> None:
        """See `RolloutEngine.close`. vLLM takes its memory and its process group down when nothing holds it."""
        self._llm = self._lora = None
        gc.collect()
        super().close()

    def _sleep(self) -> None:
        if self.settings.sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


def _import_vllm() -> Any:
    # One process, so that no tensor of the model has to travel; read when the engine starts.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"sampling.vllm.mode=colocate needs vLLM in this environment: pip install 'visual-grpo[vllm]' ({error}). A server in "
            "an environment of its own needs it there only: sampling.vllm.mode=server"
        ) from error
    return vllm
