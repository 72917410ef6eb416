"""A vLLM server (`vllm serve`) as rollout engine, over its HTTP routes.

Completions: `/v1/completions` with token ids in and out. Weights: a LoRA is loaded at run time under a name made of its
fingerprint (`/v1/load_lora_adapter`), so that every reply names the weights it was sampled with; full weights are read again from
a folder (`/collective_rpc` with `reload_weights`), after which the cache of prompts is emptied (`/reset_prefix_cache`).
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.errors import UserError
from visual_grpo.rollouts.engine import Completion, RolloutEngine
from visual_grpo.rollouts.settings import VllmConfig
from visual_grpo.workers import DaemonWorkers

if TYPE_CHECKING:
    from visual_grpo.adapters.text_lm import TextLMAdapter
    from visual_grpo.adapters.text_sampling import TextSampling
    from visual_grpo.policy import Policy

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.2
PREFIX = "visual-grpo-"
PROBE = "The 3 quick foxes: 12 + 30 = 42?"
"""A text whose tokens tell tokenizers apart."""


class VllmServer(RolloutEngine):
    """The server of one training process."""

    def __init__(self, settings: VllmConfig, *, folder: Path) -> None:
        """Look the server up and the model that it serves.

        Raises:
            UserError: no server answers, or it does not serve one model.
        """
        super().__init__(f"vLLM server {settings.url}", folder)
        self.settings = settings
        self._url = settings.url.rstrip("/").removesuffix("/v1")
        self._client = _client(settings)
        self._workers = DaemonWorkers("vllm", settings.connections)
        self._path: Path | None = None
        self._limit: int | None = None
        try:
            self.base = self._base_model()
        except BaseException:
            self._hang_up()
            raise
        self.model = self.base  # what requests name

    # -- requests ---------------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, route: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON or text) of one request.

        Raises:
            UserError, RunError: no answer in time, or it is not let in.
        """
        import httpx

        token = os.environ.get(self.settings.token_env)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(self.settings.timeout_s, connect=min(self.settings.timeout_s, CONNECT_SECONDS))
        try:
            reply = self._client.request(method, self._url + route, json=body, headers=headers, timeout=timeout)
        except httpx.TimeoutException:
            raise self.problem(
                f"{route} gave no answer within {self.settings.timeout_s:g} s; see the server, or raise sampling.vllm.timeout_s"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.problem(
                f"no answer to {route} ({type(error).__name__}: {str(error)[:120]}); start it with `vllm serve` or set "
                "sampling.vllm.url"
            ) from None
        if reply.status_code in (401, 403):
            raise self.problem(f"it does not let us in; put its API key into {self.settings.token_env}")
        try:
            return reply.status_code, reply.json()
        except ValueError:
            return reply.status_code, reply.text

    def _post(self, route: str, body: Any, hint: str) -> Any:
        """The reply of a POST that must succeed; `hint` says what a server that refuses lacks."""
        status, reply = self._ask("POST", route, body)
        if status != 200:
            raise self.problem(f"{route} answers {status} ({_message(reply)}); {hint}")
        return reply

    def _cards(self) -> list[dict[str, Any]]:
        status, reply = self._ask("GET", "/v1/models")
        cards = reply.get("data") if isinstance(reply, dict) else None
        if status != 200 or not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
            raise self.problem(f"/v1/models answers {status} ({_message(reply)}); sampling.vllm.url is no vLLM server")
        return cards

    def _base_model(self) -> str:
        cards = {card["id"]: card for card in self._cards() if not card.get("parent")}
        wanted = self.settings.model
        if wanted is None and len(cards) == 1:
            wanted = next(iter(cards))
        if wanted not in cards:
            given = "several names" if wanted is None else f"no model {wanted!r}"
            raise self.problem(f"it serves {given}; set sampling.vllm.model to one of: {', '.join(cards) or 'none'}")
        self._limit = cards[wanted].get("max_model_len")
        return str(wanted)

    # -- checks -----------------------------------------------------------------------------------------------------------------

    def check(self, adapter: TextLMAdapter, sampling: TextSampling) -> None:
        """Compare tokenizer and length limit with those of `model.path`; see `RolloutEngine.check`."""
        mine = adapter.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        body = {"model": self.base, "prompt": PROBE, "add_special_tokens": False}
        status, reply = self._ask("POST", "/tokenize", body)
        theirs = reply.get("tokens") if isinstance(reply, dict) else None
        if status != 200 or not isinstance(theirs, list):
            raise self.problem(f"/tokenize answers {status} ({_message(reply)}); serve the model with its tokenizer")
        if theirs != mine:
            raise self.problem(
                f"it serves a model with another tokenizer: {PROBE!r} has {len(theirs)} tokens there and {len(mine)} in "
                "model.path, or others; serve the model of model.path"
            )
        if self._limit is not None and self._limit <= sampling.max_new_tokens:
            raise self.problem(
                f"its --max-model-len is {self._limit}, which leaves no room for a prompt before sampling.max_new_tokens "
                f"({sampling.max_new_tokens})"
            )

    # -- weights ----------------------------------------------------------------------------------------------------------------

    def load(self, policy: Policy, fingerprint: str) -> None:
        """See `RolloutEngine.load`."""
        if policy.config.lora is not None:
            self._load_lora(policy, fingerprint)
            return
        path = self.export(policy, fingerprint)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        self._post(
            "/collective_rpc", body, "full weights need VLLM_SERVER_DEV_MODE=1 and a folder that the server reads too"
        )
        self._empty_cache()
        self._keep(path)

    def _load_lora(self, policy: Policy, fingerprint: str) -> None:
        name = PREFIX + fingerprint
        path, old = self.export(policy, fingerprint), self.model
        if name in {card["id"] for card in self._cards()}:  # of a run that was killed: its folder may be gone
            self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        self._post(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(path)},
            "a LoRA needs --enable-lora, --max-lora-rank of model.lora.rank or more, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, "
            "and a folder that the server reads too (sampling.vllm.folder)",
        )
        roots = {card["id"]: card.get("root") for card in self._cards()}
        if roots.get(name) != str(path):
            raise self.problem(
                f"it says that it loaded the LoRA {name}, but /v1/models has {roots.get(name)!r} under that name"
            )
        self.model = name
        if old not in (self.base, name):
            self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": old})
        self._keep(path)

    def _empty_cache(self) -> None:
        """Forget keys and values of prompts under the weights before; blocks that are still held make it fail for a moment."""
        end = time.monotonic() + self.settings.timeout_s
        while True:
            reply = self._post("/reset_prefix_cache", None, "full weights need VLLM_SERVER_DEV_MODE=1")
            if not isinstance(reply, dict) or reply.get("success", True):
                return
            if time.monotonic() > end:
                raise self.problem("/reset_prefix_cache does not succeed: somebody else uses this server; end that")
            time.sleep(POLL_SECONDS)

    def _keep(self, path: Path) -> None:
        if self._path != path:
            self.forget(self._path)
        self._path = path

    # -- completions ------------------------------------------------------------------------------------------------------------

    def complete(
        self, prompts: list[list[int]], seeds: list[int], sampling: TextSampling, eos_ids: Sequence[int]
    ) -> list[Completion]:
        """See `RolloutEngine.complete`; one request a row, so that each has a seed of its own."""
        fixed = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            # Stated, since the server's own defaults come from the model's generation config.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(eos_ids),
            "ignore_eos": not eos_ids,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
        }
        futures = [
            self._workers.submit(functools.partial(self._row, fixed | {"prompt": prompt, "seed": seed}))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _row(self, body: dict[str, Any]) -> Completion:
        reply = self._post("/v1/completions", body, "see the server's output")
        if not isinstance(reply, dict) or reply.get("model") != self.model:
            given = reply.get("model") if isinstance(reply, dict) else None
            raise self.problem(f"a reply is of model {given!r}, asked for {self.model!r}")
        choices = reply.get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise self.problem(f"{len(choices or ())} completions came back for one row")
        choice = choices[0]
        token_ids, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if token_ids is None:
            raise self.problem("a reply has no token_ids; it needs vLLM 0.11 or newer (return_token_ids)")
        if log_probs is None:
            raise self.problem("a reply has no log-probs, though they were asked for; serve with vLLM 0.11 or newer")
        seen = choice.get("prompt_token_ids")
        if seen is not None and seen != body["prompt"]:
            raise self.problem(f"it read {len(seen)} prompt tokens that are not the {len(body['prompt'])} it was sent")
        return Completion(token_ids=token_ids, log_probs=log_probs, finish_reason=choice.get("finish_reason"))

    def close(self) -> None:
        """See `RolloutEngine.close`. A server that is gone has nothing to give back."""
        if self.model != self.base:
            try:
                self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": self.model})
            except Exception as error:  # the run has ended, whatever the server does
                logger.info("the LoRA %s stays loaded: %s", self.model, error)
        self._hang_up()
        super().close()

    def _hang_up(self) -> None:
        self._workers.close()
        self._client.close()


def _client(settings: VllmConfig) -> Any:
    """An HTTP client.

    Raises:
        UserError: its library is missing, or the address is none.
    """
    if not settings.url.startswith(("http://", "https://")):
        raise UserError(f"sampling.vllm.url {settings.url!r} is no address; give http://HOST:PORT")
    try:
        import httpx
    except ImportError as error:
        raise UserError(
            "sampling.engine=vllm needs httpx: pip install 'visual-grpo[vllm]', or without vLLM itself 'visual-grpo[serve]'"
        ) from error
    limits = httpx.Limits(max_connections=settings.connections + 2)
    # Proxies of the environment are for the internet; an engine stands beside the run.
    return httpx.Client(limits=limits, trust_env=False)


def _message(reply: Any) -> str:
    """The server's own words, short."""
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        reply = error.get("message", error.get("detail", error)) if isinstance(error, dict) else error
    return " ".join(str(reply).split())[:200] or "nothing"
