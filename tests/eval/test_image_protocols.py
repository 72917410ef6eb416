"""The other image protocols on drawn scenes and by hand: CompBench, DPG, GenEval2, preference, diversity, FID."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.eval import compbench, diversity, dpg, fid, geneval2, preference
from visual_grpo.eval.compbench_rules import (
    Relation,
    asked_counts,
    asked_relation,
    attribute_score,
    lookup,
    noun_phrases,
    numeracy_score,
    position_score,
    spatial_score,
)
from visual_grpo.eval.images import write_samples
from visual_grpo.registry import EVALS
from visual_grpo.reward import to_pil
from visual_grpo.rewards.vqa_models import accepted_forms, load_judge
from visual_grpo.testbed.scenes import SceneObject, draw_scene


def scene(*objects) -> torch.Tensor:
    """[3, 48, 48]; each object is (shape, color, column, row) on the 3 x 3 lattice."""
    drawn = [
        SceneObject(shape=shape, color=color, center=(8.0 + 16 * column, 8.0 + 16 * row), radius=6.4)
        for shape, color, column, row in objects
    ]
    return torch.from_numpy(np.ascontiguousarray(draw_scene(drawn))).permute(2, 0, 1).float() / 255


RED_RING = scene(("ring", "red", 1, 1))
PAIR = scene(("cross", "red", 0, 1), ("circle", "green", 2, 1))
THREE = scene(*[("square", "blue", i, i) for i in range(3)])


def folder_of(tmp_path, rows):
    """GenEval's layout of [(metadata, pictures)]."""
    for index, (row, pictures) in enumerate(rows):
        write_samples(tmp_path / "images", index, row, torch.stack(pictures))
    return tmp_path / "images"


A, B = (0.0, 0.0, 100.0, 100.0), (300.0, 20.0, 400.0, 120.0)


