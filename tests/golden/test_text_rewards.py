"""Worked values of the cards on text, vision-language and judge rewards.

Cards: rewards, sections 1, 2, 7 and 8; peer_reward_recipes, section 2; pow3r, section 8 (static rows); caption_gdpo, section 8.
"""

import math

import numpy as np
import pytest
import torch

from visual_grpo.reward import RewardRequest, as_reward, to_output
from visual_grpo.rewards.anls import anls
from visual_grpo.rewards.caption_judge import b_cap_score, language_gate
from visual_grpo.rewards.cider import Corpus, cider_d
from visual_grpo.rewards.cosine_length import cosine_length
from visual_grpo.rewards.deqa import expected_level
from visual_grpo.rewards.iou import box_overlap, match_boxes
from visual_grpo.rewards.judge import Failure
from visual_grpo.rewards.repetition import repeated_share
from visual_grpo.rewards.rubric import rubric_value
from visual_grpo.rewards.unified_reward import FINAL, THREE
from visual_grpo.rewards.vlm_judge import VlmJudge
from visual_grpo.rewards.vqa_accuracy import normalise_vqa, soft_accuracy


def score(name, texts, metadata=None, params=None, **extra):
    made = RewardRequest.build(["q"] * len(texts), texts=texts, metadata=metadata, **extra)
    return to_output(as_reward(name, params=params)(made), len(texts), name)


def test_cosine_length():
    lengths = torch.tensor([0.0, 50.0, 100.0])
    torch.testing.assert_close(cosine_length(lengths, 100, 0.5, 1.0), torch.tensor([1, 0.75, 0.5]))
    torch.testing.assert_close(cosine_length(lengths, 100, -0.5, -1.0), torch.tensor([-1, -0.75, -0.5]))
    rows = [{"answer": "4"}] * 6
    output = score(
        "cosine_length", ["4"] * 3 + ["5"] * 3, rows, {"max_length": 100}, lengths=torch.tensor([0, 50, 100] * 2)
    )
    torch.testing.assert_close(output.values, torch.tensor([1, 0.75, 0.5, -1, -0.75, -0.5]))


def test_repetition():
    assert repeated_share([1, 2], 3) == 0.0
    assert repeated_share([7] * 5, 3) == pytest.approx(2 / 3)
    output = score("repetition", ["", "", ""], completion_ids=[[7] * 5, [1, 2, 3, 4], [1]])
    torch.testing.assert_close(output.values, torch.tensor([-2 / 3, 0.0, 0.0]))


@pytest.mark.parametrize(("matches", "value"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_soft_accuracy(matches, value):
    assert soft_accuracy(matches, 10) == pytest.approx(value, abs=1e-12)
    answers = ["red"] * matches + ["blue"] * (10 - matches)
    assert score("vqa_accuracy", ["Red."], [{"answers": answers}]).values.item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "normal"), [("The two cats.", "2 cats"), ("1,000", "1000"), ("red/blue", "red blue"), ("none", "0")]
)
def test_vqa_normalisation(text, normal):
    assert normalise_vqa(text) == normal


def test_boxes():
    iou, giou = box_overlap(np.array([[0.0, 0, 10, 10]]), np.array([[5.0, 0, 15, 10], [20, 20, 30, 30]]))
    np.testing.assert_allclose(iou, [[1 / 3, 0]], atol=1e-12)
    np.testing.assert_allclose(giou, [[1 / 3, -0.777778]], atol=1e-6)
    pair = np.array([[20.0, 20, 30, 30], [0, 0, 10, 10]])
    assert match_boxes(pair, np.array([[5.0, 0, 15, 10]])) == pytest.approx(1 / 6)  # sum IoU / max(2, 1)
    assert match_boxes(pair, pair[::-1]) == 1.0


@pytest.mark.parametrize(
    ("answer", "golds", "value"),
    [("Hello Wrld", ["hello world"], 0.909091), ("cat", ["dog", "cart"], 0.75), ("ab", ["abcd"], 0.0)],
)
def test_anls(answer, golds, value):
    assert anls(answer, golds) == pytest.approx(value, abs=1e-6)
    assert score("anls", [answer], [{"answers": golds}]).values.item() == pytest.approx(value, abs=1e-6)


CAPTIONS = [
    ["a red cat sits on the mat", "the cat is on a red mat"],
    ["two dogs run in the park", "dogs playing in a green park"],
    ["a man rides a horse on the beach"],
    ["a bowl of fruit with two apples and a banana", "fruit in a bowl"],
]
HYPOTHESES = ["a red cat on the mat", "two dogs in the park run", "a horse", "the fruit is in a bowl of red apples"]
PYCOCOEVALCAP = [3.80296541, 3.03728395, 1.33835877, 2.23760536]


