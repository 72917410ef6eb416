"""MixGRPO, DanceGRPO, best-of-N and GDPO through the loop on a toy flow model: identities, state, degenerate batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from killed_run import KILLED, assert_same_run, finish, output
from test_processes import assert_close_runs, pair
from toy_flow import SCORES, flow_config, flow_trainer, gradient, move, rows_of

from visual_grpo.advantages import decoupled_advantages, group_advantages
from visual_grpo.api import plan
from visual_grpo.errors import UserError
from visual_grpo.metrics import Stats
from visual_grpo.types import RewardStatus

PLAIN = {"schedule": "scheduler", "shift": None, "same_noise": False}
FLOW = {"scope": "batch", "std": "population", "eps": 1e-4, "drop_flat": True}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    made: list[Any] = []

    def build(method: Any, **over: Any) -> Any:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(flow_trainer(folder, method, **over))
        return made[-1]

    yield build
    for trainer in made:
        trainer.suite.close()
        trainer.writer.close()


def same_update(one: Any, other: Any) -> None:
    """Equal rollouts, rows and, off-policy with a working clip, equal gradients."""
    found = []
    for trainer in (one, other):
        rows, advantages = rows_of(trainer)
        move(trainer)
        found.append((rows.rollouts, advantages, *gradient(trainer, rows)))
    for name in ("latents", "next_latents", "final"):
        assert torch.equal(found[0][0].data[name], found[1][0].data[name])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-12)
    assert float(found[0][2].abs().max()) > 1e-6
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=1e-12)
    assert found[0][3] == pytest.approx(found[1][3], abs=1e-12)


# -- identities -------------------------------------------------------------------------------------------------------------


def test_a_full_window_is_flow_grpo(make: Any) -> None:
    same_update(make({"mixgrpo": {"window": 5, "window_high": 5}}, sampling=PLAIN, advantage=FLOW), make("flow_grpo"))


def test_the_first_window_is_that_of_flow_grpo_fast(make: Any) -> None:
    same_update(
        make({"mixgrpo": {"window": 2}}, sampling=PLAIN, advantage=FLOW),
        make({"flow_grpo": {"window": 2, "window_high": 2}}),
    )


def test_dancegrpo_on_all_steps_with_noises_of_their_own_is_flow_grpo_with_its_transition(make: Any) -> None:
    same_update(
        make({"dancegrpo": {"fraction": 1.0}}, sampling=PLAIN, advantage=FLOW),
        make("flow_grpo", sampling={"solver": "dance_sde", "noise_scale": 0.3}),
    )


# -- DanceGRPO --------------------------------------------------------------------------------------------------------------


def test_dancegrpo_trains_a_random_subset_of_each_row(make: Any) -> None:
    """3 of 5 steps; the loss is the mean over them of what all steps would give."""
    trainer, whole = make("dancegrpo"), make({"dancegrpo": {"fraction": 1.0}})
    rows, _ = rows_of(trainer)
    full, _ = rows_of(whole)
    steps = rows.rollouts.unit_tags["step_index"]
    assert steps.shape == (8, 3)
    assert len({tuple(row) for row in steps.tolist()}) > 2
    assert torch.equal(rows.rollouts.data["latents"], full.rollouts.data["latents"][torch.arange(8)[:, None], steps])
    now = trainer.policy.log_prob(rows.rollouts, torch.arange(3)).value
    torch.testing.assert_close(now, rows.rollouts.old_log_prob, rtol=0, atol=1e-12)
    full.weights = torch.zeros(8, 5, dtype=torch.float64).scatter(1, steps, 5 / 3)
    for one in (trainer, whole):
        move(one)
    torch.testing.assert_close(gradient(trainer, rows)[0], gradient(whole, full)[0], rtol=0, atol=1e-12)


def test_the_subset_belongs_to_the_row(make: Any) -> None:
    trainer = make("dancegrpo")
    prompts = trainer._draw()
    every = trainer.stack.rollout(prompts, trainer.state).unit_tags["step_index"]
    few = trainer.stack.rollout(prompts.select(torch.tensor([5, 2])), trainer.state).unit_tags["step_index"]
    assert torch.equal(few, every[[5, 2]])
    trainer.state.step = 1
    assert not torch.equal(trainer.stack.rollout(prompts, trainer.state).unit_tags["step_index"], every)


@pytest.mark.parametrize("method", ["dancegrpo", "mixgrpo"])
def test_a_group_shares_its_initial_noise(make: Any, method: str) -> None:
    trainer = make({method: {"fraction": 1.0} if method == "dancegrpo" else {}})
    rollouts = trainer.stack.rollout(trainer._draw(), trainer.state)
    first, following = rollouts.data["latents"][:, 0], rollouts.data["next_latents"][:, 0]
    for group in (slice(0, 4), slice(4, 8)):
        assert torch.equal(first[group], first[group][:1].expand(4, -1, -1, -1))
        assert len({tuple(row.flatten().tolist()) for row in following[group]}) == 4
    assert not torch.equal(first[0], first[4])
    assert rollouts.shared["sigmas"].tolist() == pytest.approx([1, 15 / 16, 6 / 7, 3 / 4, 3 / 5, 3 / 8, 0])


@pytest.mark.parametrize("method", ["dancegrpo", {"mixgrpo": {"window": 3}}, ["dancegrpo", {"best_of_n": {"keep": 2}}]])
def test_split_does_not_matter(make: Any, method: Any) -> None:
    found = []
    for micro_batch, units in ((8, None), (3, 1), (1, 2)):
        over = {"kl": {"beta": 0.5}, "train": {"micro_batch": micro_batch, "units_per_pass": units}}
        trainer = make(method, **over)
        rows, _ = rows_of(trainer)
        move(trainer)
        found.append(gradient(trainer, rows))
    for grad, loss in found[1:]:
        torch.testing.assert_close(grad, found[0][0], rtol=0, atol=1e-10)
        assert loss == pytest.approx(found[0][1], abs=1e-10)


# -- the window -------------------------------------------------------------------------------------------------------------


def test_the_window_moves_with_the_iterations(make: Any) -> None:
    trainer = make({"mixgrpo": {"window": 2, "shift_every": 2}}, self_test={"enabled": False})
    method = trainer.stack.methods["mixgrpo"]
    seen = []
    for _ in range(6):
        seen.append(list(method.steps_now(trainer.state)))
        trainer.iteration()
    assert seen == [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [2, 3]]
    assert trainer.stack.state_dict()["mixgrpo"] == {"start": 3, "count": 0}
    assert trainer.optimizer.steps_done == 6


def test_random_windows_are_the_same_everywhere_and_reach_both_ends(make: Any) -> None:
    starts = []
    for trainer in (make({"mixgrpo": {"window": 2, "order": "random"}}) for _ in range(2)):
        method = trainer.stack.methods["mixgrpo"]
        starts.append([])
        for step in range(40):
            trainer.state.step = step
            starts[-1].append(method.steps_now(trainer.state)[0])
    assert starts[0] == starts[1]
    assert set(starts[0]) == {0, 1, 2}


def test_an_empty_window_skips_the_update_and_still_advances(make: Any) -> None:
    """The self-test waits for an iteration with something to train."""
    options = {"window": 1, "window_high": 1, "shift_every": 1, "shrink": True, "roll_back": True}
    trainer = make({"mixgrpo": options})
    method = trainer.stack.methods["mixgrpo"]
    method.load_state_dict({"start": 1, "count": 0})
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    trainer.iteration()
    assert all(torch.equal(before[k], v) for k, v in trainer.policy.trainable.items())
    assert (trainer.optimizer.steps_done, trainer.step, trainer.tested) == (0, 1, False)
    assert method.state_dict() == {"start": 0, "count": 0}
    trainer.iteration()
    assert (trainer.optimizer.steps_done, trainer.tested) == (1, True)
    assert method.state_dict() == {"start": 1, "count": 0}


SMALL = {"steps": 5, "updates_per_step": 2, "optimizer": {"lr": 1e-3}}


def test_the_window_survives_a_kill(tmp_path: Path) -> None:
    """Killed in a checkpoint, one iteration after a move: the records and weights of the run that was never interrupted."""
    method = {"mixgrpo": {"window": 2, "shift_every": 2}}
    config = flow_config(tmp_path, method, train=SMALL, checkpoint={"every": 1})
    assert finish(config, tmp_path / "whole") == 0, output(tmp_path / "whole")
    run = tmp_path / "run"
    assert finish(config, run, kill_in=str(run / "checkpoints/.step-000004"), kill_at=1) == KILLED
    state = json.loads((run / "checkpoints/step-000003/state.json").read_text())
    assert state["methods"]["mixgrpo"] == {"start": 1, "count": 1}
    assert finish(config, run) == 0, output(run)
    assert_same_run(run, tmp_path / "whole")


def test_two_processes_compute_what_one_computes(tmp_path: Path) -> None:
    """The window and the selection of rows, with two updates a rollout."""
    method = [{"mixgrpo": {"shift_every": 1}}, {"best_of_n": {"keep": 2}}]
    config = flow_config(tmp_path, method, train={**SMALL, "steps": 3})
    assert finish(config, tmp_path / "one") == 0, output(tmp_path / "one")
    assert pair(config, tmp_path / "two") == [0, 0], (tmp_path / "two-0.log").read_text()
    assert_close_runs(tmp_path / "two", tmp_path / "one")


# -- best-of-N and GDPO -----------------------------------------------------------------------------------------------------


def test_best_of_n_keeps_the_ends_and_the_advantages_of_all(make: Any) -> None:
    trainer = make(["dancegrpo", {"best_of_n": {"keep": 2}}])
    rows, advantages = rows_of(trainer)
    wanted = group_advantages(SCORES.double(), torch.tensor([0] * 4 + [1] * 4), eps=1e-8)
    torch.testing.assert_close(advantages, wanted, rtol=0, atol=1e-6)
    assert rows.rollouts.prompts.row_ids.tolist() == [0, 3, 4, 5]
    assert torch.equal(rows.advantages, advantages[[0, 3, 4, 5]])


def test_best_of_n_leaves_failed_rows_out(make: Any) -> None:
    trainer = make(["dancegrpo", {"best_of_n": {"keep": 2}}])
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = SCORES[:, None].clone()
    rewards.status[0] = RewardStatus.FAILED
    rewards.values[0] = torch.nan
    rows, _ = trainer.prepare(rollouts, rewards, Stats())
    assert rows.rollouts.prompts.row_ids.tolist() == [2, 3, 4, 5]
    rewards.status[:] = RewardStatus.FAILED
    rows, advantages = trainer.prepare(rollouts, rewards, Stats())
    assert (len(rows), len(advantages)) == (0, 0)


def test_best_of_n_orders_before_any_clamp(make: Any) -> None:
    trainer = make(["dancegrpo", {"best_of_n": {"keep": 2}}], advantage={"clip": 0.1})
    rows, _ = rows_of(trainer)
    assert rows.rollouts.prompts.row_ids.tolist() == [0, 3, 4, 5]


def test_gdpo_sets_the_combination_of_any_stack(make: Any) -> None:
    two = {"a": {"reward": "brightness"}, "b": {"reward": "brightness", "weight": 2.0}}
    trainer = make(["flow_grpo", "gdpo"], rewards=two)
    config = trainer.config
    assert (config.combine.how, config.advantage.scope, config.advantage.std) == ("gdpo", "group", "bessel")
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = torch.stack([SCORES, SCORES.flip(0).square()], dim=1)
    _, advantages = trainer.prepare(rollouts, rewards, Stats())
    wanted = decoupled_advantages(
        rewards.values.double(), None, torch.tensor([1.0, 2.0]).double(), rollouts.group_ids, eps=1e-4
    )
    torch.testing.assert_close(advantages, wanted, rtol=0, atol=1e-9)


# -- degenerate batches and wrong input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dancegrpo", "mixgrpo"])
def test_equal_rewards_are_trained_with_no_gradient(make: Any, method: str) -> None:
    """No filtering: the rows stay, the divisors count them; with `advantage.drop_flat` they go."""
    flat = torch.cat([torch.full((4,), 0.1) * 3, SCORES[4:]])
    trainer = make(method)
    rows, advantages = rows_of(trainer, flat)
    assert len(rows) == 8
    assert bool((advantages[:4] == 0).all())
    assert bool((advantages[4:] != 0).all())
    dropped, _ = rows_of(make(method, advantage={"drop_flat": True}), flat)
    assert dropped.rollouts.group_ids.tolist() == [1, 1, 1, 1]
    nothing, _ = rows_of(trainer, torch.full((8,), 0.5))
    assert float(gradient(trainer, nothing)[0].abs().max()) == 0


@pytest.mark.parametrize("method", ["dancegrpo", "mixgrpo"])
def test_a_group_that_shrinks_to_one_row_has_no_advantage(make: Any, method: str) -> None:
    trainer = make(method)
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = SCORES[:, None].clone()
    rewards.status[:3] = RewardStatus.FAILED
    rewards.values[:3] = torch.nan
    rows, advantages = trainer.prepare(rollouts, rewards, Stats())
    assert rows.rollouts.prompts.row_ids.tolist() == [3, 4, 5, 6, 7]
    assert float(advantages[0]) == 0
    assert bool(torch.isfinite(advantages).all())


@pytest.mark.parametrize(
    ("method", "over", "message"),
    [
        ("dancegrpo", {"sampling": {"solver": "ode"}}, r"sampling\.solver is 'ode'"),
        ("mixgrpo", {"sampling": {"solver": "ode"}}, r"sampling\.solver is 'ode'"),
        (
            {"dancegrpo": {"fraction": 0.1}},
            {},
            r"fraction \(0\.1\) of the 5 steps before the last is less than one step",
        ),
        ("mixgrpo", {"sampling": {"steps": 2}}, r"use sampling\.steps of 3 or more"),
        ({"mixgrpo": {"window_high": 6}}, {}, r"window_high of at most sampling\.steps - 1"),
        (["mixgrpo", "dancegrpo"], {}, "both fill the exclusive hook 'rollout'"),
        (["dancegrpo", {"best_of_n": {"keep": 3}}], {}, "keep must be even, half best and half worst: use 2 or 4"),
        (["dancegrpo", {"best_of_n": {"keep": 4}}], {}, r"keep \(4\) must be less than train\.group_size \(4\)"),
        (
            ["dancegrpo", {"best_of_n": {"keep": 2}}],
            {"train": {"updates_per_step": 4}},
            r"updates_per_step \(4\) must divide method\.best_of_n\.keep \(2\)",
        ),
        (["flow_grpo", "gdpo"], {"combine": "sum"}, r"combine\.how is 'sum'; remove one of the two"),
        (["gdpo", "mixgrpo"], {}, "put gdpo last"),
        ("mixgrpo", {"sampling": {"shift": None}}, "schedule 'linear' needs shift: 3 for images"),
        ("flow_grpo", {"sampling": {"tail_ratio": 0.4}}, "tail_ratio shortens schedule 'linear'"),
        ("dancegrpo", {"train": {"group_size": 1}}, "group_size is 1"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, method: Any, over: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(flow_config(tmp_path, method, **over))


# -- Flash ------------------------------------------------------------------------------------------------------------------


def test_flash_takes_eleven_network_calls_for_twenty_five_steps(make: Any) -> None:
    trainer = make("mixgrpo", sampling={"steps": 25, "tail_ratio": 0.4})
    adapter, levels = trainer.policy.adapter, []
    plain = adapter.predict_velocity

    def counted(latents: Any, sigma: Any, condition: Any) -> Any:
        levels.append(float(sigma[0]))
        return plain(latents, sigma, condition)

    adapter.predict_velocity = counted
    rollouts = trainer.stack.rollout(trainer._draw(), trainer.state)
    assert len(levels) == 11
    assert rollouts.num_units == 4
    assert levels[:5] == pytest.approx(rollouts.shared["sigmas"][:5].tolist())
    assert levels == sorted(levels, reverse=True)
    now = trainer.policy.log_prob(rollouts, torch.arange(4)).value
    torch.testing.assert_close(now, rollouts.old_log_prob, rtol=0, atol=1e-12)
    levels.clear()
    trainer.evaluate(4)
    assert len(levels) == 25  # held-out pictures take every step


def test_the_tail_changes_the_rest_alone(make: Any) -> None:
    found = []
    for ratio in (None, 0.6):
        trainer = make("mixgrpo", sampling={"steps": 25, "tail_ratio": ratio})
        found.append(trainer.stack.rollout(trainer._draw(), trainer.state).data)
    assert torch.equal(found[0]["next_latents"], found[1]["next_latents"])
    apart = (found[0]["final"] - found[1]["final"]).abs().max()
    assert 0 < float(apart) < 0.1


# -- recipes ----------------------------------------------------------------------------------------------------------------


def test_published_hyperparameters() -> None:
    """The card's table, here on SD3.5-medium."""
    mix = plan("mixgrpo_sd35_medium").config
    assert mix.method == [{"mixgrpo": {}}]
    assert (mix.sampling["steps"], mix.sampling["solver"], mix.sampling["noise_scale"]) == (25, "flow_sde", 0.7)
    assert (mix.sampling["schedule"], mix.sampling["shift"], mix.sampling["same_noise"]) == ("linear", 3.0, True)
    assert (mix.train.prompts_per_step, mix.train.group_size, mix.train.updates_per_step) == (32, 12, 4)
    assert list(mix.rewards) == ["hps_v2", "image_reward", "pickscore"]
    dance = plan("dancegrpo_sd35_medium").config
    assert (dance.sampling["steps"], dance.sampling["solver"], dance.sampling["noise_scale"]) == (16, "dance_sde", 0.3)
    assert (dance.train.prompts_per_step, dance.train.group_size, dance.train.updates_per_step) == (16, 12, 3)
    assert (
        plan("dancegrpo_sd35_medium").stack.methods["dancegrpo"].units_per_row(plan("dancegrpo_sd35_medium").sampling)
        == 9
    )
    lora = plan("dancegrpo_lora_flux1_dev")
    assert lora.stack.methods["dancegrpo"].units_per_row(lora.sampling) == 6
    assert lora.config.model.lora is not None
    assert (lora.config.model.lora.rank, lora.config.model.lora.alpha, lora.config.train.steps) == (128, 256, 301)
    assert (lora.config.train.updates_per_step, lora.config.train.optimizer.lr) == (1, 3e-4)
    best = plan("dancegrpo_best_of_n_sd35_medium").config
    assert (best.train.group_size, best.method[1]) == (24, {"best_of_n": {"keep": 8}})
    for config in (mix, dance, best):
        assert (config.advantage.scope, config.advantage.std, config.advantage.eps) == ("group", "bessel", 1e-8)
        assert (config.advantage.clip, config.advantage.drop_flat, config.combine.how) == (
            5.0,
            False,
            "sum_of_advantages",
        )
        assert (config.ratio.clip_low, config.ratio.clip_high, config.kl.beta) == (1e-4, 1e-4, 0.0)
        optimizer = config.train.optimizer
        assert (optimizer.lr, optimizer.weight_decay, optimizer.grad_norm, config.train.steps) == (1e-5, 1e-4, 1.0, 300)
        assert config.model.lora is None


def test_tiny_recipes_are_evaluated_by_one_sampler() -> None:
    """Else their held-out scores could not be compared with those of `flow_grpo_tiny`."""
    names = ("mixgrpo_tiny", "mixgrpo_flash_tiny", "dancegrpo_tiny", "dancegrpo_best_of_n_tiny")
    ignored = {"noise_scale", "tail_ratio"}  # of noisy steps, which an evaluation has none of
    wanted = plan("flow_grpo_tiny").eval_sampling.model_dump(exclude=ignored)
    for name in names:
        assert plan(name).eval_sampling.model_dump(exclude=ignored) == wanted, name
