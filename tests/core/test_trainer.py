"""The loop on the toy adapter: it learns, and its gradient does not depend on how the batch is cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from toy_run import prepared, toy_config, toy_trainer

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.errors import UserError
from visual_grpo.loss import uncertain_units
from visual_grpo.metrics import Stats
from visual_grpo.trainer import Trainer

FLOAT64 = {"model": {"dtype": "float64"}, "self_test": {"enabled": False}}


def gradient(trainer: Trainer, *, off_policy: bool, binary: bool = False) -> tuple[torch.Tensor, float]:
    """Gradient and loss of the first optimizer step; `off_policy` moves the weights first, so that ratios differ from 1."""
    rollouts, rewards = trainer.collect(trainer._draw())
    # Scores in [0, 1] that depend on the row alone: every group has unequal rewards.
    scores = (rollouts.prompts.row_ids.float() * 0.37).sin()[:, None]
    rewards.values = (scores > 0.5).float() if binary else scores / 2 + 0.5
    stats = Stats()
    rows, _ = trainer.prepare(rollouts, trainer.stack.shaped(rewards, rollouts, trainer.state), stats)
    trainer.state.on_policy = not off_policy
    if off_policy:
        with torch.no_grad():
            for parameter in trainer.policy.trainable.values():
                parameter.add_(0.05 * torch.arange(parameter.numel(), dtype=parameter.dtype).view_as(parameter).sin())
    captured: dict[str, Any] = {}

    def capture(norm: torch.Tensor) -> None:
        captured["grad"] = torch.cat(
            [p.grad.flatten() for p in trainer.policy.trainable.values() if p.grad is not None]
        )

    trainer.optimizer.step = capture  # type: ignore[method-assign]
    trainer.optimizer_step(rows, stats)
    return captured["grad"], stats.reduce(trainer.ranks)["loss"]


AGGREGATIONS = [
    "sequence_mean_token_mean",
    "token_mean",
    "fixed_length",
    "sequence_mean_token_sum",
    "token_sum_over_length",
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_split_does_not_matter(tmp_path: Path, aggregation: str, level: str) -> None:
    """See `check_split`."""
    check_split(tmp_path, level, loss={"aggregation": aggregation})


METHODS: dict[str, Any] = {
    "balanced_aggregation": "balanced_aggregation",
    "lambda_grpo": "lambda_grpo",
    "tmn_reweight": "tmn_reweight",
    "seed_grpo": {"seed_grpo": {"strength": 0.5}},
    "fg_expo": "fg_expo",
    "redit": "redit",
    "rloo": "rloo",
}


@pytest.mark.parametrize("name", METHODS)
def test_split_does_not_matter_to_a_method(tmp_path: Path, name: str) -> None:
    """See `check_split`."""
    check_split(tmp_path, "token", method=METHODS[name])


@pytest.mark.parametrize("option", [{"top_entropy": 0.4}, {"off_policy_max": 1e-3}, {"top_entropy": 0.1}])
def test_split_does_not_matter_to_the_choice_of_tokens_and_answers(tmp_path: Path, option: dict[str, float]) -> None:
    """See `check_split`; most samples of a prompt begin with tokens of the same entropy."""
    check_split(tmp_path, "token", loss=option)


def test_top_entropy_trains_the_most_uncertain_tokens(tmp_path: Path) -> None:
    """The weights are 1 on the tokens above the 0.7 quantile and 0 elsewhere; a truncated answer has no say."""
    loss = {"top_entropy": 0.3, "mask_truncated": True}
    trainer = toy_trainer(tmp_path, **FLOAT64, loss=loss, sampling={"max_new_tokens": 8})
    rows, _ = prepared(trainer)
    rollouts, kept = rows.rollouts, rows.rollouts.unit_mask
    assert bool((kept.sum(1) == 0).any())
    entropy = trainer.policy.log_prob(rollouts, torch.arange(rollouts.num_units), entropy=True).entropy
    trainer.writer.close()
    assert entropy is not None
    none = uncertain_units(rollouts.select(torch.tensor([], dtype=torch.int64)), 0.3, trainer.state)
    assert none.shape == (0, rollouts.num_units)
    limit = torch.quantile(entropy[kept], 0.7)
    assert torch.equal(rows.weights.bool()[kept], (entropy >= limit - 1e-5)[kept])
    assert 0.3 <= float(rows.weights[kept].mean()) < 0.6


@pytest.mark.parametrize("option", ["top_entropy", "off_policy_max"])
def test_options_of_tokens_are_refused_for_pictures(option: str) -> None:
    with pytest.raises(UserError, match=rf"loss\.{option} is for tokens"):
        plan("flow_grpo_tiny", {f"loss.{option}": 0.2})


def check_split(tmp_path: Path, level: str, **over: Any) -> None:
    """Micro-batches 1x8, 2x4, 4x2, 8x1 and unit chunks give one loss and gradient (float64, 1e-10), lengths uneven."""
    shape = {"prompts_per_step": 2, "group_size": 4, "epochs_per_step": 2}
    reference = None
    for micro_batch, units in [(8, None), (4, None), (2, None), (1, None), (8, 1), (4, 2), (3, 2)]:
        folder = tmp_path / f"{micro_batch}-{units}"
        folder.mkdir()
        trainer = toy_trainer(
            folder,
            **FLOAT64,
            train=shape | {"micro_batch": micro_batch, "units_per_pass": units},
            ratio={"level": level, "clip_low": 0.05, "clip_high": 0.05},
            kl={"beta": 0.1},
            **over,
        )
        found = gradient(trainer, off_policy=True)
        trainer.writer.close()
        if reference is None:
            reference = found
            assert float(found[0].abs().max()) > 1e-3
        torch.testing.assert_close(found[0], reference[0], rtol=0, atol=1e-10)
        assert found[1] == pytest.approx(reference[1], abs=1e-10)


def test_micro_batch_token_mean_depends_on_the_split(tmp_path: Path) -> None:
    """TRL's bnpo divides by the tokens of the micro-batch: the one aggregation that must differ."""
    losses = []
    for micro_batch in (8, 2):
        folder = tmp_path / str(micro_batch)
        folder.mkdir()
        trainer = toy_trainer(
            folder,
            **FLOAT64,
            train={"prompts_per_step": 2, "group_size": 4, "micro_batch": micro_batch},
            loss={"aggregation": "micro_batch_token_mean"},
        )
        losses.append(gradient(trainer, off_policy=True)[1])
        trainer.writer.close()
    assert losses[0] != pytest.approx(losses[1], abs=1e-6)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(micro_batch=st.integers(1, 40), rollout_batch=st.integers(8, 40), seed=st.integers(0, 3))
