"""REAL, LENS, S-GRPO, MicroCoder-GRPO and DeGRPO through the loop: identities, refusals, degenerate batches."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.api import plan
from visual_grpo.errors import RunError, UserError
from visual_grpo.metrics import Stats
from visual_grpo.scoring import RewardSuite
from visual_grpo.trainer import Trainer

_spec = importlib.util.spec_from_file_location("toy_run", Path(__file__).parents[1] / "core" / "toy_run.py")
assert _spec is not None
assert _spec.loader is not None
toy_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy_run)
prepared, gradient, logged, move = toy_run.prepared, toy_run.gradient, toy_run.logged, toy_run.move

FLOAT64 = {"model": {"dtype": "float64"}, "self_test": {"enabled": False}}
ONE_OF_EIGHT = torch.arange(32) % 8 == 0
BINARY = toy_run.BINARY


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Toy trainers: four prompts x 8 rows, float64."""
    made: list[Trainer] = []
    numbers = itertools.count()

    def build(method: Any, **over: Any) -> Trainer:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        made.append(toy_run.toy_trainer(folder, method=method, **(FLOAT64 | over)))
        return made[-1]

    yield build
    for trainer in made:
        trainer.suite.close()
        trainer.writer.close()


# -- the base ---------------------------------------------------------------------------------------------------------------


def test_rloo_compares_with_the_other_answers(make: Any) -> None:
    """Rows that nothing scored count for nobody; what divides is refused; on-policy the gradient is REINFORCE's."""
    trainer = make(["rloo"])
    rollouts, rewards = trainer.collect(trainer._draw())
    values = BINARY.double()
    values[5] = torch.nan
    rewards.values, rewards.status = values[:, None], torch.where(values.isnan(), 1, 0)[:, None].to(rewards.status)
    found = trainer.stack.advantages(rewards, rollouts, trainer.state)
    for row in range(32):
        others = [float(values[i]) for i in range(row // 8 * 8, row // 8 * 8 + 8) if i not in (row, 5)]
        expected = 0.0 if row == 5 else float(values[row]) - sum(others) / len(others)
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    rows, _ = prepared(trainer)
    gradients, _ = gradient(trainer, rows)
    log_prob = trainer.policy.log_prob(rows.rollouts, torch.arange(rows.rollouts.num_units)).value
    reinforce = -(rows.advantages * (log_prob * rows.rollouts.unit_mask).sum(1)).mean()
    by_hand = torch.autograd.grad(reinforce, list(trainer.policy.trainable.values()))
    torch.testing.assert_close(gradients, torch.cat([g.flatten() for g in by_hand]), rtol=0, atol=1e-12)
    with pytest.raises(UserError, match=r"method 'rloo' does not read advantage\.std: leave it out"):
        make(["rloo"], advantage={"std": "bessel"})


def test_dr_grpo_with_both_divisions_is_grpo(make: Any) -> None:
    found = []
    back = {"advantage": {"std": "bessel"}, "loss": {"aggregation": "sequence_mean_token_mean"}}
    for method, over in ((["grpo"], {}), (["dr_grpo"], back)):
        trainer = make(method, **over)
        rows, _ = prepared(trainer)
        move(trainer)
        found.append(gradient(trainer, rows))
    assert float(found[0][0].abs().max()) > 1e-3
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-12)


@pytest.mark.parametrize("method", ["real", "degrpo"])
def test_the_kl_of_methods_that_aggregate_otherwise_is_a_token_mean(make: Any, method: str) -> None:
    """With rewards that are all equal only the KL is left."""
    found = []
    for name, over in (("grpo", {"loss": {"aggregation": "token_mean"}}), (method, {})):
        trainer = make([name], kl={"beta": 0.3}, **over)
        rows, _ = prepared(trainer, torch.zeros(32))
        move(trainer)
        found.append(gradient(trainer, rows, size=8)[1])
    assert found[0] > 1e-4
    assert found[0] == pytest.approx(found[1], abs=1e-12)


# -- S-GRPO -----------------------------------------------------------------------------------------------------------------


def test_s_grpo_without_noise_is_its_base(make: Any) -> None:
    base = make(["grpo"], advantage={"eps": 1e-8})
    _, plain = prepared(base)
    for flip, factor in ((0.0, 1.0), (0.1, None)):
        trainer = make([{"s_grpo": {"flip_probability": flip}}])
        _, found = prepared(trainer)
        if factor is not None:
            torch.testing.assert_close(found, plain, rtol=2e-7, atol=0)
        else:
            live = plain != 0
            assert bool((found[live].abs() < plain[live].abs()).all())
            assert bool((found[~live] == 0).all())


def test_s_grpo_without_noise_has_the_gradient_of_its_base(make: Any) -> None:
    """GRPO's advantages under Dr. GRPO's constant divisor."""
    found = []
    base = {"advantage": {"eps": 1e-8}, "loss": {"aggregation": "fixed_length"}}
    for method, over in ((["grpo"], base), ([{"s_grpo": {"flip_probability": 0.0}}], {})):
        trainer = make(method, **over)
        rows, _ = prepared(trainer)
        move(trainer)
        found.append(gradient(trainer, rows))
    assert float(found[0][0].abs().max()) > 1e-3
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=1e-9)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-6)