class TestCompBench:
    @pytest.mark.parametrize(
        ("a", "b", "place", "value"),
        [
            (A, B, "left", 1.0),
            (A, B, "right", 0.0),
            (B, A, "right", 1.0),
            (A, B, "top", 0.0),
            (A, (20, 300, 120, 400), "top", 1.0),
            ((20, 300, 120, 400), A, "bottom", 1.0),
            (A, (50, 0, 150, 100), "left", 0.1 / (1 / 3)),
            (A, (300, 300, 400, 400), "left", 0.0),  # on the diagonal neither axis is the larger one
            (A, (300, 300, 400, 400), "top", 0.0),
            (A, B, "near", 1.0),  # 20 pixels apart in height
            (A, (300, 200, 400, 300), "near", 150 / 300),
        ],
    )
    def test_positions(self, a, b, place, value):
        assert position_score(a, b, place) == pytest.approx(value)

    def test_spatial_scores(self):
        assert spatial_score((A, 0.8), (B, 0.6), "left") == pytest.approx(0.25 * 1.4 + 0.5)
        assert spatial_score((A, 0.8), (B, 0.6), "right") == 0.0  # 0.35 is below one half
        assert spatial_score((A, 1.0), (B, 1.0), "right") == 0.5
        assert spatial_score((A, 0.9), None, "left") == 0.0

    def test_numeracy_and_attributes(self):
        assert numeracy_score({"cat": 2, "dog": 3}, {"cat": 2, "dog": 3}) == 1.0
        assert numeracy_score({"cat": 2, "dog": 3}, {"dog": 3}) == 0.5
        assert numeracy_score({"cat": 2}, {}) == 0.0
        assert attribute_score([0.5, 0.5]) == 0.25
        assert attribute_score([0.5] * 9) == pytest.approx(0.5**8)

    def test_what_prompts_ask_for(self):
        assert asked_relation({"prompt": "A vase is on the top of the table."}) == Relation(
            a="vase", b="table", place="top"
        )
        assert asked_relation({"prompt": "a dog next to a cat"}).place == "near"
        assert asked_relation({"prompt": "a red dog"}) is None
        clauses = [{"class": "bear", "count": 1}, {"class": "dog", "count": 1, "position": ["below", 0]}]
        assert asked_relation({"include": clauses}) == Relation(a="dog", b="bear", place="bottom")
        assert asked_counts({"prompt": "three knives, a cup and two wine glasses"}) == {
            "knives": 3, "cup": 1, "wine glasses": 2
        }  # fmt: skip
        assert lookup({"knife": [1]}, "knives") == lookup({"knife": [1]}, "sharp knives") == [1]
        assert lookup({"person": [1, 2]}, "people") == lookup({"person": [1, 2]}, "three boys") == [1, 2]
        assert lookup({"person": [1]}, "a tall woman") == [1]
        assert lookup({"person": [1], "man": [2]}, "man") == [2]
        assert noun_phrases({"prompt": "a photo of a red ring and a blue cross"}) == ["a red ring", "a blue cross"]
        assert noun_phrases({"prompt": "x", "phrases": ["a wooden ring"]}) == ["a wooden ring"]

    def test_on_scenes(self, tmp_path):
        rows = [
            ({"prompt": "a cross on the left of a circle"}, [PAIR, RED_RING]),
            ({"prompt": "three squares"}, [THREE, RED_RING]),
        ]
        folder = folder_of(tmp_path, rows)
        spatial = compbench.evaluate(images=folder, category="spatial", out=tmp_path / "spatial")
        assert spatial["score"] == pytest.approx(0.5, abs=0.05)  # confidences near 1
        assert (spatial["images"], spatial["not_applicable"]) == (2, 2)
        lines = [json.loads(line) for line in (tmp_path / "spatial" / "results.jsonl").read_text().splitlines()]
        assert lines[1]["reason"] == "not found: cross, circle"
        counted = folder_of(tmp_path / "n", [({"prompt": "three squares"}, [THREE, RED_RING])])
        assert compbench.evaluate(images=counted, category="numeracy")["score"] == 0.5
        color = compbench.evaluate(
            images=folder_of(tmp_path / "c", [({"prompt": "a red cross and a green circle"}, [PAIR, RED_RING])]),
            category="color",
        )
        assert color["score"] == 0.5
        with pytest.raises(UserError, match="category is 'colour'"):
            compbench.evaluate(images=folder, category="colour")


CSV = """\
item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language
one,a red ring,,1,0,entity,whole,entity - whole (ring),Is there a ring?
one,a red ring,,2,1,attribute,color,attribute - color (ring red),Is there a red ring?
two,a cross,,1,0,entity,whole,entity - whole (cross),Is there a cross?
two,a cross,,2,1,other,count,other - count (cross 1),Is there a circle?
"""


class TestDpg:
    @pytest.fixture
    def questions(self, tmp_path):
        path = tmp_path / "dpg.csv"
        path.write_text(CSV)
        return path

    def test_tiles_dependencies_and_categories(self, tmp_path, questions):
        (tmp_path / "images").mkdir()
        blank = torch.full((3, 48, 48), 245 / 255)
        blue = scene(("ring", "blue", 1, 1))
        for name, tiles in (("one", [RED_RING, blue, blank, blue]), ("two", [PAIR] * 4)):
            sheet = torch.cat([torch.cat(tiles[:2], 2), torch.cat(tiles[2:], 2)], 1)
            to_pil(sheet[None])[0].save(tmp_path / "images" / f"{name}.png")
        found = dpg.evaluate(images=tmp_path / "images", questions=questions, resolution=48, out=tmp_path / "out")
        # one: 1, .5, 0, .5; two: 1 four times
        assert found["score"] == pytest.approx(100 * (0.5 + 1.0) / 2)
        assert found["images"] == 8
        assert found["categories"] == {"entity": 100.0, "attribute": 0.0, "other": 100.0}  # last tile: a blue ring
        skipped = dpg.evaluate(images=tmp_path / "images", questions=questions, resolution=48, skip_first_row=True)
        assert skipped["score"] == pytest.approx(100 * (0.25 + 1.0) / 2)

    def test_images_in_folders(self, tmp_path, questions):
        folder = folder_of(tmp_path, [({"prompt": "a red ring"}, [RED_RING, PAIR])])
        assert dpg.evaluate(images=folder, questions=questions)["score"] == 50.0

    def test_mistakes(self, tmp_path, questions):
        folder = folder_of(tmp_path, [({"prompt": "unknown"}, [RED_RING])])
        with pytest.raises(UserError, match="neither its item_id nor its prompt"):
            dpg.evaluate(images=folder, questions=questions)
        questions.write_text("a,b\n1,2\n")
        with pytest.raises(UserError, match="column 'item_id' is missing"):
            dpg.evaluate(images=folder, questions=questions)
        with pytest.raises(UserError, match="question file"):
            dpg.evaluate(images=folder)


