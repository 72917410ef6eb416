"""Worked example of GRAIL's weights, float64, and its degenerate rows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.pipelines.text.grail import (
    AFTER,
    CONTENT,
    MARKER,
    OUTSIDE,
    GrailConfig,
    boxed_span,
    hashes_span,
    saliency_weights,
)

SCORES = torch.tensor([[0.02, 0.5, 0.004, 0.1, 1.2, 0.3, 0.9, 0.25, 0.05, 0]], dtype=torch.float64)
CAUSAL = torch.cat([SCORES[:, :8], torch.zeros(1, 2, dtype=torch.float64)], dim=1)
"""In a causal model the token after the answer has no influence on it."""
PARTS = torch.tensor([[OUTSIDE] * 5 + [MARKER, CONTENT, MARKER] + [AFTER] * 2])
MASK = torch.tensor([[True] * 9 + [False]])
PLAIN = [0.5, 1.367142, 0.5, 0.912607, 1.614391, 1.0, 5.0, 1.0, 1.0, 0.0]


def weights(scores: Tensor = SCORES, parts: Tensor = PARTS, advantage: float = -0.5, **options: Any) -> Tensor:
    given = torch.full(scores.shape, advantage, dtype=torch.float64)
    return saliency_weights(scores, parts, MASK, given, GrailConfig(**options)).weights


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=6e-7)


def test_a_wrong_row_is_weighted() -> None:
    found = weights()
    close(found, PLAIN)
    products = [-0.25, -0.683571, -0.25, -0.456303, -0.807196, -0.5, -2.5, -0.5, -0.5, 0]
    close(-0.5 * found, products)


def test_a_wider_spread() -> None:
    close(weights(weight_std=1.0), [0.5, 1.734285, 0.5, 0.825213, 2.228783, 1, 5, 1, 1, 0])


def test_a_right_row_falls_back() -> None:
    close(weights(advantage=0.5), [1, 1, 1, 1, 1, 1, 5, 1, 1, 0])
    close(weights(advantage=0.5, override_on_fallback=False), [1] * 9 + [0])
    close(weights(advantage=0.5, mode="correct"), PLAIN)
    close(weights(advantage=-0.5, mode="correct"), [1, 1, 1, 1, 1, 1, 5, 1, 1, 0])
    for advantage in (0.5, -0.5):
        close(weights(advantage=advantage, mode="both"), PLAIN)


def test_an_advantage_of_zero_counts_as_wrong() -> None:
    close(weights(advantage=0.0), PLAIN)
    close(weights(advantage=0.0, mode="correct"), [1, 1, 1, 1, 1, 1, 5, 1, 1, 0])


def test_a_row_without_an_answer() -> None:
    close(weights(parts=torch.zeros_like(PARTS)), [1] * 9 + [0])
    close(weights(torch.zeros_like(SCORES), torch.zeros_like(PARTS)), [1] * 9 + [0])


def test_the_tail_of_a_causal_model_squeezes_the_weights() -> None:
    close(weights(CAUSAL), [0.981308, 1.274807, 0.834559, 1.128057, 1.354632, 1, 5, 1, 1, 0])
    before = weights(CAUSAL, normalise_over="until_span_end")
    assert float(before[0, :5].std()) > float(weights(CAUSAL)[0, :5].std())


def test_the_standard_scores_behind_the_weights() -> None:
    """Wide bounds, no answer: w - 1 is z."""
    wide = {"weight_std": 1.0, "weight_mean": 10.0, "weight_min": 0.0, "weight_max": 100.0}
    tail = torch.where(PARTS == AFTER, OUTSIDE, PARTS)
    found = weights(parts=torch.where(tail == CONTENT, MARKER, tail), **wide) - 10
    z = [
        -1.083858,
        0.734285,
        -1.992929,
        -0.174787,
        1.228783,
        0.0,
        0.0,
        0.0,
        -0.566303,
    ]  # the answer's own are overridden
    close(found[:, :9], z)
    causal = weights(CAUSAL, parts=torch.where(tail == CONTENT, MARKER, tail), **wide) - 10
    close(causal[:, :9], [-0.037384, 0.549613, -0.330882, 0.256114, 0.709264, 0, 0, 0, -2.683197])


def test_the_standard_scores_under_the_answer() -> None:
    """With the span on padding alone no token is overridden."""
    wide = {"weight_std": 1.0, "weight_mean": 10.0, "weight_min": 0.0, "weight_max": 100.0}
    parts = torch.tensor([[OUTSIDE] * 9 + [MARKER]])
    z = [-1.083858, 0.734285, -1.992929, -0.174787, 1.228783, 0.445751, 1.066289, 0.342769, -0.566303]
    close(weights(parts=parts, **wide)[:, :9] - 10, z)


def test_constant_scores_and_a_broken_gradient() -> None:
    close(weights(torch.full_like(SCORES, 0.3)), [1, 1, 1, 1, 1, 1, 5, 1, 1, 0])
    broken = SCORES.clone()
    broken[0, 2] = torch.nan
    close(weights(broken), [1, 1, 1, 1, 1, 1, 5, 1, 1, 0])
    outside = SCORES.clone()
    outside[0, 9] = torch.inf  # beyond the mask
    close(weights(outside), PLAIN)


def test_an_empty_answer_keeps_the_markers_weight() -> None:
    parts = torch.tensor([[OUTSIDE] * 5 + [MARKER, MARKER] + [AFTER] * 3])
    found = weights(parts=parts)
    assert found[0, 5:9].tolist() == [1.0] * 4
    assert 5.0 not in found[0].tolist()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{x^{2}} and \boxed{3}", "x^{2}"),
        (r"} \boxed{", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{ \boxed{4}", "4"),
        (r"\boxed{}", ""),
        ("{no box}", None),
    ],
)
def test_boxed_answers(text: str, answer: str | None) -> None:
    found = boxed_span(text)
    if answer is None:
        assert found is None
        return
    assert found is not None
    start, content, closing, end = found
    assert text[start:content] == "\\boxed{"
    assert text[content:closing] == answer
    assert text[closing:end] == "}"


def test_answers_after_hashes() -> None:
    text = "1+1=2 #### 2\n#### 3"
    assert hashes_span(text) == (6, 11, 12, 12)
    assert hashes_span("no mark") is None
    assert hashes_span("#### ") is None
