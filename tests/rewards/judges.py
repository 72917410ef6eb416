"""A real HTTP server that speaks the OpenAI protocol, and tiny random models of the true classes, for tests of judges."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

Answer = Callable[[dict[str, Any]], Any]


class JudgeServer:
    """`answer(body)` gives the reply's text, a dict of first-token log-probabilities, or (status, bytes)."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                if self.path != "/v1/chat/completions":
                    return self.reply(404, b'{"error": "no such path"}')
                found = server.answer(body)
                if isinstance(found, tuple):
                    return self.reply(*found)
                choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
                if isinstance(found, dict):
                    top = [{"token": token, "logprob": value, "bytes": None} for token, value in found.items()]
                    choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
                    found = next(iter(found))
                choice["message"] = {"role": "assistant", "content": found}
                return self.reply(200, json.dumps({"object": "chat.completion", "choices": [choice]}).encode())

            def reply(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def text_of(body: dict[str, Any]) -> str:
    content = body["messages"][0]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def image_of(body: dict[str, Any]) -> Image.Image:
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    head, data = url.split(",", 1)
    assert head == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(data)))


def answer_anything(body: dict[str, Any]) -> Any:
    """A sensible reply to any built-in prompt, decided by the content of the question alone."""
    mark = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0] % 5 + 1
    if body.get("logprobs"):
        if "quality of this image" in text_of(body):
            return {" good": -0.5, " fair": -1.0 - mark}
        return {"Yes": -0.1 * mark, "No": -2.0}
    yes = ["no", "yes"]
    return "\n".join(
        [
            f"Score: {mark}",
            f"<Score>{mark}</Score>",
            f"Final Score: {mark}",
            f"Verdict: {yes[mark % 2]}",
            f"claim | true: yes | pointable: {yes[mark % 2]}",
            f"unit | stated: {yes[mark % 2]}",
            f"Clarity: {mark}\nFluency: 5\nCoherence: 7",
        ]
    )


def slow(seconds: float) -> Answer:
    def answer(_: dict[str, Any]) -> str:
        time.sleep(seconds)
        return "Score: 5"

    return answer


IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
WORDS = ["Yes", "No", "yes", "no", " Yes", " No", " excellent", " good", " fair", " poor", " bad", "excellent"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def tiny_tokenizer() -> Any:
    """A Qwen2 tokenizer of bytes, and a few words as tokens of their own."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        letters = word.replace(" ", "\u0120")
        merges |= dict.fromkeys((letters[:i], letters[i]) for i in range(1, len(letters)))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE_TOKENS]
    tokens = dict.fromkeys([*special, *sorted(ByteLevel.alphabet()), *(left + right for left, right in merges)])
    tokenizer = Qwen2TokenizerFast(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=list(merges),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:2] + IMAGE_TOKENS})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_vlm(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """A random Qwen2.5-VL or Qwen2-VL with its processor."""
    import transformers as tf

    tokenizer = tiny_tokenizer()
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in zip(("vision_start", "vision_end", "image", "video"), IMAGE_TOKENS, strict=True)
    }
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        vision: dict[str, Any] = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32,
            "fullatt_block_indexes": [1], "window_size": 56,
        }  # fmt: skip
        config: Any = tf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        model: Any = tf.Qwen2_5_VLForConditionalGeneration(config)
        processor_class: Any = tf.Qwen2_5_VLProcessor
    else:
        vision = {"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "hidden_size": 32}
        config = tf.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        model = tf.Qwen2VLForConditionalGeneration(config)
        processor_class = tf.Qwen2VLProcessor
    for parameter in model.parameters():  # wide enough that rows differ
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    images = tf.Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    videos = tf.Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    processor_class(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


def tiny_lm(folder: Path) -> Path:
    """A random Qwen3 with its tokenizer."""
    import transformers as tf

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = tf.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    tf.Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_hps_v3(folder: Path) -> Path:
    """A random HPSv3: the base in `base`, and beside it one file of weights under the names of the published one."""
    from safetensors.torch import save_file
    from transformers import Qwen2VLForConditionalGeneration

    from visual_grpo.rewards.hps_v3 import FILE, reward_head

    base = tiny_vlm(folder / "base", "qwen2_vl")
    model = Qwen2VLForConditionalGeneration.from_pretrained(base)
    model.resize_token_embeddings(model.config.text_config.vocab_size + 1, mean_resizing=False)
    torch.manual_seed(1)
    head = reward_head(32)
    published = {
        key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value.contiguous()
        for key, value in model.state_dict().items()
    }
    save_file({**published, **{f"rm_head.{key}": value for key, value in head.state_dict().items()}}, folder / FILE)
    return folder
