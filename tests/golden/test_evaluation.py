"""Worked values of the card on evaluation, sections 1 (GenEval), 3 (OCR) and 8 (text)."""

from dataclasses import dataclass

import numpy as np
import pytest

from visual_grpo.eval import geneval, ocr, text
from visual_grpo.eval.intervals import bootstrap_interval, paired_bootstrap, paired_difference
from visual_grpo.rewards.geneval_rules import DetectionFilter, box_iou, filter_detections, judge_official, relations


@dataclass(frozen=True)
class Found:
    box: tuple[float, float, float, float]
    score: float
    color: str | None = None


A = (0, 0, 100, 100)


@pytest.mark.parametrize(
    ("a", "b", "held"),
    [
        (A, (200, 0, 300, 100), {"left of"}),
        (A, (60, 0, 160, 100), {"left of"}),
        (A, (30, 0, 130, 100), set()),
        (A, (200, 150, 300, 250), {"left of", "above"}),
        (A, (200, 90, 300, 190), {"left of"}),
        (A, (15, 15, 115, 115), set()),
        ((0, 200, 100, 300), (10, 0, 110, 100), {"below"}),
        (A, A, set()),
    ],
)
def test_relation_table(a, b, held):
    assert relations(a, b) == held
    mirror = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert relations(b, a) == {mirror[name] for name in held}


@pytest.mark.parametrize(
    ("found", "correct", "reason"),
    [
        (2, False, "expected clock>=3, found 2"),
        (3, True, ""),
        (4, False, "expected clock<4, found 4"),
    ],
)
def test_count_three_exclude_four(found, correct, reason):
    metadata = {"include": [{"class": "clock", "count": 3}], "exclude": [{"class": "clock", "count": 4}]}
    verdict = judge_official({"clock": [Found(A, 0.95)] * found}, metadata)
    assert (verdict.correct, "\n".join(verdict.reasons)) == (correct, reason)