def test_s_grpo_reads_the_clean_labels(make: Any) -> None:
    """A penalty that another method adds moves the advantages, never the count of right answers."""
    weights = []
    for method in ([{"dapo": {"dynamic_sampling": False, "overlong_cache": 3}}, "s_grpo"], ["s_grpo"]):
        trainer = make(method)
        stats = logged(trainer)
        rollouts, rewards = trainer.collect(trainer._draw())
        rewards.values = BINARY.float()[:, None]
        shaped = trainer.stack.shaped(rewards, rollouts, trainer.state)
        trainer.prepare(rollouts, shaped, Stats())
        weights.append(stats.reduce(trainer.ranks)["s_grpo/weight"])
    assert 0 < weights[0] < 1
    assert weights[0] == weights[1]


def test_s_grpo_may_drop_everything(make: Any) -> None:
    """One right of eight at p = 0.15: weight 0 in every group, no step, and the alarm tells."""
    trainer = make([{"s_grpo": {"flip_probability": 0.15}}])
    rows, advantages = prepared(trainer, ONE_OF_EIGHT)
    assert bool((advantages == 0).all())
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    stats = Stats()
    trainer.update(rows, stats)
    figures = stats.reduce(trainer.ranks)
    assert figures["loss"] == 0.0
    assert figures["grad_norm"] == 0.0
    assert all(torch.equal(before[k], v) for k, v in trainer.policy.trainable.items())
    assert "zero_gradient" in [alarm.name for alarm in trainer.alarms.check(1, figures)]


# -- REAL -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["s_grpo", "dapo", "grail", "microcoder_grpo", "lens"])
def test_real_refuses_what_it_would_ignore(other: str) -> None:
    with pytest.raises(UserError, match=f"methods 'real' and '{other}' cannot be stacked"):
        plan({**plan("real_text_tiny").config.explicit(), "method": ["real", other]})


def test_real_refuses_dropped_groups() -> None:
    with pytest.raises(UserError, match=r"set advantage\.drop_flat=false"):
        plan("real_text_tiny", {"advantage.drop_flat": True})


def test_real_refuses_a_cut_group(make: Any) -> None:
    trainer = make(["real"])
    rows, labels = prepared(trainer)
    assert set(labels.tolist()) == {-1.0, 0.0, 1.0}
    with pytest.raises(ValueError, match=r"has 8 rows, 5 of them in this loss call"):
        gradient(trainer, rows, size=5)


def test_real_updates(make: Any) -> None:
    """Four updates a rollout, through the whole step: gradients of rows stay below 1 / temperature."""
    trainer = make(
        [{"real": {"temperature": 0.5}}],
        train={"updates_per_step": 4, "optimizer": {"lr": 0.1}},
        self_test={"enabled": True},
    )
    trainer.suite = RewardSuite(
        {"test": {"reward": lambda prompts, completions: [float(len(c) < 2) for c in completions]}}
    )
    trainer.iteration()
    metrics = trainer.writer.folder.read_metrics("train")[0]["metrics"]
    assert 0 < metrics["row_weight_max"] < 2.0
    assert metrics["logit_right"] > metrics["logit_wrong"]
    assert 0 < metrics["real/labelled"] <= 1
    assert trainer.optimizer.steps_done == 4


def test_real_counts_prompts_without_both_classes(make: Any) -> None:
    """One live group of four: the loss of unmoved weights is (log(1 + P) + log(1 + M)) / 4."""
    scores = torch.zeros(32)
    scores[:3] = 1
    trainer = make(["real"])
    rows, _ = prepared(trainer, scores)
    _, loss = gradient(trainer, rows, size=8)
    assert loss == pytest.approx(float(torch.tensor([4.0, 6.0]).log().sum()) / 4)