def test_cider_d_against_the_coco_evaluation():
    """Values of pycocoevalcap 1.2 (CiderScorer, corpus document frequencies) on the same words."""
    corpus = Corpus.of(CAPTIONS)
    found = [cider_d(text, texts, corpus) for text, texts in zip(HYPOTHESES, CAPTIONS, strict=True)]
    assert found == pytest.approx(PYCOCOEVALCAP, abs=1e-6)
    output = score("cider", HYPOTHESES, [{"references": texts} for texts in CAPTIONS], {"corpus": "batch"})
    assert output.values.tolist() == pytest.approx(PYCOCOEVALCAP, abs=1e-5)
    assert score("cider", HYPOTHESES[:1], [{"references": CAPTIONS[0]}], {"corpus": "batch"}).values.item() == 0.0


def test_deqa_levels():
    """Softmax over five words, dot (5, 4, 3, 2, 1)."""
    logits = np.array([1.0, 2.0, 0.5, -1.0, 0.0])
    softmax = np.exp(logits) / np.exp(logits).sum()
    assert expected_level(logits.tolist()) == pytest.approx(softmax @ [5, 4, 3, 2, 1], abs=1e-12)
    assert math.isnan(expected_level([-math.inf] * 5))


def test_unified_reward_parsing():
    read = FINAL["final"].read
    assert read("Good.\nFinal Score: 3.5 and Final Score: 1") == pytest.approx(0.7)
    assert read("Final Score:4") == pytest.approx(0.8)
    for junk in ("", "Final Score: x", "Final Score: 0", "Final Score: 5.9", "final score: 3", "Final Score: ٣"):
        assert isinstance(read(junk), Failure)


def test_marks_of_unified_reward_2_and_of_the_qwen_vl_judge():
    reply = "Alignment Score (1-5): 4.5\nCoherence Score (1-5): 3\nStyle Score (1-5): 2.25"
    assert [scale.read(reply) for scale in THREE.values()] == pytest.approx([0.9, 0.6, 0.45])
    assert VlmJudge().scale.read("fine light <Score>4</Score>") == pytest.approx(0.8)
    assert isinstance(VlmJudge().scale.read("Score: 4"), Failure)


VERDICTS = np.array([[1, 1, 0, 1, 0], [1, 0, 0, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 1, 1]], dtype=float)
RUBRIC = ([3, 1, 2, 2, 1], [0, 0, 0, 1, 1])


def test_static_rubric_rewards():
    flat = rubric_value(VERDICTS, *RUBRIC, "flat")
    np.testing.assert_allclose(flat, [0.666667, 0.666667, 0.444444, 0.666667], atol=1e-6)
    by_category = rubric_value(VERDICTS, *RUBRIC)
    np.testing.assert_allclose(by_category, [0.666667, 0.75, 0.333333, 0.75], atol=1e-6)


def test_rubric_with_missing_verdicts():
    """A missing verdict leaves both sums, an empty category leaves the mean, and nothing at all is NaN."""
    holes = VERDICTS.copy()
    holes[0, 0] = holes[1, 3] = holes[1, 4] = np.nan
    holes[2] = np.nan
    np.testing.assert_allclose(rubric_value(holes, *RUBRIC), [0.5, 0.5, np.nan, 0.75], atol=1e-6)


def test_caption_scores():
    correctness = [0.8, 0.6, 0.7, 0.9, 0.5, 0.5, 0.75, 1]
    coverage = [0.4, 0.6, 0.5, 0.3, 0.2, 0.4, 0.6, 0.3]
    language = [0.9, 0.9, 0.6, 1, 0.8, 0.8, 0.7, 0.9]
    ratio = [1, 1.4, 2.3, 0.4, 0.5, 2, 1.2, 0.9]
    harmonic = [b_cap_score(*row) for row in zip(correctness, coverage, language, strict=True)]
    expected = [0.617143, 0.675, 0.588785, 0.551020, 0.363636, 0.521739, 0.677419, 0.551020]
    assert harmonic == pytest.approx(expected, abs=1e-6)
    assert b_cap_score(0.0, 1.0, 1.0) == 0.0
    gated = [language_gate(q, rho) for q, rho in zip(language, ratio, strict=True)]
    assert gated == [0.9, 0.9, 0, 0, 0.8, 0.8, 0.7, 0.9]


def test_multiple_choice():
    rows = [{"answer": "B", "choices": ["blue", "the red cat", "none"]}] * 6
    texts = ["<answer>(b)</answer>", "A Red Cat!", "B. red", "I choose A", "", "<answer>D</answer>"]
    output = score("multiple_choice", texts, rows)
    assert output.values.tolist() == [1, 1, 1, 0, 0, 0]
    assert output.details["answered"].tolist() == [1, 1, 1, 1, 0, 0]
    golds = [{"answer": 1, "choices": ["x", "y"]}, {"answer": "y", "choices": ["x", "y"]}, {}]
    output = score("multiple_choice", ["B"] * 3, golds)
    assert output.values[:2].tolist() == [1, 1]
    assert output.status.tolist() == [0, 0, 1]
