"""Worked example of DeGRPO, float64: both forms, gradients of the control token, the table of modes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import inputs_of, micro_of, scored, state_of

from visual_grpo.advantages import group_advantages
from visual_grpo.aggregation import Totals, aggregate
from visual_grpo.combination import combined_advantages
from visual_grpo.loss import step_totals, surrogate_loss
from visual_grpo.objectives import clipped_surrogate
from visual_grpo.pipelines.text.degrpo import (
    DeGrpo,
    DeGrpoConfig,
    ModeRewards,
    answer_modes,
    control_coefficients,
    mode_values,
)
from visual_grpo.stack import MethodStack
from visual_grpo.types import Span

REWARDS = torch.tensor([1.0, 0.5, -1, -1], dtype=torch.float64)
ADVANTAGES = group_advantages(REWARDS, torch.zeros(4, dtype=torch.int64), std="none")
CHANGES = torch.tensor(
    [[0.3, 0.1, 0, 0], [-0.1, 0.05, 0.25, -0.3], [0.1, -0.2, 0.05, 0], [0.4, 0, 0, 0]], dtype=torch.float64
)
LENGTHS = torch.tensor([2, 4, 3, 1])
MASK = (torch.arange(4) < LENGTHS[:, None]).double()
CONTROL = torch.zeros(4, 4, dtype=torch.bool)
CONTROL[:, 0] = True


def token_losses(changes: Tensor = CHANGES) -> Tensor:
    return clipped_surrogate(changes, torch.zeros_like(changes), ADVANTAGES, MASK)[0]


def totals(mask: Tensor = MASK, control: Tensor = CONTROL, micro_batches: int = 1) -> Totals:
    spans = torch.bincount(torch.where(control, int(Span.CONTROL), 0)[mask != 0], minlength=len(Span)).tolist()
    return Totals(rows=len(mask), units=int(mask.sum()), micro_batches=micro_batches, spans=tuple(spans))


def total(config: DeGrpoConfig, losses: Tensor, control: Tensor = CONTROL, size: int = 4) -> Tensor:
    """The loss in micro-batches of `size` rows."""
    parts = torch.arange(len(losses)).split(size)
    of_step = totals(control=control, micro_batches=len(parts))
    shares = [(losses[i] * control_coefficients(MASK[i], control[i], of_step, config)).sum() for i in parts]
    return torch.stack(shares).sum()


def test_token_losses() -> None:
    assert ADVANTAGES.tolist() == pytest.approx([1.125, 0.625, -0.875, -0.875])
    expected = [
        [-1.350000, -1.243317, 0, 0],
        [-0.565523, -0.657044, -0.750000, -0.463011],
        [0.967025, 0.716389, 0.919862, 0],
        [1.305347, 0, 0, 0],
    ]
    torch.testing.assert_close(token_losses(), torch.tensor(expected).double(), rtol=0, atol=6e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -0.246098),
        ({"control_weight": 0.0}, -0.246187),
        ({"response": "row_mean"}, -0.262047),
        ({"control_tokens": 0}, -0.112027),
    ],
)
def test_loss(options: dict[str, Any], expected: float) -> None:
    config = DeGrpoConfig(**options)
    control = CONTROL if config.control_tokens else torch.zeros_like(CONTROL)
    assert float(total(config, token_losses(), control)) == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, -0.246098), ({"response": "row_mean"}, -0.262047), ({"control_tokens": 0}, -0.112027)],
)
def test_the_loss_through_the_hooks(options: dict[str, Any], expected: float) -> None:
    """Advantages, tags, totals and coefficients of the loop, from the rewards on."""
    stack, state = MethodStack({"degrpo": DeGrpo(DeGrpoConfig(**options))}), state_of(**DeGrpo.defaults)
    batch = scored(REWARDS)
    found = combined_advantages(batch, torch.zeros(4, dtype=torch.int64), LENGTHS, state.config)
    torch.testing.assert_close(found, ADVANTAGES)
    rows = inputs_of(MASK.bool(), found, [0] * 4)
    rows = replace(rows, rollouts=stack.chain("after_rollout", rows.rollouts, state))
    coefficients = stack.aggregate(MASK, step_totals(rows, 1), rows.rollouts, state)
    loss, _ = surrogate_loss(stack, micro_of(rows, CHANGES), rows, coefficients, state)
    assert float(loss) == pytest.approx(expected, abs=6e-7)


def test_the_mean_of_the_control_tokens() -> None:
    losses = torch.where(CONTROL, token_losses(), 0.0)
    assert float(total(DeGrpoConfig(control_weight=1.0), losses)) == pytest.approx(0.089212, abs=6e-7)


@pytest.mark.parametrize(("response", "mode"), [("token_mean", "token_mean"), ("row_mean", "sequence_mean_token_mean")])
def test_without_control_tokens_it_is_grpo(response: Any, mode: Any) -> None:
    found = total(DeGrpoConfig(control_tokens=0, response=response), token_losses(), torch.zeros_like(CONTROL))
    plain = aggregate(token_losses(), MASK, totals(), mode=mode)
    assert float(found) == pytest.approx(float(plain), abs=1e-12)


def test_the_gradient_of_the_control_token_does_not_depend_on_the_length() -> None:
    leaf = torch.zeros_like(CHANGES).requires_grad_()
    (gradient,) = torch.autograd.grad(total(DeGrpoConfig(control_weight=0.01), token_losses(leaf)), leaf)
    torch.testing.assert_close(gradient[:, 0], -0.01 * ADVANTAGES / 4)
    leaf = torch.zeros_like(CHANGES).requires_grad_()
    common = total(DeGrpoConfig(control_tokens=0), token_losses(leaf), torch.zeros_like(CONTROL))
    (gradient,) = torch.autograd.grad(common, leaf)
    torch.testing.assert_close(gradient[:, 0], -ADVANTAGES / 10)


@pytest.mark.parametrize("response", ["token_mean", "row_mean"])
def test_only_the_micro_batch_form_depends_on_the_split(response: Any) -> None:
    whole = total(DeGrpoConfig(response=response), token_losses())
    for size in (1, 2, 3):
        assert float(total(DeGrpoConfig(response=response), token_losses(), size=size)) == pytest.approx(
            float(whole), abs=1e-10
        )
    config = DeGrpoConfig(response="token_mean", divisors="micro_batch")
    assert float(total(config, token_losses())) == pytest.approx(
        float(total(DeGrpoConfig(), token_losses())), abs=1e-12
    )
    assert float(total(config, token_losses(), size=2)) != pytest.approx(float(total(config, token_losses())), abs=1e-4)


@pytest.mark.parametrize("response", ["token_mean", "row_mean"])
@pytest.mark.parametrize("divisors", ["step", "micro_batch"])
def test_answers_of_one_token_and_of_none(response: Any, divisors: Any) -> None:
    """The control term alone, and an empty answer counts in no mean of control tokens."""
    mask = torch.tensor([[1.0, 0], [1, 0], [0, 0]]).double()
    control = torch.tensor([[True, False]] * 3)
    config = DeGrpoConfig(control_weight=0.5, response=response, divisors=divisors)
    found = control_coefficients(mask, control, totals(mask, control), config)
    rows = 3 if response == "row_mean" else 2
    torch.testing.assert_close(found, 0.5 * mask / rows)


def test_the_table_of_modes() -> None:
    texts = ["<short>7", "<short>8", "<think>3+4</think>7", "<think>8", "7", ""]
    modes = answer_modes(texts, "<short>", "<think>")
    assert modes.tolist() == [0, 0, 1, 1, 2, 2]
    right = torch.tensor([True, False, True, False, True, False])
    assert mode_values(modes, right, ModeRewards()).tolist() == [1.0, -1.0, 0.5, -1.0, -1.0, -1.0]
    assert mode_values(modes, right, ModeRewards(think_right=0.75))[2] == 0.75
    assert answer_modes(["#### 7", "3+4=7 #### 7"], "####", "").tolist() == [0, 1]


def test_what_other_methods_have_added_to_the_score_stays() -> None:
    """The table replaces the score, and a penalty of another method is kept; an answer without a score stays without one."""
    rewards = scored(torch.tensor([[1.0, -0.2], [0, -0.1], [torch.nan, torch.nan]]).double(), ("right", "length"))
    rewards.clean = scored([1.0, 0, torch.nan], ("right",))
    rollouts = inputs_of(torch.ones(3, 2).bool(), ADVANTAGES[:3], [0, 0, 0], texts=["<think>", "<short>", ""]).rollouts
    method = DeGrpo(DeGrpoConfig(mode_rewards=ModeRewards()))
    shaped = method.shape_rewards(rewards, rollouts, state_of(**DeGrpo.defaults))
    torch.testing.assert_close(shaped.total().double()[:2], torch.tensor([0.5 - 0.2, -1 - 0.1]).double())
    assert shaped.usable.tolist() == [True, True, False]
