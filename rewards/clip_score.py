"""CLIPScore: how well the image fits its prompt, by a CLIP nobody trained for it.

Three conventions are published under this name, and their figures cannot be compared (cosine c of text and image):

- `diffusion_nft`: c, CLIP ViT-L/14, prompt as it is, images resized bilinearly as tensors. Range 0.22 to 0.33.
- `paper` (Hessel et al. 2021, arXiv 2104.08718): 2.5 max(c, 0), CLIP ViT-B/32, "A photo depicts " before the prompt. Range 0.4
  to 0.9.
- `torchmetrics`: 100 c, CLIP ViT-L/14; a text longer than the window loses its end token. Range 20 to 35. The metric is the mean
  over the images, clamped at 0 after the mean; a row is not clamped.

The cosine is taken from normalised features and never from logits / 100: a model whose logit scale is not 100 would be off.
Every row with an image is applicable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward, clip_image_features, eight_bit, features, load_clip

__all__ = ["VARIANTS", "ClipScore", "Variant", "bilinear_pixels", "clip_score"]

Name = Literal["diffusion_nft", "paper", "torchmetrics"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One published convention."""

    model: str
    prefix: str = ""
    scale: float = 1.0
    clamp: bool = False
    """negative cosines count as 0, row by row."""
    bilinear: bool = False
    """images are resized bilinearly as tensors, not by the processor."""
    keep_end: bool = True
    """a text that is too long keeps its end token."""


VARIANTS: dict[str, Variant] = {
    "diffusion_nft": Variant(model="openai/clip-vit-large-patch14", bilinear=True),
    "paper": Variant(model="openai/clip-vit-base-patch32", prefix="A photo depicts ", scale=2.5, clamp=True),
    "torchmetrics": Variant(model="openai/clip-vit-large-patch14", scale=100.0, keep_end=False),
}


def clip_score(cosine: Tensor, variant: Variant) -> Tensor:
    """Score [N] of cosines [N].

    >>> clip_score(torch.tensor([0.3, -0.1]), VARIANTS["paper"]).tolist()
    [0.75, 0.0]
    """
    return variant.scale * (cosine.clamp(min=0) if variant.clamp else cosine)


def bilinear_pixels(images: Tensor, image_processor: Any) -> Tensor:
    """Resize images [N, 3, H, W] in [0, 1] by their shorter side (bilinear, antialiased), crop the centre and normalise."""
    from torchvision.transforms.v2.functional import center_crop, normalize, resize

    crop = [image_processor.crop_size["height"], image_processor.crop_size["width"]]
    resized = resize(eight_bit(images), [image_processor.size["shortest_edge"]], antialias=True)
    return normalize(center_crop(resized, crop), list(image_processor.image_mean), list(image_processor.image_std))


@register_reward("clip_score")
class ClipScore(ModelReward):
    """Cosine of CLIP's text and image features, under one of three published conventions.

    Details: `cosine`.
    """

    label = "clip_score"

    def __init__(
        self,
        variant: Name = "diffusion_nft",
        *,
        model: str | None = None,
        processor: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose the convention; nothing is loaded before the first call.

        Args:
            variant: "diffusion_nft", "paper" or "torchmetrics", see the module.
            model: Hub id or folder of a `CLIPModel`; None: the variant's own.
            processor: Hub id or folder of its processor; None: as `model`.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        if variant not in VARIANTS:
            raise UserError(f"clip_score: variant is {variant!r}; give one of {', '.join(get_args(Name))}.")
        self.variant = VARIANTS[variant]
        self.model = model or self.variant.model
        self.processor = processor or self.model

    def load(self) -> tuple[Any, Any]:
        """Load the model and its processor."""
        return load_clip("clip_score", self.model, self.processor, self.device, self.dtype)

    def score(self, loaded: tuple[Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Score the rows by their own cosines."""
        model, processor = loaded
        window = model.config.text_config.max_position_embeddings
        tokens = processor.tokenizer(
            [self.variant.prefix + prompt for prompt in request.prompts],
            padding="max_length",
            truncation=self.variant.keep_end,
            max_length=window,
            return_tensors=None,
        )
        columns = {
            key: torch.tensor([ids[:window] for ids in tokens[key]], device=self.device)
            for key in ("input_ids", "attention_mask")
        }
        texts = features(model.get_text_features(**columns))
        if self.variant.bilinear:
            assert request.images is not None
            pixels = bilinear_pixels(request.images.to(self.device), processor.image_processor)
            images = features(model.get_image_features(pixel_values=pixels.to(self.dtype)))
        else:
            images = clip_image_features(model, processor, request)
        cosine = (texts * images).sum(-1)
        return {"values": clip_score(cosine, self.variant), "cosine": cosine}
