"""The Mask2Former detector: its post-processing on made-up logits, the whole on a small random model."""

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor, SwinConfig

from visual_grpo.errors import UserError
from visual_grpo.rewards.geneval import load_detector
from visual_grpo.rewards.geneval_rules import DetectionFilter
from visual_grpo.rewards.mask2former import COLORS, ColorClassifier, Instance, Mask2FormerDetector, find_instances


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    backbone = SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=6,
        id2label={0: "mouse", 1: "cat", 2: "keyboard", 3: "remote"},
    )  # fmt: skip
    path = tmp_path_factory.mktemp("mask2former")
    Mask2FormerForUniversalSegmentation(config).save_pretrained(path)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)
    return str(path)


def test_post_processing():
    classes = torch.full((3, 3), -10.0)
    classes[0, 1], classes[1, 0], classes[2, 2] = 10.0, 10.0, 10.0  # the third query is "no object"
    masks = torch.full((3, 8, 8), -20.0)
    masks[0, 2:4, 1:5] = 20.0
    masks[1, 4:8, 4:8] = 1.0
    first, second = find_instances(classes, masks, (8, 8), 0.3)
    assert first[0] == 1
    assert first[1] == pytest.approx(1.0, abs=1e-4)
    assert first[2] == (1.0, 2.0, 5.0, 4.0)
    assert first[3].sum() == 8
    assert (second[0], second[2]) == (0, (4.0, 4.0, 8.0, 8.0))
    assert second[1] == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=1e-4)
    assert [item[0] for item in find_instances(classes, masks, (8, 8), 0.8)] == [1]
    assert find_instances(classes, masks[:, :0].new_full((3, 8, 8), -1.0), (8, 8), 0.3) == []


def test_detects_on_a_random_model(folder):
    detector = Mask2FormerDetector(model=folder, threshold=0.0, device="cpu")
    images = torch.rand(2, 3, 48, 40, generator=torch.Generator().manual_seed(0))
    found = detector.detect(images)
    assert len(found) == 2
    assert any(found)
    for answer in found:
        assert set(answer) <= {"computer mouse", "cat", "computer keyboard", "tv remote"}
        for item in (item for items in answer.values() for item in items):
            assert 0 < item.score <= 1
            assert item.mask.shape == (48, 40)
            assert 0 <= item.box[0] < item.box[2] <= 40
            assert 0 <= item.box[1] < item.box[3] <= 48
    (alone,) = detector.detect(images[1:])
    assert {k: [o.box for o in v] for k, v in alone.items()} == {k: [o.box for o in v] for k, v in found[1].items()}


class MeanColorClip:
    """Stands for CLIP: an image's feature is its mean colour, a text's the colour that it names."""

    names = ("red", "green", "blue")
    texts: list = []  # noqa: RUF012

    def encode_image(self, pixels):
        return pixels.mean((2, 3)) - 0.5

    def encode_text(self, tokens):
        return tokens.float()

    def tokenize(self, texts):
        self.texts.extend(texts)
        return torch.tensor([[1.0 if f" {n}" in t else -1.0 for n in self.names] for t in texts])


def test_colors():
    clip = MeanColorClip()
    to_tensor = lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255  # noqa: E731
    classify = ColorClassifier(clip, to_tensor, clip.tokenize, "cpu")
    image = Image.new("RGB", (16, 16), (0, 0, 255))
    image.paste((255, 0, 0), (4, 4, 12, 8))
    mask = np.zeros((16, 16), dtype=bool)
    mask[4:8, 4:12] = True
    # The box is twice as high as the mask: the blue below must have become grey.
    item = Instance((4.0, 4.0, 12.0, 12.0), 0.9, mask, lambda found: classify(image, "cat", found))
    assert item.color == "red"
    assert classify.weights("cat").shape == (len(COLORS), 3)
    assert len(clip.texts) == 3 * len(COLORS)  # made once a class
    assert clip.texts[:3] == ["a photo of a red cat", "a photo of a red-colored cat", "a photo of a red object"]


def test_clip_is_built_with_the_activation_of_its_training():
    """OpenAI's weights want QuickGELU, which open_clip takes from the model's name and not from the weights'."""
    detector = Mask2FormerDetector()
    tag = open_clip.pretrained.get_pretrained_cfg(detector.color_model, detector.color_weights)
    assert open_clip.get_model_config(detector.color_model)["quick_gelu"] is tag["quick_gelu"] is True


def test_by_name_and_without_weights(tmp_path):
    assert isinstance(load_detector("mask2former"), Mask2FormerDetector)
    with pytest.raises(UserError, match=r"threshold 0\.1 is below the 0\.3 of Mask2FormerDetector"):
        load_detector("mask2former", DetectionFilter(threshold=0.1))
    with pytest.raises(UserError, match=r"threshold 0\.2 is below"):
        load_detector("mask2former", DetectionFilter(counting_threshold=0.2))
    own = Mask2FormerDetector(threshold=0.1)
    assert load_detector(own, DetectionFilter(threshold=0.1)) is own
    with pytest.raises(UserError, match=r"mask2former could not be loaded from .*hf download"):
        Mask2FormerDetector(model=str(tmp_path / "absent")).detect(torch.zeros(1, 3, 8, 8))
    with pytest.raises(UserError, match="colour classifier of mask2former needs open_clip"):
        ColorClassifier.load("ViT-B-32", str(tmp_path / "absent.pt"), "cpu")
