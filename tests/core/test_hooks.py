"""What the loop hands to hooks, and when: the clean scores, figures, the KL's factor, settled rows, coefficients of the terms."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from loss_rows import inputs_of, mask_of, micro_of, rollouts_of, scored, state_of
from toy_run import toy_trainer

from visual_grpo.aggregation import Totals, aggregation_coefficients
from visual_grpo.combination import judged
from visual_grpo.loss import LossInputs, regularisers, surrogate_loss
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.metrics import Stats, flat_rows
from visual_grpo.stack import MethodStack
from visual_grpo.types import RewardBatch


class Doubled(Method[MethodConfig]):
    """Shapes the rewards, and notes the clean ones that it sees."""

    def __init__(self) -> None:
        super().__init__(MethodConfig())
        self.seen: Any = None

    def shape_rewards(self, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        self.seen = rewards.clean
        return replace(rewards, values=2 * rewards.values)


def test_each_shaping_method_sees_the_clean_scores() -> None:
    first, second = Doubled(), Doubled()
    clean = scored([0.0, 1.0])
    out = MethodStack({"a": first, "b": second}).shaped(clean, rollouts_of(mask_of([1, 1]), [0, 0]), state_of())
    assert first.seen is clean
    assert second.seen is clean
    assert out.clean is clean
    assert out.total().tolist() == [0.0, 4.0]
    assert MethodStack({}).shaped(clean, rollouts_of(mask_of([1, 1]), [0, 0]), state_of()) is clean


def test_noise_does_not_hide_a_flat_group() -> None:
    clean = scored([1.0, 1.0, 0.0, 1.0])
    noisy = replace(clean, values=clean.values + torch.tensor([[0.1], [0.2], [0.3], [0.4]]).double(), clean=clean)
    ids = torch.tensor([4, 4, 9, 9])
    assert not bool(flat_rows(noisy, ids, state_of(), Stats()).any())  # shaped, but not by noise
    marked = replace(noisy, noisy=True)
    assert flat_rows(marked, ids, state_of(), Stats()).tolist() == [True, True, False, False]
    assert judged(marked) is clean
    assert RewardBatch.concat([marked, marked]).noisy
    assert marked.select(torch.tensor([0])).noisy


def test_the_kl_is_scaled_and_weighted() -> None:
    """Divergence 0.1 on each of five tokens, two of weight 0.5."""
    mask = mask_of([2, 3])
    rows = inputs_of(mask, torch.ones(2).double(), [0, 0])
    rows.weights[0] = 0.5
    micro = micro_of(rows, torch.full((2, 3), 0.1, dtype=torch.float64), reference=torch.zeros(2, 3).double())
    coefficients = aggregation_coefficients(mask.double(), Totals.of_mask(mask), mode="token_mean")
    for weighted, scale, expected in ((False, 1.0, 0.05), (False, 0.5, 0.025), (True, 1.0, 0.04), (True, 3.0, 0.12)):
        state = state_of(kl={"beta": 0.5, "estimator": "k1", "weighted": weighted})
        state.kl_scale = scale
        total, _ = regularisers(MethodStack({}), micro, rows, coefficients, state)
        assert float(total) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("on_policy", [True, False])
def test_importance_makes_the_gradient_of_the_estimate_that_of_the_kl(on_policy: bool) -> None:
    """All tokens of a categorical, each with its share of samples in place of samples; k3 alone has another gradient."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    now = logits.log_softmax(0)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    old = now.detach() if on_policy else torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    kl = (now.exp() * (now - ref)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    mask = mask_of([3])
    rows = inputs_of(mask, torch.ones(1).double(), [0])
    micro = micro_of(rows, now[None], reference=ref[None])
    micro.old_log_prob = old[None]
    found = {}
    for importance in (False, True):
        state = state_of(kl={"beta": 1.0, "estimator": "k3", "importance": importance})
        total, _ = regularisers(MethodStack({}), micro, rows, old.exp()[None], state)
        (found[importance],) = torch.autograd.grad(total, logits, retain_graph=True)
        if importance:
            torch.testing.assert_close(total, kl, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[True], exact, rtol=0, atol=1e-12)
    assert float((found[False] - exact).abs().max()) > 1e-2


