"""The text protocols from files to summary: judges that fail, interruptions, and paired comparisons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from visual_grpo.cli import main
from visual_grpo.errors import RunError, UserError
from visual_grpo.eval import caption, compare, text, vqa
from visual_grpo.eval.judging import Answers, Question, ask, load_judge, parse_json


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- judges -------------------------------------------------------------------------------------------------------------------


class Flaky:
    """Fails at first, then says what it is asked to; counts calls."""

    def __init__(self, failures: int = 0) -> None:
        self.calls, self.failures = 0, failures

    def __call__(self, prompt: str, image: Image.Image | None = None) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionError("away")
        return prompt.upper()


def questions(*prompts: str) -> list[Question[str]]:
    return [Question(prompt=p, read=str) for p in prompts]


def test_answers_come_in_order_and_equal_questions_are_asked_once(tmp_path: Path) -> None:
    judge = Flaky()
    store = tmp_path / "answers.jsonl"
    assert ask(judge, questions("b", "a", "b", "c"), answers=Answers(store), workers=3) == ["B", "A", "B", "C"]
    assert judge.calls == 3
    with store.open("a") as file:
        file.write('{"key": "torn')
    assert ask(judge, questions("c", "d"), answers=Answers(store), workers=1) == ["C", "D"]
    assert judge.calls == 4
    assert len(lines(store)) == 4


def test_a_judge_that_fails_is_asked_again_a_bounded_number_of_times() -> None:
    assert ask(Flaky(2), questions("a"), retries=2) == ["A"]
    with pytest.raises(RunError, match=r"failed on all of 1 questions; the first: ConnectionError: away"):
        ask(Flaky(3), questions("a"), retries=2)

    def reads_numbers(text: str) -> int:
        return int(text)

    some = [Question(prompt=p, read=reads_numbers) for p in ("1", "x")]
    assert ask(Flaky(), some, retries=0) == [1, None]


def test_no_judge() -> None:
    with pytest.raises(UserError, match=r"judge=package.module:function"):
        load_judge(None)
    with pytest.raises(UserError, match="cannot be called"):
        load_judge(3)
    with pytest.raises(ValueError, match="no JSON"):
        parse_json("none [ here")


# -- CaptionQA ----------------------------------------------------------------------------------------------------------------

QA = [
    {"image": "a.png", "question": "Which colour is the ring?", "choices": ["red", "blue", "green"], "answer": "red"},
    {"image": "a.png", "question": "How many squares?", "choices": ["one", "two"], "answer": "two"},
    {"image": "b.png", "question": "Is there a cross?", "choices": ["yes", "no"], "answer": "no"},
    {"image": "c.png", "question": "Which?", "choices": ["x", "y"], "answer": "x"},
]
CAPTIONS = [{"image": "a.png", "caption": "a red ring"}, {"image": "b.png", "caption": "a yes"}]


def reader(prompt: str, image: Image.Image | None = None) -> str:
    """Takes the choice whose text is in the caption, else says that it cannot, else the first."""
    said = prompt.split("Caption:\n")[1].split("\n")[0]
    shown = dict(re.findall(r"^([A-Z])\. (.*)$", prompt, flags=re.MULTILINE))
    fits = [letter for letter, choice in shown.items() if choice in said]
    cannot = [letter for letter, choice in shown.items() if choice.startswith("Cannot")]
    return (fits + cannot + ["A"])[0]


def test_captionqa(tmp_path: Path) -> None:
    """Right (1), cannot answer (1/2 + 0.05), wrong (0); an image without a caption is left out."""
    given = {"texts": write(tmp_path / "c.jsonl", CAPTIONS), "prompts": write(tmp_path / "q.jsonl", QA)}
    found = caption.evaluate(**given, judge=reader, out=tmp_path / "out")
    assert found["score"] == pytest.approx(1.55 / 3)
    assert found["accuracy"] == pytest.approx(1 / 3)
    assert found["cannot_answer"] == pytest.approx(1 / 3)
    assert (found["questions"], found["judge_failed"], found["without_caption"]) == (3, 0, 1)
    low, high = found["intervals"]["score"]
    assert low == 0
    assert high == pytest.approx(0.775)  # drawn by image: a.png twice
    shown = [line["shown"] for line in lines(tmp_path / "out" / "results.jsonl")]
    assert sorted(shown[0]) == sorted([*QA[0]["choices"], "Cannot answer from the caption"])
    assert sorted(shown[2]) == ["no", "yes"]
    other = caption.evaluate(**given, judge=reader, out=tmp_path / "other", workers=1)
    assert other == found


def test_captionqa_choices_are_shuffled_as_by_one_generator(tmp_path: Path) -> None:
    import random

    generator = random.Random(0)
    expected = []
    for row in QA[:3]:
        listed = [*row["choices"], *([] if "yes" in row["choices"] else ["Cannot answer from the caption"])]
        order = list(range(len(listed)))
        generator.shuffle(order)
        expected.append([listed[i] for i in order])
    texts, prompts = write(tmp_path / "c.jsonl", CAPTIONS), write(tmp_path / "q.jsonl", QA)
    caption.evaluate(texts=texts, prompts=prompts, judge=reader, out=tmp_path / "out")
    assert [line["shown"] for line in lines(tmp_path / "out" / "results.jsonl")] == expected


def test_an_interrupted_judgement_goes_on(tmp_path: Path) -> None:
    given = {"texts": write(tmp_path / "c.jsonl", CAPTIONS), "prompts": write(tmp_path / "q.jsonl", QA)}
    calls: list[str] = []

    def dies(prompt: str, image: Any = None) -> str:
        calls.append(prompt)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return reader(prompt)

    dies.name = "judge"  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        caption.evaluate(**given, judge=dies, out=tmp_path / "out", workers=1)
    assert len(lines(tmp_path / "out" / "answers.jsonl")) == 2
    found = caption.evaluate(**given, judge=dies, out=tmp_path / "out", workers=1)
    assert len(calls) == 4
    assert found["score"] == pytest.approx(1.55 / 3)


# -- CapArena and DCScore -----------------------------------------------------------------------------------------------------


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        Image.new("RGB", (8, 8), "red" if name < "m" else "blue").save(folder / name)
    return folder


def longer(prompt: str, image: Image.Image | None = None) -> str:
    assert image is not None
    first, second = re.search(r"Caption 1: (.*?)\n\nCaption 2: (.*?)\n\n", prompt, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    return "Tie" if len(first) == len(second) else f"Caption {1 if len(first) > len(second) else 2} is better."


def test_caparena(tmp_path: Path) -> None:
    """The better one wins wherever it stands."""
    names = [f"{c}.png" for c in "abcdefgh"]
    ours = write(tmp_path / "c.jsonl", [{"image": n, "caption": "long words here"} for n in names])
    theirs = ["x", "x", "x", "x", "x", "long words here", "a much longer caption", "x"]
    rows = [
        {"image": n, "baseline": "P" if i < 4 else "Q", "caption": theirs[i], "reference": "r"}
        for i, n in enumerate(names)
    ]
    found = caption.evaluate(
        texts=ours, prompts=write(tmp_path / "p.jsonl", rows), protocol="caparena", judge=longer,
        pictures=pictures(tmp_path, *names), out=tmp_path / "out",
    )  # fmt: skip
    assert (found["P"], found["Q"], found["average"], found["length"]) == (100.0, 25.0, 62.5, 3.0)
    firsts = {line["first"] for line in lines(tmp_path / "out" / "results.jsonl")}
    assert firsts == {True, False}


def inspector(prompt: str, image: Image.Image | None = None) -> str:
    """Splits at 'and', matches equal texts, and sees red in red images."""
    numbered = re.findall(r"^\d+\. (.*)$", prompt, flags=re.MULTILINE)
    if prompt.startswith("Split"):
        said = prompt.split("Caption: ")[1]
        if not said.strip():
            return "[]"
        return json.dumps([{"unit": u, "relevant": "mood" not in u} for u in said.split(" and ")])
    if prompt.startswith("Below"):
        a, b = (re.findall(r"^\d+\. (.*)$", part, flags=re.MULTILINE) for part in prompt.split("\nB:"))
        return json.dumps([b.index(u) + 1 if u in b else None for u in a])
    assert image is not None
    red = image.getpixel((0, 0)) == (255, 0, 0)
    return "```json\n" + json.dumps([int(("red" in u) == red) for u in numbered]) + "\n```"


def test_dcscore(tmp_path: Path) -> None:
    """a: one of two human units, verified, and one that is false: P 1/2, R 1/2. n: no unit. Relevant: P 1, R 1/2."""
    texts = write(
        tmp_path / "c.jsonl",
        [{"image": "a.png", "caption": "a red ring and a happy mood"}, {"image": "n.png", "caption": ""}],
    )
    rows = [{"image": "a.png", "units": ["a red ring", "a square"]}, {"image": "n.png", "units": ["blue"]}]
    found = caption.evaluate(
        texts=texts, prompts=write(tmp_path / "p.jsonl", rows), protocol="dcscore", judge=inspector,
        pictures=pictures(tmp_path, "a.png", "n.png"), out=tmp_path / "out",
    )  # fmt: skip
    one = (0.5 + 2 / 3) / 2
    assert found["dcscore"] == pytest.approx(100 * one / 2, abs=1e-5)
    assert found["precision"] == pytest.approx(25)
    assert found["judge_failed"] == 0


def test_a_step_of_dcscore_that_fails_takes_its_image_out(tmp_path: Path) -> None:
    def half(prompt: str, image: Image.Image | None = None) -> str:
        return "no list" if prompt.startswith("Below") and "blue" in prompt else inspector(prompt, image)

    texts = write(tmp_path / "c.jsonl", [{"image": "a.png", "caption": "red"}, {"image": "n.png", "caption": "blue"}])
    rows = [{"image": "a.png", "units": ["red"]}, {"image": "n.png", "units": ["blue"]}]
    found = caption.evaluate(
        texts=texts, prompts=write(tmp_path / "p.jsonl", rows), protocol="dcscore", judge=half, retries=0,
        pictures=pictures(tmp_path, "a.png", "n.png"),
    )  # fmt: skip
    assert found["judge_failed"] == 1
    assert found["dcscore"] == pytest.approx(100, abs=1e-5)


def test_mistakes_of_caption(tmp_path: Path) -> None:
    texts, prompts = write(tmp_path / "c.jsonl", CAPTIONS), write(tmp_path / "q.jsonl", QA)
    for options, message in (
        ({"protocol": "captionq"}, r"Did you mean 'captionqa'\?"),
        ({"protocol": "dcscore"}, "pictures=DIR"),
        ({"judge": None}, "needs a judge"),
        ({"texts": None}, "needs the captions"),
        ({"texts": write(tmp_path / "x.jsonl", [{"image": "z", "caption": "c"}])}, "no image of"),
        ({"texts": write(tmp_path / "y.jsonl", [{"image": "z"}])}, "needs 'image' and 'caption'"),
        ({"prompts": write(tmp_path / "w.jsonl", [{**QA[0], "answer": "pink"}])}, "is none of the choices"),
        ({"prompts": write(tmp_path / "v.jsonl", [{"image": "a.png"}])}, "'question' must be a str"),
    ):
        with pytest.raises(UserError, match=message):
            caption.evaluate(**{"texts": texts, "prompts": prompts, "judge": reader, **options})


# -- answers about images -----------------------------------------------------------------------------------------------------


def test_vqa_metrics(tmp_path: Path) -> None:
    rows = [
        {"answers": ["two"] * 2 + ["3"] * 8, "category": "count"},
        {"answers": ["red"] * 10, "category": "colour"},
    ]
    prompts = write(tmp_path / "q.jsonl", rows)
    texts = write(tmp_path / "a.jsonl", [{"completion": t} for t in ("2", "<answer>3</answer>", "Red.", "blue")])
    found = vqa.evaluate(texts=texts, prompts=prompts, metric=["vqa_accuracy", "anls"], out=tmp_path / "out")
    assert found["vqa_accuracy"] == pytest.approx((0.6 + 1 + 1 + 0) / 4)
    assert found["by"]["colour"]["vqa_accuracy"] == 0.5
    assert set(found["intervals"]) == {"vqa_accuracy", "anls"}
    assert [line["vqa_accuracy"] for line in lines(tmp_path / "out" / "items.jsonl")] == [pytest.approx(0.8), 0.5]


def test_choices_and_boxes(tmp_path: Path) -> None:
    prompts = write(tmp_path / "q.jsonl", [{"choices": ["cat", "dog"], "answer": g} for g in ("B", "dog", "cat", "A")])
    texts = write(tmp_path / "a.jsonl", [{"text": t} for t in ("B", "(B)", "B", "nothing")])
    assert vqa.evaluate(texts=texts, prompts=prompts, metric="multiple_choice")["multiple_choice"] == 0.5
    prompts = write(tmp_path / "b.jsonl", [{"box": [0, 0, 10, 10]}, {"boxes": [[0, 0, 10, 10], [20, 20, 30, 30]]}])
    texts = write(tmp_path / "c.jsonl", [{"text": "[5, 0, 15, 10]"}, {"text": "20 20 30 30"}])
    found = vqa.evaluate(texts=texts, prompts=prompts, metric="iou")
    assert found["iou"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["iou@0.5"] == 0


def test_mistakes_of_vqa(tmp_path: Path) -> None:
    prompts = write(tmp_path / "q.jsonl", [{"answer": "x"}])
    texts = write(tmp_path / "a.jsonl", [{"text": "x"}])
    for options, message in (
        ({}, "needs at least 4 annotators"),
        ({"metric": "anl"}, r"Did you mean 'anls'\?"),
        ({"metric": "iou"}, "no 'box'"),
        ({"metric": "multiple_choice"}, "no list 'choices'"),
        ({"texts": None}, "needs a file of answers"),
        ({"texts": write(tmp_path / "b.jsonl", [{}])}, "no text under"),
    ):
        with pytest.raises(UserError, match=message):
            vqa.evaluate(**{"texts": texts, "prompts": prompts, **options})


# -- text problems and comparisons --------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Results of two systems on forty problems; the second solves half of what the first does not."""
    prompts = write(tmp_path / "p.jsonl", [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(40)])
    for name, right in (("a", lambda i: i % 2 == 0), ("b", lambda i: i % 4 != 3)):
        rows = [{"completion": str(i + 1 if right(i) or s == 3 else 0)} for i in range(40) for s in range(4)]
        texts = write(tmp_path / f"{name}.jsonl", rows)
        found = text.evaluate(
            texts=texts, prompts=prompts, reward="exact_match", ks=(1, 2, 3), out=tmp_path / f"out-{name}"
        )
        assert set(found["intervals"]) == {"avg@4", "pass@1", "pass@2", "pass@3", "maj@2", "maj@3", "maj@4"}
        assert found["interval"] == found["intervals"]["avg@4"]
    return tmp_path / "out-a", tmp_path / "out-b"


