"""Worked values of the card on evaluation that concern images: seeds, the colour rule, detection settings, published tables."""

import hashlib

import pytest
from PIL import Image

from visual_grpo.eval.generate import sample_id
from visual_grpo.eval.geneval_prompts import FLOW_GRPO_MIX, coco_classes, render
from visual_grpo.eval.intervals import stratified_interval
from visual_grpo.eval.preference import table_scale
from visual_grpo.rewards.color_names import box_color, color_name


def test_seeds_are_the_first_bytes_of_sha256_of_seed_prompt_and_sample():
    digest = hashlib.sha256(b"42:7:3").digest()
    assert sample_id(42, 7, 3) == int.from_bytes(digest[:8], "big") >> 1
    assert len({sample_id(seed, p, i) for seed in (0, 1) for p in range(50) for i in range(4)}) == 400


@pytest.mark.parametrize(
    ("rgb", "name"),
    [
        ((255, 0, 0), "red"),
        ((220, 20, 60), "red"),
        ((255, 165, 0), "orange"),
        ((255, 255, 0), "yellow"),
        ((255, 215, 0), "yellow"),
        ((0, 128, 0), "green"),
        ((34, 139, 34), "green"),
        ((0, 0, 255), "blue"),
        ((0, 0, 128), "blue"),
        ((128, 0, 128), "purple"),
        ((75, 0, 130), "purple"),
        ((255, 192, 203), "pink"),
        ((255, 105, 180), "pink"),
        ((165, 42, 42), "brown"),
        ((139, 69, 19), "brown"),
        ((0, 0, 0), "black"),
        ((255, 255, 255), "white"),
        ((128, 128, 128), None),
    ],
)
def test_the_colour_rule(rgb, name):
    assert color_name(*rgb) == name


def test_the_centre_of_a_box_decides():
    image = Image.new("RGB", (20, 20), "blue")
    image.paste((255, 0, 0), (4, 4, 16, 16))
    assert box_color(image, (0, 0, 20, 20)) == "red"
    assert box_color(image, (0, 0, 3, 3)) == "blue"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"tag": "single_object", "include": [{"class": "bench", "count": 1}]}, "a photo of a bench"),
        ({"include": [{"class": "bench", "count": 1}, {"class": "sports ball", "count": 1}]},
         "a photo of a bench and a sports ball"),
        ({"include": [{"class": "clock", "count": 2}]}, "a photo of two clocks"),
        ({"include": [{"class": "fire hydrant", "count": 1, "color": "blue"}]}, "a photo of a blue fire hydrant"),
        ({"include": [{"class": "teddy bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}]},
         "a photo of a dog right of a teddy bear"),
        ({"include": [{"class": "wine glass", "count": 1, "color": "purple"}, {"class": "apple", "count": 1, "color": "black"}]},
         "a photo of a purple wine glass and a black apple"),
        ({"include": [{"class": "sheep", "count": 3}]}, "a photo of three sheeps"),
        ({"include": [{"class": "knife", "count": 4}]}, "a photo of four knifes"),
    ],
)  # fmt: skip
def test_the_cards_examples_of_prompts(row, text):
    assert render(row) == text


def test_coco_names():
    names = coco_classes()
    assert (len(names), names[0]) == (80, "person")
    assert names[64:67] == ["computer mouse", "tv remote", "computer keyboard"]


def test_flow_grpos_mix():
    order = ("position", "counting", "color_attr", "colors", "two_object", "single_object")
    assert [FLOW_GRPO_MIX[tag] for tag in order] == [7, 5, 3, 1, 1, 0]


def test_scales_of_the_drawbench_table():
    assert [table_scale(name, None) for name in ("pickscore", "deqa", "unified_reward", "clipscore")] == [26, 5, 5, 1]


def test_the_overall_score_draws_within_each_task():
    """A task without spread adds none, however many images it has."""
    values = [1.0] * 90 + [0.0, 1.0] * 5
    tags = ["single_object"] * 90 + ["counting"] * 10
    found = stratified_interval(values, tags)
    assert found.mean == pytest.approx(0.75)
    assert 0.5 < found.low < 0.65
    assert 0.85 < found.high < 1.0
    with pytest.raises(ValueError, match="one a value"):
        stratified_interval([1.0], [])
