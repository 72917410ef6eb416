"""PickScore: how well people would like the image for its prompt, by a CLIP trained on their choices.

Source: yuvalkirstain/PickScore; flow_grpo's reward is the same figure / 26. Score exp(logit_scale) * cos(text, image) / divisor.
Range: 18 to 24 before the division, so 0.7 to 0.92 after it. Every row with an image is applicable.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.adapters.paths import without_progress_bars
from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardOutput, RewardRequest, register_reward

__all__ = ["PickScore", "features", "load_weights"]


def load_weights(what: str, source: str, load: Any, **options: Any) -> Any:
    """Run a library's `from_pretrained` on `source`; failure becomes one message that says what is missing and how to get it."""
    try:
        with without_progress_bars():
            return load(source, **options)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if Path(source).is_dir():
            raise UserError(f"{what} could not be loaded from the folder {source!r}: {lines[0][:200]}") from error
        raise UserError(
            f"{what} could not be loaded from {source!r}: it is no folder, and as a Hub id it is neither in the cache (HF_HOME) "
            f"nor could be fetched ({lines[0][:200]}). Fetch it once where there is network (`hf download OWNER/NAME`) and "
            f"copy the cache, or give the path of a folder that holds it."
        ) from error


def features(output: Any) -> Tensor:
    """Projected features [N, D] of unit length, float32; transformers 4 returns a tensor and 5 an object."""
    raw: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return torch.nn.functional.normalize(raw.float(), dim=-1)


@register_reward("pickscore")
class PickScore(Reward):
    """PickScore v1 of each image with its own prompt.

    Details: `cosine` of the two embeddings.
    """

    needs = frozenset({"images"})

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        divisor: float = 26.0,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose weights and scale; nothing is loaded before the first call.

        Args:
            model: Hub id or folder of the `CLIPModel`.
            processor: Hub id or folder of its image processor and tokenizer.
            divisor: the score is divided by this; 1 gives the published scale.
            device: where it runs; None: CUDA if there is one, else the CPU.
            dtype: of the two encoders; halves make ties within a group. The similarity is always float32.
            batch_size: rows encoded at a time.
        """
        if dtype not in ("float32", "float16", "bfloat16"):
            raise UserError(f"pickscore: dtype is {dtype!r}; give float32, float16 or bfloat16.")
        if batch_size < 1 or divisor <= 0:
            raise UserError(f"pickscore: batch_size and divisor must be above 0; they are {batch_size} and {divisor}.")
        self.model, self.processor = model, processor
        self.divisor, self.batch_size = divisor, batch_size
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = getattr(torch, dtype)
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def _load(self) -> tuple[Any, Any]:
        with self._lock:
            if self._loaded is None:
                from transformers import CLIPModel, CLIPProcessor

                processor = load_weights("pickscore's processor", self.processor, CLIPProcessor.from_pretrained)
                model = load_weights("pickscore's model", self.model, CLIPModel.from_pretrained, dtype=self.dtype)
                self._loaded = model.to(self.device).eval().requires_grad_(False), processor
            return self._loaded

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> RewardOutput:
        model, processor = self._load()
        parts = []
        for start in range(0, len(request), self.batch_size):
            rows = slice(start, start + self.batch_size)
            pixels = processor.image_processor(images=request.pil_images[rows], return_tensors="pt")["pixel_values"]
            # Padded to the full length as the model was trained; its text encoder reads the end token only.
            tokens = processor.tokenizer(
                request.prompts[rows],
                padding="max_length",
                truncation=True,
                max_length=model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(self.device)
            images = features(model.get_image_features(pixel_values=pixels.to(self.device, self.dtype)))
            texts = features(
                model.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
            )
            parts.append((texts * images).sum(-1))
        cosine = torch.cat(parts).cpu()
        scale = model.logit_scale.detach().float().exp().cpu()
        return RewardOutput(values=scale * cosine / self.divisor, details={"cosine": cosine})

    def close(self) -> None:
        """Let go of the model; the next call loads it again."""
        with self._lock:
            self._loaded = None