def test_paired_differences(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = compare.compare(*two)
    rows = {row["figure"]: row for row in found["table"]}
    average = rows["avg@4"]
    assert (average["a"], average["b"]) == (pytest.approx(0.625), pytest.approx(0.8125))
    assert average["value"] == pytest.approx(0.1875)
    assert 0 < average["low"] < 0.1875 < average["high"]
    assert average["p_value"] < 0.01
    assert rows["maj@4"]["value"] == pytest.approx(0.25)
    assert main(["eval", "text", "--compare", str(two[0]), str(two[1])]) == 0
    assert "avg@4" in capsys.readouterr().out
    assert main(["eval", "text", "--compare", str(two[0]), str(two[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"][0]["prompts"] == 40


def test_what_cannot_be_compared(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"there is no"):
        compare.compare(two[0], tmp_path / "empty")
    write(tmp_path / "empty" / "items.jsonl", [{"item": "z", "avg@4": 1.0}])
    with pytest.raises(UserError, match="no sample of the same prompt in common"):
        compare.compare(two[0], tmp_path / "empty")
    assert main(["eval", "text", "--compare", str(two[0]), str(two[1]), "--texts", str(tmp_path / "a.jsonl")]) == 2
    assert "--compare reads two result folders" in capsys.readouterr().err


def test_scoring_goes_on_where_it_stopped(two: tuple[Path, Path], tmp_path: Path) -> None:
    """The verdicts of the first half are there already, the last line torn; the summary is the same."""
    store = two[0] / "verdicts.jsonl"
    whole, summary = store.read_text(), json.loads((two[0] / "summary.json").read_text())
    store.write_text(whole[: len(whole) // 2])
    again = text.evaluate(
        texts=tmp_path / "a.jsonl", prompts=tmp_path / "p.jsonl", reward="exact_match", ks=(1, 2, 3), out=two[0],
        score_batch=7,
    )  # fmt: skip
    assert again == summary
    assert sorted(store.read_text().splitlines()) == sorted(whole.splitlines())


def test_the_table_shows_intervals(two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--texts", str(tmp_path / "a.jsonl"), "--prompts", str(tmp_path / "p.jsonl")]
    assert main(["eval", "text", *files, "--out", str(two[0]), "reward=exact_match"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"avg@4\s+│\s+0\.6250\s+│\s+\[0\.\d+, 0\.\d+\]", out), out
