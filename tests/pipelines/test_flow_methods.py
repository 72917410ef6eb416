"""Flow-GRPO and V-GRPO through the loop, on a tiny random SD3 in float64: identities and degenerate batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
import tiny_sd3

from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import merge, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.loss import passes
from visual_grpo.metrics import Stats
from visual_grpo.run_folder import RunFolder
from visual_grpo.trainer import Trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    tiny_sd3.build(folder / "parts").save_pretrained(folder / "model")
    for split in ("train", "test"):
        lines = [f'{{"prompt": "{split} {word}", "tag": "t"}}\n' for word in ("abc", "bcd", "cde", "def")]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Any:
    """Trainers of a method on the random model; rewards are set by the tests."""
    made: list[Trainer] = []

    def build(method: Any, **over: Any) -> Trainer:
        config: dict[str, Any] = {
            "name": f"run{len(made)}",
            "model": {"adapter": "sd3", "path": str(model / "model"), "dtype": "float64"},
            "method": method,
            "data": {"source": str(model / "train.jsonl")},
            "eval": {"source": str(model / "test.jsonl")},
            "rewards": {"brightness": 1.0},
            "sampling": {"steps": 4, "max_sequence_length": 10},
            "train": {"prompts_per_step": 2, "group_size": 4, "micro_batch": 8, "updates_per_step": 1, "ema": None},
        }
        ready = plan(merge(config, over))
        folder = RunFolder.create(tmp_path / "runs", ready.config.name, config_yaml=to_yaml(ready.config))
        made.append(build_trainer(ready, folder, Ranks()))
        return made[-1]

    yield build
    for trainer in made:
        trainer.suite.close()
        trainer.writer.close()


SCORES = torch.tensor([0.9, 0.2, 0.4, 0.1, 0.3, 0.8, 0.5, 0.55])


def rows_of(trainer: Trainer, scores: Tensor = SCORES) -> tuple[Any, Tensor]:
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = scores[:, None]
    return trainer.prepare(rollouts, rewards, Stats())


def move(trainer: Trainer, size: float) -> None:
    """Another policy than the one that sampled."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.trainable.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def gradient(trainer: Trainer, rows: Any) -> tuple[Tensor, float]:
    from visual_grpo.aggregation import Totals

    mask = rows.rollouts.unit_mask
    total = 0.0
    for index in torch.arange(len(rows)).split(trainer.config.train.micro_batch):
        for loss, _ in passes(trainer.stack, rows.select(index), Totals.of_mask(mask), trainer.state):
            loss.backward()
            total += float(loss.detach())
    parts = [p.grad.flatten() for p in trainer.policy.trainable.values() if p.grad is not None]
    trainer.optimizer.zero_grad()
    return torch.cat(parts), total


def test_v_grpo_on_policy_gradient_is_advantage_weighted_flow_matching(make: Any) -> None:
    """Ratio 1: loss = -mean(A), gradient = mean(A * grad Lhat), the flow-matching loss of each finished sample."""
    trainer = make({"v_grpo": {"pairs": 3}})
    rows, advantages = rows_of(trainer)
    found, loss = gradient(trainer, rows)
    assert loss == pytest.approx(-float(advantages.mean()), abs=1e-9)
    log_prob = trainer.policy.log_prob(rows.rollouts, torch.arange(3))
    (-log_prob.value.mean(1) * advantages.double()).mean().backward()
    wanted = torch.cat([p.grad.flatten() for p in trainer.policy.trainable.values() if p.grad is not None])
    assert float(wanted.abs().max()) > 1e-6
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2])
def test_v_grpo_pair_by_pair_backward_is_exact(make: Any, chunk: int) -> None:
    """Pairs replayed one by one give the full gradient (1e-12), off-policy with the clip active and both pulls on."""
    over = {
        "ratio": {"level": "sequence", "clip_low": 1e-3, "clip_high": 1e-3},
        "kl": {"beta": 0.7, "estimator": "prediction"},
        "train": {"epochs_per_step": 2},
    }
    found = []
    for units in (None, chunk):
        trainer = make(
            {"v_grpo": {"pairs": 4, "kl_old_beta": 0.3}}, **merge(over, {"train": {"units_per_pass": units}})
        )
        rows, _ = rows_of(trainer)
        move(trainer, 0.01)
        trainer.state.on_policy = False
        found.append(gradient(trainer, rows))
        ratio = (
            (trainer.policy.log_prob(rows.rollouts, torch.arange(4)).value - rows.rollouts.old_log_prob).mean(1).exp()
        )
        assert bool(((ratio - 1).abs() > 1e-3).any()), "the clip must be active for this test to say anything"
    assert float(found[0][0].abs().max()) > 1e-6
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-12)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-12)


