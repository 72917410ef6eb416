"""The protocols on folders of images and files of texts, from disk to summary."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from visual_grpo.errors import UserError
from visual_grpo.eval import geneval, images, ocr, text
from visual_grpo.rewards.geneval import load_detector
from visual_grpo.testbed.scenes import SceneObject, draw_scene


def scene(*objects) -> torch.Tensor:
    """[3, 48, 48] in [0, 1]; each object is (shape, color, column, row) on the 3 x 3 lattice."""
    drawn = [
        SceneObject(shape=shape, color=color, center=(8.0 + 16 * column, 8.0 + 16 * row), radius=6.4)
        for shape, color, column, row in objects
    ]
    return torch.from_numpy(np.ascontiguousarray(draw_scene(drawn))).permute(2, 0, 1).float() / 255


ROWS = [
    {"tag": "single_object", "prompt": "a photo of a ring", "include": [{"class": "ring", "count": 1}]},
    {
        "tag": "counting",
        "prompt": "a photo of two squares",
        "include": [{"class": "square", "count": 2}],
        "exclude": [{"class": "square", "count": 3}],
    },
    {
        "tag": "position",
        "prompt": "a photo of a cross left of a circle",
        "include": [{"class": "circle", "count": 1}, {"class": "cross", "count": 1, "position": ["left of", 0]}],
    },
    {"tag": "colors", "prompt": "a photo of a red ring", "include": [{"class": "ring", "count": 1, "color": "red"}]},
]
RING, BLUE_RING = scene(("ring", "red", 1, 1)), scene(("ring", "blue", 1, 1))
SCENES = [
    [RING, scene(("square", "red", 0, 0))],
    [scene(("square", "red", 0, 0), ("square", "blue", 2, 2)), scene(*[("square", "red", i, i) for i in range(3)])],
    [
        scene(("cross", "red", 0, 1), ("circle", "green", 2, 1)),
        scene(("cross", "red", 2, 1), ("circle", "green", 0, 1)),
    ],
    [RING, BLUE_RING],
]


@pytest.fixture
def folder(tmp_path):
    for index, (row, pictures) in enumerate(zip(ROWS, SCENES, strict=True)):
        images.write_samples(tmp_path / "out", index, row, torch.stack(pictures))
    return tmp_path / "out"


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


class TestGenEval:
    def test_a_folder_in_the_original_layout(self, folder, tmp_path):
        summary = geneval.evaluate(images=folder, out=tmp_path / "results")
        assert summary["overall"] == 0.5
        assert {tag: task["score"] for tag, task in summary["tasks"].items()} == {
            "single_object": 0.5,
            "counting": 0.5,
            "position": 0.5,
            "colors": 0.5,
        }
        assert (summary["images"], summary["prompts"], summary["prompt_accuracy"]) == (8, 4, 1.0)
        assert summary["detector"] == "testbed"
        low, high = summary["image_accuracy_interval"]
        assert low <= 0.5 <= high
        lines = geneval.read_results(tmp_path / "results" / "results.jsonl")
        assert [line["correct"] for line in lines] == [True, False] * 4
        original = {"filename", "tag", "prompt", "correct", "reason", "metadata", "details"}
        assert original <= set(lines[0])
        assert json.loads(lines[0]["metadata"]) == ROWS[0]
        (box,) = json.loads(lines[0]["details"])["ring"]
        assert len(box) == 5
        assert lines[3]["reason"] == "expected square<3, found 3"
        assert lines[5]["reason"] == "expected cross left of target, found right of target"
        recomputed = geneval.summarise(lines)
        assert recomputed == {key: summary[key] for key in recomputed}
        assert json.loads((tmp_path / "results" / "summary.json").read_text())["overall"] == 0.5
        tasks = "".join(f"{tag:<16} = 50.00% (1 / 2)\n" for tag in ("single_object", "counting", "position", "colors"))
        assert (tmp_path / "results" / "summary_scores.txt").read_text() == (
            "Summary\n=======\nTotal images: 8\nTotal prompts: 4\n% correct images: 50.00%\n% correct prompts: 100.00%\n\n"
            f"Task breakdown\n==============\n{tasks}\nOverall score (avg. over tasks): 0.50000\n"
        )

    def test_a_flat_folder_with_a_prompt_file(self, tmp_path, prompt_file):
        flat = tmp_path / "flat"
        flat.mkdir()
        for index, pictures in enumerate(SCENES):
            for number, picture in enumerate(pictures):
                images.to_pil(picture[None])[0].save(flat / f"{index:05d}_{number}.png")
        (flat / "notes.txt").write_text("not an image")
        assert geneval.evaluate(images=flat, prompts=prompt_file)["overall"] == 0.5

    def test_images_of_several_sizes(self, folder):
        extra = folder / "00000" / "samples" / "0002.png"
        images.to_pil(RING[None])[0].resize((96, 96), Image.Resampling.NEAREST).save(extra)
        assert len(geneval.evaluate_folder(folder, batch_size=3)) == 9

    def test_result_lines_of_the_original_are_read(self, tmp_path):
        path = tmp_path / "original.jsonl"
        line = {"filename": "x/00000/samples/0000.png", "tag": "colors", "prompt": "p", "correct": True, "reason": ""}
        path.write_text(json.dumps({**line, "metadata": "{}", "details": "{}"}) + "\n")
        assert geneval.summarise(geneval.read_results(path))["overall"] == 1.0

    @pytest.mark.parametrize(
        ("break_it", "message"),
        [
            (lambda f: [p.unlink() for p in f.rglob("metadata.jsonl")], r"metadata.jsonl' is missing"),
            (lambda f: (f / "00000" / "metadata.jsonl").write_text("{"), "line 1: no JSON object"),
            (lambda f: (f / "00000" / "metadata.jsonl").write_text('{"prompt": "a ring"}'), "no tag, include"),
            (lambda f: (f / "00000" / "samples" / "0000.png").write_bytes(b"no image"), "cannot read the image"),
            (lambda f: [p.unlink() for p in f.rglob("*.png")], "has no images"),
        ],
    )
    def test_broken_folders_are_explained(self, folder, break_it, message):
        break_it(folder)
        with pytest.raises(UserError, match=message):
            geneval.evaluate(images=folder)

    def test_wrong_arguments(self, folder, tmp_path, prompt_file):
        with pytest.raises(UserError, match="there is no folder"):
            geneval.evaluate(images=tmp_path / "nowhere")
        with pytest.raises(UserError, match="needs a folder of images"):
            geneval.evaluate()
        with pytest.raises(UserError, match="cannot read"):
            geneval.evaluate(images=folder, prompts=tmp_path / "nowhere.jsonl")
        with pytest.raises(UserError, match="cannot import the detector"):
            geneval.evaluate(images=folder, detector="no_module:Detector")
        (folder / "00009").mkdir()
        with pytest.raises(UserError, match=r"belongs to prompt 9, but the prompt file ends at 3"):
            geneval.evaluate(images=folder, prompts=prompt_file)
        (tmp_path / "flat").mkdir()
        images.to_pil(RING[None])[0].save(tmp_path / "flat" / "00000.png")
        with pytest.raises(UserError, match="needs its prompt file"):
            geneval.evaluate(images=tmp_path / "flat")

    def test_the_testbed_detector_by_every_name(self):
        for given in ("testbed", "visual_grpo.testbed.detector:SceneDetector", load_detector("testbed")):
            assert list(load_detector(given).detect(RING[None])[0]) == ["ring"]


def write_card(path, word):
    image = Image.new("RGB", (128, 64), "white")
    ImageDraw.Draw(image).text((8, 6), word, fill="black", font=ImageFont.load_default(40))
    image.save(path)


class TestOcr:
    def test_a_flat_folder(self, tmp_path):
        for index, word in enumerate(["SALE", "SALE", "SALE"]):
            write_card(tmp_path / f"{index:05d}.png", word)
        prompts = tmp_path / "prompts.txt"
        prompts.write_text('a sign "SALE"\n\na sign "SALT"\na plain sign\n')
        out = tmp_path / "results"
        summary = ocr.evaluate(images=tmp_path, prompts=prompts, out=out, engine_params={"detection_side": 128})
        assert summary["accuracy"] == pytest.approx(0.875)
        assert (summary["exact_match"], summary["contained"], summary["edit_distance"]) == (0.5, 0.5, 0.5)
        assert (summary["images"], summary["without_target"]) == (2, 1)
        lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert [line["recognised"] for line in lines] == ["SALE", "SALE", ""]
        assert lines[2]["score"] is None

    def test_mistakes(self, tmp_path):
        write_card(tmp_path / "00000.png", "A")
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("a plain sign\n")
        with pytest.raises(UserError, match="no prompt has a text in double quotes"):
            ocr.evaluate(images=tmp_path, prompts=prompts)
        with pytest.raises(UserError, match="unexpected keyword argument 'nkfc'"):
            ocr.evaluate(images=tmp_path, prompts=prompts, nkfc=True)
        with pytest.raises(UserError, match="needs a folder"):
            ocr.evaluate()


class TestText:
    @pytest.fixture
    def files(self, tmp_path):
        problems = [{"prompt": "3 + 4?", "answer": "7"}, {"prompt": "2 * 2?", "answer": "4"}, {"prompt": "no gold"}]
        answers = [["7", "8", "8"], ["4", "so 4", "5"], ["1", "1", "1"]]
        prompts, texts = tmp_path / "problems.jsonl", tmp_path / "texts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in problems))
        rows = [{"completion": answer} for row in answers for answer in row]
        rows[4]["truncated"] = True
        texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return prompts, texts

    def test_completions_of_several_samples(self, files, tmp_path):
        prompts, texts = files
        summary = text.evaluate(prompts=prompts, texts=texts, reward="exact_match", ks=(1, 3), out=tmp_path / "results")
        assert summary["avg@3"] == pytest.approx(1 / 3)  # the truncated right answer counts as wrong
        assert (summary["pass@1"], summary["pass@3"]) == (pytest.approx(1 / 3), 1.0)
        assert summary["maj@3"] == 0.5
        assert (summary["problems"], summary["without_gold"]) == (2, 1)
        assert summary["truncation_rate"] == pytest.approx(1 / 9)
        lines = (tmp_path / "results" / "results.jsonl").read_text().splitlines()
        assert json.loads(lines[4]) == {"problem": 1, "answer": "4", "correct": False, "truncated": True}

    def test_plain_lines_are_completions(self, files, tmp_path):
        prompts, _ = files
        plain = tmp_path / "texts.txt"
        plain.write_text("so 7\n5\n1\n")
        assert text.evaluate(prompts=prompts, texts=plain, reward="exact_match")["avg@1"] == 0.5

    def test_mistakes(self, files, tmp_path):
        prompts, texts = files
        with pytest.raises(UserError, match=r"every k must lie in 1\.\.3"):
            text.evaluate(prompts=prompts, texts=texts, reward="exact_match", ks=4)
        with pytest.raises(UserError, match="needs a file of completions"):
            text.evaluate(prompts=prompts)
        short = tmp_path / "short.jsonl"
        short.write_text('{"completion": "7"}\n' * 4)
        with pytest.raises(UserError, match="4 completions for 3 problems"):
            text.evaluate(prompts=prompts, texts=short)
        short.write_text('{"prompt": "3 + 4?", "response": "7"}\n' * 3)  # the question must not be judged as the answer
        with pytest.raises(UserError, match="line 1: no text under 'completion'"):
            text.evaluate(prompts=prompts, texts=short, reward="exact_match")
        short.write_text('{"answer": "7"}\n' * 3)
        with pytest.raises(UserError, match="no text under 'completion'"):
            text.evaluate(prompts=prompts, texts=short)
