"""A server that speaks the routes of vLLM 0.32 which visual_grpo uses, with a transformers model behind them.

It is no vLLM: it answers the same requests, and really loads the LoRAs and weights that it is told to load. `Faults` make it
misbehave in one way each. Run as a program it is a server in a process of its own:

    python tests/rollouts/stand_in.py MODEL_FOLDER PORT
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from visual_grpo.adapters.kv_cache import cache_name
from visual_grpo.adapters.paths import without_progress_bars


@dataclass
class Faults:
    """One way each to be wrong."""

    stale: bool = False
    """weights that are sent are confirmed and not loaded."""
    raw_log_probs: bool = False
    """log-probs leave the temperature out, as vLLM's default mode does."""
    change: dict[str, Any] = field(default_factory=dict)
    """fields of a completion's choice that are overwritten; a function gets the value."""
    hangs: bool = False
    """no completion comes back."""
    dies: tuple[int, int] | None = None
    """(weights sent, completions since then) after which the server refuses all."""
    dev_mode: bool = True
    lora: bool = True
    end_ids: tuple[int, ...] = ()
    """further tokens at which it stops, as a generation config may name."""


class StandIn:
    """One model, its LoRAs, and what was asked of it."""

    def __init__(
        self, folder: str, *, name: str = "base", faults: Faults | None = None, max_model_len: int = 256
    ) -> None:
        self.name, self.folder, self.max_model_len = name, folder, max_model_len
        self.faults = faults or Faults()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        with without_progress_bars():
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.plain = {k: v.clone() for k, v in self.model.state_dict().items()}
        self._cache_name = cache_name(self.model)
        self.loras: dict[str, str] = {}
        self.requests: list[tuple[str, Any]] = []
        self.sent = 0
        self.completions = 0
        """since weights were sent last."""
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._active: str | None = None

    # -- weights ----------------------------------------------------------------------------------------------------------------

    def _activate(self, name: str) -> None:
        """The base model, or the base model with a LoRA added to its weights."""
        if name == self._active:
            return
        weights = {k: v.clone() for k, v in self.plain.items()}
        if name in self.loras and not self.faults.stale:
            folder = Path(self.loras[name])
            config = json.loads((folder / "adapter_config.json").read_text())
            layers = load_file(folder / "adapter_model.safetensors")
            for key, down in layers.items():
                if key.endswith("lora_A.weight"):
                    target = key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                    up = layers[key.replace("lora_A", "lora_B")]
                    weights[target] += config["lora_alpha"] / config["r"] * up @ down
        self.model.load_state_dict(weights)
        self._active = name

    def reload(self, folder: str) -> None:
        if not self.faults.stale:
            with without_progress_bars():
                fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.plain = {k: v.clone() for k, v in fresh.state_dict().items()}
        self._active = None
        self.sent, self.completions = self.sent + 1, 0

    # -- routes ---------------------------------------------------------------------------------------------------------------

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        if self.faults.hangs and route == "/v1/completions":
            self.ended.wait()
        with self._lock:
            self.requests.append((route, body))
            dies = self.faults.dies
            if self.ended.is_set() or (dies is not None and (self.sent, self.completions) >= dies):
                return 500, {"error": {"message": "EngineCore is dead"}}
            routes = {
                "/v1/models": self._models, "/tokenize": self._tokenize, "/v1/completions": self._complete,
                "/v1/load_lora_adapter": self._load, "/v1/unload_lora_adapter": self._unload,
                "/collective_rpc": self._rpc, "/reset_prefix_cache": self._reset,
            }  # fmt: skip
            if route not in routes:
                return 404, {"detail": "Not Found"}
            return routes[route](body)

    def _models(self, _: Any) -> tuple[int, Any]:
        base = {
            "id": self.name,
            "object": "model",
            "root": self.folder,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        loras = [{"id": n, "object": "model", "root": p, "parent": self.name} for n, p in self.loras.items()]
        return 200, {"object": "list", "data": [base, *loras]}

    def _tokenize(self, body: Any) -> tuple[int, Any]:
        ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
        return 200, {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    def _load(self, body: Any) -> tuple[int, Any]:
        if not self.faults.lora:
            return 404, {"detail": "Not Found"}
        name, path = body["lora_name"], body["lora_path"]
        if name in self.loras:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not (Path(path) / "adapter_config.json").is_file():
            return 404, {"error": {"message": f"No adapter found for '{name}' at '{path}'"}}
        self.loras[name] = path
        self.sent, self.completions = self.sent + 1, 0
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, body: Any) -> tuple[int, Any]:
        if body["lora_name"] not in self.loras:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        del self.loras[body["lora_name"]]
        return 200, "Success"

    def _rpc(self, body: Any) -> tuple[int, Any]:
        if not self.faults.dev_mode:
            return 404, {"detail": "Not Found"}
        assert body["method"] == "reload_weights"
        self.reload(body["kwargs"]["weights_path"])
        return 200, {"results": [None]}

    def _reset(self, _: Any) -> tuple[int, Any]:
        return 200, {"success": True}

    @torch.no_grad()
    def _complete(self, body: Any) -> tuple[int, Any]:
        if body["model"] not in (self.name, *self.loras):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        self.completions += 1
        self._activate(body["model"])
        generator = torch.Generator().manual_seed(body["seed"])
        stops = {*body["stop_token_ids"], *self.faults.end_ids}
        ids, log_probs, reason = list(body["prompt"]), [], "length"
        cache = None
        for _ in range(body["max_tokens"]):
            token_ids = torch.tensor([ids if cache is None else ids[-1:]])
            output = self.model(input_ids=token_ids, use_cache=True, **{self._cache_name: cache})
            cache, logits = getattr(output, self._cache_name), output.logits[0, -1].float()
            scores = (logits / (body["temperature"] or 1.0)).log_softmax(-1)
            token = (
                int(scores.argmax())
                if body["temperature"] == 0
                else int(scores.exp().multinomial(1, generator=generator))
            )
            log_probs.append(float((logits.log_softmax(-1) if self.faults.raw_log_probs else scores)[token]))
            ids.append(token)
            if token in stops and not body["ignore_eos"]:
                reason = "stop"
                break
        new = ids[len(body["prompt"]) :]
        choice: dict[str, Any] = {
            "index": 0, "text": self.tokenizer.decode(new), "finish_reason": reason, "token_ids": new,
            "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": log_probs},
        }  # fmt: skip
        for key, value in self.faults.change.items():
            choice[key] = value(choice[key]) if callable(value) else value
        return 200, {"object": "text_completion", "model": body["model"], "choices": [choice]}


def _handler(server: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, value = server.answer(self.path, body)
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _reply

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(server: StandIn, port: int = 0) -> Any:
    """The server's address, while the block runs."""
    http = ThreadingHTTPServer(("127.0.0.1", port), _handler(server))
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        server.ended.set()
        http.shutdown()
        http.server_close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with serving(StandIn(sys.argv[1]), int(sys.argv[2])) as url:
        print(f"serving {url}", flush=True)
        threading.Event().wait()
