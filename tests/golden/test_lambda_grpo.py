"""Worked example of lambda-GRPO, float64, and the process sets of random words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from loss_rows import inputs_of, mask_of, micro_of, rollouts_of, scored, state_of

from visual_grpo.advantages import group_advantages
from visual_grpo.aggregation import Totals, aggregate, aggregation_coefficients
from visual_grpo.errors import UserError
from visual_grpo.loss import regularisers, surrogate_loss
from visual_grpo.method import MethodConfig
from visual_grpo.pipelines.text.lambda_grpo import LambdaGrpo, sharing_counts
from visual_grpo.stack import MethodStack

IDS = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 7], [1, 8, 0, 0], [9, 9, 9, 0]])
LENGTHS = torch.tensor([3, 4, 2, 3])
MASK = mask_of(LENGTHS.tolist())
GROUP = torch.zeros(4, dtype=torch.int64)
ADVANTAGES = group_advantages(torch.tensor([1, 0, 1, 0]).double(), GROUP)


def close(actual: Tensor, expected: Tensor | list[float] | float) -> None:
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def weights(mask: Tensor = MASK, ids: Tensor = IDS, groups: list[int] | None = None) -> Tensor:
    rollouts = rollouts_of(mask, groups or [0] * len(ids), data={"completion_ids": ids})
    ones = torch.ones(mask.shape)
    return LambdaGrpo(MethodConfig()).unit_weights(ones, scored([0.0] * len(ids)), rollouts, state_of())


def test_weights() -> None:
    close(ADVANTAGES, [0.865875, -0.865875, 0.865875, -0.865875])
    third = 0.333333
    expected = [[third, 0.5, 1, 1], [third, 0.5, 1, 1], [third, 1, 1, 1], [1, 1, 1, 1]]
    found = weights()
    close(found[MASK], torch.tensor(expected)[MASK])
    assert not found.requires_grad
    coefficient = -found * ADVANTAGES[:, None]
    a = 0.865875
    close(coefficient[0, :3], [-0.288625, -0.432938, -a])
    close(coefficient[1], [0.288625, 0.432938, a, a])
    close(coefficient[2, :2], [-0.288625, -a])
    close(coefficient[3, :3], [a, a, a])


@pytest.mark.parametrize(
    ("mode", "expected", "plain"),
    [("token_mean", 0.192417, 0.144313), ("sequence_mean_token_mean", 0.093202, 0.0)],
)
def test_losses(mode: str, expected: float, plain: float) -> None:
    unit = -ADVANTAGES[:, None].expand(4, 4)
    totals = Totals.of_mask(MASK)
    assert int(totals.units) == 12
    close(aggregate(unit, MASK, totals, mode=mode, weights=weights()), expected)
    close(aggregate(unit, MASK, totals, mode=mode), plain)


@pytest.mark.parametrize(
    ("mode", "expected"), [(None, 0.192417), ("token_mean", 0.192417), ("sequence_mean_token_mean", 0.093202)]
)
def test_losses_and_gradients_through_the_loop(mode: str | None, expected: float) -> None:
    """The weights reach the loss and not its divisors; without a mode, by the method's own default."""
    own = {**LambdaGrpo.defaults, **({} if mode is None else {"loss": {"aggregation": mode}})}
    stack, state = MethodStack({"lambda_grpo": LambdaGrpo(MethodConfig())}), state_of(**own)
    rows = inputs_of(MASK, ADVANTAGES, [0] * 4, data={"completion_ids": IDS})
    rows.weights = stack.chain("unit_weights", rows.weights, scored([1.0, 0, 1, 0]), rows.rollouts, state)
    now = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    coefficients = stack.aggregate(MASK.double(), Totals.of_mask(MASK), rows.rollouts, state)
    loss, _ = surrogate_loss(stack, micro_of(rows, now), rows, coefficients, state)
    close(loss.detach(), expected)
    loss.backward()
    divisor = 12 if mode != "sequence_mean_token_mean" else 4 * LENGTHS[:, None]
    close(now.grad, torch.where(MASK, -ADVANTAGES[:, None] * weights() / divisor, 0.0))