def test_v_grpo_pairs_are_shared_by_the_group_and_cover_the_schedule(make: Any) -> None:
    trainer = make({"v_grpo": {"pairs": 4}})
    rollouts, _ = trainer.collect(trainer._draw())
    sigma, noise = rollouts.data["pair_sigma"], rollouts.data["pair_noise"]
    for group in (0, 1):
        rows = rollouts.group_ids == group
        assert bool((sigma[rows] == sigma[rows][0]).all())
        assert bool((noise[rows] == noise[rows][0]).all())
    assert not torch.equal(noise[0], noise[-1])
    # four pairs on four steps: every level once, noisy to clean
    torch.testing.assert_close(sigma[0], rollouts.shared["sigmas"][:-1].to(sigma))


def test_v_grpo_refuses_more_pairs_than_steps(make: Any) -> None:
    with pytest.raises(UserError, match=r"pairs \(5\) must be at most sampling\.steps \(4\)"):
        make({"v_grpo": {"pairs": 5}})


def test_v_grpo_flat_group_has_no_gradient_unless_pulled(make: Any) -> None:
    flat = torch.full((8,), 0.5)
    trainer = make({"v_grpo": {"pairs": 2}})
    rows, advantages = rows_of(trainer, flat)
    assert bool((advantages == 0).all())
    assert float(gradient(trainer, rows)[0].abs().max()) == 0.0
    pulled = make({"v_grpo": {"pairs": 2}}, kl={"beta": 1.0, "estimator": "prediction"})
    rows, _ = rows_of(pulled, flat)
    move(pulled, 0.01)
    assert float(gradient(pulled, rows)[0].abs().max()) > 0


def test_v_grpo_later_updates_are_clipped_against_the_sampler(make: Any) -> None:
    """Two epochs: the stored log-probs are those of the weights that sampled, on the same pairs."""
    trainer = make({"v_grpo": {"pairs": 2}}, train={"epochs_per_step": 2})
    rollouts, _ = trainer.collect(trainer._draw())
    with torch.no_grad():
        again = trainer.policy.log_prob(rollouts, torch.arange(2)).value
    torch.testing.assert_close(rollouts.old_log_prob, again, rtol=0, atol=1e-12)


def test_flow_grpo_never_trains_the_last_step(make: Any) -> None:
    trainer = make("flow_grpo")
    rollouts, _ = trainer.collect(trainer._draw())
    assert rollouts.unit_tags["step_index"][0].tolist() == [0, 1, 2]
    assert bool(rollouts.unit_mask.all())


def test_flow_grpo_fast_trains_its_window_alone(make: Any) -> None:
    trainer = make({"flow_grpo": {"window": 2, "window_high": 3}})
    starts = set()
    for step in range(12):
        trainer.state.step = step
        rollouts = trainer.stack.rollout(trainer._draw(), trainer.state)
        window = rollouts.unit_tags["step_index"][0].tolist()
        assert window[1] == window[0] + 1
        starts.add(window[0])
    assert starts == {0, 1}


def test_flow_grpo_drops_flat_groups_and_keeps_the_others(make: Any) -> None:
    scores = torch.cat([torch.full((4,), 0.5), SCORES[4:]])
    trainer = make("flow_grpo")
    rows, advantages = rows_of(trainer, scores)
    assert bool((advantages[:4] == 0).all())
    assert rows.rollouts.group_ids.tolist() == [1, 1, 1, 1]
    std = scores.double().std(correction=0)
    torch.testing.assert_close(rows.advantages, (scores[4:].double() - scores[4:].double().mean()) / (std + 1e-4))


