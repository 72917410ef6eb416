"""What a text method, its loss or its sampler would ignore or could not use is refused, with the setting to change."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from toy_run import toy_config, toy_trainer

from visual_grpo.api import plan
from visual_grpo.errors import UserError
from visual_grpo.pipelines.text.fg_expo import question_weights
from visual_grpo.scoring import RewardSuite

TWICE = {"train": {"updates_per_step": 2}}


@pytest.mark.parametrize(
    ("method", "over", "message"),
    [
        # of the core, beside a method
        ("real", {"advantage": {"std": "none"}}, "method 'real' does not read advantage.std: leave it out"),
        ("real", {"advantage": {"soft_clip": 1.0}}, "'real' does not read advantage.soft_clip"),
        ("real", {"ratio": {"clip_low": 0.1, "clip_high": 0.3}}, "does not read ratio.clip_low and ratio.clip_high"),
        ("real", {"loss": {"aggregation": "token_mean"}}, "'real' does not read loss.aggregation"),
        ("real", {"loss": {"top_entropy": 0.2}}, "'real' does not read loss.top_entropy"),
        ("real", {"loss": {"off_policy_max": 0.2}, **TWICE}, "'real' does not read loss.off_policy_max"),
        ("sft", {"advantage": {"drop_flat": True}}, "'sft' does not read advantage.drop_flat"),
        ("sft", {"advantage": {"clip": 0.5}}, "'sft' does not read advantage.clip"),
        ("sft", {"ratio": {"old": "sampler"}}, "'sft' does not read ratio.old"),
        ("sft", {"loss": {"off_policy_max": 0.2}, **TWICE}, "'sft' does not read loss.off_policy_max"),
        ("sft", {"kl": {"beta": 0.1, "importance": True}}, "'sft' does not read kl.importance"),
        ("tmn_reweight", {"advantage": {"scope": "batch"}}, "'tmn_reweight' does not read advantage.scope"),
        ("degrpo", {"loss": {"aggregation": "token_mean"}}, "'degrpo' does not read loss.aggregation"),
        # of the core's surrogates
        (
            "grpo",
            {"loss": {"surrogate": "sapo"}, "ratio": {"clip_low": 0.1}},
            "surrogate=sapo does not read ratio.clip_low",
        ),
        (
            "grpo",
            {"loss": {"surrogate": "cispo"}, "ratio": {"clip_low": 0.1, "clip_high": 5.0}},
            "surrogate=cispo does not read ratio.clip_low: leave",
        ),
        ("dapo", {"loss": {"surrogate": "vespo"}, "ratio": {"clip_high": 0.3}}, "=vespo does not read ratio.clip_high"),
        # of a method
        (
            {"dapo": {"overlong_weight": 2.0}},
            {},
            "method.dapo.overlong_weight would not be read without overlong_cache",
        ),
        (
            {"dapo": {"dynamic_sampling": False, "max_tries": 9}},
            {},
            "max_tries would not be read without dynamic_sampling",
        ),
        (
            {"dapo": {"overlong_cache": 2, "overlong_weight": -1.0}},
            {},
            "overlong_weight: Input should be greater than or",
        ),
        ({"seed_grpo": {"gamma": 3.0}}, {}, "gamma would not be read without form=focal"),
        (
            {"tmn_reweight": {"difficulty_reweight": False, "gamma": 2.0}},
            {},
            "gamma would not be read without difficulty",
        ),
        ({"fg_expo": {"sigma": None, "decay": 0.1}}, {}, "fg_expo.decay would not be read without sigma"),
        ({"redit": {"std": 0.0, "noise": "uniform"}}, {}, "redit.noise would not be read without std above 0"),
        ({"microcoder_grpo": {"stage": 3}}, {}, "microcoder_grpo.stage would not be read without diversity_target"),
        (
            {"degrpo": {"control_tokens": 0, "control_weight": 0.5}},
            {},
            "control_weight would not be read without control",
        ),
        (
            {"microcoder_grpo": {"diversity_target": 0.5, "temperatures": [True, 2.0]}},
            {},
            "temperatures: a truth value",
        ),
        # of rewards
        ("grpo", {"rewards": {"exact_match": 0.0}}, "rewards: every weight is 0"),
        ("real", {"rewards": {"exact_match": 0.5}}, "rewards.exact_match.weight is 0.5, so none would be: set it to 1"),
    ],
)
def test_what_nothing_would_read_is_refused(tmp_path: Path, method: Any, over: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(toy_config(tmp_path, method=method, **over))


@pytest.mark.parametrize(
    ("method", "over"),
    [
        (["dr_grpo", "tmn_reweight"], {}),  # what another method sets is no wish of the user's
        (["dapo", "degrpo"], {}),
        ("dapo", {"loss": {"surrogate": "sapo"}}),
        ("grpo", {"loss": {"surrogate": "cispo"}, "ratio": {"clip_high": 5.0}}),
        ("real", {"loss": {"mask_truncated": True}}),
        (["sft", "lambda_grpo"], {"kl": {"beta": 0.1}}),
        ("sft", {"rewards": {"exact_match": 0.0}}),
        ({"seed_grpo": {"form": "focal", "gamma": 3.0}}, {}),
    ],
)
def test_what_is_read_is_not(tmp_path: Path, method: Any, over: dict[str, Any]) -> None:
    made = plan(toy_config(tmp_path, method=method, **over))
    plan(made.config.model_dump(mode="json"))  # as a stage of a pipeline is planned again, every value stated


@pytest.mark.parametrize("other", ["dapo", "redit", "s_grpo", "seed_grpo", "microcoder_grpo", "fg_expo", "degrpo"])
def test_given_answers_are_not_compared_by_their_rewards(tmp_path: Path, other: str) -> None:
    with pytest.raises(UserError, match=f"'sft' and '{other}' cannot be stacked: the answers of sft are given"):
        plan(toy_config(tmp_path, method=["sft", other]))


def test_dynamic_sampling_would_drop_the_groups_that_tell_modes_apart(tmp_path: Path) -> None:
    modes = {"degrpo": {"mode_rewards": {}}}
    with pytest.raises(UserError, match=r"'degrpo' and 'dapo' do not fit: .* method\.dapo.dynamic_sampling=false"):
        plan(toy_config(tmp_path, method=["dapo", modes]))
    plan(toy_config(tmp_path, method=[{"dapo": {"dynamic_sampling": False}}, modes]))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["sampling.temperature=0"], "sampling.temperature is 0, .* eval.sampling.temperature=0"),
        (["sampling.temperature=1e-30"], r"sampling.temperature: must be 0 \(greedy\) or at least 1e-06"),
        (["eval.sampling.temperature=1e-7"], "eval.sampling.temperature: must be 0"),
        (["sampling.engine=vllm", "eval.sampling.temperature=0.001"], "vLLM takes 0.01 in place of all below"),
        (["loss.mask_truncated=true", "sampling.stop_on_eos=false"], "all of them do: nothing would be trained"),
    ],
)
def test_samples_that_nothing_can_be_learned_from(over: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan("grpo_text_tiny", over)


def test_greedy_evaluations_and_given_answers_are_fine() -> None:
    plan("grpo_text_tiny", ["eval.sampling.temperature=0"])
    plan("sft_text_tiny", ["sampling.temperature=0"])


def test_a_penalty_is_added_to_a_product_and_no_factor_of_it(tmp_path: Path) -> None:
    """Right answers of one token differ from right ones of two by the penalty, and wrong ones from both."""
    method = {"dapo": {"overlong_cache": 2, "dynamic_sampling": False}}
    trainer = toy_trainer(tmp_path, method=[method, {"redit": {"std": 1e-6}}], combine="product")
    trainer.suite = RewardSuite({"test": {"reward": lambda completions, **_: [float(len(c) < 2) for c in completions]}})
    rollouts, rewards = trainer.collect(trainer._draw())
    shaped = trainer.stack.shaped(trainer.normalisers(rewards), rollouts, trainer.state)
    trainer.suite.close()
    trainer.writer.close()
    assert shaped.names == ("test", "overlong", "dither")
    length, cut = rollouts.unit_mask.sum(1), rollouts.truncated
    assert cut is not None
    assert set(cut.tolist()) == {True, False}
    penalty = torch.where(cut, -1.0, (1 - length.float()).clamp(max=0) / 2)
    torch.testing.assert_close(shaped.total(), rewards.values[:, 0] + penalty, rtol=0, atol=1e-4)


def test_no_question_is_left_out_for_good() -> None:
    weights = question_weights(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), 0.001)
    assert bool((weights > 0).all())
    assert float(weights[1]) == 1.0


def test_graded_rewards_of_real_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = toy_trainer(tmp_path, method="real", self_test={"enabled": False})
    grades = [0.0, 0.5] * 16
    trainer.suite = RewardSuite({"test": {"reward": lambda prompts, **_: grades[: len(prompts)]}})
    with caplog.at_level(logging.WARNING, logger="visual_grpo"):
        for _ in range(2):
            trainer.iteration()
    trainer.suite.close()
    trainer.writer.close()
    told = [r.getMessage() for r in caplog.records if "in neither class" in r.getMessage()]
    assert told == [
        "real: 16 of 32 answers have a score other than 0 and 1 (0.5) and are in neither class; use one reward of 0 and 1 with "
        "weight 1"
    ]


@pytest.mark.parametrize("method", [{"sft": {"column": "tga"}}, {"tmn_reweight": {"task_key": "tga"}}])
def test_a_column_that_one_prompt_lacks_is_missed_before_the_run(tmp_path: Path, method: Any) -> None:
    config = toy_config(tmp_path, method=method)
    lines = [{"prompt": f"say {i}", "answer": "1", "tga": "1"} for i in range(15)] + [
        {"prompt": "say 99", "answer": "1"}
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    from visual_grpo.build import read_prompts

    with pytest.raises(UserError, match=r"'tga', (and|but) prompt 'say 99'"):
        read_prompts(plan(config))
