"""Truncated importance weights against an engine (card vlm_grpo_baseline, "vLLM correction"); values worked by hand in float64.

Row 1 differs by [0.5, -0.2, 0.4] (sum 0.7), row 2 by [1.2, 0.3] (sum 1.5, third unit masked), row 3 by [-0.9, -1.1, NaN].
"""

import math

import pytest
import torch

from visual_grpo.importance import correction_weights, sampler_difference, summed_log_weight

OLD = torch.tensor([[-0.5, -1.2, -0.1], [-0.3, -0.7, -2.0], [-1.4, -2.1, -0.6]], dtype=torch.float64)
SAMPLER = torch.tensor([[-1.0, -1.0, -0.5], [-1.5, -1.0, -9.0], [-0.5, -1.0, math.nan]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.float64)
DIFFERENCE = [[0.5, -0.2, 0.4], [1.2, 0.3, 0.0], [-0.9, -1.1, 0.0]]
TOKEN = [
    [1.648721270700, 0.818730753078, 1.491824697641],
    [3.320116922737, 1.349858807576, 1.0],
    [0.406569659741, 0.332871083698, 1.0],
]
SEQUENCE = [[2.013752707470], [4.481689070338], [0.135335283237]]


def difference() -> torch.Tensor:
    return sampler_difference(OLD, SAMPLER, MASK)


def close(found: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_difference_leaves_masked_units_and_missing_log_probs_out():
    close(difference(), DIFFERENCE)


@pytest.mark.parametrize(
    ("mode", "lower", "expected", "outside"),
    [
        ("token_truncate", None, [TOKEN[0], [3.0, *TOKEN[1][1:]], TOKEN[2]], 1),
        ("token_mask", None, [TOKEN[0], [0.0, *TOKEN[1][1:]], TOKEN[2]], 1),
        ("token_truncate", 0.4, [TOKEN[0], [3.0, *TOKEN[1][1:]], [TOKEN[2][0], 0.4, 1.0]], 2),
        ("token_mask", 0.4, [TOKEN[0], [0.0, *TOKEN[1][1:]], [TOKEN[2][0], 0.0, 1.0]], 2),
        ("sequence_truncate", None, [SEQUENCE[0], [3.0], SEQUENCE[2]], 1),
        ("sequence_mask", None, [SEQUENCE[0], [0.0], SEQUENCE[2]], 1),
        ("sequence_truncate", 0.5, [SEQUENCE[0], [3.0], [0.5]], 2),
        ("sequence_mask", 0.5, [SEQUENCE[0], [0.0], [0.0]], 2),
    ],
)
def test_weights_of_each_mode(mode, lower, expected, outside):
    weights, cut = correction_weights(difference(), mode=mode, upper=3.0, lower=lower)
    close(weights, expected)
    assert cut.shape == weights.shape
    assert int(cut.sum()) == outside


def test_the_defaults_are_those_of_the_card():
    close(correction_weights(difference())[0], [SEQUENCE[0], [0.0], SEQUENCE[2]])


def test_far_differences_stay_finite():
    far = torch.tensor([[900.0, 0.0], [-900.0, 0.0]], dtype=torch.float64)
    for mode, first in (("sequence_truncate", 3.0), ("sequence_mask", 0.0)):
        close(correction_weights(far, mode=mode)[0], [[first], [0.0]])
    assert torch.isfinite(summed_log_weight(far, mode="token_mask")).all()


def test_the_log_weight_of_a_row_is_that_of_its_cut_tokens():
    found = summed_log_weight(difference(), mode="token_truncate", upper=3.0)
    expected = torch.tensor([0.7, math.log(3.0) + 0.3, -2.0], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    masked = summed_log_weight(difference(), mode="token_mask", upper=3.0)
    assert masked[1].item() == pytest.approx(math.log(1e-8) + 0.3)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of sequence_mask"):
        correction_weights(difference(), mode="sequence")  # type: ignore[arg-type]