def test_geometry_does_not_change_the_gradient(
    tmp_path_factory: pytest.TempPathFactory, micro_batch: int, rollout_batch: int, seed: int
) -> None:
    """Micro-batch and rollout chunk are free choices (float64, 1e-10)."""
    found = []
    for size, chunk in ((32, None), (micro_batch, rollout_batch)):
        trainer = toy_trainer(
            tmp_path_factory.mktemp("run"), **FLOAT64, train={"micro_batch": size, "rollout_batch": chunk, "seed": seed}
        )
        found.append(gradient(trainer, off_policy=False)[0])
        trainer.writer.close()
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


BINARY_METHODS: dict[str, Any] = {
    "real": {"method": ["real"], "kl": {"beta": 0.1}},
    "real, bce": {"method": [{"real": {"form": "bce"}}]},
    "lens": {"method": ["lens"]},
    "s_grpo": {"method": ["s_grpo"]},
    "degrpo": {"method": [{"degrpo": {"control_weight": 0.3}}], "kl": {"beta": 0.1}},
    "microcoder_grpo": {"method": [{"microcoder_grpo": {"mask_share": 0.5, "repeat_window": 1}}]},
}


@pytest.mark.parametrize("method", BINARY_METHODS)
def test_split_does_not_matter_to_methods_of_labels(tmp_path: Path, method: str) -> None:
    """Micro-batches and unit chunks of each method, rewards 0 and 1, off-policy (float64, 1e-10)."""
    reference = None
    for micro_batch, units in [(16, None), (8, None), (3, None), (1, None), (16, 1), (5, 2)]:
        folder = tmp_path / f"{micro_batch}-{units}"
        folder.mkdir()
        train = {"prompts_per_step": 3, "group_size": 4, "micro_batch": micro_batch, "units_per_pass": units}
        trainer = toy_trainer(folder, **FLOAT64, train=train, **BINARY_METHODS[method])
        found = gradient(trainer, off_policy=True, binary=True)
        trainer.writer.close()
        reference = reference or found
        assert float(reference[0].abs().max()) > 1e-4
        torch.testing.assert_close(found[0], reference[0], rtol=0, atol=1e-10)
        assert found[1] == pytest.approx(reference[1], abs=1e-10)


