"""Preference and quality rewards on small random models of the true classes, against the packages that define them."""

from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch.nn.functional import cosine_similarity
from transformers import AutoImageProcessor, CLIPModel, CLIPProcessor, Dinov2Model, ViTForImageClassification

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardError, RewardRequest, as_reward, to_output
from visual_grpo.rewards.aesthetic import AestheticHead
from visual_grpo.rewards.clip_score import bilinear_pixels
from visual_grpo.rewards.hps_v2 import build_clip, hps_pixels
from visual_grpo.rewards.loading import load_strict, read_state
from visual_grpo.types import RewardStatus

PROMPTS = ["a cat", "two red dogs", "a very long prompt that goes on and on beyond the end of the window", "x"]
EXACT = {"atol": 1e-5, "rtol": 0}


@pytest.fixture
def made():
    return RewardRequest.build(PROMPTS, images=torch.rand(4, 3, 48, 40, generator=torch.Generator().manual_seed(1)))


def score(name, params, made, **more):
    return to_output(as_reward(name, params={**params, **more})(made), len(made), name)


# ---- clip_score


@pytest.fixture
def clip(tiny_clip):
    return CLIPModel.from_pretrained(tiny_clip).eval(), CLIPProcessor.from_pretrained(tiny_clip)


def whole_model(clip, texts, pixels):
    """Cosines by the model's own forward pass."""
    model, processor = clip
    tokens = processor.tokenizer(texts, padding="max_length", truncation=True, max_length=24, return_tensors="pt")
    with torch.no_grad():
        output = model(**tokens, pixel_values=pixels)
    scale = model.logit_scale.exp()
    return output.logits_per_image.diagonal() / scale


def test_clip_score_of_the_paper(clip, clip_score_params, made):
    texts = ["A photo depicts " + prompt for prompt in PROMPTS]
    pixels = clip[1].image_processor(images=made.pil_images, return_tensors="pt")["pixel_values"]
    cosine = whole_model(clip, texts, pixels)
    output = score("clip_score", clip_score_params, made, variant="paper")
    torch.testing.assert_close(output.details["cosine"], cosine.detach(), **EXACT)
    torch.testing.assert_close(output.values, 2.5 * cosine.detach().clamp(min=0), **EXACT)


def test_clip_score_of_diffusion_nft(clip, clip_score_params, made):
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize

    processor = clip[1].image_processor
    prepare = Compose([Resize(32), CenterCrop((32, 32)), Normalize(processor.image_mean, processor.image_std)])
    pixels = prepare((made.images * 255).round() / 255)
    torch.testing.assert_close(bilinear_pixels(made.images, processor), pixels, **EXACT)
    cosine = whole_model(clip, PROMPTS, pixels).detach()
    torch.testing.assert_close(score("clip_score", clip_score_params, made).values, cosine, **EXACT)
    assert cosine.std() > 1e-4


