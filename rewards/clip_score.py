"""CLIPScore: how well the image fits its prompt, by a CLIP nobody trained for it.

Four conventions are published under this name, and their figures cannot be compared (cosine c of text and image):

- `diffusion_nft`: c, CLIP ViT-L/14, prompt as it is, images resized bilinearly as tensors. Range 0.22 to 0.33.
- `paper` (Hessel et al. 2021, arXiv 2104.08718): 2.5 max(c, 0), CLIP ViT-B/32, "A photo depicts " before the prompt. Range 0.4
  to 0.9.
- `refclip` (RefCLIPScore, the same paper): harmonic mean of `paper` and the largest cosine of the text with its reference texts,
  clamped at 0; all texts get the prefix. Range 0.5 to 0.9. A row without references is not applicable.
- `torchmetrics`: 100 c, CLIP ViT-L/14; a text longer than the window loses its end token. Range 20 to 35. The metric is the mean
  over the images, clamped at 0 after the mean; a row is not clamped.

The cosine is taken from normalised features and never from logits / 100: a model whose logit scale is not 100 would be off.
Every row with an image is applicable, but for `refclip`. The text is the prompt of a generated image, or the completion of a
policy that writes captions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.cider import reference_texts
from visual_grpo.rewards.judge import row_image
from visual_grpo.rewards.loading import ModelReward, eight_bit, features, load_clip

__all__ = ["VARIANTS", "ClipScore", "Variant", "bilinear_pixels", "clip_score", "ref_clip_score"]

Name = Literal["diffusion_nft", "paper", "refclip", "torchmetrics"]
Scored = Literal["prompt", "completion"]


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
    references: bool = False
    """reference texts count too."""


VARIANTS: dict[str, Variant] = {
    "diffusion_nft": Variant(model="openai/clip-vit-large-patch14", bilinear=True),
    "paper": Variant(model="openai/clip-vit-base-patch32", prefix="A photo depicts ", scale=2.5, clamp=True),
    "refclip": Variant(
        model="openai/clip-vit-base-patch32", prefix="A photo depicts ", scale=2.5, clamp=True, references=True
    ),
    "torchmetrics": Variant(model="openai/clip-vit-large-patch14", scale=100.0, keep_end=False),
}


def clip_score(cosine: Tensor, variant: Variant) -> Tensor:
    """Score [N] of cosines [N].

    >>> clip_score(torch.tensor([0.3, -0.1]), VARIANTS["paper"]).tolist()
    [0.75, 0.0]
    """
    return variant.scale * (cosine.clamp(min=0) if variant.clamp else cosine)


def ref_clip_score(score: Tensor, reference: Tensor) -> Tensor:
    """Harmonic mean of scores [N] from 0 on and of cosines [N] with the nearest reference, clamped at 0; 0 where either is 0.

    >>> ref_clip_score(torch.tensor([0.75, 0.75]), torch.tensor([0.5, -0.1])).tolist()
    [0.6000000238418579, 0.0]
    """
    nearest = reference.clamp(min=0)
    return (2 * score * nearest / (score + nearest)).masked_fill(score * nearest == 0, 0.0)


def bilinear_pixels(images: Tensor, image_processor: Any) -> Tensor:
    """Resize images [N, 3, H, W] in [0, 1] by their shorter side (bilinear, antialiased), crop the centre and normalise."""
    from torchvision.transforms.v2.functional import center_crop, normalize, resize

    crop = [image_processor.crop_size["height"], image_processor.crop_size["width"]]
    resized = resize(eight_bit(images), [image_processor.size["shortest_edge"]], antialias=True)
    return normalize(center_crop(resized, crop), list(image_processor.image_mean), list(image_processor.image_std))


@register_reward("clip_score")
class ClipScore(ModelReward):
    """Cosine of CLIP's text and image features, under one of four published conventions.

    Details: `cosine`; with `refclip` also `reference`, the cosine with the nearest reference text.
    """

    label = "clip_score"

    def __init__(
        self,
        variant: Name = "diffusion_nft",
        *,
        text: Scored = "prompt",
        image_key: str = "image",
        references_key: str = "references",
        model: str | None = None,
        processor: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose the convention; nothing is loaded before the first call.

        Args:
            variant: "diffusion_nft", "paper", "refclip" or "torchmetrics", see the module.
            text: what is compared with the image: the "prompt" of a generated image, or the "completion" that describes one.
            image_key: with "completion", metadata column of the image, see `judge.row_image`.
            references_key: metadata column of the reference texts (a list, or one text); "refclip" only.
            model: Hub id or folder of a `CLIPModel`; None: the variant's own.
            processor: Hub id or folder of its processor; None: as `model`.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        for name, value, known in (("variant", variant, Name), ("text", text, Scored)):
            if value not in get_args(known):
                raise UserError(f"clip_score: {name} is {value!r}; give one of {', '.join(get_args(known))}.")
        self.variant = VARIANTS[variant]
        self.text, self.image_key, self.references_key = text, image_key, references_key
        if text == "completion":
            self.needs = frozenset({"texts"})  # type: ignore[misc]
        self.model = model or self.variant.model
        self.processor = processor or self.model

    def load(self) -> tuple[Any, Any]:
        """Load the model and its processor."""
        return load_clip("clip_score", self.model, self.processor, self.device, self.dtype)

    def score(self, loaded: tuple[Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Score the rows by their own cosines."""
        model, processor = loaded
        written = request.prompts if self.text == "prompt" else request.texts
        assert written is not None
        texts = self._text_features(model, processor, written)
        pixels = self._pixels(processor.image_processor, request)
        images = features(model.get_image_features(pixel_values=pixels.to(self.device, self.dtype)))
        cosine = (texts * images).sum(-1)
        values = clip_score(cosine, self.variant)
        if not self.variant.references:
            return {"values": values, "cosine": cosine}
        references = [reference_texts(row.get(self.references_key)) for row in request.metadata]
        nearest = self._nearest(model, processor, texts, references)
        return {
            "values": ref_clip_score(values, nearest),
            "cosine": cosine,
            "reference": nearest,
            "applicable": torch.tensor([bool(row) for row in references]),
        }

    def _text_features(self, model: Any, processor: Any, texts: list[str]) -> Tensor:
        """Unit features [N, D]."""
        window = model.config.text_config.max_position_embeddings
        tokens = processor.tokenizer(
            [self.variant.prefix + text for text in texts],
            padding="max_length",
            truncation=self.variant.keep_end,
            max_length=window,
            return_tensors=None,
        )
        columns = {
            key: torch.tensor([ids[:window] for ids in tokens[key]], device=self.device)
            for key in ("input_ids", "attention_mask")
        }
        return features(model.get_text_features(**columns))

    def _pixels(self, image_processor: Any, request: RewardRequest) -> Tensor:
        """What the model reads [N, 3, S, S]."""
        if self.text == "prompt" and self.variant.bilinear:
            assert request.images is not None
            return bilinear_pixels(request.images.to(self.device), image_processor)
        pictures: list[Image.Image] = (
            request.pil_images
            if self.text == "prompt"
            else [row_image(request, row, self.image_key) for row in range(len(request))]
        )
        if self.variant.bilinear:
            from torchvision.transforms.functional import to_tensor

            return torch.cat([bilinear_pixels(to_tensor(picture)[None], image_processor) for picture in pictures])
        pixels: Tensor = image_processor(images=pictures, return_tensors="pt")["pixel_values"]
        return pixels

    def _nearest(self, model: Any, processor: Any, texts: Tensor, references: list[list[str]]) -> Tensor:
        """Largest cosine [N] of each text's feature [N, D] with those of its references; NaN where there are none."""
        flat = [text for row in references for text in row]
        nearest = torch.full((len(texts),), float("nan"), device=texts.device)
        if flat:
            parts = [
                self._text_features(model, processor, flat[start : start + self.batch_size])
                for start in range(0, len(flat), self.batch_size)
            ]
            found = torch.cat(parts).split([len(row) for row in references])
            for i, (rows, text) in enumerate(zip(found, texts, strict=True)):
                if len(rows):
                    nearest[i] = (rows @ text).max()
        return nearest