@pytest.mark.parametrize("form", ["anchored", "bce"])
def test_real_gives_no_label_to_answers_that_are_masked(make: Any, form: str) -> None:
    """Unmoved weights, and all answers alike but for their labels: log 2 for each row of bce, whatever was masked."""
    trainer = make([{"real": {"form": form}}], loss={"mask_truncated": True})
    rows, labels = prepared(trainer, torch.arange(32) % 2 == 0)
    cut = rows.rollouts.truncated
    assert cut is not None
    assert bool(cut.any())
    assert bool((labels[cut] == 0).all())
    assert bool((labels[~cut] != 0).any())
    _, loss = gradient(trainer, rows, size=8)
    if form == "bce":
        assert loss == pytest.approx(math.log(2))
        return
    groups = [labels[rows.rollouts.group_ids == g] for g in range(4)]
    shares = [math.log(1 + int((g > 0).sum())) + math.log(1 + int((g < 0).sum())) for g in groups if bool(g.any())]
    assert loss == pytest.approx(sum(shares) / 4)


# -- LENS -------------------------------------------------------------------------------------------------------------------


def test_lens_learns_from_groups_without_a_right_answer(make: Any) -> None:
    scores = torch.zeros(32)
    scores[:8], scores[8] = 1, 1  # all right, one right, none, none
    trainer = make(["lens"])
    seen = logged(trainer)
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = scores[:, None]
    shaped = trainer.stack.shaped(rewards, rollouts, trainer.state)
    assert shaped.clean is rewards
    stats = Stats()
    _, advantages = trainer.prepare(rollouts, shaped, stats)
    assert stats.reduce(trainer.ranks)["flat_groups"] == 0.25, "only the group that is all right"
    assert bool((advantages[:8] == 0).all())
    assert bool((advantages[16:].abs() > 0).any())
    assert float(advantages[16:24].sum()) == pytest.approx(0.0, abs=1e-9)
    assert seen.reduce(trainer.ranks)["lens/negative_groups"] == 0.5
    kept = rollouts.unit_mask
    confidence = (torch.where(kept, rollouts.old_log_prob, 0.0).sum(1) / kept.sum(1)).exp()
    for group in (slice(16, 24), slice(24, 32)):
        assert int(advantages[group].argmin()) == int(confidence[group].argmax())


def test_lens_and_its_conflicts(make: Any) -> None:
    with pytest.raises(UserError, match=r"set method\.dapo\.dynamic_sampling=false"):
        make(["lens", "dapo"])
    make(["lens", {"dapo": {"dynamic_sampling": False}}])
    with pytest.raises(UserError, match=r"combine\.how=product does not add"):
        make(["lens"], combine={"how": "product"})
    with pytest.raises(UserError, match=r"combine\.how=gdpo does not add"):
        plan("lens_text_tiny", {"combine.how": "gdpo"})
    with pytest.raises(RunError, match=r"lens needs rewards of 0 or 1, but one is 0\.5"):
        prepared(make(["lens"]), torch.full((32,), 0.5))


def test_rows_that_nothing_scored_get_nothing_from_lens(make: Any) -> None:
    trainer = make(["lens"])
    trainer.suite = RewardSuite(
        {"test": {"reward": lambda prompts, completions: [None if i % 2 else 0.0 for i in range(len(prompts))]}}
    )
    rollouts, rewards = trainer.collect(trainer._draw())
    shaped = trainer.stack.shaped(rewards, rollouts, trainer.state)
    _, advantages = trainer.prepare(rollouts, shaped, Stats())
    assert torch.equal(shaped.usable, rewards.usable)
    assert bool((advantages[~rewards.usable] == 0).all())
    assert bool((advantages[rewards.usable] != 0).any())


# -- MicroCoder-GRPO --------------------------------------------------------------------------------------------------------

CODER = {"repeat_window": 2, "correct_from": 0.0}  # every scored answer counts as right, so every cut one is eligible