def test_reward_rises(tmp_path: Path) -> None:
    """Sixty steps on two digits: the mean reward of the last steps is far above the first."""
    result = vg.train(
        toy_config(tmp_path, train={"steps": 60, "prompts_per_step": 8}, eval={"every": 0}), root=tmp_path / "runs"
    )
    from visual_grpo.run_folder import read_metrics

    rewards = [r["metrics"]["reward/total"] for r in read_metrics(result.folder) if r["kind"] == "train"]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2
    assert (Path(result.folder) / "model" / "model.safetensors").is_file()
    assert (Path(result.folder) / "report.html").is_file()


def test_all_groups_flat_leaves_the_weights_untouched(tmp_path: Path) -> None:
    """With `drop_flat` a batch of equal rewards is no batch: no optimizer step, weights bit-identical, an alarm."""

    def constant(prompts: list[str], completions: list[str]) -> list[float]:
        return [1.0] * len(prompts)

    trainer = toy_trainer(tmp_path, advantage={"drop_flat": True}, alarms={"flat_groups_steps": 1})
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    trainer.suite = vg_suite(constant)
    trainer.iteration()
    assert all(torch.equal(before[k], v) for k, v in trainer.policy.trainable.items())
    assert trainer.optimizer.steps_done == 0
    names = [r["name"] for r in trainer.writer.folder.read_metrics("alarm")]
    trainer.writer.close()
    assert "flat_groups" in names


def digit_sum(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that almost always differs within a group."""
    return [float(sum(map(int, text))) for text in completions]


def vg_suite(reward: Any) -> Any:
    from visual_grpo.scoring import RewardSuite

    return RewardSuite({"test": {"reward": reward}})


def test_several_updates_a_rollout_are_off_policy(tmp_path: Path) -> None:
    """The first update has ratio 1; later ones use the stored log-probs and may be clipped."""
    trainer = toy_trainer(
        tmp_path, train={"updates_per_step": 4, "optimizer": {"lr": 0.3}}, ratio={"clip_low": 1e-3, "clip_high": 1e-3}
    )
    trainer.suite = vg_suite(digit_sum)
    trainer.iteration()
    metrics = trainer.writer.folder.read_metrics("train")[0]["metrics"]
    trainer.writer.close()
    assert trainer.optimizer.steps_done == 4
    assert metrics["ratio_max"] > 1.0001
    assert metrics["clip_fraction"] > 0


def test_averaged_weights_follow(tmp_path: Path) -> None:
    """EMA is updated every `every` optimizer steps and is what evaluation and export use."""
    trainer = toy_trainer(tmp_path, train={"ema": {"decay": 0.5, "every": 1}})
    trainer.suite = vg_suite(digit_sum)
    trainer.run()
    trainer.writer.close()
    assert set(trainer.policy.sets) == {"ema"}
    ema, now = trainer.policy.sets["ema"], trainer.policy.trainable
    assert any(not torch.equal(ema[k], now[k]) for k in ema)
