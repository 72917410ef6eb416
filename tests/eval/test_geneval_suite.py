"""The whole GenEval protocol: all prompts with synthetic detections, the original's summary, resuming, comparing."""

import importlib.util
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.eval import compare, geneval, images
from visual_grpo.eval.geneval_prompts import coco_classes, generate_prompts, render, share_out
from visual_grpo.rewards.geneval_rules import COLORS

_spec = importlib.util.spec_from_file_location("shared_data", Path(__file__).with_name("shared_data.py"))
shared_data = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared_data)


@dataclass(frozen=True)
class Found:
    box: tuple[float, float, float, float]
    score: float = 0.95
    color: str | None = None


OFFSETS = {"left of": (-200, 0), "right of": (200, 0), "above": (0, -200), "below": (0, 200)}


def perfect(metadata) -> dict[str, list[Found]]:
    """Detections of an image that shows exactly what is asked for."""
    found: dict[str, list[Found]] = {}
    for number, clause in enumerate(metadata["include"]):
        x, y = 1000 * number if "position" not in clause else 0, 0
        if "position" in clause:
            x, y = OFFSETS[clause["position"][0]]
        boxes = [(x + 120 * i, y, x + 120 * i + 100, y + 100) for i in range(clause["count"])]
        found.setdefault(clause["class"], []).extend(Found(box, color=clause.get("color")) for box in boxes)
    return found


def spoiled(metadata) -> dict[str, list[Found]]:
    """Each task's own mistake: one object too few, or the wrong colour, or the mirrored place."""
    found = perfect(metadata)
    clause = metadata["include"][-1]
    if "color" in clause:
        other = next(c for c in COLORS if c != clause["color"])
        found[clause["class"]] = [Found(o.box, color=other) for o in found[clause["class"]]]
    elif "position" in clause:
        found[clause["class"]] = [
            Found(tuple(-v for v in (*o.box[2:], *o.box[:2])), color=None) for o in found[clause["class"]]
        ]
    else:
        found[clause["class"]] = found[clause["class"]][1:]
    return found


class Synthetic:
    """Right for the images whose number says so: pixel value 1 is right, 0 spoiled."""

    def __init__(self, queue):
        self.queue = list(queue)

    def detect(self, pictures):
        return [self.queue.pop(0) for _ in range(len(pictures))]


def test_all_prompts_with_four_synthetic_images_each():
    """Of every prompt's four images the first p % 5 are right: each task's score is known in advance."""
    rows = geneval.judge_images
    metadata = shared_data.geneval_metadata()
    assert len(metadata) == 553
    expected: dict[str, list[bool]] = {}
    queue, owners = [], []
    for number, row in enumerate(metadata):
        for image in range(4):
            right = image < number % 5
            queue.append(perfect(row) if right else spoiled(row))
            owners.append(row)
            expected.setdefault(row["tag"], []).append(right)
    names = [f"{i // 4:05d}/samples/{i % 4:04d}.png" for i in range(len(owners))]
    lines = rows(torch.zeros(len(owners), 3, 1, 1), owners, names, Synthetic(queue))
    assert len(lines) == 2212
    summary = geneval.summarise(lines)
    assert {tag: len(v) for tag, v in expected.items()} == {
        "single_object": 320, "two_object": 396, "counting": 320, "colors": 376, "position": 400, "color_attr": 400
    }  # fmt: skip
    assert {tag: task["score"] for tag, task in summary["tasks"].items()} == pytest.approx(
        {tag: np.mean(v) for tag, v in expected.items()}
    )
    assert summary["overall"] == pytest.approx(np.mean([np.mean(v) for v in expected.values()]))
    assert summary["prompts"] == 553
    assert summary["prompt_accuracy"] == pytest.approx(np.mean([n % 5 > 0 for n in range(553)]))
    rows = geneval.table(lines)
    assert rows[0]["value"] == pytest.approx(summary["overall"])
    assert rows[0]["low"] < rows[0]["value"] < rows[0]["high"]


