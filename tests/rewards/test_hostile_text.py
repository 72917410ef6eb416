"""What a policy may write, and what tables hold in place of an answer: no hang, and no score that says nothing."""

import math
import time

import pytest
import torch
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.eval.vqa_scores import read_boxes
from visual_grpo.reward import RewardRequest, as_reward, to_output
from visual_grpo.rewards.iou import parse_boxes
from visual_grpo.rewards.vqa_models import VlmJudge, build_judge


def score(name, texts, rows=None, **params):
    request = RewardRequest.build(["p"] * len(texts), texts=texts, metadata=rows)
    return to_output(as_reward(name, params=params)(request), len(texts), name).values.tolist()


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("json", "```json" + "\n" * 100_000),
        ("json", "```" + " \n" * 100_000 + "x"),
        ("think_answer", "<think>" + "</think><answer>" * 50_000),
        ("think", "<think>" * 50_000),
        ("box", "(1,1)" + " " * 200_000),
        ("answer", "<answer>" * 100_000),
    ],
)
def test_form_is_judged_in_time_that_grows_with_the_length(style, text):
    began = time.process_time()
    assert score("format", [text], style=style) == [0.0]
    assert time.process_time() - began < 2.0


def test_boxes_are_found_in_time_that_grows_with_the_length():
    began = time.process_time()
    assert read_boxes("1" * 50_000) == []
    assert read_boxes("at 1.5, 2, 30, 40.25 and 1 2 3 4") == [(1.5, 2.0, 30.0, 40.25), (1.0, 2.0, 3.0, 4.0)]
    assert parse_boxes("(1,2) , (3,4)") == parse_boxes("(1,2)(3,4)") == [[1.0, 2.0, 3.0, 4.0]]
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('```json\n{"a": 1}\n```', 1.0), ("```\n\n[1]\n\n  ```", 1.0), ('<think>x</think>\n```json \n{"a": "```"}\n```', 1.0),
        ('```json\n{"a": 1}```', 0.0), ("```python\n[1]\n```", 0.0), ('```json\n{"a": 1}\n``` so', 0.0), ("```json\n```", 0.0),
    ],
)  # fmt: skip
def test_fenced_json(text, good):
    assert score("format", [text], style="json") == [good]


def test_think_answer_takes_the_published_form():
    body = "<answer>b</answer>"
    good = [f"<think>a</think>{body}", f"<think>a</think>\n {body}\n", f"<think></think> x</think>{body}"]
    bad = [f"<think>a</think> x {body}", f"<think>a</think>{body} x", f" <think>a</think>{body}"]
    assert score("format", good + bad, style="think_answer") == [1.0] * 3 + [0.0] * 3


@pytest.mark.parametrize("name", ["exact_match", "anls", "vqa_accuracy", "multiple_choice", "math_verify"])
def test_a_cell_without_a_value_is_no_gold_answer(name):
    rows = [{"answer": gold} for gold in ("", "  ", math.nan, None, [])]
    assert all(map(math.isnan, score(name, [r"\boxed{nan}"] * len(rows), rows)))


def test_gold_answers_as_objects_and_beyond_the_options():
    row = {"answers": [{"answer": "cat"}, {"answer": "cats"}]}
    for name in ("anls", "vqa_accuracy"):
        assert score(name, ["cat"], [row]) == [1.0]
    assert score("exact_match", ["7"], [{"answer": [{"answer": "7"}]}]) == [1.0]
    beyond = [{"answer": gold, "choices": ["x", "y"]} for gold in ("E", "z", 2)]
    assert all(map(math.isnan, score("multiple_choice", ["A"] * 3, beyond)))


def test_one_of_several_gold_answers_is_enough_for_math_verify():
    rows = [{"answer": ["1/2", "0.25"]}, {"answer": ["3", "4"]}]
    assert score("math_verify", [r"\boxed{\frac{1}{4}}", r"\boxed{5}"], rows) == [1.0, 0.0]


def test_an_empty_rubric_is_refused():
    with pytest.raises(UserError, match="criteria is empty"):
        as_reward("rubric", params={"criteria": []})


def test_log_probabilities_above_0_are_no_probabilities(serve):
    server = serve(lambda _: {"Yes": 900.0})
    reward = as_reward("vqa_score", params={"endpoint": server.endpoint, "retries": 0})
    with pytest.raises(RuntimeError, match="no chat completion with what was asked for"):
        reward(RewardRequest.build(["p"], images=torch.zeros(1, 3, 8, 8)))
    server.answer = lambda _: {"Yes": 5e-4}  # rounded by the server
    judge = build_judge(server.endpoint, "m")
    assert isinstance(judge, VlmJudge)
    assert judge.probability([Image.new("RGB", (8, 8))], ["?"], [("Yes",)]).tolist() == [1.0]
    reward.close()
    judge.close()
