"""HPSv3: human preference by a Qwen2-VL with a reward head.

Source: Ma et al. (arXiv 2508.03789), weights MizzenAI/HPSv3; card rewards, section 1: image at exactly 256 * 28 * 28 pixels,
last hidden state at the token <|Reward|>, head of linear layers hidden-1024-16-2 with ReLU in float32, giving (mu, sigma);
the value is mu. Range about -5 to 15, without bounds. Every row with an image is applicable. The stored prompt paraphrases
the published one: for published figures put the wording of the package `hpsv3`, which ends in the token, into a
`prompt_file`.
"""

from __future__ import annotations

import threading
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.adapters.paths import without_progress_bars
from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward
from visual_grpo.rewards.judge import render
from visual_grpo.rewards.loading import load_weights

__all__ = ["FILE", "TOKEN", "HpsV3", "reward_head"]

TOKEN = "<|Reward|>"
FILE = "HPSv3.safetensors"
PIXELS = 256 * 28 * 28


def reward_head(hidden: int) -> nn.Sequential:
    """The head on a hidden state [N, hidden], giving mu and sigma [N, 2]; dropout as in the checkpoint's numbering."""
    return nn.Sequential(
        nn.Linear(hidden, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )


@register_reward("hps_v3")
class HpsV3(Reward):
    """HPSv3's mu for each image with its own prompt. Details: `sigma`, as the head gives it."""

    needs = frozenset({"images"})
    rows_per_call = 16

    def __init__(
        self,
        *,
        model: str = "MizzenAI/HPSv3",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        prompt_file: str | None = None,
        pixels: int = PIXELS,
        device: Any = None,
        dtype: str | None = None,
        batch_size: int = 4,
    ) -> None:
        """Choose weights; nothing is loaded before the first call.

        Args:
            model: HPSv3.safetensors, a folder that holds it, or a Hub id.
            base: Hub id or folder with config and processor of the Qwen2-VL.
            prompt_file: text file in place of the stored prompt, with {prompt} and <|Reward|> in it.
            pixels: images are resized to about this many.
            device: where it runs; None: CUDA if there is one, else the CPU.
            dtype: of the backbone; None: bfloat16 on CUDA, float32 on the CPU. The head is always float32.
            batch_size: rows read at a time.
        """
        if dtype not in (None, "float32", "float16", "bfloat16"):
            raise UserError(f"hps_v3: dtype is {dtype!r}; give float32, float16 or bfloat16.")
        if batch_size < 1 or pixels < 1:
            raise UserError(f"hps_v3: batch_size and pixels must be above 0; they are {batch_size} and {pixels}.")
        stored = resources.files("visual_grpo.rewards") / "prompts" / "hps_v3.txt"
        try:
            template = (Path(prompt_file) if prompt_file else stored).read_text(encoding="utf-8-sig").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"hps_v3: prompt_file cannot be read: {error}.") from error
        if "{prompt}" not in template or TOKEN not in template:
            raise UserError(f"hps_v3: the prompt file must hold {{prompt}} and {TOKEN}.")
        self.template, self.model, self.base = template, model, base
        self.pixels, self.batch_size = pixels, batch_size
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        default = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = default if dtype is None else getattr(torch, dtype)
        self._loaded: tuple[Any, nn.Sequential, Any, int] | None = None
        self._lock = threading.Lock()

    def _load(self) -> tuple[Any, nn.Sequential, Any, int]:
        """Backbone, head, processor and the id of the token."""
        with self._lock:
            if self._loaded is None:
                from transformers import AutoProcessor

                size = {"min_pixels": self.pixels, "max_pixels": self.pixels}
                processor = load_weights("hps_v3's processor", self.base, AutoProcessor.from_pretrained, **size)
                processor.tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
                processor.tokenizer.padding_side = "left"
                token = processor.tokenizer.convert_tokens_to_ids(TOKEN)
                weights = load_weights("hps_v3's weights", self.model, _read_weights)
                parts = [key for key in weights if key.startswith("rm_head.")]
                top = {key.removeprefix("rm_head."): weights.pop(key).float() for key in parts}
                backbone = self._backbone(weights, token)
                head = reward_head(backbone.config.text_config.hidden_size)
                try:
                    head.load_state_dict(top)
                except RuntimeError as error:
                    raise UserError(f"hps_v3: the weights {self.model!r} have no head of HPSv3: {error}") from error
                model = backbone.model.to(self.device).eval().requires_grad_(False)
                self._loaded = model, head.to(self.device).eval().requires_grad_(False), processor, token
            return self._loaded

    def _backbone(self, weights: dict[str, Tensor], token: int) -> Any:
        """The Qwen2-VL with `weights`, whose vocabulary holds one token more than the base's."""
        from transformers import AutoConfig, Qwen2VLForConditionalGeneration

        config = load_weights("hps_v3's config", self.base, AutoConfig.from_pretrained)
        rows = next((value.shape[0] for key, value in weights.items() if key.endswith("embed_tokens.weight")), 0)
        if token >= rows:
            raise UserError(
                f"hps_v3: {TOKEN} would be token {token} of {self.base!r}, but {self.model!r} has {rows} embeddings; give the "
                f"base model that it was trained on."
            )
        config.text_config.vocab_size = rows
        # The library renames what older versions of it have saved.
        with without_progress_bars():
            backbone, report = Qwen2VLForConditionalGeneration.from_pretrained(
                None, config=config, state_dict=weights, dtype=self.dtype, output_loading_info=True
            )
        missing = sorted(key for key in report["missing_keys"] if "lm_head" not in key)
        if missing or report["mismatched_keys"]:
            raise UserError(
                f"hps_v3: the weights {self.model!r} do not fit {self.base!r} (missing {missing[:2]}, of other shape "
                f"{sorted(report['mismatched_keys'])[:2]}); give the base model that they were trained on."
            )
        return backbone

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> RewardOutput:
        parts = [self._score(request, i) for i in range(0, len(request), self.batch_size)]
        found = torch.cat(parts).cpu()
        return RewardOutput(values=found[:, 0], details={"sigma": found[:, 1]})

    def _score(self, request: RewardRequest, start: int) -> Tensor:
        """Mu and sigma [n, 2] of the rows from `start` on, one batch."""
        model, head, processor, token = self._load()
        rows = slice(start, start + self.batch_size)
        images = request.pil_images[rows]
        texts = []
        for prompt in request.prompts[rows]:
            text = render(self.template, prompt=prompt.replace(TOKEN, " "))
            chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
            texts.append(processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        inputs = processor(text=texts, images=[[image] for image in images], padding=True, return_tensors="pt")
        inputs = inputs.to(self.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        hidden = model(**inputs).last_hidden_state
        mask = inputs["input_ids"] == token
        at = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
        result: Tensor = head(hidden[torch.arange(len(at), device=at.device), at].float())
        return result

    def close(self) -> None:
        """Let go of the model; the next call loads it again."""
        with self._lock:
            self._loaded = None


def _read_weights(source: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = Path(source)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(source, FILE))
    weights: dict[str, Tensor] = load_file(path)
    return weights