class Soft:
    """A judge that gives the queued probabilities."""

    def __init__(self, *values):
        self.values = list(values)

    def probability(self, images, questions, forms):
        return torch.tensor([self.values.pop(0) for _ in questions])

    def answer(self, images, questions):
        return ["yes"] * len(questions)


class TestGenEval2:
    def test_means_skills_and_atoms(self, tmp_path):
        rows = [
            (
                {
                    "prompt": "two red rings",
                    "atom_count": 3,
                    "vqa_list": [["How many rings are there?", "2"], ["Are the rings red?", "Yes"]],
                    "skills": ["count", "attribute"],
                },
                [RED_RING],
            ),
            (
                {
                    "prompt": "p",
                    "atom_count": 4,
                    "vqa_list": [["Is there a ring?", "Yes"]] * 2,
                    "skills": ["object"] * 2,
                },
                [PAIR],
            ),
        ]
        folder = folder_of(tmp_path, rows)
        found = geneval2.evaluate(images=folder, judge=Soft(0.25, 1.0, 0.0, 0.5))
        assert found["am"] == pytest.approx(100 * (0.625 + 0.25) / 2)
        assert found["gm"] == pytest.approx(100 * (math.sqrt(0.25) + 0) / 2)
        assert found["skills"] == {"count": 25.0, "attribute": 100.0, "object": 25.0}
        assert found["atoms"] == {"3": 50.0, "4": 0.0}
        real = geneval2.evaluate(images=folder)  # the testbed's judge: one ring, red; no ring
        assert (real["am"], real["gm"]) == (25.0, 0.0)
        with pytest.raises(UserError, match="no vqa_list"):
            geneval2.evaluate(images=folder_of(tmp_path / "x", [({"prompt": "p"}, [PAIR])]))

    def test_accepted_forms(self):
        assert accepted_forms("How many cats?", "three") == ("three", "Three", " three", " Three", "3", " 3")
        assert accepted_forms("Is it red?", "Yes") == ("Yes", "yes", " yes", " Yes")


def test_the_scene_judge():
    judge = load_judge("testbed")
    picture = to_pil(PAIR[None])[0]
    asked = {
        "Is there a red cross?": "yes",
        "Is there a blue cross?": "no",
        "How many circles are there?": "1",
        "Is the cross left of the circle?": "yes",
        "Is the circle left of the cross?": "no",
        "Are there two crosses?": "no",
        "Is there a dog?": "no",
    }
    assert judge.answer([picture] * len(asked), list(asked)) == list(asked.values())
    assert judge.probability([picture], ["How many circles are there?"], [("one", "1")]).tolist() == [1.0]
    with pytest.raises(UserError, match="needs the methods probability"):
        load_judge(object())


