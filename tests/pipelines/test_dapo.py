"""DAPO through the loop, on the toy adapter."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
import toy_run

from visual_grpo.advantages import group_advantages, overlong_penalty
from visual_grpo.api import plan
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import PromptBatch


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


def test_a_row_that_nothing_scored_gets_no_penalty(tmp_path: Path) -> None:
    """No gold answer: the row has no reward, clean or shaped, and an advantage of 0 however long it is."""
    trainer = toy_run.toy_trainer(tmp_path, method=[{"dapo": {"dynamic_sampling": False, "overlong_cache": 3}}])
    even = [int(row.prompt.split()[1]) % 2 == 0 for row in trainer.source.rows]
    assert any(even)
    assert not all(even)
    trainer.suite = RewardSuite(
        {"test": {"reward": lambda prompts, completions: [0.0 if int(p[4:]) % 2 == 0 else None for p in prompts]}}
    )
    rollouts, clean = trainer.collect(trainer._draw())
    shaped = trainer.stack.shaped(clean, rollouts, trainer.state)
    advantages = trainer.stack.advantages(shaped, rollouts, trainer.state)
    trainer.writer.close()
    unscored = torch.tensor([int(p.split()[1]) % 2 == 1 for p in rollouts.prompts.prompts])
    assert bool(unscored.any())
    assert bool((~unscored).any())
    assert torch.equal(shaped.usable, ~unscored)
    assert bool(shaped.total()[unscored].isnan().all())
    assert bool((advantages[unscored] == 0).all())
    assert bool((advantages[~unscored] != 0).any())


def test_the_recipe_weighs_the_penalty_as_the_paper() -> None:
    """Equation 7 scores -1 or 1, so a penalty of -1 is half the distance of right and wrong; math_verify scores 0 or 1."""
    (method,) = plan("dapo_qwen2_5_7b").config.method
    weight = method["dapo"]["overlong_weight"]
    right, length = torch.tensor([1.0, 1, 0, 0]), torch.tensor([100, 18432, 16384, 20481])
    penalty, ids = overlong_penalty(length, 20480, 4096), torch.zeros(4, dtype=torch.int64)
    ours = group_advantages((right + weight * penalty).double(), ids, eps=0.0)
    papers = group_advantages((2 * right - 1 + penalty).double(), ids, eps=0.0)
    torch.testing.assert_close(ours, papers)


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


class Polite(Method[MethodConfig]):
    """Changes every prompt before it is sampled."""

    def before_rollout(self, prompts: PromptBatch, state: LoopState) -> PromptBatch:
        """Add a word."""
        return replace(prompts, prompts=[f"{prompt} please" for prompt in prompts.prompts])


def test_refilled_prompts_pass_the_hooks_of_the_stack(tmp_path: Path) -> None:
    """What a member does before the rollout holds for the prompts that replace flat groups, and once for each."""
    trainer = toy_run.toy_trainer(tmp_path, method=[{"dapo": {"max_tries": 6}}, "test_dapo:Polite"])
    rollouts, _ = collect(trainer, first_digit_of_even_prompts)
    trainer.writer.close()
    assert trainer.source.cursor > 4, "nothing was refilled"
    assert len(torch.unique(rollouts.group_ids)) == 4
    words = [prompt.split() for prompt in rollouts.prompts.prompts]
    assert [(first, last) for first, _, *last in words] == [("say", ["please"])] * len(words)