def test_microcoder_without_a_mask_is_grpo_with_its_settings(make: Any) -> None:
    found = []
    settings = {"advantage": {"eps": 1e-6}, "ratio": {"clip_high": 0.28}, "loss": {"aggregation": "token_mean"}}
    for method, over in ((["grpo"], settings), ([{"microcoder_grpo": {**CODER, "mask_share": 0.0}}], {})):
        trainer = make(method, **over)
        rows, _ = prepared(trainer)
        move(trainer)
        found.append(gradient(trainer, rows)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_the_mask_takes_its_share_and_touches_no_other_row(make: Any) -> None:
    big = {"train": {"prompts_per_step": 16, "group_size": 32, "micro_batch": 64}}
    scores = torch.arange(512) % 2 == 0
    plain, cut = None, None
    for share in (0.0, 1.0, 0.3):
        trainer = make([{"microcoder_grpo": {**CODER, "mask_share": share}}], **big)
        rows, advantages = prepared(trainer, scores)
        if plain is None:
            plain, cut = advantages, rows.rollouts.truncated
            continue
        masked = (advantages == 0) & (plain != 0)
        assert torch.equal(advantages[~masked], plain[~masked])
        assert cut is not None
        assert bool(cut[masked].all())
        assert bool((rows.rollouts.unit_mask.sum(1)[masked] == 3).all())
        if share == 1.0:
            assert torch.equal(masked, cut)
        else:
            assert float(masked.sum() / cut.sum()) == pytest.approx(0.3, abs=0.07)
            again = make([{"microcoder_grpo": {**CODER, "mask_share": share}}], **big)
            assert torch.equal(prepared(again, scores)[1], advantages), "one draw for each seed, step and row"


def test_all_rows_masked_is_a_step_of_nothing(make: Any) -> None:
    trainer = make([{"microcoder_grpo": {**CODER, "mask_share": 1.0}}])
    rollouts, rewards = trainer.collect(trainer._draw())
    rollouts.truncated = torch.ones(32, dtype=torch.bool)
    rewards.values = BINARY.float()[:, None]
    rows, advantages = trainer.prepare(rollouts, rewards, Stats())
    assert bool((advantages == 0).all())
    found, loss = gradient(trainer, rows)
    assert loss == 0.0
    assert bool((found == 0).all())


def test_microcoder_refuses_what_does_not_fit(make: Any) -> None:
    with pytest.raises(UserError, match=r"loss\.mask_truncated=true masks all"):
        make(["microcoder_grpo"], loss={"mask_truncated": True})
    with pytest.raises(UserError, match=r"temperatures must rise from above 0, got \[1\.0, 0\.5\]"):
        make([{"microcoder_grpo": {"temperatures": [1.0, 0.5]}}])
    trainer = make([{"microcoder_grpo": {"complete_detail": "code/complete"}}])
    with pytest.raises(RunError, match=r"no reward gives 'code/complete'; there are: exact_match/answered"):
        prepared(trainer)


def test_the_pilot_takes_the_lowest_temperature_that_is_diverse_enough(make: Any) -> None:
    stages = {"temperatures": [0.05, 1.2, 2.0], "diversity_target": 0.7, "pilot_prompts": 2}
    trainer = make([{"microcoder_grpo": stages}])
    method = trainer.stack.methods["microcoder_grpo"]
    rollouts, _ = trainer.collect(trainer._draw())
    assert method.temperature == 1.2
    assert trainer.state.sampling.temperature == 1.2
    units = torch.arange(rollouts.num_units)
    with torch.no_grad():
        ratio = (trainer.policy.log_prob(rollouts, units).value - rollouts.old_log_prob)[rollouts.unit_mask].exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-12)
    unreachable = make([{"microcoder_grpo": {**stages, "temperatures": [0.05, 0.06], "diversity_target": 0.99}}])
    unreachable.collect(unreachable._draw())
    assert unreachable.stack.methods["microcoder_grpo"].temperature == 0.06


