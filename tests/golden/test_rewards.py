"""Worked values of the card on rewards, sections 3 (GenEval), 4 (OCR), 6 (JPEG), 7 (text) and 8 (exact match)."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward, to_output
from visual_grpo.rewards.answers import extract_answer, same_answer
from visual_grpo.rewards.geneval import GenEval
from visual_grpo.rewards.geneval_rules import judge_official, judge_partial
from visual_grpo.rewards.jpeg import jpeg_kilobytes
from visual_grpo.rewards.length import soft_overlong
from visual_grpo.rewards.ocr_score import TextRules, levenshtein, match_text, quoted_text, reading_order


@dataclass(frozen=True)
class Found:
    box: tuple[float, float, float, float]
    color: str | None = None
    score: float = 0.95


LEFT, RIGHT, FAR_RIGHT = (0, 0, 100, 100), (200, 0, 300, 100), (400, 0, 500, 100)
SPREAD = [(i * 200, 0, i * 200 + 100, 100) for i in range(8)]


def clocks(count: int):
    return {"clock": [Found(SPREAD[i]) for i in range(count)]} if count else {}


def tag(name, *clauses, **more):
    return {"tag": name, "prompt": name, "include": list(clauses), **more}


COUNT_3 = tag("counting", {"class": "clock", "count": 3}, exclude=[{"class": "clock", "count": 4}])
TWO = tag("two_object", {"class": "bench", "count": 1}, {"class": "dog", "count": 1})
TWO_COLORS = tag(
    "color_attr", {"class": "cup", "count": 1, "color": "red"}, {"class": "apple", "count": 1, "color": "black"}
)
POSITION = tag("position", {"class": "bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]})
CUP, APPLE = Found(LEFT, "red"), Found(RIGHT, "black")

# (metadata, objects, official, strict, partial as the reference, partial mended)
GENEVAL = {
    "count 3, found 0": (COUNT_3, clocks(0), False, False, 0.0, 0.0),
    "count 3, found 1": (COUNT_3, clocks(1), False, False, 1 / 3, 1 / 3),
    "count 3, found 2": (COUNT_3, clocks(2), False, False, 2 / 3, 2 / 3),
    "count 3, found 3": (COUNT_3, clocks(3), True, True, 1.0, 1.0),
    "count 3, found 4": (COUNT_3, clocks(4), False, False, 2 / 3, 2 / 3),
    "count 3, found 5": (COUNT_3, clocks(5), False, False, 1 / 3, 1 / 3),
    "count 3, found 7": (COUNT_3, clocks(7), False, False, -1 / 3, -1 / 3),
    "two_object, both once": (TWO, {"bench": [Found(LEFT)], "dog": [Found(RIGHT)]}, True, True, 1.0, 1.0),
    "two_object, first twice": (
        TWO,
        {"bench": [Found(LEFT), Found(FAR_RIGHT)], "dog": [Found(RIGHT)]},
        True,
        False,
        0.5,
        0.5,
    ),
    "two_object, one missing": (TWO, {"dog": [Found(RIGHT)]}, False, False, 0.5, 0.5),
    "color_attr, one colour wrong": (
        TWO_COLORS,
        {"cup": [CUP], "apple": [Found(RIGHT, "green")]},
        False,
        False,
        0.75,
        0.75,
    ),
    "color_attr, one object missing": (TWO_COLORS, {"cup": [CUP]}, False, False, 0.5, 0.5),
    "color_attr, right": (TWO_COLORS, {"cup": [CUP], "apple": [APPLE]}, True, True, 1.0, 1.0),
    "position right": (POSITION, {"bear": [Found(LEFT)], "dog": [Found(RIGHT)]}, True, True, 1.0, 1.0),
    "position wrong side": (POSITION, {"bear": [Found(RIGHT)], "dog": [Found(LEFT)]}, False, False, 0.75, 2 / 3),
    "position, target missing": (POSITION, {"dog": [Found(RIGHT)]}, False, False, 1 / 3, 1 / 3),
    "position, two targets": (
        POSITION,
        {"bear": [Found(LEFT), Found(FAR_RIGHT)], "dog": [Found(RIGHT)]},
        True,
        False,
        1 / 3,
        1 / 3,
    ),
}


@pytest.mark.parametrize("case", GENEVAL)
def test_geneval_table(case):
    metadata, objects, official, strict, partial, mended = GENEVAL[case]
    assert judge_official(objects, metadata).correct is official
    reference = judge_partial(objects, metadata)
    assert reference.correct is strict
    assert reference.score == pytest.approx(partial, abs=1e-12)
    assert judge_partial(objects, metadata, position_bug="fixed").score == pytest.approx(mended, abs=1e-12)


class FixedDetector:
    """A detector that knows the answer: image i of a request shows `scenes[i]`."""

    def __init__(self, scenes):
        self.scenes = scenes

    def detect(self, images):
        return [self.scenes[round(float(image.mean()) * 100)] for image in images]


def geneval_request():
    """One row a case of the table; the pixel value carries the index of its scene."""
    images = torch.stack([torch.full((3, 4, 4), i / 100) for i in range(len(GENEVAL))])
    return RewardRequest.build(["p"] * len(GENEVAL), images=images, metadata=[case[0] for case in GENEVAL.values()])


@pytest.mark.parametrize("mode", ["official", "strict", "partial", "mixed"])
def test_geneval_modes(mode):
    detector = FixedDetector([case[1] for case in GENEVAL.values()])
    output = to_output(GenEval(mode, detector=detector)(geneval_request()), len(GENEVAL), "geneval")
    expected = {
        "official": lambda c: float(c[2]),
        "strict": lambda c: float(c[3]),
        "partial": lambda c: c[4],
        "mixed": lambda c: 0.5 * c[3] + 0.5 * max(c[4], 0.0),
    }[mode]
    torch.testing.assert_close(output.values, torch.tensor([expected(case) for case in GENEVAL.values()]))
    assert output.details["correct"].tolist() == [float(case[2]) for case in GENEVAL.values()]
    assert output.details["strict"].tolist() == [float(case[3]) for case in GENEVAL.values()]
    torch.testing.assert_close(output.details["partial"], torch.tensor([case[4] for case in GENEVAL.values()]))


def test_geneval_options():
    detector = FixedDetector([case[1] for case in GENEVAL.values()])
    clipped = to_output(GenEval(detector=detector, clip=True)(geneval_request()), len(GENEVAL), "geneval")
    assert clipped.values.min() == 0.0
    assert clipped.details["partial"].min() < 0
    fixed = to_output(GenEval(detector=detector, position_bug="fixed")(geneval_request()), len(GENEVAL), "geneval")
    torch.testing.assert_close(fixed.values, torch.tensor([case[5] for case in GENEVAL.values()]))
    with pytest.raises(UserError, match="mode is 'loose'"):
        GenEval("loose")
    with pytest.raises(UserError, match="has no method detect"):
        GenEval(detector=object()).detector  # noqa: B018


# ---- section 4

OCR = [
    ("Helo Wrld", "Hello World", 0.8),
    ("HELLOWORLD!!", "Hello World", 1.0),
    ("NASA 2O49", "NASA 2049", 0.875),
    ("", "Hello World", 0.0),
    ("Helo World and more text", "Hello World", 0.0),
    ("abcdefghijklmnopqrstuvwxyz", "Hello World", 0.0),
    # peer_reward_recipes, section 8
    ("hello world!", "Hello World", 1.0),
    ("helo wrld", "Hello World", 0.8),
    ("a long text about something else", "NASA 2049", 0.0),
    ("", "NASA 2049", 0.0),
]


@pytest.mark.parametrize(("recognised", "target", "score"), OCR)
def test_ocr_scores(recognised, target, score):
    assert match_text(recognised, target).score == pytest.approx(score, abs=1e-12)


def test_ocr_details_and_options():
    match = match_text("xx hello world", "Hello World")
    assert (match.exact, match.contained, match.distance) == (False, True, 2)
    assert match_text("HELLO world", "Hello World").exact
    assert match_text("anything", " ") is None
    window = TextRules(best_window=True)
    assert match_text("Helo World and more text", "Hello World", window).score == pytest.approx(0.9)
    assert match_text("Hello, World", "Hello World").score == pytest.approx(0.9)
    assert match_text("Hello, World", "Hello World", TextRules(strip_punctuation=True)).score == 1.0
    assert match_text("ＨＥＬＬＯ", "hello").score == 0.0
    assert match_text("ＨＥＬＬＯ", "hello", TextRules(nfkc=True)).score == 1.0


def test_quoted_text():
    assert quoted_text('says "Spring Collection 2024" in "gold"') == "Spring Collection 2024"
    assert quoted_text("says nothing") is None
    assert quoted_text('an open " quote') is None
    assert quoted_text('says ""') == ""
    assert quoted_text("says “curly”") is None
    assert quoted_text("says “curly”", typographic=True) == "curly"


def test_levenshtein_against_the_full_table():
    def table(a, b):
        rows = [[i + j if i * j == 0 else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
        for i in range(1, len(a) + 1):
            for j in range(1, len(b) + 1):
                swap = rows[i - 1][j - 1] + (a[i - 1] != b[j - 1])
                rows[i][j] = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, swap)
        return rows[-1][-1]

    generator = np.random.default_rng(0)
    for _ in range(200):
        a, b = ("".join(generator.choice(list("abc"), size=generator.integers(0, 8))) for _ in range(2))
        assert levenshtein(a, b) == table(a, b)
        windows = {a[i:j] for i in range(len(a) + 1) for j in range(i, len(a) + 1)}
        assert levenshtein(a, b, best_window=True) == min(table(w, b) for w in windows)


def test_reading_order():
    lines = [
        ("d", 1.0, (50, 42, 90, 60)),
        ("a", 1.0, (0, 2, 40, 20)),
        ("c", 1.0, (0, 40, 40, 58)),
        ("b", 1.0, (50, 0, 90, 18)),
    ]
    assert [line[0] for line in reading_order(lines)] == ["a", "b", "c", "d"]


# ---- section 6


def test_jpeg_sizes():
    """Deterministic for one build of libjpeg only, hence the tolerance."""
    black = Image.new("RGB", (64, 64))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))
    assert jpeg_kilobytes(black) == pytest.approx(0.691, rel=0.02)
    assert jpeg_kilobytes(noise) == pytest.approx(5.446, rel=0.02)


def test_jpeg_rewards():
    made = RewardRequest.build(["p"], images=torch.zeros(1, 3, 64, 64))
    assert as_reward("jpeg_incompressibility")(made).values.item() == pytest.approx(0.691, rel=0.02)
    assert as_reward("jpeg_compressibility")(made).values.item() == pytest.approx(-0.001382, rel=0.02)


# ---- section 7


def score(name, texts, metadata=None, params=None, **extra):
    made = RewardRequest.build(["q"] * len(texts), texts=texts, metadata=metadata, **extra)
    reward = as_reward(name, params=params)
    try:
        return to_output(reward(made), len(texts), name)
    finally:
        reward.close()


def test_math_values():
    golds = ["1/2", "x=3", "1/3", "42", "no number here", None]
    answers = [r"\boxed{0.5}", r"\boxed{3}", r"\boxed{2/6}", "forty two", r"\boxed{1}", r"\boxed{1}"]
    output = score("math_verify", answers, [{"solution": gold} for gold in golds])
    assert output.values[:4].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert output.status.tolist() == [0, 0, 0, 0, 1, 1]


def test_think_format():
    texts = [
        "<think>\nreasons\n</think>\nanswer",
        "<think>no end",
        "<think>one</think><think>two</think>",
        "first <think>a</think>",
        "<think></think>",
    ]
    assert score("format", texts).values.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_think_answer_format():
    texts = ["<think>a\nb</think>\n <answer>4</answer>", "<think>a</think><answer>4</answer>.", "<answer>4</answer>"]
    assert score("format", texts, params={"style": "think_answer"}).values.tolist() == [1.0, 0.0, 0.0]
    assert score("format", ["ab", "b"], params={"pattern": "a.$"}).values.tolist() == [1.0, 0.0]
    for params in ({"style": "thonk"}, {"pattern": "("}):
        with pytest.raises(UserError, match="format:"):
            as_reward("format", params=params)


def test_soft_overlong():
    lengths = torch.tensor([0.0, 80.0, 90.0, 100.0, 101.0])
    assert soft_overlong(lengths, 100, 20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    output = score("overlong", [""] * 5, params={"max_length": 100, "cache": 20}, lengths=lengths.long())
    assert output.values.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_length():
    target = score("length", ["a b", "a b c d", "a b c d e f g h i"], params={"target": 4, "unit": "words"})
    assert target.values.tolist() == [0.5, 1.0, 0.0]
    ceiling = score("length", ["ab", "abcde", "a" * 9], params={"ceiling": 4, "unit": "characters"})
    assert ceiling.values.tolist() == [1.0, 0.75, 0.0]
    ids = score("length", ["x", "x"], params={"target": 2}, completion_ids=[[1, 2], [1]])
    assert ids.values.tolist() == [1.0, 0.5]
    for params in ({}, {"target": 2, "ceiling": 3}, {"target": 0}, {"target": 2, "unit": "bytes"}):
        with pytest.raises(UserError, match="length:"):
            as_reward("length", params=params)


# ---- section 8


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("<think>12</think><answer> The cat </answer>", "auto", "The cat"),
        (r"3 so \boxed{\frac{1}{2}}", "auto", r"\frac{1}{2}"),
        ("sum 3 + 4\n#### 7\nbye 9", "auto", "7"),
        ("between 3 and 1,234.5.", "auto", "1,234.5"),
        ("costs $5, or -3", "last_number", "-3"),
        ("I think (B).", "letter", "B"),
        ("<answer>C</answer> not A", "letter", "C"),
        ("A dog. It's I", "letter", "I"),
        ("none", "auto", None),
        (r"\boxed{open", "boxed", None),
        (" yes ", "whole", "yes"),
    ],
)
def test_extraction(text, how, answer):
    assert extract_answer(text, how) == answer


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("The two, Cats.", "two cats", True),
        ("1,000", "1000.0", True),
        ("3.5", "35", False),
        ("-5", "5", False),
        ("$5", "5", True),
        ("5 apples", "5", False),
        ("b", "B", True),
    ],
)
def test_same_answer(left, right, same):
    assert same_answer(left, right) is same


def test_exact_match():
    golds = ["4", ["cat", "a kitten"], "steps... #### 1,200", "x", None, 7]
    texts = ["so 4", "<answer>Kitten!</answer>", "total 1200", "no number", "5", r"\boxed{8}"]
    output = score("exact_match", texts, [{"answer": gold} for gold in golds])
    assert output.values[[0, 1, 2, 3, 5]].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert output.status.tolist() == [0, 0, 0, 0, 1, 0]
    assert output.details["answered"].tolist() == [1, 1, 1, 0, 1, 1]