class TestPreference:
    def test_scales_intervals_and_states(self, tmp_path):
        rows = [({"prompt": f"p{i}"}, [torch.full((3, 8, 8), i / 8)] * 2) for i in range(4)]
        folder = folder_of(tmp_path, rows)

        class Scaled:
            divisor = 26.0

        def half(images, prompts):
            return [None if p == "p0" else 0.5 for p in prompts]

        found = preference.evaluate(
            images=folder, out=tmp_path / "out", rewards={"brightness": {}, "half": {"reward": half}}
        )
        assert found["means"] == {"brightness": pytest.approx(0.1875, abs=1e-3), "half": 0.5}
        assert found["not_applicable"] == {"brightness": 0, "half": 2}
        assert found["table"][0]["prompts"] == 4
        assert [row["group"] for row in found["table"]] == ["", ""]
        styles = [
            ({"prompt": f"p{i}", "tag": "photo" if i < 3 else "anime"}, [torch.full((3, 8, 8), i / 8)])
            for i in range(4)
        ]
        tagged = preference.evaluate(images=folder_of(tmp_path / "styles", styles), rewards={"brightness": {}})
        by_style = {row["figure"]: row["value"] for row in tagged["table"] if row["group"] == "brightness"}
        assert by_style == {"photo": pytest.approx(1 / 8, abs=1e-3), "anime": pytest.approx(3 / 8, abs=2e-3)}
        assert tagged["means"] == {"brightness": pytest.approx(1.5 / 8, abs=1e-3)}  # over all images
        assert preference.table_scale("pickscore", Scaled()) == 26.0
        assert preference.table_scale("unified_reward", None) == 5.0
        assert (tmp_path / "out" / "successes.png").is_file()
        with pytest.raises(UserError, match="no reward named 'brightnes'"):
            preference.evaluate(images=folder, rewards="brightnes")
        with pytest.raises(UserError, match="scale is 'raw'"):
            preference.evaluate(images=folder, scale="raw")


class TestDiversity:
    def test_within_prompts(self, tmp_path):
        folder = folder_of(
            tmp_path, [({"prompt": "same"}, [RED_RING, RED_RING]), ({"prompt": "other"}, [RED_RING, 1 - RED_RING])]
        )
        found = diversity.evaluate(images=folder, out=tmp_path / "out")
        assert found["diversity"] == pytest.approx((0 + 2) / 2, abs=1e-6)  # the negative has cosine -1
        assert found["prompts"] == 2
        again = diversity.evaluate(images=folder, out=tmp_path / "out")
        assert again["diversity"] == found["diversity"]
        with pytest.raises(UserError, match="at least two images of a prompt"):
            diversity.evaluate(images=folder_of(tmp_path / "x", [({"prompt": "p"}, [RED_RING])]))


def two_features(images):
    return images.mean((2, 3))[:, :2]


class TestFid:
    def test_gaussians_by_hand(self):
        """Equal covariances: the distance is the squared distance of the means."""
        rows = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
        assert fid.frechet_distance(rows, rows) == pytest.approx(0.0, abs=1e-6)
        assert fid.frechet_distance(rows + torch.tensor([3.0, 4.0]), rows) == pytest.approx(25.0, abs=1e-5)
        # one dimension: (m1 - m2)^2 + (s1 - s2)^2, variances 2 and 8
        assert fid.frechet_distance(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])) == pytest.approx(
            1 + (math.sqrt(2) - math.sqrt(8)) ** 2, abs=1e-5
        )

    def test_folders(self, tmp_path):
        generator = np.random.default_rng(0)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for i in range(6):
                pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
        same = fid.evaluate(images=tmp_path / "a", reference=tmp_path / "a", features=two_features, resamples=0)
        assert same["fid"] == pytest.approx(0.0, abs=1e-8)
        found = fid.evaluate(
            images=tmp_path / "a", reference=tmp_path / "b", features=two_features, out=tmp_path / "out"
        )
        assert found["fid"] > 0
        assert found["table"][0]["low"] <= found["fid"] <= found["table"][0]["high"]
        with pytest.raises(UserError, match="reference images"):
            fid.evaluate(images=tmp_path / "a")
        (tmp_path / "empty").mkdir()
        with pytest.raises(UserError, match="at least two images"):
            fid.evaluate(images=tmp_path / "a", reference=tmp_path / "empty", features="pixels")


def test_every_row_of_the_table_is_importable():
    for name in EVALS.names():
        assert callable(EVALS.get(name))
