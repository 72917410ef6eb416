"""Worked example of REAL, float64: losses, gradients, variants; and its degenerate prompts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.aggregation import Totals
from visual_grpo.errors import RunError
from visual_grpo.pipelines.text.real import Form, Real, RealConfig, class_labels, row_losses
from visual_grpo.types import LogProb, MicroBatch, PromptBatch, RolloutBatch

CHANGES = [
    [0.2, 0.4, 0, 0],
    [-0.3, 0.1, -0.1, 0],
    [0.05, 0.05, 0.2, 0],
    [0.3, 0.1, 0, 0],
    [0.7, 0, 0, 0],
    [-0.2, 0.1, 0, 0],
]
LENGTHS = torch.tensor([2, 3, 3, 2, 1, 2])
IDS = torch.tensor([0, 0, 0, 0, 1, 1])
SCORES = torch.tensor([1.0, 0, 1, 0, 0, 0])


def example(changes: Tensor, *, form: Form = "anchored", scores: Tensor = SCORES, lengths: Tensor = LENGTHS) -> Tensor:
    """The loss of both prompts, through the method's own hooks."""
    rows = len(changes)
    mask = torch.arange(4) < lengths[:, None]
    prompts = PromptBatch(
        prompts=[""] * rows, metadata=[{} for _ in range(rows)], group_ids=IDS[:rows], row_ids=torch.arange(rows)
    )
    rollouts = RolloutBatch(prompts=prompts, unit_kind="token", unit_mask=mask)
    labels = class_labels(scores, IDS[:rows], mask.any(1))
    method, state = Real(RealConfig(form=form)), Any
    micro = MicroBatch(
        rollouts=rollouts,
        units=torch.arange(4),
        advantages=labels[:, None],
        mask=mask.double(),
        log_prob=LogProb(value=changes),
        old_log_prob=torch.zeros_like(changes),
    )
    unit_loss, _ = method.surrogate(micro, state)
    totals = Totals(rows=rows, units=int(mask.sum()), groups=2, live_rows=int((labels != 0).sum()))
    return (unit_loss * method.aggregate(mask.double(), totals, rollouts, state)).sum()


def changes(factor: float = 1.0) -> Tensor:
    return (torch.tensor(CHANGES, dtype=torch.float64) * factor).requires_grad_()


def test_loss_and_gradient() -> None:
    given = changes()
    loss = example(given)
    assert loss.item() == pytest.approx(1.029484, abs=6e-7)
    (gradient,) = torch.autograd.grad(loss, given)
    rows = torch.tensor([-0.115903, 0.082436, -0.115272, 0.225313, 0, 0], dtype=torch.float64)
    expected = rows[:, None] * (torch.arange(4) < LENGTHS[:, None])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=6e-7)
    bound = 1 / (0.5 * 2)
    assert float((gradient.sum(1)).abs().max()) < bound


def test_both_parts_of_the_loss() -> None:
    """The other class far on its own side leaves log(1 + 0)."""
    labels, ids = torch.tensor([1.0, -1, 1, -1]), torch.zeros(4, dtype=torch.int64)
    for logits, part in (([0.3, -1e3, 0.1, -1e3], 0.861852), ([1e3, -0.1, 1e3, 0.2], 1.197116)):
        found = row_losses(torch.tensor(logits).double(), labels, ids, temperature=0.5, form="anchored").sum()
        assert float(found) == pytest.approx(part, abs=6e-7)


def test_first_update() -> None:
    """Unmoved weights: the loss is no measure of progress, and the gradient is 1 / (tau (1 + rows of the class))."""
    given = changes(0.0)
    loss = example(given)
    assert loss.item() == pytest.approx(1.098612, abs=6e-7)
    (gradient,) = torch.autograd.grad(loss, given)
    torch.testing.assert_close(gradient.sum(1)[:4], torch.tensor([-1.0, 1.0, -1.0, 1.0]).double() / (0.5 * 3) / 2)


@pytest.mark.parametrize(("form", "expected"), [("bce", 0.636695), ("product", 0.712731)])
def test_variants(form: Form, expected: float) -> None:
    assert example(changes(), form=form).item() == pytest.approx(expected, abs=6e-7)


def test_one_right_and_one_wrong_answer() -> None:
    logits = torch.tensor([0.3, -0.2], dtype=torch.float64)
    found = row_losses(logits, torch.tensor([1.0, -1]), torch.tensor([0, 0]), temperature=0.5, form="anchored").sum()
    assert float(found) == pytest.approx(
        float((1 + (-logits[0] / 0.5).exp()).log() + (1 + (logits[1] / 0.5).exp()).log())
    )


def test_a_loss_of_two_passes_has_the_same_gradient() -> None:
    """First the logits of all rows without gradient, then each row by its coefficient."""
    given = changes()
    (direct,) = torch.autograd.grad(example(given), given)
    leaf = changes()
    (coefficient,) = torch.autograd.grad(example(leaf), leaf)
    again = changes()
    (twice,) = torch.autograd.grad((coefficient.detach() * again).sum(), again)
    torch.testing.assert_close(direct, twice, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["anchored", "bce", "product"])
def test_prompts_without_both_classes(form: Form) -> None:
    given = changes()
    for scores in (torch.zeros(6), torch.ones(6)):
        loss = example(given, form=form, scores=scores)
        assert loss.item() == 0.0
        (gradient,) = torch.autograd.grad(loss, given)
        assert bool((gradient == 0).all())


@pytest.mark.parametrize("form", ["anchored", "bce", "product"])
def test_an_answer_without_tokens_and_a_graded_one_belong_to_no_class(form: Form) -> None:
    lengths = torch.tensor([2, 3, 0, 2, 1, 2])
    without = example(changes(), form=form, lengths=lengths)
    for value in (torch.nan, 0.4):
        scores = torch.tensor([1.0, 0, value, 0, 0, 0])
        assert example(changes(), form=form, scores=scores).item() == pytest.approx(without.item())
    given = changes()
    (gradient,) = torch.autograd.grad(example(given, form=form, lengths=lengths), given)
    assert torch.isfinite(gradient).all()
    assert bool((gradient[2] == 0).all())


@pytest.mark.parametrize("form", ["anchored", "bce", "product"])
def test_far_logits_do_not_overflow(form: Form) -> None:
    given = changes(1000.0)
    loss = example(given, form=form)
    (gradient,) = torch.autograd.grad(loss, given)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert loss.item() >= 100


def test_groups_of_any_size() -> None:
    labels = class_labels(torch.tensor([1.0, 0, 0, 1, 0, 1]), torch.tensor([3, 3, 3, 0, 0, 7]), torch.ones(6).bool())
    assert labels.tolist() == [1, -1, -1, 1, -1, 0]


def test_graded_rewards_are_refused() -> None:
    with pytest.raises(
        RunError, match=r"real needs rewards of 0 and 1 as labels; this step's are graded, from 0\.2 to 0\.7"
    ):
        class_labels(torch.tensor([0.2, 0.7]), torch.zeros(2, dtype=torch.int64), torch.ones(2).bool())