def test_answers_that_the_policy_has_left_are_not_pushed_down_further() -> None:
    """Mean old minus new log-prob 0.3, 0.3 and 0.05; of the two with a negative advantage only the far one goes."""
    mask = mask_of([2, 3, 2])
    rows = inputs_of(mask, torch.tensor([-1.0, 1.0, -1.0]).double(), [0, 0, 0])
    log_prob = torch.tensor([[-0.6, 0.0, 9.0], [-0.3, -0.3, -0.3], [0.0, -0.1, 9.0]]).double().requires_grad_()
    coefficients = aggregation_coefficients(mask.double(), Totals.of_mask(mask), mode="token_mean")
    found = {}
    for limit in (None, 0.2):
        state = state_of(loss={"off_policy_max": limit})
        state.on_policy = False
        loss, figures = surrogate_loss(MethodStack({}), micro_of(rows, log_prob), rows, coefficients, state)
        (found[limit],) = torch.autograd.grad(loss, log_prob)
    assert (found[None][0, :2] != 0).any()
    assert (found[0.2][0] == 0).all()
    torch.testing.assert_close(found[0.2][1:], found[None][1:], rtol=0, atol=0)
    share, count = figures["off_policy_fraction"]
    assert (float(share), float(count)) == (2, 7)


class Watched(Method[MethodConfig]):
    """Fills the hooks and notes what it is given."""

    def __init__(self) -> None:
        super().__init__(MethodConfig())
        self.rows: list[LossInputs] = []
        self.scales: list[float] = []

    def unit_weights(self, weights: Any, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        state.log({"watched/rows": (torch.tensor(3.0), torch.tensor(2.0))})
        self.scales.append(state.kl_scale)
        return weights

    def kl_scale(self, scale: float, rewards: Any, rollouts: Any, state: LoopState) -> float:
        return scale * 0.25

    def before_updates(self, rows: Any, rewards: Any, state: LoopState) -> Any:
        assert len(rows) == len(rewards)
        state.log({"watched/settled": (torch.tensor(float(len(rows))), torch.tensor(1.0))})
        self.rows.append(rows)
        mark = torch.arange(len(rows))
        return replace(rows, rollouts=replace(rows.rollouts, data={**rows.rollouts.data, "mark": mark}))

    def regulariser_coefficients(self, coefficients: Any, mask: Any, totals: Any, rollouts: Any, state: Any) -> Any:
        assert len(rollouts.data["mark"]) == len(mask)
        self.scales.append(state.kl_scale)
        return coefficients


def half(prompts: list[str], completions: list[str]) -> list[float]:
    """Groups of odd prompts are flat."""
    return [
        float((text[:1] or "9") < "5") if int(p[4:]) % 2 == 0 else 0.0
        for p, text in zip(prompts, completions, strict=True)
    ]


def test_hooks_in_a_step(tmp_path: Path) -> None:
    """Figures reach the metrics (those of the self-test do not); rows are those that are trained."""
    from visual_grpo.scoring import RewardSuite

    trainer = toy_trainer(tmp_path, kl={"beta": 0.5}, advantage={"drop_flat": True})
    trainer.suite = RewardSuite({"test": {"reward": half}})
    watched = Watched()
    trainer.stack.methods["watched"] = watched
    trainer.iteration()
    (metrics,) = [r["metrics"] for r in trainer.writer.folder.read_metrics("train")]
    trainer.writer.close()
    assert metrics["watched/rows"] == 1.5
    probe, rows = watched.rows
    assert metrics["watched/settled"] == len(rows) == metrics["rows"] < 32
    assert len(probe) == 16
    assert set(watched.scales) == {1.0, 0.25}
    index = rows.rollouts.prompts.tags["index"].tolist()
    assert [trainer.source.rows[i].prompt for i in index] == rows.rollouts.prompts.prompts
