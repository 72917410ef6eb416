"""Verdicts that are wrong with a known probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardError, RewardRequest, as_reward, to_output
from visual_grpo.types import RewardStatus


def scored(count: int = 4000, prompt: str = "say {}", **params: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half of the answers are right: (given, true, flipped)."""
    texts = [str(i % 2) for i in range(count)]
    request = RewardRequest.build(
        [prompt.format(i) for i in range(count)], texts=texts, metadata=[{"answer": "1"}] * count
    )
    output = to_output(as_reward("label_noise", params=params)(request), count, "label_noise")
    return output.values, torch.tensor([float(text) for text in texts]), output.details["flipped"]


def test_both_verdicts_are_flipped_as_often_as_asked() -> None:
    given, true, flipped = scored(flip=0.2)
    assert torch.equal(given, torch.where(flipped == 1, 1 - true, true))
    for right in (0, 1):  # 2,000 draws: five standard errors are 0.045
        assert float(flipped[true == right].mean()) == pytest.approx(0.2, abs=0.045)


def test_no_noise_is_the_reward_itself() -> None:
    given, true, flipped = scored(flip=0.0)
    assert torch.equal(given, true)
    assert not bool(flipped.any())


def test_flips_depend_on_seed_prompt_and_text_alone() -> None:
    first, again, other = (scored(flip=0.3, seed=seed)[2] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    same = scored(prompt="one", flip=0.3)[2]  # two texts, each with its verdict
    assert len(set(same[::2].tolist())) == len(set(same[1::2].tolist())) == 1


def test_rows_without_a_verdict_stay_without_one() -> None:
    request = RewardRequest.build(["a"] * 50, texts=[str(i) for i in range(50)])
    output = to_output(as_reward("label_noise", params={"flip": 0.4})(request), 50, "label_noise")
    assert set(output.status.tolist()) == {int(RewardStatus.NOT_APPLICABLE)}
    assert not bool(output.details["flipped"].any())


def test_details_and_options_of_the_reward_pass() -> None:
    request = RewardRequest.build(["a", "a"], texts=["#### 7", "7"], metadata=[{"answer": "7"}] * 2)
    params = {"params": {"extraction": "hashes"}, "flip": 0.0}
    output = to_output(as_reward("label_noise", params=params)(request), 2, "label_noise")
    assert output.values.tolist() == [1.0, 0.0]
    assert output.details["answered"].tolist() == [1.0, 0.0]


def test_what_it_refuses() -> None:
    for flip in (-0.1, 0.5):
        with pytest.raises(UserError, match=r"flip must be at least 0 and below 0\.5"):
            as_reward("label_noise", params={"flip": flip})
    with pytest.raises(UserError, match="reward 'jpeg_compressibility' reads more"):
        as_reward("label_noise", params={"reward": "jpeg_compressibility"})
    request = RewardRequest.build(["a"], texts=["sever"], metadata=[{"answer": "seven"}])
    with pytest.raises(RewardError, match=r"flips verdicts of 0 or 1, and reward 'anls' gave 0\.8"):
        as_reward("label_noise", params={"reward": "anls", "params": {"threshold": 1.0}})(request)