def test_every_published_prompt_follows_from_its_clauses():
    metadata = shared_data.geneval_metadata()
    assert [render(row) for row in metadata] == [row["prompt"] for row in metadata]
    assert {row["include"][0]["class"] for row in metadata if row["tag"] == "single_object"} == set(coco_classes())
    counting = [row for row in metadata if row["tag"] == "counting"]
    assert all(row["exclude"][0]["count"] == row["include"][0]["count"] + 1 for row in counting)
    counts = Counter(row["include"][0]["count"] for row in counting)
    relations = Counter(row["include"][1]["position"][0] for row in metadata if row["tag"] == "position")
    if (
        shared_data.shared_file("geneval/evaluation_metadata.jsonl") is not None
    ):  # the published file, not our own prompts
        assert counts == {2: 26, 3: 28, 4: 26}
        assert relations == {"below": 28, "right of": 27, "above": 26, "left of": 19}


class TestPrompts:
    def test_rules(self):
        counts = share_out(140, {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1})
        rows = generate_prompts(counts, seed=1)
        assert len(rows) == len({row["prompt"] for row in rows}) == 140
        tags = [row["tag"] for row in rows]
        assert tags.count("position") == round(140 * 7 / 17)
        for row in rows:
            clauses = row["include"]
            assert not any("color" in c and c["class"] == "person" for c in clauses)
            if row["tag"] == "counting":
                assert 2 <= clauses[0]["count"] <= 4
                assert row["exclude"] == [{"class": clauses[0]["class"], "count": clauses[0]["count"] + 1}]
            if len(clauses) == 2:
                assert clauses[0]["class"] != clauses[1]["class"]
            if row["tag"] == "color_attr":
                assert clauses[0]["color"] != clauses[1]["color"]

    def test_a_task_does_not_depend_on_the_others_and_seeds_differ(self):
        alone = generate_prompts({"counting": 5}, seed=3)
        beside = generate_prompts({"counting": 5, "position": 5}, seed=3)
        assert alone == [row for row in beside if row["tag"] == "counting"]
        assert alone != generate_prompts({"counting": 5}, seed=4)

    def test_the_test_prompts_are_left_out(self):
        every = generate_prompts({"two_object": 6}, classes=["cat", "dog", "bus"])
        banned = [row["prompt"].upper() for row in every[:2]]
        rest = generate_prompts({"two_object": 4}, classes=["cat", "dog", "bus"], exclude=banned)
        assert sorted(row["prompt"] for row in rest) == sorted(row["prompt"] for row in every[2:])
        with pytest.raises(UserError, match="only 4 different two_object prompts are left"):
            generate_prompts({"two_object": 5}, classes=["cat", "dog", "bus"], exclude=banned)

    def test_mistakes(self):
        with pytest.raises(UserError, match=r"no task 'colours'\. Did you mean 'colors'"):
            generate_prompts({"colours": 1}, classes=["cat"])
        with pytest.raises(UserError, match="count of at least 1"):
            share_out(0, {"position": 1})
        with pytest.raises(UserError, match="at least one class"):
            generate_prompts({"counting": 1}, classes=[])


ORIGINAL = """\
Summary
=======
Total images: 5
Total prompts: 3
% correct images: 60.00%
% correct prompts: 66.67%

Task breakdown
==============
colors           = 50.00% (1 / 2)
single_object    = 66.67% (2 / 3)

Overall score (avg. over tasks): 0.58333
"""


def test_the_originals_summary_line_by_line():
    lines = [
        {"tag": "colors", "correct": True, "metadata": "a"},
        {"tag": "single_object", "correct": True, "metadata": "b"},
        {"tag": "colors", "correct": False, "metadata": "a"},
        {"tag": "single_object", "correct": True, "metadata": "b"},
        {"tag": "single_object", "correct": False, "metadata": "c"},
    ]
    assert geneval.format_summary(lines) == ORIGINAL
    with pytest.raises(UserError, match="no GenEval results"):
        geneval.format_summary([])


def test_colour_reasons_count_what_was_seen():
    row = {"tag": "colors", "prompt": "p", "include": [{"class": "cup", "count": 3, "color": "red"}]}
    seen = {"cup": [Found((0, 0, 9, 9), color=c) for c in ("blue", "red", "blue")]}
    (line,) = geneval.judge_images(torch.zeros(1, 3, 1, 1), [row], ["x"], Synthetic([seen]))
    assert line["reason"] == "expected red cup>=3, found 1 red; and 1 red, 2 blue"


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"tag": "single_object", "prompt": f"a photo of a {name}", "include": [{"class": name, "count": 1}]}
        for name in ("cat", "dog", "cup")
    ]
    for index, row in enumerate(rows):
        images.write_samples(tmp_path / "images", index, row, torch.full((2, 3, 8, 8), 0.25 * index))
    return tmp_path / "images"


