"""Worked example of MicroCoder-GRPO: truncation mask, repetition, diversity."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import mask_of, rollouts_of, scored, state_of

from visual_grpo.advantages import group_advantages
from visual_grpo.combination import combined_advantages
from visual_grpo.pipelines.text.microcoder_grpo import (
    CORRECT,
    INCOMPLETE,
    MASK_DRAW,
    WRONG,
    MicroCoderGrpo,
    MicroCoderGrpoConfig,
    diversity,
    group_diversities,
    repeats,
    truncation_mask,
    verdicts,
)

REWARDS = torch.tensor([1, 1, 0, 0], dtype=torch.float64)
TRUNCATED = torch.tensor([False, True, True, True])
VERDICTS = torch.tensor([CORRECT, CORRECT, INCOMPLETE, WRONG])
LOOPING = torch.tensor([False, False, True, False])


@pytest.mark.parametrize(("draw", "second"), [(0.02, 0.0), (0.25, 0.866024)])
def test_masked_advantages(draw: float, second: float) -> None:
    advantages = group_advantages(REWARDS, torch.zeros(4, dtype=torch.int64), eps=1e-6)
    plain = torch.tensor([0.866024, 0.866024, -0.866024, -0.866024]).double()
    torch.testing.assert_close(advantages, plain, rtol=0, atol=6e-7)
    masked = truncation_mask(TRUNCATED, VERDICTS, LOOPING, torch.tensor([0.01, draw, 0.03, 0.04]), 0.1)
    expected = torch.tensor([0.866024, second, -0.866024, -0.866024]).double()
    torch.testing.assert_close(torch.where(masked, 0.0, advantages), expected, rtol=0, atol=6e-7)


def hooked(share: float, *, wrong: int = 3, window: int = 128) -> torch.Tensor:
    """The example's four answers of up to 4,096 tokens through the hook; the third ends in a loop of 128 tokens."""
    lengths = [900, 4096, 4096, 4096]
    ids = torch.arange(4096).repeat(4, 1)
    ids[2, -128:] = ids[2, -256:-128]
    rollouts = rollouts_of(mask_of(lengths), [0] * 4, data={"completion_ids": ids}, truncated=TRUNCATED)
    rewards = scored(REWARDS)
    rewards.details = {"code/complete": torch.tensor([float(row != 2 and row <= wrong) for row in range(4)])}
    state = state_of(**MicroCoderGrpo.defaults)
    options = {"mask_share": share, "repeat_window": window, "complete_detail": "code/complete"}
    plain = combined_advantages(rewards, torch.zeros(4, dtype=torch.int64), torch.ones(4), state.config)
    return MicroCoderGrpo(MicroCoderGrpoConfig(**options)).adjust_advantages(plain, rewards, rollouts, state)


def test_the_example_through_the_hook() -> None:
    """Only the second answer can be masked: the first is whole, the third loops, the fourth is wrong."""
    whole = [0.866024, 0.866024, -0.866024, -0.866024]
    cut = torch.tensor([0.866024, 0, -0.866024, -0.866024]).double()
    draw = float(torch.rand((), generator=state_of().generator(MASK_DRAW, 1)))
    for share, expected in ((0.0, torch.tensor(whole).double()), (1.0, cut)):
        torch.testing.assert_close(hooked(share), expected, rtol=0, atol=6e-7)
    torch.testing.assert_close(hooked(draw + 1e-6), cut, rtol=0, atol=6e-7)
    torch.testing.assert_close(hooked(draw - 1e-6), torch.tensor(whole).double(), rtol=0, atol=6e-7)
    assert hooked(1.0, window=127)[2] == 0, "a loop of 128 tokens is none of 127"
    assert hooked(1.0, wrong=2)[3] == 0, "nothing complete to test: incomplete, not wrong"


def test_no_share_and_the_whole_share() -> None:
    draws = torch.tensor([0.0, 0.999, 0.0, 0.0])
    assert not bool(truncation_mask(TRUNCATED, VERDICTS, LOOPING, draws, 0.0).any())
    assert truncation_mask(TRUNCATED, VERDICTS, LOOPING, draws, 1.0).tolist() == [False, True, False, False]


def test_repetition() -> None:
    assert repeats([1, 2, 3, 1, 2, 3], 3)
    assert not repeats([1, 2, 3, 1, 2, 4], 3)
    assert not repeats([1, 2, 3, 1, 2], 3)
    assert repeats([9, 5, 5], 1)
    assert not repeats([], 1)


def test_verdicts() -> None:
    """A cut answer that was tested and failed is wrong; one without a program to test, or without a score, is incomplete."""
    scores = torch.tensor([1.0, 0.0, 0.0, torch.nan, 1.0, 0.0])
    truncated = torch.tensor([True, True, True, True, True, False])
    judged = torch.tensor([True, True, False, True, False, False])
    expected = [CORRECT, WRONG, INCOMPLETE, INCOMPLETE, CORRECT, WRONG]
    assert verdicts(scores, truncated, judged, 1.0).tolist() == expected


def test_diversity() -> None:
    answers = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9, 10]]
    assert diversity(answers) == pytest.approx(0.888889, abs=6e-7)
    pairs = [(0, 1), (0, 2), (1, 2)]
    assert [1 - diversity([answers[i], answers[j]]) for i, j in pairs] == pytest.approx([1 / 3, 0, 0])
    assert diversity([[1, 2], [1, 2]]) == 0.0
    assert diversity([[1, 2], [1, 3]]) == 1.0
    assert diversity([[1, 2], [1, 2, 3, 4]]) == 1.0
    assert diversity([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0
    assert diversity([[], []]) == 0.0
    found = group_diversities([*answers, [1], [2, 2, 2, 2], [2, 2, 2, 2]], torch.tensor([4, 4, 4, 9, 2, 2]))
    torch.testing.assert_close(found, torch.tensor([8 / 9, 0.0]).double())