def test_official_rule_uses_the_best_count_objects_of_target_and_object():
    """A third, worse-placed object beyond `count` is not looked at."""
    metadata = {"include": [{"class": "bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}]}
    bears = [Found(A, 0.9), Found((400, 0, 500, 100), 0.8)]
    dogs = [Found((200, 0, 300, 100), 0.9), Found((-300, 0, -200, 100), 0.8)]
    assert judge_official({"bear": bears, "dog": dogs}, metadata).correct
    assert not judge_official({"bear": bears[::-1], "dog": dogs}, metadata).correct
    unmatched = judge_official({"dog": dogs}, metadata)
    assert unmatched.reasons == ["expected bear>=1, found 0", "no target for dog to be right of"]


def test_official_colour_is_counted_among_the_best():
    metadata = {"include": [{"class": "cup", "count": 2, "color": "red"}]}
    reds = [Found(A, 0.9, "red"), Found(A, 0.8, "red"), Found(A, 0.7, "blue")]
    assert judge_official({"cup": reds}, metadata).correct
    assert not judge_official({"cup": reds[1:]}, metadata).correct


def test_a_clause_refers_to_earlier_clauses_only():
    metadata = {"include": [{"class": "dog", "count": 1, "position": ["right of", 1]}, {"class": "bear", "count": 1}]}
    with pytest.raises(ValueError, match="must name a clause before it"):
        judge_official({"dog": [Found(A, 0.9)], "bear": [Found(A, 0.9)]}, metadata)


def test_detection_filter():
    raw = {"cup": [Found(A, 0.3), Found(A, 0.31), Found(A, 0.95)], "dog": [Found(A, 0.2)]}
    assert [o.score for o in filter_detections(raw, "colors", DetectionFilter())["cup"]] == [0.95, 0.31]
    assert [o.score for o in filter_detections(raw, "counting", DetectionFilter())["cup"]] == [0.95]
    assert "dog" not in filter_detections(raw, None, DetectionFilter())
    many = {"cup": [Found(A, 0.5 + i / 100) for i in range(20)]}
    kept = filter_detections(many, None, DetectionFilter())["cup"]
    assert len(kept) == 16
    assert kept[0].score == pytest.approx(0.69)
    shifted = {"cup": [Found((0, 0, 9, 9), 0.9), Found((5, 0, 14, 9), 0.8), Found((50, 0, 59, 9), 0.7)]}
    assert len(filter_detections(shifted, None, DetectionFilter(max_overlap=1 / 3))["cup"]) == 2
    assert len(filter_detections(shifted, None, DetectionFilter(max_overlap=0.34))["cup"]) == 3
    assert box_iou((0, 0, 9, 9), (5, 0, 14, 9)) == pytest.approx(1 / 3)


def line(tag, correct, metadata):
    return {"tag": tag, "correct": correct, "metadata": metadata}


def test_geneval_summary_is_the_unweighted_mean_of_tasks():
    lines = [
        line("colors", True, "a"),
        line("colors", False, "a"),
        line("colors", False, "b"),
        line("colors", False, "b"),
    ]
    lines += [line("single_object", True, "c")]
    summary = geneval.summarise(lines)
    assert summary["overall"] == pytest.approx((0.25 + 1.0) / 2)
    assert list(summary["tasks"]) == ["single_object", "colors"]
    assert summary["tasks"]["colors"] == {"score": 0.25, "correct": 1, "images": 4}
    assert (summary["images"], summary["image_accuracy"]) == (5, pytest.approx(0.4))
    assert (summary["prompts"], summary["prompt_accuracy"]) == (3, pytest.approx(2 / 3))
    assert summary["missing_tasks"] == ["two_object", "counting", "position", "color_attr"]
    assert geneval.summarise([])["overall"] is None


@pytest.mark.parametrize(
    ("tasks", "printed"),
    [((0.98, 0.74, 0.39, 0.85, 0.15, 0.23), 0.557), ((0.98, 0.78, 0.50, 0.81, 0.24, 0.52), 0.638)],
)
def test_published_overalls_recomputed(tasks, printed):
    """SDXL and SD3.5-M: the mean of the rounded task scores; the tasks have unequal numbers of images, as in GenEval."""
    lines = []
    for number, (name, score) in enumerate(zip(geneval.TASKS, tasks, strict=True), start=1):
        images = 100 * number
        lines += [line(name, i < round(score * images), f"{name} {i // 4}") for i in range(images)]
    summary = geneval.summarise(lines)
    assert summary["overall"] == pytest.approx(printed, abs=5e-4)
    assert summary["image_accuracy"] != pytest.approx(printed, abs=5e-3)


def test_ocr_summary_is_a_mean_and_not_a_rate():
    lines = [
        {"score": 1.0, "exact": True, "contained": True, "distance": 0},
        {"score": 1.0, "exact": False, "contained": True, "distance": 4},
        {"score": 0.5, "exact": False, "contained": False, "distance": 3},
        {"score": None, "exact": None, "contained": None, "distance": None},
    ]
    assert ocr.summarise(lines) == {
        "accuracy": pytest.approx(2.5 / 3),
        "exact_match": pytest.approx(1 / 3),
        "contained": pytest.approx(2 / 3),
        "edit_distance": pytest.approx(7 / 3),
        "images": 3,
        "without_target": 1,
    }


@pytest.mark.parametrize(
    ("samples", "correct", "k", "value"),
    [(10, 3, 1, 0.3), (10, 3, 5, 11 / 12), (16, 1, 8, 0.5), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (10, 3, 8, 1.0)],
)
def test_pass_at_k(samples, correct, k, value):
    assert text.pass_at_k(samples, correct, k) == value


def test_pass_at_k_refuses_what_it_cannot_estimate():
    with pytest.raises(ValueError, match=r"pass@5 needs at least 5 samples"):
        text.pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="0 <= correct <= samples"):
        text.pass_at_k(4, 5, 1)
    assert text.pass_at_k(100_000, 1, 50_000) == 0.5


def test_averages_and_majority():
    correct = [[True, False, False, False], [True, True, True, False]]
    assert text.avg_at_k(correct) == 0.5
    assert text.mean_pass_at_k(correct, 4) == 1.0
    answers = [["7", "8", "8.0", None], ["1", "2", "2", "1"]]
    assert text.maj_at_k(answers, correct) == 0.5  # 8 wins and is wrong; 1 and 2 tie and 1 was first
    assert text.maj_at_k([[None, None]], [[False, False]]) == 0.0
    summary = text.summarise(correct, answers, ks=(1, 2))
    assert summary["problems"] == 2
    assert summary["avg@4"] == summary["pass@1"] == 0.5
    assert summary["pass@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert summary["maj@4"] == 0.5


def test_bootstrap_interval_covers_and_narrows():
    values = np.random.default_rng(1).normal(0.5, 0.1, 400)
    interval = bootstrap_interval(values)
    assert interval.mean == pytest.approx(values.mean())
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert bootstrap_interval([0.5] * 10) == bootstrap_interval([0.5] * 10)


def test_clusters_are_drawn_together():
    """Four copies of every value carry no more information than one."""
    values = np.random.default_rng(2).random(50)
    single, copied = (
        bootstrap_interval(values),
        bootstrap_interval(np.repeat(values, 4), clusters=list(np.repeat(range(50), 4))),
    )
    assert copied.count == single.count == 50
    assert copied.high - copied.low == pytest.approx(single.high - single.low)
    naive = bootstrap_interval(np.repeat(values, 4))
    assert naive.high - naive.low < 0.6 * (single.high - single.low)


def test_pairing_removes_what_items_share():
    difficulty = np.random.default_rng(3).random(100) * 10
    gain = 0.2 + np.random.default_rng(4).normal(0, 0.1, 100)
    for result in (paired_bootstrap(difficulty, difficulty + gain), paired_difference(difficulty, difficulty + gain)):
        assert 0.15 < result.low < result.mean < result.high < 0.25
        assert result.p_value < 0.01
    none = paired_bootstrap([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (none.mean, none.low, none.high, none.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_paired_difference_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.302653."""
    result = paired_difference([0, 0, 0], [1, 2, 3])
    assert result.mean == 2.0
    assert result.high - result.mean == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    with pytest.raises(ValueError, match="at least two pairs"):
        paired_difference([1], [2])


@pytest.mark.parametrize(("values", "message"), [([], "at least one number"), ([float("nan")], "finite numbers")])
def test_intervals_refuse_what_has_no_mean(values, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values)