def test_clip_score_of_torchmetrics(clip, clip_score_params, made):
    """It pads to the longest text, cuts ids at the window, and clamps the mean only."""
    model, processor = clip
    tokens = processor.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert tokens["input_ids"].shape[1] > 24
    pixels = processor.image_processor(images=made.pil_images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        texts = model.get_text_features(tokens["input_ids"][:, :24], tokens["attention_mask"][:, :24])
        images = model.get_image_features(pixels)
    texts, images = (getattr(item, "pooler_output", item) for item in (texts, images))
    expected = 100 * cosine_similarity(texts, images)
    output = score("clip_score", clip_score_params, made, variant="torchmetrics")
    torch.testing.assert_close(output.values, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(output.details["cosine"], expected / 100, **EXACT)
    kept = score("clip_score", clip_score_params, made, variant="paper").details["cosine"]
    assert (kept - output.details["cosine"]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:Encountered caption longer than:UserWarning")
def test_clip_score_against_torchmetrics_itself(clip, clip_score_params, made):
    """Its own update and compute; it takes uint8 images and expects tensors of features, which transformers 5 wraps."""
    from torchmetrics.multimodal import CLIPScore

    class Tensors(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config

        def get_image_features(self, *inputs):
            found = self.model.get_image_features(*inputs)
            return getattr(found, "pooler_output", found)

        def get_text_features(self, *inputs):
            found = self.model.get_text_features(*inputs)
            return getattr(found, "pooler_output", found)

    metric = CLIPScore(model_name_or_path=lambda: (Tensors(clip[0]), clip[1]))
    values = score("clip_score", clip_score_params, made, variant="torchmetrics").values
    pixels = (made.images * 255).round().to(torch.uint8)
    with torch.no_grad():
        for i, prompt in enumerate(PROMPTS):
            metric.reset()
            metric.update(pixels[i], prompt)
            assert metric.compute().item() == pytest.approx(max(values[i].item(), 0.0), abs=1e-3), (
                i
            )  # 100 times the cosine
        metric.reset()
        metric.update(list(pixels), PROMPTS)
        assert metric.compute().item() == pytest.approx(max(values.mean().item(), 0.0), abs=1e-3)


REFERENCES = [
    ["a cat", "the cat on a mat"],
    ["dogs"],
    [],
    ["a sentence that is much longer than the window of the model", "x"],
]


def test_ref_clip_score(clip, clip_score_params, made, tmp_path):
    """Cosines of the text with each of its references, all with the prefix, by the model alone."""
    rows = [{"references": texts} for texts in REFERENCES]
    request = RewardRequest.build(PROMPTS, images=made.images, metadata=rows)
    assert set(score("clip_score", clip_score_params, request, variant="refclip").values[[0, 1, 3]].tolist()) == {0.0}
    model, processor = clip  # its cosines are below 0: turned round they are above
    model.text_projection.weight.data.neg_()
    for part in clip:
        part.save_pretrained(tmp_path)
    clip_score_params = {"model": str(tmp_path), "device": "cpu"}
    output = score("clip_score", clip_score_params, request, variant="refclip")

    def encoded(text):
        tokens = processor.tokenizer(
            "A photo depicts " + text, padding="max_length", truncation=True, max_length=24, return_tensors="pt"
        )
        with torch.no_grad():
            found = model.get_text_features(**tokens)
        return getattr(found, "pooler_output", found)[0].double()

    nearest = [max((cosine_similarity(encoded(p), encoded(r), 0).item() for r in rs), default=float("nan"))
               for p, rs in zip(PROMPTS, REFERENCES, strict=True)]  # fmt: skip
    paper = score("clip_score", clip_score_params, made, variant="paper").values.double()
    expected = [
        2 * a * max(b, 0) / (a + max(b, 0)) if a > 0 else 0.0 for a, b in zip(paper.tolist(), nearest, strict=True)
    ]
    assert output.status.tolist() == [0, 0, int(RewardStatus.NOT_APPLICABLE), 0]
    for i in (0, 1, 3):
        assert output.details["reference"][i].item() == pytest.approx(nearest[i], abs=1e-5)
        assert output.values[i].item() == pytest.approx(expected[i], abs=1e-5)
    assert min(output.values[[0, 1, 3]].tolist()) > 0
    one = score("clip_score", clip_score_params, request, variant="refclip", batch_size=1)
    torch.testing.assert_close(one.values, output.values, equal_nan=True, **EXACT)
    bare = RewardRequest.build(PROMPTS, images=made.images)
    assert set(score("clip_score", clip_score_params, bare, variant="refclip").status.tolist()) == {1}


@pytest.mark.parametrize("variant", ["diffusion_nft", "paper", "refclip", "torchmetrics"])
def test_clip_score_of_captions(clip_score_params, made, variant):
    """A caption of the image in a column scores as the prompt of the same generated image."""
    rows = [{"references": ["a cat", "dogs"], "photo": image} for image in made.pil_images]
    rows[1]["photo"] = made.pil_images[1].resize((30, 60))  # the images of a batch may differ in size
    images = RewardRequest.build(PROMPTS, images=made.images, metadata=rows)
    captions = RewardRequest.build(["describe"] * 4, texts=PROMPTS, metadata=rows)
    more = {"variant": variant, "text": "completion", "image_key": "photo"}
    found = score("clip_score", clip_score_params, captions, **more).values
    wanted = score("clip_score", clip_score_params, images, variant=variant).values
    torch.testing.assert_close(
        found[[0, 2, 3]], wanted[[0, 2, 3]], atol=1e-4 if variant == "torchmetrics" else 1e-5, rtol=0
    )
    assert as_reward("clip_score", params={**clip_score_params, **more}).needs == {"texts"}
    with pytest.raises(RewardError, match="row 0 has no image"):
        score("clip_score", clip_score_params, captions, text="completion")


def test_a_variant_that_does_not_exist():
    with pytest.raises(UserError, match="variant is 'openai'; give one of diffusion_nft, paper, refclip, torchmetrics"):
        as_reward("clip_score", params={"variant": "openai"})
    with pytest.raises(UserError, match="text is 'answer'; give one of prompt, completion"):
        as_reward("clip_score", params={"text": "answer"})


# ---- aesthetic


def test_aesthetic_is_one_affine_map_of_the_unit_feature(clip, aesthetic_params, made):
    state = torch.load(aesthetic_params["head"], weights_only=True)
    weight, bias = torch.eye(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    for layer in (0, 2, 4, 6, 7):
        matrix = state[f"layers.{layer}.weight"].double()
        weight, bias = matrix @ weight, matrix @ bias + state[f"layers.{layer}.bias"].double()
    pixels = clip[1].image_processor(images=made.pil_images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        image = clip[0].get_image_features(pixels)
    image = getattr(image, "pooler_output", image).double()
    expected = (image / image.norm(dim=-1, keepdim=True)) @ weight[0] + bias[0]
    values = score("aesthetic", aesthetic_params, made).values
    torch.testing.assert_close(values, expected.float(), **EXACT)
    assert values.std() > 1e-5


def test_aesthetic_names_and_faults(aesthetic_params, made, tmp_path):
    state = torch.load(aesthetic_params["head"], weights_only=True)
    places = (0, 2, 4, 6, 7)
    assert set(state) == {f"layers.{i}.{kind}" for i in places for kind in ("weight", "bias")}
    state["layers.9.weight"] = state.pop("layers.7.weight")
    torch.save(state, tmp_path / "wrong.pth")
    with pytest.raises(UserError, match=r"without layers\.7\.weight; unknown layers\.9\.weight"):
        score("aesthetic", aesthetic_params, made, head=str(tmp_path / "wrong.pth"))


def test_a_checkpoint_of_the_published_names_and_shapes_loads_strictly_into_aesthetic(tmp_path):
    """LAION's file: 768 features, layers 0, 2, 4, 6 and 7 of the sequence."""
    state = {}
    for place, shape in {0: (1024, 768), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}.items():
        state |= {f"layers.{place}.weight": torch.randn(shape), f"layers.{place}.bias": torch.randn(shape[0])}
    path = tmp_path / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(state, path)
    head = AestheticHead()
    load_strict("aesthetic's head", head, read_state("aesthetic's head", path), path)
    assert all(torch.equal(value, state[key]) for key, value in head.state_dict().items())
    with pytest.raises(UserError, match=r"\(unknown layers\.8\.bias\)"):
        load_strict("aesthetic's head", head, {**state, "layers.8.bias": torch.zeros(1)}, path)
    del state["layers.6.bias"]
    with pytest.raises(UserError, match=r"\(without layers\.6\.bias\)"):
        load_strict("aesthetic's head", head, state, path)


# ---- hps_v2


def tiny_open_clip(params, file="HPS_v2.1_compressed.pt"):
    model = open_clip.CLIP(**params["architecture"])
    checkpoint = torch.load(f"{params['weights']}/{file}", weights_only=True)
    model.load_state_dict(checkpoint["state_dict"])
    return model.eval()


def test_hps_is_the_cosine_of_open_clip(hps_v2_params, made):
    model = tiny_open_clip(hps_v2_params)
    pixels = hps_pixels((made.images * 255).round() / 255, 32)
    with torch.no_grad():
        images, texts, _ = model(pixels, open_clip.tokenize(PROMPTS))
    values = score("hps_v2", hps_v2_params, made).values
    torch.testing.assert_close(values, (images * texts).sum(-1), **EXACT)
    assert values.std() > 1e-4


def test_hps_pixels_of_a_square_are_a_plain_resize():
    from torchvision.transforms.functional import InterpolationMode, normalize, resize

    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    for antialias in (True, False):
        expected = normalize(
            resize(images, [48, 48], interpolation=InterpolationMode.BICUBIC, antialias=antialias), mean, std
        )
        torch.testing.assert_close(hps_pixels(images, 48, antialias=antialias), expected, **EXACT)
    assert (hps_pixels(images, 48) - hps_pixels(images, 48, antialias=False)).abs().max() > 0.1


def test_hps_pads_the_rest_with_black_and_the_odd_pixel_goes_last():
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    wide = hps_pixels(torch.ones(1, 3, 30, 64), 32)[0]  # 15 rows: 8 above, 9 below
    assert [bool((wide[:, row] < 0).all()) for row in range(32)] == [True] * 8 + [False] * 15 + [True] * 9
    torch.testing.assert_close(wide[:, 0, 0], -mean / std)
    tall = hps_pixels(torch.ones(1, 3, 64, 30), 32)[0]
    torch.testing.assert_close(tall, wide.transpose(1, 2))


def test_hps_versions_and_faults(hps_v2_params, made, tmp_path):
    for version in ("2.1", 2.1, "v2.1"):
        assert as_reward("hps_v2", params={"version": version}).version == "2.1"
    with pytest.raises(UserError, match=r"version is '3'; give 2\.0 or 2\.1"):
        as_reward("hps_v2", params={"version": "3"})
    with pytest.raises(UserError, match=r"holds no 'HPS_v2_compressed\.pt'"):
        score("hps_v2", hps_v2_params, made, version="2.0")
    state = tiny_open_clip(hps_v2_params).state_dict()
    state["score_predictor"] = state.pop("visual.proj")
    torch.save({"state_dict": state}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(UserError, match=r"without visual\.proj; unknown score_predictor"):
        score("hps_v2", hps_v2_params, made, weights=str(tmp_path))
    with pytest.raises(UserError, match="knows no architecture 'ViT-H-15'"):
        build_clip("ViT-H-15")


def tower(prefix, layers, width):
    names = {}
    for i in range(layers):
        block = f"{prefix}.resblocks.{i}"
        for norm in ("ln_1", "ln_2"):
            names |= {f"{block}.{norm}.weight": [width], f"{block}.{norm}.bias": [width]}
        names |= {f"{block}.attn.in_proj_weight": [3 * width, width], f"{block}.attn.in_proj_bias": [3 * width]}
        names |= {f"{block}.attn.out_proj.weight": [width, width], f"{block}.attn.out_proj.bias": [width]}
        names |= {f"{block}.mlp.c_fc.weight": [4 * width, width], f"{block}.mlp.c_fc.bias": [4 * width]}
        names |= {f"{block}.mlp.c_proj.weight": [width, 4 * width], f"{block}.mlp.c_proj.bias": [width]}
    return names


def published_hps():
    """Names and shapes of HPS_v2_compressed.pt and HPS_v2.1_compressed.pt."""
    names = {
        "positional_embedding": [77, 1024],
        "text_projection": [1024, 1024],
        "logit_scale": [],
        "token_embedding.weight": [49408, 1024],
        "visual.class_embedding": [1280],
        "visual.positional_embedding": [257, 1280],
        "visual.proj": [1280, 1024],
        "visual.conv1.weight": [1280, 3, 14, 14],
    }
    for norm, width in (("ln_final", 1024), ("visual.ln_pre", 1280), ("visual.ln_post", 1280)):
        names |= {f"{norm}.weight": [width], f"{norm}.bias": [width]}
    return {**names, **tower("visual.transformer", 32, 1280), **tower("transformer", 24, 1024)}


def test_hps_has_the_published_parameters():
    model = build_clip("ViT-H-14")
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == published_hps()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_checkpoint_of_the_published_names_and_shapes_loads_strictly_into_hps():
    state = {name: torch.empty(shape, device="meta") for name, shape in published_hps().items()}
    model, path = build_clip("ViT-H-14"), Path("HPS_v2.1_compressed.pt")
    load_strict("hps_v2's weights", model, state, path)
    with pytest.raises(UserError, match=r"\(unknown logit_bias\)"):
        load_strict("hps_v2's weights", model, {**state, "logit_bias": state["logit_scale"]}, path)
    del state["visual.transformer.resblocks.31.mlp.c_fc.bias"]
    with pytest.raises(UserError, match=r"\(without visual\.transformer\.resblocks\.31\.mlp\.c_fc\.bias\)"):
        load_strict("hps_v2's weights", model, state, path)


# ---- dino_similarity


def test_dino_is_the_cosine_of_the_cls_features(dino_similarity_params, made, tmp_path):
    other = Image.fromarray(np.random.default_rng(3).integers(0, 256, (50, 70, 3)).astype(np.uint8))
    other.save(tmp_path / "other.png")
    rows = [{"reference": "other.png"}, {}, {"reference": made.pil_images[2]}, {"reference": other}]
    request = RewardRequest.build(PROMPTS, images=made.images, metadata=rows)
    output = score("dino_similarity", dino_similarity_params, request, root=str(tmp_path))
    folder = dino_similarity_params["model"]
    model, processor = Dinov2Model.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)

    def cls(image):
        with torch.no_grad():
            return model(**processor(images=image, return_tensors="pt")).pooler_output

    expected = [cosine_similarity(cls(made.pil_images[i]), cls(other)).item() for i in (0, 3)]
    assert output.values[[0, 3]].tolist() == pytest.approx(expected, abs=1e-5)
    assert output.values[2].item() == pytest.approx(1.0, abs=1e-5)
    assert output.status.tolist() == [0, int(RewardStatus.NOT_APPLICABLE), 0, 0]
    request.metadata[0]["reference"] = "missing.png"
    with pytest.raises(UserError, match=r"reference image '.*missing\.png' of column 'reference' cannot be read"):
        score("dino_similarity", dino_similarity_params, request, root=str(tmp_path))


# ---- nsfw


def test_nsfw_is_a_gate(nsfw_params, made):
    folder = nsfw_params["model"]
    model, processor = ViTForImageClassification.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**processor(images=made.pil_images, return_tensors="pt")).logits
    expected = logits.softmax(-1)[:, 1]
    output = score("nsfw", nsfw_params, made)
    torch.testing.assert_close(output.details["probability"], expected, **EXACT)
    middle = expected.median().item() + 1e-6
    gate = score("nsfw", nsfw_params, made, threshold=middle).values
    assert gate.tolist() == (expected < middle).float().tolist()
    assert {0.0, 1.0} == set(gate.tolist())


def test_nsfw_faults(nsfw_params, made):
    with pytest.raises(UserError, match=r"has no class porn; its classes are normal, nsfw"):
        score("nsfw", nsfw_params, made, unsafe=["porn"])
    with pytest.raises(UserError, match="threshold is 0"):
        as_reward("nsfw", params={"threshold": 0})
