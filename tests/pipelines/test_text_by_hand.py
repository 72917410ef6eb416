"""Losses and gradients of text methods against loops over rows and tokens, written from their papers' formulas (float64)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from toy_run import gradient, move, prepared, toy_trainer

from visual_grpo.loss import LossInputs
from visual_grpo.scoring import RewardSuite
from visual_grpo.trainer import Trainer

SCORES = torch.tensor([1, 0, 0, 1, 0, 0, 1, 0, *[0] * 8, *[1] * 7, 0, 1, *[0] * 7])
"""Four groups of eight: mixed, all wrong, nearly all right, nearly all wrong."""
CLIP = 0.05


def group_advantages(std: bool) -> list[float]:
    """`(r - mean) / (std + 1e-4)` with n - 1, or `r - mean`."""
    out = []
    for start in range(0, 32, 8):
        group = [float(x) for x in SCORES[start : start + 8]]
        mean = sum(group) / 8
        spread = math.sqrt(sum((x - mean) ** 2 for x in group) / 7)
        out += [0.0 if spread == 0 else (x - mean) / (spread + 1e-4 if std else 1.0) for x in group]
    return out


def token_losses(new: Tensor, old: Tensor, kept: Tensor, advantages: list[float]) -> dict[tuple[int, int], Tensor]:
    """The clipped loss of each trained token."""
    out = {}
    for i, t in kept.nonzero().tolist():
        ratio, a = (new[i, t] - old[i, t]).exp(), advantages[i]
        out[i, t] = torch.maximum(-ratio * a, -ratio.clamp(1 - CLIP, 1 + CLIP) * a)
    return out


def balanced(losses: dict[tuple[int, int], Tensor], kept: Tensor, advantages: list[float], _: Any) -> Tensor:
    """BA: token means by the sign of the advantage, mixed by the number of answers, averaged over groups."""
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, 32, 8):
        rows = range(start, start + 8)
        for side in ([i for i in rows if advantages[i] > 0], [i for i in rows if advantages[i] <= 0]):
            tokens = [losses[i, t] for i in side for t in range(kept.shape[1]) if kept[i, t]]
            if tokens:
                total = total + len(side) / 8 * torch.stack(tokens).mean()
    return total / 4


def decoupled(losses: dict[tuple[int, int], Tensor], kept: Tensor, _: Any, __: Any) -> Tensor:
    """DeGRPO as printed: the control token by its weight, the others by their mean in the row, over all rows."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(32):
        own = [losses[i, t] for t in range(kept.shape[1]) if kept[i, t]]
        if own:
            total = total + 0.3 * own[0]
        if len(own) > 1:
            total = total + torch.stack(own[1:]).mean()
    return total / 32


def shared(losses: dict[tuple[int, int], Tensor], kept: Tensor, _: Any, words: list[list[int]]) -> Tensor:
    """lambda-GRPO: each token divided by the answers of its group that begin as its own does up to it, token mean."""
    total = torch.zeros((), dtype=torch.float64)
    for (i, t), loss in losses.items():
        group = range(i // 8 * 8, i // 8 * 8 + 8)
        alike = sum(len(words[j]) > t and words[j][: t + 1] == words[i][: t + 1] for j in group)
        total = total + loss / alike
    return total / len(losses)


Formula = Callable[[dict[tuple[int, int], Tensor], Tensor, list[float], list[list[int]]], Tensor]
CASES: dict[str, tuple[Any, bool, Formula]] = {
    "balanced_aggregation": ("balanced_aggregation", True, balanced),
    "degrpo": ({"degrpo": {"response": "row_mean", "control_weight": 0.3}}, False, decoupled),
    "lambda_grpo": ("lambda_grpo", True, shared),
}


@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "truncated rows masked"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_by_hand(name: str, masked: bool, tmp_path: Path) -> None:
    """With moved weights, so that ratios differ and some are clipped; in one pass and in micro-batches of five rows."""
    method, std, formula = CASES[name]
    trainer = toy_trainer(
        tmp_path,
        method=method,
        model={"dtype": "float64"},
        self_test={"enabled": False},
        kl={"beta": 0.0},
        ratio={"clip_low": CLIP, "clip_high": CLIP},
        loss={"mask_truncated": masked},
        sampling={"max_new_tokens": 6},
    )
    rows, _ = prepared(trainer, SCORES)
    move(trainer)
    expected = by_hand(trainer, rows, std, formula)
    for size in (32, 5):
        found, loss = gradient(trainer, rows, size)
        torch.testing.assert_close(found, expected[1], rtol=0, atol=1e-10)
        assert loss == pytest.approx(expected[0], abs=1e-10)
    trainer.writer.close()


def by_hand(trainer: Trainer, rows: LossInputs, std: bool, formula: Formula) -> tuple[float, Tensor]:
    rollouts, kept = rows.rollouts, rows.rollouts.unit_mask
    assert rollouts.truncated is not None
    assert bool(rollouts.truncated.any())
    new = trainer.policy.log_prob(rollouts, torch.arange(rollouts.num_units)).value
    advantages = group_advantages(std)
    assert rollouts.old_log_prob is not None
    losses = token_losses(new, rollouts.old_log_prob, kept, advantages)
    ids, stop = rollouts.data["completion_ids"].tolist(), 10
    words = [row[: row.index(stop) + 1] if stop in row else row for row in ids]
    loss = formula(losses, kept, advantages, words)
    grads = torch.autograd.grad(loss, list(trainer.policy.trainable.values()), allow_unused=True)
    return loss.item(), torch.cat([g.flatten() for g in grads if g is not None])


@pytest.mark.parametrize("least", [2.0**-10, 2.0**40], ids=["scaled", "overflows at first"])
def test_small_coefficients_survive_float16(least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A divisor of 1e8 leaves the gradient of a divisor of 1, smaller by 1e8: float16 alone would round it to 0."""
    monkeypatch.setattr("visual_grpo.loss.UNIT_SCALE", least)
    norms = []
    for divisor in (1, 10**8):
        (tmp_path / str(divisor)).mkdir()
        trainer = toy_trainer(
            tmp_path / str(divisor),
            model={"dtype": "float16"},
            self_test={"enabled": False},
            loss={"aggregation": "fixed_length", "max_length": divisor},
        )
        trainer.suite = RewardSuite(
            {"test": {"reward": lambda completions, **_: [float(len(c) < 2) for c in completions]}}
        )
        trainer.iteration()
        (metrics,) = [record["metrics"] for record in trainer.writer.folder.read_metrics("train")]
        trainer.suite.close()
        trainer.writer.close()
        norms.append(metrics["grad_norm"] * divisor)
    assert norms[0] > 1e-2
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)
