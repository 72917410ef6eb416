"""DAPO through the loop, on the toy adapter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.scoring import RewardSuite

_spec = importlib.util.spec_from_file_location("toy_run", Path(__file__).parents[1] / "core" / "toy_run.py")
assert _spec is not None
assert _spec.loader is not None
toy_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy_run)


def first_digit_of_even_prompts(prompts: list[str], completions: list[str]) -> list[float]:
    """Groups of odd prompts are flat: dynamic sampling must replace them."""
    return [
        float((c[:1] or "0") < "5") if int(p.split()[1]) % 2 == 0 else 0.0
        for p, c in zip(prompts, completions, strict=True)
    ]


def collect(trainer: Any, reward: Any) -> Any:
    trainer.suite = RewardSuite({"test": {"reward": reward}})
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards = trainer.stack.shaped(rewards, rollouts, trainer.state)
    return trainer.stack.after_score(rollouts, rewards, trainer.state)


def test_flat_groups_are_replaced_until_the_batch_is_full(tmp_path: Path) -> None:
    trainer = toy_run.toy_trainer(tmp_path, method=[{"dapo": {"max_tries": 6}}])
    rollouts, rewards = collect(trainer, first_digit_of_even_prompts)
    trainer.writer.close()
    assert len(torch.unique(rollouts.group_ids)) == 4
    assert all(int(p.split()[1]) % 2 == 0 for p in rollouts.prompts.prompts)
    total = rewards.total()
    for group in torch.unique(rollouts.group_ids):
        rows = rollouts.group_ids == group
        assert int(rows.sum()) == 8
        assert float(total[rows].max() - total[rows].min()) > 0
    assert len(set(rollouts.prompts.row_ids.tolist())) == len(rollouts), "refilled rows need noise of their own"


def test_the_tries_are_bounded(tmp_path: Path) -> None:
    """A reward that never differs ends the search; nothing is trained and nothing hangs."""
    trainer = toy_run.toy_trainer(tmp_path, method=[{"dapo": {"max_tries": 3}}])
    rollouts, _ = collect(trainer, lambda prompts, completions: [1.0] * len(prompts))
    trainer.writer.close()
    assert len(rollouts) == 0
    assert trainer.source.cursor == 3 * 4


def test_flatness_is_judged_on_the_clean_score(tmp_path: Path) -> None:
    """Lengths differ, so the shaped rewards differ; the group is flat all the same."""
    trainer = toy_run.toy_trainer(tmp_path, method=[{"dapo": {"max_tries": 1, "overlong_cache": 3}}])
    rollouts, _ = collect(trainer, lambda prompts, completions: [1.0] * len(prompts))
    trainer.writer.close()
    assert len(rollouts) == 0


def test_overlong_penalty(tmp_path: Path) -> None:
    """Limit 3, cache 3: 1 token -1/3, 2 tokens -2/3, 3 tokens -1; a truncated answer counts as beyond the limit."""
    trainer = toy_run.toy_trainer(tmp_path, method=[{"dapo": {"dynamic_sampling": False, "overlong_cache": 3}}])
    trainer.suite = RewardSuite({"test": {"reward": lambda prompts, completions: [0.0] * len(prompts)}})
    rollouts, clean = trainer.collect(trainer._draw())
    shaped = trainer.stack.shaped(clean, rollouts, trainer.state)
    trainer.writer.close()
    length = torch.where(rollouts.truncated, 4, rollouts.unit_mask.sum(1))
    wanted = torch.where(length > 3, torch.tensor(-1.0), -length / 3)
    torch.testing.assert_close(shaped.total(), wanted.float())
    assert shaped.clean is clean
    assert len(set(length.tolist())) > 1


def test_the_cache_must_fit_the_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"overlong_cache \(9\) must be at most sampling.max_new_tokens \(3\)"):
        toy_run.toy_trainer(tmp_path, method=[{"dapo": {"overlong_cache": 9}}])


def test_empty_batch_is_skipped_with_an_alarm(tmp_path: Path) -> None:
    trainer = toy_run.toy_trainer(tmp_path, method=["dapo"], self_test={"enabled": False})
    trainer.suite = RewardSuite({"test": {"reward": lambda prompts, completions: [1.0] * len(prompts)}})
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    trainer.iteration()
    names = [r["name"] for r in trainer.writer.folder.read_metrics("alarm")]
    trainer.writer.close()
    assert all(torch.equal(before[k], v) for k, v in trainer.policy.trainable.items())
    assert names, "a step without a live group must be told"