class Counting:
    """Finds a cat in every image and counts its calls."""

    def __init__(self, name="cat"):
        self.name, self.seen = name, 0

    def detect(self, pictures):
        self.seen += len(pictures)
        return [{self.name: [Found((0, 0, 4, 4))]} for _ in pictures]


class TestResultFolder:
    def test_an_interrupted_run_goes_on(self, folder, tmp_path):
        out = tmp_path / "out"

        class Breaks(Counting):
            def detect(self, pictures):
                if self.seen >= 4:
                    raise KeyboardInterrupt
                return super().detect(pictures)

        Breaks.__name__ = "Counting"
        with pytest.raises(KeyboardInterrupt):
            geneval.evaluate(images=folder, out=out, detector=Breaks(), batch_size=2)
        results = out / "results.jsonl"
        results.write_bytes(results.read_bytes()[:-20])  # and the last line was cut off
        again = Counting()
        summary = geneval.evaluate(images=folder, out=out, detector=again, batch_size=2)
        assert again.seen == 3
        whole = geneval.evaluate(images=folder, detector=Counting())
        assert {k: v for k, v in summary.items() if k != "table"} == {k: v for k, v in whole.items() if k != "table"}
        assert len(geneval.read_results(results)) == 6
        assert (out / "summary_scores.txt").read_text() == geneval.format_summary(geneval.read_results(results))
        assert "| overall (mean of tasks) | 0.3333 |" in (out / "table.md").read_text()

    def test_a_changed_image_is_scored_again_and_other_settings_are_refused(self, folder, tmp_path):
        out = tmp_path / "out"
        geneval.evaluate(images=folder, out=out, detector=Counting())
        images.write_samples(folder, 1, {"tag": "colors", "prompt": "new", "include": []}, torch.ones(1, 3, 8, 8))
        again = Counting()
        geneval.evaluate(images=folder, out=out, detector=again)
        assert again.seen == 2  # the new image, and the other one of the prompt: it is asked something else now
        with pytest.raises(UserError, match=r"other settings \(threshold was 0.3 and is now 0.5\)"):
            geneval.evaluate(images=folder, out=out, detector=Counting(), threshold=0.5)

    def test_grids_say_why(self, folder, tmp_path):
        from visual_grpo.grid import load_grid

        geneval.evaluate(images=folder, out=tmp_path / "out", detector=Counting())
        good, bad = (load_grid(tmp_path / "out" / f"{name}.png") for name in ("successes", "failures"))
        assert good.captions == ["a photo of a cat\nright: 1 cat"] * 2
        assert bad.captions[0] == "a photo of a dog\nexpected dog>=1, found 0"
        assert bad.marks == [0.0] * 4
        geneval.evaluate(images=folder, out=tmp_path / "none", detector=Counting(), grid=0)
        assert not list((tmp_path / "none").glob("*.png"))

    def test_paired_differences(self, folder, tmp_path):
        geneval.evaluate(images=folder, out=tmp_path / "a", detector=Counting("cat"))
        geneval.evaluate(images=folder, out=tmp_path / "b", detector=Counting("none"))
        found = compare.compare(tmp_path / "a", tmp_path / "b")
        (row,) = [r for r in found["table"] if r["figure"] == "correct"]
        assert (row["a"], row["b"], row["value"]) == (pytest.approx(1 / 3), 0.0, pytest.approx(-1 / 3))
        assert (found["samples"], found["only_a"], row["prompts"]) == (6, 0, 3)
        original = tmp_path / "original.jsonl"
        lines = geneval.read_results(tmp_path / "b" / "results.jsonl")
        keys = ("filename", "tag", "prompt", "correct", "reason", "metadata", "details")
        original.write_text("".join(json.dumps({k: line[k] for k in keys}) + "\n" for line in lines[:4]))
        against = compare.compare(tmp_path / "a", original)
        assert (against["samples"], against["only_a"]) == (4, 2)
        geneval.evaluate(images=folder, out=tmp_path / "c", detector=Counting(), threshold=0.5)
        with pytest.raises(UserError, match=r"scored differently \(threshold"):
            compare.compare(tmp_path / "a", tmp_path / "c")
        with pytest.raises(UserError, match="there is no"):
            compare.compare(tmp_path / "a", tmp_path / "nowhere")
