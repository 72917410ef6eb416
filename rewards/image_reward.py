"""ImageReward: how well people would like the image for its prompt, by BLIP's text encoder reading the image.

Source: THUDM/ImageReward (arXiv 2304.05977), checkpoint ImageReward.pt (v1.0). A ViT-L/16 encodes the image, BLIP's BERT reads
the prompt with cross-attention to it, an affine head scores the first token; (score - 0.1672) / 1.0333. Range -2.3 to 2.0. Every
row with an image is applicable.

The network is timm's ViT and the BERT of transformers' BLIP under the published parameter names, so the checkpoint loads
strictly. The package `image-reward` (2023) needs internals of transformers that are gone. Departure: images and prompts are
batched, where the reference goes image by image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from visual_grpo.errors import UserError, did_you_mean
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.aesthetic import AestheticHead
from visual_grpo.rewards.loading import ModelReward, find_file, load_strict, load_weights, read_state, resident

__all__ = ["ARCHITECTURE", "ImageReward", "ImageRewardNetwork", "build_network", "clip_transform", "standardise"]

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of raw scores over the reference's data."""
TOKENS = 35
ARCHITECTURE: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 16,
    "vision_width": 1024,
    "vision_layers": 24,
    "vision_heads": 16,
    "vocab_size": 30524,
    "text_width": 768,
    "text_layers": 12,
    "text_heads": 12,
    "text_mlp_width": 3072,
    "text_positions": 512,
    "projection": 256,
}
"""Of the published checkpoint (BLIP large and its med_config.json)."""


def standardise(raw: Tensor) -> Tensor:
    """Published scale of the head's raw scores.

    >>> [round(x, 6) for x in standardise(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()]
    [-0.16178, 0.805956]
    """
    return (raw - MEAN) / STD


def clip_transform(size: int) -> Any:
    """PIL image to normalised tensor [3, size, size]: shorter side to `size` (bicubic), centre crop, CLIP's mean and std."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.Resize(size, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        ]
    )


class _Blip(nn.Module):
    """Image encoder, text encoder and the two projections of the checkpoint, which ImageReward does not use."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        from timm.models.vision_transformer import VisionTransformer
        from transformers import BlipTextConfig
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        self.visual_encoder = VisionTransformer(
            img_size=sizes["image_size"],
            patch_size=sizes["patch_size"],
            embed_dim=sizes["vision_width"],
            depth=sizes["vision_layers"],
            num_heads=sizes["vision_heads"],
            num_classes=0,
        )
        config = BlipTextConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["text_width"],
            encoder_hidden_size=sizes["vision_width"],
            intermediate_size=sizes["text_mlp_width"],
            num_hidden_layers=sizes["text_layers"],
            num_attention_heads=sizes["text_heads"],
            max_position_embeddings=sizes["text_positions"],
            bos_token_id=None,  # nothing is generated, and BLIP's ids do not exist in a small vocabulary
            eos_token_id=None,
            sep_token_id=None,
            is_decoder=True,  # gives the layers their cross-attention; the forward pass below is bidirectional
        )
        self.text_encoder = BlipTextModel(config, add_pooling_layer=False)
        self.vision_proj = nn.Linear(sizes["vision_width"], sizes["projection"])
        self.text_proj = nn.Linear(sizes["text_width"], sizes["projection"])


class ImageRewardNetwork(nn.Module):
    """The whole network under the published names: `blip.visual_encoder`, `blip.text_encoder`, `mlp.layers`."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.blip = _Blip(sizes)
        self.mlp = AestheticHead(sizes["text_width"])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixels: Tensor) -> Tensor:
        """Standardised scores.

        Args:
            input_ids, attention_mask: [N, L].
            pixels: [N, 3, H, W], normalised.

        Returns:
            [N] float32.
        """
        image = self.blip.visual_encoder.forward_features(pixels)
        hidden = self.blip.text_encoder(
            input_ids=input_ids, attention_mask=attention_mask, encoder_hidden_states=image, is_decoder=False
        ).last_hidden_state
        return standardise(self.mlp(hidden[:, 0].float()))


def build_network(overrides: Mapping[str, Any] | None = None) -> ImageRewardNetwork:
    """Build the network without weights (parameters on the meta device); `overrides` change sizes of `ARCHITECTURE`."""
    from accelerate import init_empty_weights

    for key in overrides or {}:
        if key not in ARCHITECTURE:
            raise UserError(f"image_reward: architecture has no {key!r}.{did_you_mean(key, ARCHITECTURE)}")
    with init_empty_weights(include_buffers=False):
        return ImageRewardNetwork({**ARCHITECTURE, **(overrides or {})})


@register_reward("image_reward")
class ImageReward(ModelReward):
    """ImageReward v1.0 of each image with its own prompt."""

    label = "image_reward"

    def __init__(
        self,
        *,
        weights: str = "THUDM/ImageReward",
        tokenizer: str = "google-bert/bert-base-uncased",
        architecture: Mapping[str, Any] | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        """Choose weights; nothing is loaded before the first call.

        Args:
            weights: path of ImageReward.pt, folder or Hub id that holds it.
            tokenizer: Hub id or folder of BERT's tokenizer.
            architecture: sizes that differ from the published `ARCHITECTURE`, for tests and own checkpoints.
            device, dtype, batch_size: see `ModelReward`; the head is always float32.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        self.weights, self.tokenizer, self.architecture = weights, tokenizer, dict(architecture or {})

    def load(self) -> tuple[ImageRewardNetwork, Any, Any]:
        """Load the network, its tokenizer and its image transform."""
        from transformers import BertTokenizer

        what = "image_reward's weights"

        def build() -> ImageRewardNetwork:
            network = build_network(self.architecture)
            path = find_file(what, self.weights, "ImageReward.pt")
            state = read_state(what, path)
            # A buffer of 0, 1, 2, ... that transformers wrote into checkpoints until 2023.
            state.pop("blip.text_encoder.embeddings.position_ids", None)
            load_strict(what, network, state, path)
            network.blip.to(self.dtype)
            network.mlp.float()
            return network.to(self.device).eval().requires_grad_(False)

        key = ("image_reward", self.weights, str(self.architecture), str(self.device), self.dtype)
        network = resident(key, build)
        tokenizer = load_weights("image_reward's tokenizer", self.tokenizer, BertTokenizer.from_pretrained)
        return network, tokenizer, clip_transform({**ARCHITECTURE, **self.architecture}["image_size"])

    def score(self, loaded: tuple[ImageRewardNetwork, Any, Any], request: RewardRequest) -> dict[str, Tensor]:
        """Score the rows."""
        network, tokenizer, transform = loaded
        tokens = tokenizer(
            request.prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.device)
        images: list[Image.Image] = request.pil_images
        pixels = torch.stack([transform(image) for image in images]).to(self.device, self.dtype)
        return {"values": network(tokens["input_ids"], tokens["attention_mask"], pixels)}