def test_flow_grpo_with_no_live_group_leaves_the_weights_alone(make: Any) -> None:
    trainer = make("flow_grpo", alarms={"flat_groups_steps": 1})
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values[:] = 0.5
    stats = Stats()
    rows, _ = trainer.prepare(rollouts, rewards, stats)
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    trainer.update(rows, stats)
    assert all(torch.equal(before[k], v) for k, v in trainer.policy.trainable.items())
    assert stats.reduce(trainer.ranks)["flat_groups"] == 1.0


def test_flow_grpo_units_one_by_one_give_the_full_gradient(make: Any) -> None:
    """Token-level ratios need no second pass: chunks of steps, off-policy, with the KL of means (1e-10)."""
    found = []
    for units in (None, 1):
        trainer = make(
            "flow_grpo",
            kl={"beta": 0.5},
            ratio={"clip_low": 1e-3, "clip_high": 1e-3},
            train={"units_per_pass": units, "micro_batch": 8 if units is None else 3},
        )
        rows, _ = rows_of(trainer)
        move(trainer, 0.01)
        trainer.state.on_policy = False
        found.append(gradient(trainer, rows))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-10)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-10)


def test_flow_grpo_kl_is_the_code_form(make: Any) -> None:
    """beta * mean over rows and steps of MEAN (mean - mean_ref)^2 / (2 std^2), std without sqrt(-dt)."""
    trainer = make("flow_grpo", kl={"beta": 1.0})
    rows, _ = rows_of(trainer)
    move(trainer, 0.02)
    units = torch.arange(3)
    with torch.no_grad():
        now = trainer.policy.log_prob(rows.rollouts, units)
        with trainer.policy.reference():
            ref = trainer.policy.log_prob(rows.rollouts, units)
    sigmas = rows.rollouts.shared["sigmas"].double()
    std = 0.7 * torch.sqrt(sigmas[:3] / (1 - torch.where(sigmas[:3] == 1, sigmas[1], sigmas[:3])))
    wanted = ((now.mean - ref.mean).square().flatten(2).mean(2) / (2 * std.square())).mean()
    rows.advantages = torch.zeros_like(rows.advantages)
    found = gradient(trainer, rows)[1]
    assert float(wanted) > 1e-9
    assert found == pytest.approx(float(wanted), rel=1e-6)


def test_unguided_training_of_a_guided_rollout_keeps_the_ratio_to_the_rollout(make: Any) -> None:
    """ "CFG distillation": the first ratio is exp(log p unguided - log p guided), and not 1."""
    over = {"sampling": {"guidance": 3.0, "logprob_mode": "cond"}, "ratio": {"clip_low": 0.9, "clip_high": 9.0}}
    trainer = make("flow_grpo", **over)
    rows, _ = rows_of(trainer)
    with torch.no_grad():
        new = trainer.policy.log_prob(rows.rollouts, torch.arange(3)).value
    ratio = (new - rows.rollouts.old_log_prob).exp()
    assert float((ratio - 1).abs().max()) > 1e-4
    assert trainer.state.on_policy
    found = gradient(trainer, rows)[1]
    assert found == pytest.approx(-float((ratio * rows.advantages[:, None]).mean()), abs=1e-9)
    assert abs(found + float(rows.advantages.mean())) > 1e-6


def test_no_reference_forward_without_kl(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make("flow_grpo")
    rows, _ = rows_of(trainer)
    monkeypatch.setattr(trainer.policy, "reference", lambda: pytest.fail("the reference was asked for"))
    gradient(trainer, rows)


def test_flow_grpo_refuses_an_ode_sampler(make: Any) -> None:
    with pytest.raises(UserError, match=r"sampling\.solver is 'ode'"):
        make("flow_grpo", sampling={"solver": "ode"})
