"""Worked values of the card on rewards, sections 0 and 1, that concern image and preference rewards."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from transformers import CLIPImageProcessor

from visual_grpo.reward import RewardRequest, to_pil
from visual_grpo.rewards.aesthetic import AestheticHead
from visual_grpo.rewards.clip_score import VARIANTS, clip_score, ref_clip_score
from visual_grpo.rewards.hps_v2 import hps_pixels
from visual_grpo.rewards.hps_v3 import PIXELS, reward_head
from visual_grpo.rewards.image_reward import clip_transform, standardise
from visual_grpo.rewards.loading import features

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def test_image_reward_scale():
    raw = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert standardise(raw).tolist() == pytest.approx([-0.161780, 0.805956], abs=1e-6)


def test_the_three_clip_scores():
    cosine = torch.tensor([0.3, -0.1], dtype=torch.float64)
    assert clip_score(cosine, VARIANTS["paper"]).tolist() == pytest.approx([0.75, 0.0], abs=1e-12)
    assert clip_score(cosine, VARIANTS["diffusion_nft"]).tolist() == pytest.approx([0.3, -0.1], abs=1e-12)
    rows = clip_score(cosine, VARIANTS["torchmetrics"])
    assert rows.tolist() == pytest.approx([30.0, -10.0], abs=1e-12)
    # torchmetrics clamps after the mean, the paper each image: 10 here, where clamping first would give 15.
    assert max(rows.mean().item(), 0.0) == pytest.approx(10.0)
    assert VARIANTS["paper"].prefix == "A photo depicts "
    assert VARIANTS["paper"].model.endswith("vit-base-patch32")
    assert VARIANTS["diffusion_nft"].model == VARIANTS["torchmetrics"].model == "openai/clip-vit-large-patch14"


def test_ref_clip_score_is_a_harmonic_mean_clamped_at_0():
    """2 a b / (a + b) of a = 2.5 max(c, 0) and b = max(largest reference cosine, 0), by hand; 0 where one is 0, also both."""
    cosine = torch.tensor([0.3, 0.3, 0.3, -0.1, -0.1], dtype=torch.float64)
    nearest = torch.tensor([0.8, 0.5, -0.2, 0.8, -0.2], dtype=torch.float64)
    found = ref_clip_score(clip_score(cosine, VARIANTS["refclip"]), nearest)
    assert found.tolist() == pytest.approx([1.2 / 1.55, 0.6, 0.0, 0.0, 0.0], abs=1e-12)
    assert found[0].item() == pytest.approx(0.774194, abs=1e-6)
    assert (VARIANTS["refclip"].prefix, VARIANTS["refclip"].model) == (
        VARIANTS["paper"].prefix,
        VARIANTS["paper"].model,
    )


def test_hps_v3_size_and_head():
    assert PIXELS == 200704
    head = reward_head(3584)
    shapes = [tuple(layer.weight.shape) for layer in head if isinstance(layer, torch.nn.Linear)]
    assert shapes == [(1024, 3584), (16, 1024), (2, 16)]
    assert [type(layer).__name__ for layer in head] == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear"]
    assert head[2].p == 0.05


def test_a_zero_feature_stays_zero():
    assert features(torch.zeros(1, 4)).tolist() == [[0.0] * 4]


def test_the_aesthetic_head_has_no_activation():
    """Without one, f(2x) - f(x) = f(x) - f(0): the head is 768 weights and a bias."""
    head = AestheticHead().double().eval()
    assert [list(p.shape) for p in head.parameters() if p.ndim == 2] == [
        [1024, 768], [128, 1024], [64, 128], [16, 64], [1, 16],
    ]  # fmt: skip
    assert [layer.p for layer in head.layers if isinstance(layer, torch.nn.Dropout)] == [0.2, 0.2, 0.1]
    x = torch.randn(3, 768, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(head(2 * x) - head(x), head(x) - head(0 * x))


@pytest.mark.parametrize(
    ("size", "filled"),
    [((512, 512), (224, 224)), ((512, 256), (224, 112)), ((300, 400), (168, 224)), ((224, 224), (224, 224))],
)
def test_hps_scales_the_longer_side(size, filled):
    """size = round(dim * 224 / max); the rest is black, that is -mean / std."""
    pixels = hps_pixels(torch.ones(1, 3, *size))[0]
    assert pixels.shape == (3, 224, 224)
    white = pixels[0] > 0
    assert (int(white.any(1).sum()), int(white.any(0).sum())) == filled
    if filled != (224, 224):
        assert pixels[:, 0, 0].tolist() == pytest.approx([-m / s for m, s in zip(MEAN, STD, strict=True)], abs=1e-6)


def test_hps_leaves_224_as_it_is():
    image = torch.rand(1, 3, 224, 224)
    expected = (image - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(hps_pixels(image), expected)


def test_bicubic_without_antialias_is_wrong_for_large_images():
    """Section 0: 512 -> 224 of noise differs by 0.61 on average in normalised units."""
    noise = torch.from_numpy(np.random.default_rng(0).random((1, 3, 512, 512), dtype=np.float32))
    difference = (hps_pixels(noise) - hps_pixels(noise, antialias=False)).abs().mean().item()
    assert difference == pytest.approx(0.61, abs=0.1)


def test_pixels_reach_a_model_at_full_contrast():
    """Section 0: a float image that is rescaled twice collapses to -1.79..-1.47, every image black; ours must not."""
    ramp = torch.linspace(0, 1, 64).expand(1, 3, 64, 64)
    pixels = clip_transform(32)(to_pil(ramp)[0])
    assert pixels.min() < -1.4
    assert pixels.max() > 1.8
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    black = processor(
        images=torch.tensor([0.0, 1.0]).repeat(32).expand(3, 64, 64), do_resize=False, return_tensors="pt"
    )
    assert black["pixel_values"].min().item() == pytest.approx(-1.79, abs=5e-3)
    assert black["pixel_values"].max().item() == pytest.approx(-1.47, abs=5e-3)


def test_tensor_and_pil_resizes_are_near_but_not_equal():
    """Section 0: mean 0.004 in normalised units; hence PIL where the reference uses PIL."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 512, 3)).astype(np.uint8))
    request = RewardRequest.build(["x"], images=torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255)
    by_pil = clip_transform(224)(request.pil_images[0])
    resized = interpolate(request.images, size=(224, 224), mode="bicubic", antialias=True)
    by_tensor = (resized[0] - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    difference = (by_pil - by_tensor).abs()
    assert difference.mean().item() == pytest.approx(0.004, abs=0.002)
    assert 0.01 < difference.max().item() < 0.2
