"""Worked values of the cards rewards (section 8) and evaluation (section 9): answers about images, captions."""

from __future__ import annotations

import pytest

from visual_grpo.eval.caption_scores import (
    CANNOT,
    Unit,
    caparena_scores,
    captionqa_score,
    dcscore,
    is_yes_no,
    read_letter,
    read_preference,
    unit_f1,
)
from visual_grpo.eval.vqa_scores import (
    anls,
    box_giou,
    box_iou,
    match_boxes,
    read_boxes,
    vqa_accuracy,
    vqa_normalise,
)


@pytest.mark.parametrize(("agree", "accuracy"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_of_ten_annotators(agree: int, accuracy: float) -> None:
    others = [f"other {i}" for i in range(10 - agree)]
    assert vqa_accuracy("two", ["2"] * agree + others) == pytest.approx(accuracy, abs=1e-6)


def test_vqa_accuracy_needs_annotators() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        vqa_accuracy("a", ["a"] * 3)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The two cats.", "2 cats"),
        ("1,000", "1000"),
        ("red/blue", "red blue"),
        ("3.5", "3.5"),
        ("None", "0"),
        ("yes!", "yes"),
        ("a, b", "b"),
        ("Red\nand\ta BLUE", "red and blue"),
        ("", ""),
    ],
)
def test_vqa_normalisation(text: str, normal: str) -> None:
    assert vqa_normalise(text).strip() == normal


@pytest.mark.parametrize(
    ("answer", "golds", "value"),
    [
        ("Hello Wrld", ["Hello World"], 0.909091),
        ("cat", ["dog", "cart"], 0.75),
        ("ab", ["abcd"], 0.0),
        ("A  b", ["a B"], 1.0),
        ("", ["x"], 0.0),
        ("", [""], 1.0),
    ],
)
def test_anls(answer: str, golds: list[str], value: float) -> None:
    assert anls(answer, golds) == pytest.approx(value, abs=1e-6)


def test_boxes() -> None:
    a, b, far = (0, 0, 10, 10), (5, 0, 15, 10), (20, 20, 30, 30)
    assert box_iou(a, b) == pytest.approx(1 / 3, abs=1e-6)
    assert box_giou(a, b) == pytest.approx(1 / 3, abs=1e-6)
    assert box_iou(a, far) == 0
    assert box_giou(a, far) == pytest.approx(-0.777778, abs=1e-6)
    assert match_boxes([b, far], [far, a]) == pytest.approx((1 + 1 / 3) / 2)
    assert match_boxes([far], [far, a]) == 0.5
    assert match_boxes([], [a]) == 0
    assert read_boxes("[0, 0, 10, 10] and (5 0 15 10), not 9, 9, 3, 12") == [a, b]
    assert read_boxes("no box") == []


def test_captionqa_scores() -> None:
    assert captionqa_score("red", "red", 4) == 1
    assert captionqa_score("blue", "red", 4) == 0
    assert captionqa_score(CANNOT, "red", 4) == pytest.approx(0.30, abs=1e-6)
    assert captionqa_score(CANNOT, "red", 3) == pytest.approx(1 / 3 + 0.05, abs=1e-6)


def test_which_questions_get_no_cannot_answer() -> None:
    assert is_yes_no("What?", ["Yes", "No"])
    assert is_yes_no("Is it red?", ["red", "blue"])
    assert not is_yes_no("Which colour is it?", ["red", "blue"])
    assert not is_yes_no("Island or lake?", ["yes", "maybe"])


@pytest.mark.parametrize(
    ("text", "letter"),
    [("B", "B"), (" b. ", "B"), ("Answer: C", "C"), ("<think>A or B</think>\nD", "D"), ("2", "B"), ("(A)", "A")],
)
def test_letters(text: str, letter: str) -> None:
    assert read_letter(text, 4) == letter


@pytest.mark.parametrize("text", ["", "E", "9", "hello there"])
def test_no_letter(text: str) -> None:
    with pytest.raises(ValueError, match="no letter"):
        read_letter(text, 4)


def test_caparena_scores() -> None:
    """200 a baseline: (wins - losses) / 2, then the unweighted mean."""
    found = caparena_scores({"GPT": [1] * 40 + [-1] * 120 + [0] * 40, "Cog": [1] * 150 + [-1] * 50, "Cpm": [0] * 200})
    assert found == {"GPT": -40.0, "Cog": 50.0, "Cpm": 0.0, "average": pytest.approx(10 / 3)}
    assert [read_preference(t) for t in ("Caption 1 is better.", "caption 2 is better", "Tie.")] == [1, 2, 0]
    with pytest.raises(ValueError, match="neither"):
        read_preference("Caption 3 is better")


def units(*given: tuple[bool, int | None, bool]) -> list[Unit]:
    return [Unit(relevant=r, human=h, verified=v) for r, h, v in given]


def test_dcscore_by_hand() -> None:
    """Five units, four human ones: two say human 0, one of them wrongly; one extra is true, one false and not relevant.

    All: P = 3/5; right = 1/2 + 1 + 1 = 2.5 of 4 + 1; R = 0.5; F = 0.6 / 1.1.
    Relevant (four of them): P = 3/4, R = 0.5, F = 0.75 / 1.25.
    """
    told = units((True, 0, True), (True, 0, False), (True, 2, True), (True, None, True), (False, None, False))
    precision, recall, f = unit_f1(told, 4)
    assert (precision, recall, f) == (pytest.approx(0.6), pytest.approx(0.5), pytest.approx(0.6 / 1.1, abs=1e-6))
    found = dcscore(told, 4)
    assert found.f_relevant == pytest.approx(0.6, abs=1e-6)
    assert found.score == pytest.approx((0.6 / 1.1 + 0.6) / 2, abs=1e-6)


def test_dcscore_without_units_or_truth_or_people() -> None:
    assert dcscore([], 3).score == 0
    assert dcscore(units((True, 0, False)), 1).score == 0
    assert dcscore(units((True, None, True)), 0).score == pytest.approx(1, abs=1e-6)
    assert dcscore(units((False, 0, True)), 1).score == pytest.approx(0.5, abs=1e-6)
