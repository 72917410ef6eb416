"""HPS v2: how well people would like the image for its prompt, by an open_clip ViT-H/14 trained on their choices.

Source: tgxs002/HPSv2 (arXiv 2306.09341), checkpoints HPS_v2_compressed.pt (2.0) and HPS_v2.1_compressed.pt (2.1) of xswu/HPSv2.
Score: cosine of text and image, no logit scale. Range 0.20 to 0.38 (papers print it times 100); 2.0 and 2.1 cannot be compared,
and neither can scores of different prompts. Every row is applicable.

Images are prepared as the reference does, not as CLIP does: made float first, then the longer side scaled to 224 and the rest
padded with black. Departures: float32 by default where the reference runs under half-precision autocast (differences of about
1e-3), and the checkpoint stays resident (the reference reads it at every call).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward, eight_bit, find_file, load_strict, read_state, resident

__all__ = ["FILES", "HpsV2", "build_clip", "hps_pixels"]

FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def hps_pixels(images: Tensor, side: int = 224, *, antialias: bool = True) -> Tensor:
    """Prepare images as HPS v2 does.

    Args:
        images: [N, 3, H, W] in [0, 1].
        side: of the square that the model reads; nothing is scaled if the longer side has it already.
        antialias: smooth when scaling down; scores published before torchvision 0.17 were made without.

    Returns:
        [N, 3, side, side], normalised; an odd padding pixel lies at the right or the bottom. The reference does not pad an image
        whose longer side is `side` already, and then fails unless it is square; here it is padded.
    """
    height, width = images.shape[-2:]
    if max(height, width) != side:
        size = [round(edge * side / max(height, width)) for edge in (height, width)]
        images = interpolate(images, size=size, mode="bicubic", align_corners=False, antialias=antialias)
    below, right = side - images.shape[-2], side - images.shape[-1]
    images = pad(images, (right // 2, right - right // 2, below // 2, below - below // 2))
    mean, std = (images.new_tensor(three).view(3, 1, 1) for three in (MEAN, STD))
    return (images - mean) / std


def build_clip(architecture: str | Mapping[str, Any]) -> Any:
    """Build an open_clip `CLIP` without weights (parameters on the meta device), by name or by its config."""
    import open_clip
    from accelerate import init_empty_weights

    config = open_clip.get_model_config(architecture) if isinstance(architecture, str) else dict(architecture)
    if config is None:
        raise UserError(f"hps_v2: open_clip knows no architecture {architecture!r}; HPS v2 is 'ViT-H-14'.")
    with init_empty_weights(include_buffers=False):  # a billion random numbers would be thrown away at once
        return open_clip.CLIP(**config)


@register_reward("hps_v2")
class HpsV2(ModelReward):
    """HPS v2 of each image with its own prompt."""

    label = "hps_v2"

    def __init__(
        self,
        version: str | float = "2.1",
        *,
        weights: str = "xswu/HPSv2",
        architecture: str | Mapping[str, Any] = "ViT-H-14",
        antialias: bool = True,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose version and weights; nothing is loaded before the first call.

        Args:
            version: "2.0" or "2.1"; says which file of `weights` is read.
            weights: path of the checkpoint, folder or Hub id that holds it.
            architecture: open_clip's name or config; another one than the published for tests and own checkpoints.
            antialias: see `hps_pixels`.
            device, dtype, batch_size: see `ModelReward`.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        self.version = str(version).removeprefix("v")
        if self.version not in FILES:
            raise UserError(f"hps_v2: version is {version!r}; give 2.0 or 2.1.")
        self.weights, self.architecture, self.antialias = weights, architecture, antialias

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer, which open_clip ships."""
        import open_clip

        what = "hps_v2's weights"

        def build() -> Any:
            path = find_file(what, self.weights, FILES[self.version])
            model = build_clip(self.architecture)
            load_strict(what, model, read_state(what, path), path)
            return model.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)

        key = ("hps_v2", self.weights, self.version, str(self.architecture), str(self.device), self.dtype)
        model = resident(key, build)
        return model, open_clip.SimpleTokenizer(context_length=model.context_length)

    def score(self, loaded: tuple[Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Cosine of the rows."""
        model, tokenizer = loaded
        assert request.images is not None
        side = model.visual.image_size[0]
        pixels = hps_pixels(eight_bit(request.images.to(self.device)), side, antialias=self.antialias)
        images = model.encode_image(pixels.to(self.dtype), normalize=False).float()
        texts = model.encode_text(tokenizer(request.prompts).to(self.device), normalize=False).float()
        return {"values": torch.nn.functional.cosine_similarity(images, texts)}
