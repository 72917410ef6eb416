"""Text and grounding rewards beyond the worked values: malformed answers, coordinate systems, options, wrong parameters."""

import json
import math

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardError, RewardRequest, as_reward, to_output
from visual_grpo.rewards.iou import parse_boxes
from visual_grpo.rewards.multiple_choice import chosen_option
from visual_grpo.types import RewardStatus


def score(name, texts, metadata=None, params=None, **extra):
    made = RewardRequest.build(["q"] * len(texts), texts=texts, metadata=metadata, **extra)
    return to_output(as_reward(name, params=params)(made), len(texts), name)


HUGE = 200_000
MALFORMED = [
    "",
    " \n\t",
    "NaN",
    "-inf",
    "1e999999",
    "٣ ४ ５ ²",
    "<answer>",
    "<answer></answer>",
    "</answer><answer>",
    "<think><think></think>",
    r"\boxed{" * 50,
    "\\boxed{" + "{" * HUGE,
    "[1, 2, 3",
    "[NaN, 1, 2, 3]",
    "[1e5, 1, 2, 3]",
    "[٣, ٣, ٤, ٤]",
    "[" + "1" * HUGE + ", 1, 2, 3]",
    "[" * HUGE,
    "(1,2),(3," * 3000,
    "x" * HUGE,
    "a b c " * 20_000,
    "1," * (HUGE // 2),
    "<answer>" * 5000,
    "```json\n" + "[" * 5000,
    "\ud800 half a pair",
    "\x00\u202e\ufeff",
]
ROW = {
    "answer": "12 cats",
    "answers": ["12 cats", "twelve"],
    "choices": ["cat", "dog"],
    "box": [1, 2, 3, 4],
    "references": ["a cat on a mat"],
}
CASES = [
    ("anls", {}),
    ("cider", {"corpus": "batch"}),
    ("cosine_length", {"max_length": 10, "unit": "words"}),
    ("exact_match", {}),
    ("iou", {"gold_key": "box"}),
    ("iou", {"gold_key": "box", "mode": "giou"}),
    ("multiple_choice", {"gold_key": "choices"}),
    ("repetition", {"unit": "words"}),
    ("vqa_accuracy", {}),
    *[
        ("format", {"style": style})
        for style in ("think", "think_answer", "answer", "boxed", "json", "box", "tag_count")
    ],
    ("format", {"tags": ["plan", "answer"]}),
]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_malformed_answers_never_raise(name, params):
    output = score(name, MALFORMED, [dict(ROW) for _ in MALFORMED], params)
    assert not (output.status == RewardStatus.FAILED).any()


def test_malformed_boxes_score_nothing():
    output = score("iou", MALFORMED, [{"answer": [1, 2, 3, 4]}] * len(MALFORMED))
    assert output.values.max() == 0.0


# ---- grounding


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("[1, 2, 3.5, 4]", [[1, 2, 3.5, 4]]),
        (
            '```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, {"bbox_2d": [5, 6, 7, 8]}]\n```',
            [[1, 2, 3, 4], [5, 6, 7, 8]],
        ),
        ("<|box_start|>(12,34),(56,78)<|box_end|>", [[12, 34, 56, 78]]),
        ("[0, 0, 9, 9] no <answer>(.1, .2, .3, .4)</answer>", [[0.1, 0.2, 0.3, 0.4]]),
        ("[1, 2, 3, 4, 5]", []),
        ("1, 2, 3, 4", []),
    ],
)
def test_boxes_are_found(text, boxes):
    assert parse_boxes(text) == boxes


@pytest.mark.parametrize(
    ("params", "row", "text"),
    [
        ({}, {}, "[40, 20, 80, 60]"),
        ({"coordinates": "unit"}, {"image_size": [160, 80]}, "[0.25, 0.25, 0.5, 0.75]"),
        ({"coordinates": "thousand"}, {"image_size": [160, 80]}, "[250, 250, 500, 750]"),
        (
            {"answer_size_key": "resized"},
            {"image_size": [160, 80], "resized": (320, 160)},
            "[80, 40, 160, 120]",
        ),
        (
            {"coordinates": "thousand", "gold_coordinates": "unit"},
            {"answer": [0.25, 0.25, 0.5, 0.75]},
            "[250, 250, 500, 750]",
        ),
    ],
)
def test_coordinate_systems(params, row, text):
    assert score("iou", [text], [{"answer": [40, 20, 80, 60], **row}], params).values.item() == pytest.approx(1.0)


def test_single_and_many_gold_boxes():
    one, two = [0, 0, 10, 10], [20, 20, 30, 30]
    texts = [f"first {two}, rather {one}", f"{two} {one}", f"{one} {one} {two}", str(one), "none", "none"]
    rows = [{"answer": gold} for gold in (one, [one, two], [one, two], [one, two], [one], [])]
    output = score("iou", texts, rows)
    torch.testing.assert_close(output.values, torch.tensor([1, 1, 2 / 3, 0.5, 0, 1]))
    assert output.details["boxes"].tolist() == [2, 2, 3, 1, 0, 0]
    giou = score("iou", ["none", f"{one}"], [{"answer": one}, {"answer": [one, two]}], {"mode": "giou"})
    assert giou.values.tolist() == [-1.0, 0.0]
    half = score("iou", ["[5, 0, 15, 10]", "[2, 0, 12, 10]"], [{"answer": one}] * 2, {"mode": "threshold"})
    assert half.values.tolist() == [0.0, 1.0]
    golds = [None, "no box", [3, 3, 1, 1], [math.nan] * 4, "[0, 0, 10, 10]", {"bbox_2d": one}, [{"bbox": one}]]
    output = score("iou", [str(one)] * len(golds), [{"answer": gold} for gold in golds])
    assert output.status.tolist() == [1, 1, 1, 1, 0, 0, 0]