def test_the_temperature_rises_by_one_candidate_after_several_looks(make: Any) -> None:
    stages = {"temperatures": [0.5, 1.0, 1.5], "diversity_target": 0.8, "stage": 2, "patience": 2}
    trainer = make([{"microcoder_grpo": stages}])
    method, state = trainer.stack.methods["microcoder_grpo"], trainer.state
    method.temperature = 0.5
    taken = []
    for step, seen in enumerate(
        [0.1, 0.1, 0.9, 0.9, 0.1, 0.1, 0.63, 0.63, 0.65, 0.65, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    ):
        state.step, method._diversity = step, seen
        method.after_step({}, state)
        taken.append(method.temperature)
    # Looks at steps 1, 3, 5, 7, ...: low, fine, low, low (0.63 < 0.64) -> up; fine, low, low -> up; then the highest stays.
    assert taken == [0.5] * 7 + [1.0] * 6 + [1.5] * 4
    again = make([{"microcoder_grpo": stages}])
    again.stack.load_state_dict(trainer.stack.state_dict())
    rollouts, _ = again.collect(again._draw())
    assert rollouts.data["temperature"].unique().tolist() == [1.5]
    changed = make([{"microcoder_grpo": {**stages, "temperatures": [0.7, 0.9]}}])
    changed.stack.load_state_dict(trainer.stack.state_dict())
    assert changed.stack.methods["microcoder_grpo"].temperature is None


# -- DeGRPO -----------------------------------------------------------------------------------------------------------------


def test_degrpo_without_control_tokens_is_grpo(make: Any) -> None:
    settings = {"advantage": {"std": "none"}, "loss": {"aggregation": "token_mean"}}
    found = []
    for method, over in ((["grpo"], settings), ([{"degrpo": {"control_tokens": 0}}], {"kl": {"beta": 0.0}})):
        trainer = make(method, **over)
        rows, _ = prepared(trainer)
        move(trainer)
        found.append(gradient(trainer, rows)[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_degrpo_rewards_modes_and_tells_a_missing_tag(make: Any) -> None:
    modes = {"short_start": "1", "think_start": ""}
    trainer = make([{"degrpo": {"mode_rewards": modes}}])
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = BINARY.float()[:, None]
    shaped = trainer.stack.shaped(rewards, rollouts, trainer.state)
    assert shaped.clean is rewards
    brief = torch.tensor([text.startswith("1") for text in rollouts.texts])
    expected = torch.where(BINARY, torch.where(brief, 1.0, 0.5), -1.0)
    assert torch.equal(shaped.total(), expected)
    assert bool((rollouts.unit_tags["span"][:, 0] == 3).all())
    assert bool((rollouts.unit_tags["span"][:, 1:] == 0).all())
    rows, _ = trainer.prepare(rollouts, shaped, Stats())
    bare = replace(rows, rollouts=replace(rows.rollouts, unit_tags={}))
    with pytest.raises(RunError, match=r"no unit of the step has the tag span = control"):
        gradient(trainer, bare)


def test_a_long_answer_behind_the_brief_token_has_no_mode(make: Any) -> None:
    trainer = make([{"degrpo": {"mode_rewards": {"short_start": "", "short_max": 2}}}])
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = BINARY.float()[:, None]
    lengths = torch.arange(len(BINARY)) % 3 + 1
    rollouts = replace(rollouts, unit_mask=torch.arange(rollouts.num_units) < lengths[:, None])
    shaped = trainer.stack.shaped(rewards, rollouts, trainer.state)
    assert torch.equal(shaped.total(), torch.where(BINARY & (lengths <= 2), 1.0, -1.0))


# -- recipes ----------------------------------------------------------------------------------------------------------------


def test_published_settings() -> None:
    real = plan("real_r1_distill_qwen_1_5b").config
    assert (real.train.prompts_per_step, real.train.group_size, real.train.updates_per_step) == (128, 8, 4)
    assert (real.train.optimizer.lr, real.sampling["temperature"], real.kl.beta) == (2e-6, 0.6, 0.0)
    lens = plan("lens_qwen2_5_3b").config
    assert (lens.train.prompts_per_step, lens.train.group_size, lens.sampling["max_new_tokens"]) == (32, 16, 4096)
    s_grpo = plan("s_grpo_llama3_2_3b").config
    assert s_grpo.method == [{"s_grpo": {"flip_probability": 0.15}}]
    assert (s_grpo.advantage.std, s_grpo.advantage.eps, s_grpo.loss.aggregation) == ("bessel", 1e-8, "fixed_length")
    coder = plan("microcoder_grpo_qwen3_4b").config
    assert (coder.sampling["temperature"], coder.ratio.clip_high, coder.train.prompts_per_step) == (1.2, 0.28, 64)
    grail = plan("grail_qwen3_4b").config
    assert (grail.advantage.std, grail.loss.mask_truncated, grail.ratio.clip_high) == ("none", True, 0.28)
    assert (grail.train.epochs_per_step, grail.train.optimizer.warmup_steps, grail.sampling["top_k"]) == (4, 20, 50)
    assert grail.train.steps * grail.train.epochs_per_step == 200, "the reference counts optimizer steps"
    assert (grail.train.prompts_per_step, grail.train.group_size) == (32, 8)
    degrpo = plan("degrpo_thinkless_1_5b").config
    assert (degrpo.kl.beta, degrpo.kl.estimator, degrpo.advantage.std) == (0.001, "k3", "none")
    assert (degrpo.sampling["max_new_tokens"], degrpo.train.updates_per_step) == (24576, 2)
