"""The exact detector: accuracy on ground truth, garbage, sizes."""

import numpy as np
import pytest
import torch

from visual_grpo.rewards.geneval_rules import DetectionFilter, filter_detections, judge_official, judge_partial
from visual_grpo.testbed.detector import SceneDetector
from visual_grpo.testbed.scene_scores import is_correct
from visual_grpo.testbed.scenes import COLORS, KINDS, SHAPES, SceneObject, all_prompts, draw_scene, sample_scene


def to_tensor(images):
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def truth(count, seed=0):
    """`count` random (metadata, objects) pairs, kinds in equal shares."""
    rng = np.random.default_rng(seed)
    by_kind = [[entry for entry in all_prompts() if entry["tag"] == kind] for kind in KINDS]
    entries = [members[rng.integers(len(members))] for members, _ in zip(by_kind * count, range(count), strict=False)]
    return [(entry, sample_scene(entry, rng)) for entry in entries]


def found_objects(detections):
    return sorted((name, item.color) for name, items in detections.items() for item in items)


@pytest.fixture(scope="module")
def ground_truth():
    pairs = truth(1002)
    return pairs, SceneDetector().detect(to_tensor([draw_scene(objects) for _, objects in pairs]))


def test_finds_exactly_what_was_drawn(ground_truth):
    pairs, found = ground_truth
    exact = [
        found_objects(detections) == sorted((o.shape, o.color) for o in objects)
        for (_, objects), detections in zip(pairs, found, strict=True)
    ]
    assert np.mean(exact) >= 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_judged_correct(ground_truth, kind):
    pairs, found = ground_truth
    verdicts = []
    for (entry, _), detections in zip(pairs, found, strict=True):
        if entry["tag"] == kind:
            kept = filter_detections(detections, kind, DetectionFilter())
            verdicts.append((judge_official(kept, entry).correct, judge_partial(kept, entry).correct))
    assert len(verdicts) == 167
    assert np.mean(verdicts) >= 0.99


def test_wrong_prompts_are_judged_wrong(ground_truth):
    pairs, found = ground_truth
    shifted = [entry for entry, _ in pairs[len(KINDS) :]]  # the next scene of the same kind
    wrong = [is_correct(entry, detections) for entry, detections in zip(shifted, found, strict=False)]
    assert np.mean(wrong) < 0.1


def test_boxes_and_scores(ground_truth):
    pairs, found = ground_truth
    errors, scores = [], []
    for (_, objects), detections in zip(pairs, found, strict=True):
        boxes = np.array([item.box for items in detections.values() for item in items])
        scores += [item.score for items in detections.values() for item in items]
        errors += [np.abs(boxes - item.box).max(axis=1).min() for item in objects]
    assert np.quantile(errors, 0.99) < 1.0
    assert np.quantile(scores, 0.01) > 0.95


def test_build_script_and_rule_engine_agree(ground_truth):
    pairs, found = ground_truth
    entries = [entry for entry, _ in pairs]
    for shift in (0, 1, len(KINDS)):
        for entry, detections in zip(entries[shift:], found, strict=False):
            kept = filter_detections(detections, entry["tag"], DetectionFilter())
            assert is_correct(entry, detections) == judge_official(kept, entry).correct


def test_works_under_blur_and_noise():
    pairs = truth(120, seed=1)
    images = to_tensor([draw_scene(objects) for _, objects in pairs])
    blurred = torch.nn.functional.avg_pool2d(images, 2, stride=1, padding=0)
    blurred = torch.nn.functional.pad(blurred, (1, 0, 1, 0), value=245 / 255)
    noisy = (blurred + 0.03 * torch.randn(blurred.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    verdicts = [
        is_correct(entry, found) for (entry, _), found in zip(pairs, SceneDetector().detect(noisy), strict=True)
    ]
    assert np.mean(verdicts) >= 0.95


def test_batch_and_single_images_agree():
    images = to_tensor([draw_scene(objects) for _, objects in truth(12, seed=2)])
    detector = SceneDetector()
    assert detector.detect(images) == [detector.detect(image[None])[0] for image in images]


def test_other_sizes_give_boxes_in_their_own_pixels():
    scene = [SceneObject(shape="cross", color="green", center=(24.0, 8.0), radius=6.5)]
    large = torch.nn.functional.interpolate(to_tensor([draw_scene(scene)]), scale_factor=4, mode="bicubic").clamp(0, 1)
    (item,) = SceneDetector().detect(large)[0]["cross"]
    assert item.color == "green"
    assert np.allclose(item.box, np.array(scene[0].box) * 4, atol=4)


def test_touching_objects_of_two_colors_are_told_apart():
    scene = [
        SceneObject(shape="square", color="red", center=(16.0, 24.0), radius=6.8),
        SceneObject(shape="square", color="blue", center=(28.0, 24.0), radius=6.8),
    ]
    assert found_objects(SceneDetector().detect(to_tensor([draw_scene(scene)]))[0]) == [
        ("square", "blue"),
        ("square", "red"),
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [4.5, 9.0])
def test_other_sizes_of_objects_are_recognised(shape, radius):
    scenes = [[SceneObject(shape=shape, color=color, center=(24.2, 23.7), radius=radius)] for color in COLORS]
    found = SceneDetector().detect(to_tensor([draw_scene(scene) for scene in scenes]))
    assert [found_objects(item) for item in found] == [[(shape, color)] for color in COLORS]


GENERATOR = torch.Generator().manual_seed(0)
GARBAGE = {
    "noise": torch.rand(8, 3, 48, 48, generator=GENERATOR),
    "out of range": 5 * torch.randn(8, 3, 48, 48, generator=GENERATOR),
    "nan": torch.full((2, 3, 48, 48), float("nan")),
    "infinite": torch.tensor([float("inf"), -float("inf")])[:, None, None, None].expand(2, 3, 48, 48),
    "some nan": torch.where(torch.rand(8, 3, 48, 48, generator=GENERATOR) < 0.1, float("nan"), 0.9),
    "black": torch.zeros(2, 3, 48, 48),
    "white": torch.ones(2, 3, 48, 48),
    "blocks": torch.rand(8, 3, 12, 12, generator=GENERATOR).repeat_interleave(4, 2).repeat_interleave(4, 3),
    "stripes": torch.rand(8, 3, 1, 48, generator=GENERATOR).expand(8, 3, 48, 48),
    "tiny": torch.rand(2, 3, 3, 5, generator=GENERATOR),
    "half": torch.rand(2, 3, 48, 48, generator=GENERATOR).half(),
}


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("report_unknown", [False, True])
def test_garbage_never_crashes(name, report_unknown):
    images = GARBAGE[name]
    found = SceneDetector(report_unknown=report_unknown).detect(images)
    assert len(found) == len(images)
    for detections in found:
        for items in detections.values():
            assert all(np.isfinite([*item.box, item.score]).all() and 0 <= item.score <= 1 for item in items)
    if name in ("nan", "white", "black"):
        assert not any(set(detections) - {"unknown"} for detections in found)


def test_wrong_shape_of_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"must be \[N, 3, H, W\]"):
        SceneDetector().detect(torch.zeros(3, 48, 48))
    assert SceneDetector().detect(torch.zeros(0, 3, 48, 48)) == []


def test_unknown_components_are_reported_on_request():
    image = torch.full((1, 3, 48, 48), 245 / 255)
    image[:, :, 20:24, 5:40] = 0.1  # a bar
    assert SceneDetector().detect(image) == [{}]
    (item,) = SceneDetector(report_unknown=True).detect(image)[0]["unknown"]
    assert item.color == "black"
