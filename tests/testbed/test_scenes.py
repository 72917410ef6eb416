"""The drawn world: prompts, metadata, split, scenes."""

from collections import Counter

import numpy as np
import pytest

from visual_grpo.rewards.geneval_rules import relations as rule_relations
from visual_grpo.testbed.noisy_captions import corrupt_caption
from visual_grpo.testbed.scenes import (
    BACKGROUND,
    CELL,
    COLORS,
    IMAGE_SIZE,
    KINDS,
    NUMBERS,
    RELATIONS,
    SHAPES,
    all_prompts,
    draw_prompt,
    draw_scene,
    plural,
    relations,
    sample_scene,
    signed_distance,
    split_prompts,
    with_article,
)
from visual_grpo.testbed.words import WORDS, all_word_prompts, draw_word, draw_word_prompt
from visual_grpo.testbed.words import split_prompts as split_word_prompts


def by_kind(prompts):
    return {kind: [entry for entry in prompts if entry["tag"] == kind] for kind in KINDS}


def test_number_of_prompts_of_each_kind():
    counts = Counter(entry["tag"] for entry in all_prompts())
    assert counts == {
        "single_object": 24,
        "two_object": 30,
        "counting": 72,
        "colors": 48,
        "position": 120,
        "color_attr": 1680,
    }
    texts = [entry["prompt"] for entry in all_prompts()]
    assert len(set(texts)) == len(texts)


def test_captions_match_the_metadata():
    for entry in all_prompts():
        text, include = entry["prompt"], entry["include"]
        names = [plural(c["class"]) if c["count"] > 1 else c["class"] for c in include]
        phrases = [f"{c['color']} {name}" if "color" in c else name for c, name in zip(include, names, strict=True)]
        if entry["tag"] == "counting":
            assert text.endswith(f" of {NUMBERS[include[0]['count']]} {phrases[0]}")
            assert entry["exclude"] == [{"class": include[0]["class"], "count": include[0]["count"] + 1}]
        elif entry["tag"] == "position":
            relation, target = include[1]["position"]
            assert target == 0
            assert text.endswith(f" of {with_article(phrases[1])} {relation} {with_article(phrases[0])}")
        else:
            assert text.endswith(" of " + " and ".join(map(with_article, phrases)))
            assert "exclude" not in entry


def test_known_captions():
    texts = {entry["prompt"] for entry in all_prompts()}
    assert {
        "a photo of a red circle and an orange square",
        "a photo of three crosses",
        "a photo of a circle left of a square",
        "a drawing of a ring",
        "a photo of a black diamond",
    } <= texts


def test_split_is_disjoint_complete_and_stable():
    train, heldout = split_prompts()
    train_texts = {entry["prompt"] for entry in train}
    held_texts = {entry["prompt"] for entry in heldout}
    assert not train_texts & held_texts
    assert train_texts | held_texts == {entry["prompt"] for entry in all_prompts()}
    counts = {kind: len(members) for kind, members in by_kind(heldout).items()}
    assert counts == {
        "single_object": 7,
        "two_object": 9,
        "counting": 22,
        "colors": 14,
        "position": 36,
        "color_attr": 504,
    }
    assert by_kind(heldout)["two_object"][0]["prompt"] == "a photo of a circle and a diamond"  # stable over machines


@pytest.mark.parametrize("kind", KINDS)
def test_scenes_hold_what_the_prompt_says(kind):
    rng = np.random.default_rng(0)
    prompts = by_kind(all_prompts())[kind]
    for entry in prompts[:: max(len(prompts) // 24, 1)]:
        objects = sample_scene(entry, rng)
        wanted = [(c["class"], c.get("color")) for c in entry["include"] for _ in range(c["count"])]
        assert [(o.shape, o.color if color else None) for o, (_, color) in zip(objects, wanted, strict=True)] == wanted
        for clause in entry["include"]:
            if "position" in clause:
                assert clause["position"][0] in rule_relations(objects[1].box, objects[0].box)


def test_objects_stay_inside_their_cells_and_apart():
    rng = np.random.default_rng(1)
    for entry in all_prompts()[::7]:
        cells = []
        for item in sample_scene(entry, rng):
            x1, y1, x2, y2 = item.box
            assert 0 <= x1 < x2 <= IMAGE_SIZE
            assert 0 <= y1 < y2 <= IMAGE_SIZE
            cells.append((int(item.center[0] // CELL), int(item.center[1] // CELL)))
        for i, first in enumerate(cells):
            assert all(abs(first[0] - other[0]) + abs(first[1] - other[1]) > 1 for other in cells[:i])


def test_drawing_is_deterministic_and_has_the_right_colors():
    entry = next(e for e in all_prompts() if e["prompt"] == "a photo of a blue square")
    first, second = (draw_prompt(entry, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, second)
    assert first.dtype == np.uint8
    assert first.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    colors = {tuple(pixel) for pixel in first.reshape(-1, 3).tolist()}
    assert COLORS["blue"] in colors
    assert (BACKGROUND,) * 3 in colors
    assert (draw_scene([]) == BACKGROUND).all()


def test_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="unknown shape 'star'"):
        signed_distance("star", np.zeros(1), np.zeros(1), 3.0)


def test_relations_agree_with_the_rule_engine():
    rng = np.random.default_rng(2)
    for _ in range(300):
        corners = rng.integers(0, 40, size=(2, 2))
        first, second = (
            (x, y, x + w, y + h) for (x, y), (w, h) in zip(corners, rng.integers(4, 20, size=(2, 2)), strict=True)
        )
        assert relations(first, second) == rule_relations(first, second)


def test_corrupted_captions_keep_their_form():
    rng = np.random.default_rng(0)
    texts = {str(entry["prompt"]) for entry in all_prompts() + all_word_prompts()}
    for text in sorted(texts)[::5]:
        assert corrupt_caption(text, rng, probability=0.0) == text
        changed = corrupt_caption(text, rng, probability=1.0)
        assert len(changed.split()) - changed.count(" of a") == len(text.split()) - text.count(" of a") or any(
            relation in text for relation in RELATIONS
        )
    single = "a photo of a circle"
    drawn = Counter(corrupt_caption(single, rng, probability=0.3) for _ in range(2000))
    assert set(drawn) == {f"a photo of {with_article(shape)}" for shape in SHAPES}
    assert drawn[single] / 2000 == pytest.approx(0.7 + 0.3 / 6, abs=0.04)


def test_corrupted_captions_get_the_right_article():
    rng = np.random.default_rng(0)
    texts = {corrupt_caption("a photo of an orange circle", rng, probability=1.0) for _ in range(100)}
    assert any(" of an orange " in text for text in texts)
    assert any(" of a red " in text for text in texts)
    assert not any(" an red" in text or " a orange" in text for text in texts)


def test_word_prompts_quote_their_word():
    prompts = all_word_prompts()
    assert all(entry["prompt"].split('"')[1] == entry["word"] for entry in prompts)
    train, heldout = split_word_prompts()
    assert (len(train), len(heldout)) == (34, 14)
    assert not {e["prompt"] for e in train} & {e["prompt"] for e in heldout}


def test_words_are_drawn_inside_the_image():
    rng = np.random.default_rng(0)
    for entry in all_word_prompts()[: len(WORDS)]:
        image = draw_word_prompt(entry, rng)
        assert image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert (border > 200).all()
        assert (image < 100).any()
    assert draw_word("READABLE", size=128).shape == (128, 128, 3)


def test_a_word_that_cannot_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        draw_word("ANEXTRAORDINARILYLONGWORD", size=32)