@pytest.mark.parametrize(("weighted", "expected"), [(True, 0.003), (False, 0.004)])
def test_the_kl_is_weighted_too(weighted: bool, expected: float) -> None:
    """A divergence of 0.1 on each of twelve tokens, beta 0.04; the weights sum to 9."""
    close(weights()[MASK].sum(), 9.0)
    assert LambdaGrpo.defaults["kl"] == {"weighted": True}
    state = state_of(kl={"beta": 0.04, "estimator": "k1", "weighted": weighted})
    rows = inputs_of(MASK, ADVANTAGES, [0] * 4)
    rows.weights = weights()
    micro = micro_of(rows, torch.full((4, 4), 0.1).double(), reference=torch.zeros(4, 4).double())
    coefficients = aggregation_coefficients(MASK.double(), Totals.of_mask(MASK), mode="token_mean")
    close(regularisers(MethodStack({}), micro, rows, coefficients, state)[0], expected)


def walk(rows: list[list[int]]) -> list[list[int]]:
    """Counts by plain comparison of beginnings."""
    return [[sum(other[: t + 1] == row[: t + 1] for other in rows) for t in range(len(row))] for row in rows]


def test_the_vectorised_counts_agree_with_a_plain_walk() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = torch.randint(0, 6, (14,), generator=generator)
        ids = torch.randint(0, 3, (14, 5), generator=generator)
        groups = torch.randint(0, 3, (14,), generator=generator)
        counts = sharing_counts(ids, lengths, groups)
        for g in range(3):
            rows = torch.nonzero(groups == g).flatten().tolist()
            wanted = walk([ids[i, : lengths[i]].tolist() for i in rows])
            assert [counts[i, : lengths[i]].tolist() for i in rows] == wanted


def test_no_shared_beginning_is_grpo_bit_for_bit() -> None:
    distinct = torch.tensor([[1, 5], [2, 5], [3, 5], [4, 5]])
    assert torch.equal(weights(torch.ones(4, 2, dtype=torch.bool), distinct), torch.ones(4, 2).double())


def test_identical_answers_weigh_one_over_the_group() -> None:
    close(weights(torch.ones(5, 3, dtype=torch.bool), torch.full((5, 3), 7)), torch.full((5, 3), 0.2))


def test_an_answer_that_begins_another() -> None:
    """They share up to the end of the shorter; the longer goes on alone. Another group does not matter."""
    ids = torch.tensor([[1, 2, 3], [1, 2, 0], [1, 2, 3]])
    found = weights(mask_of([3, 2, 0], 3), ids, [0, 0, 0])
    close(found[0], [0.5, 0.5, 1.0])
    close(found[1, :2], [0.5, 0.5])
    close(found[2], [1.0, 1.0, 1.0])  # an empty answer shares nothing
    close(weights(mask_of([3, 2, 3], 3), ids, [0, 1, 2]), torch.ones(3, 3))


def test_a_token_that_is_not_trained_belongs_to_the_beginning() -> None:
    mask = torch.tensor([[True, False, True], [True, False, True]])
    close(weights(mask, torch.tensor([[1, 5, 2], [1, 6, 2]]))[mask], [0.5, 1.0, 0.5, 1.0])


def test_tokens_of_one_scale_do_not_follow_one_another() -> None:
    """Scale 0 has one token, scale 1 two: with an equal scale 0 each token of scale 1 is compared alone."""
    ids = torch.tensor([[1, 2, 3], [1, 9, 3], [4, 2, 3]])
    scale = torch.tensor([[0, 1, 1]] * 3)
    found = sharing_counts(ids, torch.tensor([3, 3, 3]), torch.zeros(3, dtype=torch.int64), scale)
    assert found.tolist() == [[2, 1, 2], [2, 1, 2], [1, 1, 1]]
    plain = sharing_counts(ids, torch.tensor([3, 3, 3]), torch.zeros(3, dtype=torch.int64))
    assert plain.tolist() == [[2, 1, 1], [2, 1, 1], [1, 1, 1]]


def test_rows_without_token_ids_are_refused() -> None:
    rollouts = rollouts_of(MASK, [0] * 4)
    with pytest.raises(UserError, match="compares token ids, and adapter 'toy' keeps none"):
        LambdaGrpo(MethodConfig()).unit_weights(torch.ones(4, 4), scored([0.0] * 4), rollouts, state_of())


def test_no_row_at_all() -> None:
    empty = rollouts_of(torch.zeros(0, 3, dtype=torch.bool), [], data={"completion_ids": torch.zeros(0, 3).long()})
    found = LambdaGrpo(MethodConfig()).unit_weights(torch.ones(0, 3), scored([]), empty, state_of())
    assert found.shape == (0, 3)