def test_a_missing_size_says_which_column():
    with pytest.raises(UserError, match=r"column 'image_size' with \(width, height\) above 0; this one has None"):
        score("iou", ["[1, 2, 3, 4]"], [{"answer": [1, 2, 3, 4]}], {"coordinates": "unit"})


# ---- the others


@pytest.mark.parametrize(
    ("text", "options", "letter"),
    [
        ("B", (), "B"),
        ("(c).", (), "C"),
        ("B) a dog", (), "B"),
        (r"so \boxed{D}", (), "D"),
        ("the dog", ["cat", "dog"], "B"),
        ("the answer is C", (), "C"),
        ("I do not know", (), "I"),
        ("zebra", ["cat", "dog"], None),
    ],
)
def test_chosen_option(text, options, letter):
    assert chosen_option(text, options) == letter


def test_format_families():
    def values(texts, **params):
        return score("format", texts, params=params).values.tolist()

    assert values(["<answer>4</answer>", "<answer> </answer>", "4"], style="answer") == [1, 0, 0]
    assert values([r"so \boxed{4}", r"\boxed{4} \boxed{5}", r"\boxed{4"], style="boxed") == [1, 0, 0]
    texts = ['{"a": 1}', "```json\n[1]\n```", "<think>{</think> {}", "{} and more", "3", "[1,"]
    assert values(texts, style="json") == [1, 1, 1, 0, 0, 0]
    assert values(["[1, 2, 3, 4]", "none"], style="box") == [1, 0]
    texts = ["<think>a</think><answer>b</answer>", "<think>a</think>", "a"]
    assert values(texts, style="tag_count") == [1, 0.5, 0]
    texts = ["<plan>a</plan>\n<code>b</code>", "<code>b</code><plan>a</plan>", "<plan>a</plan><code>b</code>!"]
    assert values(texts, tags=["plan", "code"]) == [1, 0, 0]


def test_vqa_options():
    rows = [{"answers": [{"answer": "Two cats"}] * 10}]
    assert score("vqa_accuracy", ["two cats"], rows).values.item() == 1.0
    unchanged = score("vqa_accuracy", ["two cats"], rows, {"normalise": "disagreement"})
    assert unchanged.values.item() == 0.0
    assert score("vqa_accuracy", ["<answer>2</answer>"], [{"answer": "two"}]).values.item() == 1.0
    assert score("vqa_accuracy", ["2"], [{}]).status.tolist() == [RewardStatus.NOT_APPLICABLE]


def test_cosine_length_keeps_the_state_of_its_correctness_reward():
    rows = [{"answer": "4"}, {}, {"answer": "5"}]
    params = {"max_length": 2, "unit": "words", "exceeded": -10.0}
    output = score("cosine_length", ["4", "4", "so 5 it is"], rows, params)
    assert output.status.tolist() == [0, 1, 0]
    assert output.values[2].item() == -10.0
    assert output.details["correct"][[0, 2]].tolist() == [1, 1]


def test_cider_corpus_files(tmp_path):
    captions = tmp_path / "captions.txt"
    captions.write_text("a cat on a mat\ntwo dogs in a park\n")
    rows = [{"references": ["a cat on a mat"]}, {}]
    output = score("cider", ["a cat on a mat", "x"], rows, {"corpus": str(captions), "divisor": 10})
    assert output.values[0].item() == pytest.approx(1.0)
    assert output.status.tolist() == [0, 1]
    with pytest.raises(UserError, match="is no file"):
        as_reward("cider", params={"corpus": str(tmp_path / "absent.jsonl")})
    (tmp_path / "one.jsonl").write_text(json.dumps({"references": ["a"]}))
    with pytest.raises(UserError, match="holds 1 images"):
        as_reward("cider", params={"corpus": str(tmp_path / "one.jsonl")})


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("anls", {"threshold": 0}, "threshold is 0"),
        ("cider", {"corpus": "batch", "sigma": 0}, "sigma and divisor"),
        ("cosine_length", {"max_length": 0}, "max_length is 0"),
        ("cosine_length", {"max_length": 9, "correct": [1]}, "two numbers"),
        ("format", {"tags": []}, "list of one or more names"),
        ("iou", {"coordinates": "mm"}, "coordinates is 'mm'"),
        ("repetition", {"n": 0}, "n is 0"),
        ("vqa_accuracy", {"normalise": "never"}, "normalise is 'never'"),
        ("vqa_accuracy", {"extraction": "guess"}, "extraction is 'guess'"),
    ],
)
def test_wrong_parameters(name, params, message):
    with pytest.raises(UserError, match=message):
        as_reward(name, params=params)


def test_repetition_needs_token_ids():
    with pytest.raises(RewardError, match="set unit: words"):
        score("repetition", ["a a a a"])


@pytest.mark.parametrize(
    ("gold", "wanted"),
    [
        (r"Since $x = 3$, the sum is $\boxed{12}$, as $y = 9$.", [1.0, 0.0]),
        ("3 + 9 = 12\n#### 12", [1.0, 0.0]),
        ("12", [1.0, 0.0]),
        ("x = 12, so nothing is marked", [0.0, 0.0]),
    ],
)
def test_a_worked_solution_is_no_answer_itself(gold: str, wanted: list[float]) -> None:
    r"""GSM8K marks the answer by ####, MATH by \boxed."""
    texts = [r"so \boxed{12}", r"so \boxed{9}"]
    found = score("exact_match", texts, [{"solution": gold}] * 2)
    assert found.values.tolist() == wanted
