"""Every flow method with every small member: each does to the method's step what it does to any other, on a toy flow model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from toy_flow import SCORES, flow_trainer, gradient, move

from visual_grpo.metrics import Stats
from visual_grpo.trainer import EMA, Trainer


def captions(prompt: str, images: Tensor, count: int) -> list[str]:
    """Two more prompts a picture, which the toy's encoder tells apart."""
    return [f"{prompt}{'!' * (i + 1)}" for i in range(count)]


METHODS: dict[str, list[Any]] = {
    "flow_grpo": ["flow_grpo"],
    "flow_grpo_fast": [{"flow_grpo": {"window": 2, "window_high": 2}}],
    "dancegrpo": ["dancegrpo"],
    "mixgrpo": ["mixgrpo"],
    "diffusion_nft": ["diffusion_nft"],
    "v_grpo": ["v_grpo"],
    "vipo": ["flow_grpo", {"vipo": {"maps": "colours", "patch": 1}}],
    "mv_grpo": ["flow_grpo", {"mv_grpo": {"enhancer": "test_flow_members:captions", "captions": 2}}],
}
PLAIN = {"advantage": {"drop_flat": False, "clip": 5.0}, "kl": {"beta": 0.0}}
HALF_FLAT = torch.cat([torch.full((4,), 0.5), SCORES[4:]])


@pytest.fixture(params=METHODS)
def make(request: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[Trainer] = []

    def build(*members: Any, **over: Any) -> Trainer:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(flow_trainer(folder, [*METHODS[request.param], *members], **(PLAIN | over)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.suite.close()
        trainer.writer.close()


def views(trainer: Trainer) -> int:
    """Rows that a picture becomes."""
    return 3 if "mv_grpo" in trainer.stack.methods else 1


def rows_of(trainer: Trainer, scores: Tensor = SCORES) -> tuple[Any, Tensor]:
    """Rows to train and the advantages of all rows, for given rewards of the pictures under every caption."""
    rollouts, rewards = trainer.collect(trainer._draw())
    rollouts, rewards = trainer.stack.after_score(rollouts, rewards, trainer.state)
    rewards.values = scores[rollouts.prompts.row_ids][:, None]
    return trainer.prepare(rollouts, rewards, Stats())


def moved_gradient(trainer: Trainer) -> Tensor:
    rows, _ = rows_of(trainer)
    move(trainer)
    return gradient(trainer, rows)[0]


def test_kl_adds_a_term_in_proportion_to_its_weight(make: Any) -> None:
    none, one, two = (moved_gradient(make(kl={"beta": beta})) for beta in (0.0, 0.5, 1.0))
    assert float((one - none).abs().max()) > 1e-8
    torch.testing.assert_close(two - none, 2 * (one - none), rtol=1e-6, atol=1e-12)


def test_averaged_weights_follow_the_trained_ones(make: Any) -> None:
    trainer = make(train={"ema": {"decay": 0.5, "every": 1}})
    before = {name: value.detach().clone() for name, value in trainer.policy.trainable.items()}
    trainer.iteration()
    trainer.iteration()
    with trainer.policy.weights(EMA):
        averaged = {name: value.detach().clone() for name, value in trainer.policy.trainable.items()}
    moved = [name for name, value in trainer.policy.trainable.items() if not torch.equal(value, before[name])]
    assert moved
    for name in moved:
        assert not torch.equal(averaged[name], trainer.policy.trainable[name])
        assert not torch.equal(averaged[name], before[name])


def test_soft_clip_bounds_the_advantages(make: Any) -> None:
    free = rows_of(make())[1]
    bound = rows_of(make(advantage=PLAIN["advantage"] | {"soft_clip": 0.7}))[1]
    assert float(free.abs().max()) > 0.7
    assert float(bound.abs().max()) <= 0.7


def test_flat_groups_are_dropped(make: Any) -> None:
    kept, dropped = make(), make(advantage={"drop_flat": True, "clip": 5.0})
    assert len(rows_of(kept, HALF_FLAT)[0]) == 8 * views(kept)
    rows, advantages = rows_of(dropped, HALF_FLAT)
    assert len(rows) == 4 * views(dropped)
    assert len(advantages) == 8 * views(dropped)
    assert bool(
        (rows.advantages.flatten(1).abs().amax(1) > 0).all()
        if rows.advantages.ndim > 1
        else (rows.advantages != 0).any()
    )


def test_best_of_n_trains_the_ends(make: Any) -> None:
    trainer = make({"best_of_n": {"keep": 2}})
    rows, _ = rows_of(trainer)
    assert len(rows) == 4 * views(trainer)
    if views(trainer) == 1:
        assert rows.rollouts.prompts.row_ids.tolist() == [0, 3, 4, 5]
    assert float(gradient(trainer, rows)[0].abs().max()) > 0


def test_gdpo_normalises_each_reward_by_itself(make: Any) -> None:
    """A reward a thousand times as large does not drown the other: its scale leaves the gradient."""
    found = []
    for scale in (1.0, 1000.0):
        trainer = make("gdpo", rewards={"a": {"reward": "brightness"}, "b": {"reward": "brightness"}})
        rollouts, rewards = trainer.collect(trainer._draw())
        rollouts, rewards = trainer.stack.after_score(rollouts, rewards, trainer.state)
        assert trainer.config.combine.how == "gdpo"
        values = torch.stack([SCORES, scale * SCORES.flip(0).square()], dim=1)
        rewards.values = values[rollouts.prompts.row_ids]
        found.append(trainer.stack.advantages(rewards, rollouts, trainer.state))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-3)
