"""The text methods through the loop: stacks, identities with GRPO, refusals, and a step of each tiny recipe on its real model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
import tiny_sd3
from toy_run import gradient, move, prepared, toy_config, toy_trainer

from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.pipelines.text.fg_expo import kl_factor
from visual_grpo.run_folder import RunFolder
from visual_grpo.scoring import RewardSuite
from visual_grpo.trainer import Trainer

FLOAT64 = {"model": {"dtype": "float64"}, "self_test": {"enabled": False}}


def small(prompts: list[str], completions: list[str]) -> list[float]:
    """0 or 1, rarely equal within a group."""
    return [float((text[:1] or "9") < "5") for text in completions]


def steps(trainer: Trainer, count: int = 1, reward: Any = small) -> list[dict[str, float]]:
    """Metrics of the first steps."""
    trainer.suite = RewardSuite({"test": {"reward": reward}})
    for _ in range(count):
        trainer.iteration()
    found = [record["metrics"] for record in trainer.writer.folder.read_metrics("train")]
    trainer.suite.close()
    trainer.writer.close()
    return found


def weights_after(folder: Path, method: Any, **over: Any) -> dict[str, torch.Tensor]:
    folder.mkdir()
    trainer = toy_trainer(folder, method=method, **FLOAT64, **over)
    steps(trainer, 2)
    return {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}


STACKS: dict[str, list[Any]] = {
    "dapo, redit, ba": [{"dapo": {"max_tries": 3, "overlong_cache": 2}}, "redit", "balanced_aggregation"],
    "grpo, seed, lambda": ["grpo", {"seed_grpo": {"strength": 0.5, "extraction": "whole"}}, "lambda_grpo"],
    "dapo, tmn": ["dapo", "tmn_reweight"],
    "fg_expo, dapo": [{"dapo": {"max_tries": 2}}, "fg_expo", {"redit": {"std": 0.01}}],
    "everything": ["lambda_grpo", "tmn_reweight", "seed_grpo", "fg_expo", "redit", "balanced_aggregation"],
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_takes_a_step(name: str, tmp_path: Path) -> None:
    """With the self-test; loss finite, weights moved, each method's figures in the metrics."""
    trainer = toy_trainer(tmp_path, method=STACKS[name])
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    (metrics,) = steps(trainer)
    assert all(bool(torch.isfinite(v).all()) for v in trainer.policy.trainable.values())
    assert any(not torch.equal(v, before[k]) for k, v in trainer.policy.trainable.items())
    assert metrics["grad_norm"] > 0
    figures = {
        "balanced_aggregation": "balanced_aggregation/length_negative",
        "seed_grpo": "seed_grpo/factor",
        "lambda_grpo": "lambda_grpo/weight",
        "tmn_reweight": "tmn_reweight/advantage_max",
        "fg_expo": "fg_expo/kl_beta",
        "redit": "redit/noise_only_groups",
    }
    for method in trainer.stack.methods:
        assert method not in figures or figures[method] in metrics, method
    if "seed_grpo" in trainer.stack.methods:
        assert 0 < metrics["seed_grpo/factor"] < 1
    if "lambda_grpo" in trainer.stack.methods:
        assert 0 < metrics["lambda_grpo/weight"] < 1


def test_dithered_flow_model(tmp_path: Path) -> None:
    """[v_grpo, redit] on a random SD3: noise on the reward of images, evaluations without."""
    tiny_sd3.build(tmp_path / "parts").save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        lines = [json.dumps({"prompt": f"{split} {word}"}) + "\n" for word in ("abc", "bcd")]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    made = plan(
        {
            "model": {"adapter": "sd3", "path": str(tmp_path / "model")},
            "method": [{"v_grpo": {"pairs": 2}}, {"redit": {"std": 0.1}}],
            "data": {"source": str(tmp_path / "train.jsonl")},
            "eval": {"source": str(tmp_path / "test.jsonl")},
            "rewards": {"brightness": 1.0},
            "sampling": {"steps": 2, "max_sequence_length": 10},
            "train": {"prompts_per_step": 2, "group_size": 2, "micro_batch": 4},
        }
    )
    folder = RunFolder.create(tmp_path / "runs", "v", config_yaml=to_yaml(made.config))
    trainer = build_trainer(made, folder, Ranks())
    trainer.iteration()
    (metrics,) = [record["metrics"] for record in folder.read_metrics("train")]
    assert metrics["reward_shaped/total"] != metrics["reward/total"]
    assert "reward/dither" not in metrics
    assert metrics["grad_norm"] > 0
    found = trainer.evaluate(2)
    trainer.suite.close()
    trainer.writer.close()
    assert set(found.metrics) == {"brightness"}


class OwnAggregation(Method[MethodConfig]):
    """Fills the hook that BA fills."""

    def aggregate(self, mask: Any, totals: Any, rollouts: Any, state: LoopState) -> Any:
        """Unused."""
        raise AssertionError


class OwnAdvantages(Method[MethodConfig]):
    """Fills the hook that TMN fills."""

    def advantages(self, rewards: Any, rollouts: Any, state: LoopState) -> Any:
        """Unused."""
        raise AssertionError


@pytest.mark.parametrize(
    ("method", "other", "hook"),
    [("balanced_aggregation", "OwnAggregation", "aggregate"), ("tmn_reweight", "OwnAdvantages", "advantages")],
)
def test_two_providers_of_one_hook_are_refused(method: str, other: str, hook: str, tmp_path: Path) -> None:
    name = f"test_text_stacks:{other}"
    with pytest.raises(
        UserError, match=rf"'{method}' and '{name}' cannot be stacked: both fill the exclusive hook '{hook}'"
    ):
        plan(toy_config(tmp_path, method=[method, name]))


def test_what_does_not_fit_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"combine\.how=gdpo makes the advantages, and so does method 'tmn_reweight'"):
        plan(toy_config(tmp_path, method="tmn_reweight", combine="gdpo"))
    with pytest.raises(UserError, match=r"kl\.beta is 0: set kl\.beta"):
        plan(toy_config(tmp_path, method=["fg_expo", "dapo"]))
    for method in ("balanced_aggregation", "lambda_grpo", "seed_grpo"):
        with pytest.raises(UserError, match="no model has the units that all of them need"):
            plan(toy_config(tmp_path, method=["v_grpo", method]))
    with pytest.raises(UserError, match=r"std: Input should be greater than or equal to 0"):
        plan(toy_config(tmp_path, method={"redit": {"std": -1}}))


def test_a_prompt_without_a_task_is_refused_before_sampling(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"task_key is 'task', but prompt 'say \d+' has no such column; it has prompt, answer, tag"
    ):
        toy_trainer(tmp_path, method={"tmn_reweight": {"task_key": "task"}})


SAME: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "redit without noise": ("grpo", ["grpo", {"redit": {"std": 0.0}}], {}),
    "seed without strength": ("dr_grpo", ["dr_grpo", {"seed_grpo": {"strength": 0.0}}], {}),
    "fg_expo switched off": (
        "grpo",
        {"fg_expo": {"adaptive_kl": False, "sigma": None}},
        {
            "kl": {"beta": 0.02},
            "advantage": {"std": "population", "eps": 1e-6},
            "loss": {"aggregation": "token_mean"},
        },
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_identities_with_the_base_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Two steps end in the same weights."""
    base, method, over = SAME[name]
    one, two = weights_after(tmp_path / "base", base, **over), weights_after(tmp_path / "method", method, **over)
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_lambda_grpo_with_distinct_first_tokens_is_grpo(tmp_path: Path) -> None:
    """Groups of two whose answers begin differently: all weights are 1."""
    found = {}
    for name, method in (("base", {"grpo": {}}), ("lambda", {"lambda_grpo": {}})):
        (tmp_path / name).mkdir()
        over = {"train": {"prompts_per_step": 8, "group_size": 2}, "loss": {"aggregation": "token_mean"}}
        trainer = toy_trainer(tmp_path / name, method=method, **FLOAT64, **over)
        keep_distinct(trainer)
        (metrics,) = steps(trainer)
        if name == "lambda":
            assert metrics["lambda_grpo/weight"] == 1.0
        assert metrics["rows"] >= 2
        found[name] = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    assert all(torch.equal(v, found["lambda"][k]) for k, v in found["base"].items())


def keep_distinct(trainer: Trainer) -> None:
    """Leave out groups whose answers begin alike."""

    class Distinct(Method[MethodConfig]):
        def filter_groups(self, keep: Any, rewards: Any, rollouts: Any, state: LoopState) -> Any:
            first = rollouts.data["completion_ids"][:, 0].view(-1, 2)
            return keep & (first[:, 0] != first[:, 1]).repeat_interleave(2)

    trainer.stack.methods["distinct"] = Distinct(MethodConfig())


def test_filters_and_figures_read_the_clean_reward(tmp_path: Path) -> None:
    """All groups are flat but for the noise: told by the self-test, counted, dropped by `drop_flat`."""
    trainer = toy_trainer(tmp_path, method="redit", advantage={"drop_flat": True})
    before = {k: v.detach().clone() for k, v in trainer.policy.trainable.items()}
    (metrics,) = steps(trainer, reward=lambda prompts, completions: [1.0] * len(prompts))
    record = json.loads((trainer.writer.folder.path / "self_test.json").read_text())
    checks = record["checks"] if isinstance(record, dict) else record
    unequal = next(c for c in checks if c["name"] == "groups with unequal rewards")
    assert (unequal["status"], unequal["detail"].split(":")[0]) == ("warn", "0 of 4")
    assert metrics["flat_groups"] == metrics["redit/noise_only_groups"] == 1.0
    assert metrics["reward/total"] == 1.0
    assert metrics["reward_shaped/total"] != 1.0
    assert metrics["rows"] == 0
    assert all(torch.equal(before[k], v) for k, v in trainer.policy.trainable.items())


def test_noise_alone_trains_without_the_filter(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, method="redit")
    (metrics,) = steps(trainer, reward=lambda prompts, completions: [1.0] * len(prompts))
    assert metrics["grad_norm"] > 0


def test_dynamic_sampling_reads_the_clean_reward(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, method=[{"dapo": {"max_tries": 2}}, "redit"], self_test={"enabled": False})
    (metrics,) = steps(trainer, reward=lambda prompts, completions: [1.0] * len(prompts))
    assert metrics["grad_norm"] == 0
    assert trainer.source.cursor == 2 * 4


def test_the_kl_follows_the_accuracy_and_the_table_its_questions(tmp_path: Path) -> None:
    """Flat groups that dynamic sampling drops move their questions' rates too."""
    method = [{"dapo": {"max_tries": 2}}, {"fg_expo": {"decay": 0.5}}]
    trainer = toy_trainer(tmp_path, method=method, self_test={"enabled": False})
    (metrics,) = steps(trainer, reward=lambda prompts, completions: [float(int(p[4:]) % 2) for p in prompts])
    rates = trainer.stack.methods["fg_expo"].state_dict()["rates"]
    drawn = rates[rates != 0.5]
    assert len(drawn) == 8
    even = torch.tensor([int(row.prompt[4:]) % 2 == 0 for row in trainer.source.rows])
    assert set(rates[even].tolist()) <= {0.5, 0.25}
    assert set(rates[~even].tolist()) <= {0.5, 0.75}
    assert "fg_expo/kl_beta" not in metrics  # nothing was left to train


def test_the_loss_holds_the_kl_at_the_factor_of_the_accuracy(tmp_path: Path) -> None:
    """All answers right: no advantage, and GRPO with its KL coefficient times 0.880797."""
    found = []
    for method, beta in (("grpo", 0.5 * kl_factor(1.0)), ("fg_expo", 0.5)):
        (tmp_path / method).mkdir()
        over = {"kl": {"beta": beta}, "loss": {"aggregation": "token_mean"}}
        trainer = toy_trainer(tmp_path / method, method=method, **FLOAT64, **over)
        rows, advantages = prepared(trainer, torch.ones(32))
        assert bool((advantages == 0).all())
        move(trainer)
        found.append(gradient(trainer, rows))
        trainer.suite.close()
        trainer.writer.close()
    assert found[0][1] > 1e-4
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-12)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-12)


def test_a_resumed_run_draws_the_same_questions(tmp_path: Path) -> None:
    over = {"method": [{"fg_expo": {"decay": 0.2}}], **FLOAT64}
    trainer = toy_trainer(tmp_path, **over)
    trainer.suite = RewardSuite({"test": {"reward": small}})
    for _ in range(3):
        trainer.iteration()
    trainer.save()
    wanted = trainer._draw().prompts
    rates = trainer.stack.methods["fg_expo"].state_dict()["rates"]
    trainer.writer.close()
    trainer.writer.folder.close()
    made = plan(toy_config(tmp_path, **over))
    again = build_trainer(made, RunFolder(trainer.writer.folder.path, resumed=True), Ranks())
    again.resume()
    assert torch.equal(again.stack.methods["fg_expo"].state_dict()["rates"], rates)
    assert len(set(rates.tolist())) > 2
    assert again._draw().prompts == wanted
    again.writer.close()


def test_published_settings() -> None:
    """The cards' tables of hyperparameters."""
    ba = plan("balanced_aggregation_qwen2_5_math_7b").config
    assert (ba.train.group_size, ba.train.optimizer.lr, ba.kl.beta) == (16, 1e-6, 0.0)
    assert (ba.ratio.clip_low, ba.ratio.clip_high) == (0.2, 0.28)
    for name in ("dapo_qwen2_5_7b", "balanced_aggregation_qwen2_5_math_7b"):
        train = plan(name).config.train
        assert train.optimizer.warmup_steps == 20 * train.updates_per_step, "DAPO warms up over 20 rollout batches"
    lam = plan("lambda_grpo_qwen2_5_3b").config
    assert (lam.train.prompts_per_step, lam.train.group_size, lam.train.updates_per_step) == (4, 6, 1)
    assert (lam.sampling["temperature"], lam.sampling["max_new_tokens"], lam.kl.beta) == (0.75, 1200, 0.0)
    assert lam.model.lora is not None
    assert (lam.model.lora.rank, lam.model.lora.alpha, lam.model.lora.dropout) == (64, 128, 0.05)
    assert (lam.advantage.std, lam.advantage.eps, lam.kl.weighted) == ("bessel", 1e-4, True)
    assert plan("lambda_grpo_text_tiny").config.loss.aggregation == "token_mean"
    tmn = plan("tmn_reweight_qwen3_4b").config
    assert (tmn.train.prompts_per_step, tmn.train.group_size, tmn.train.updates_per_step) == (128, 16, 1)
    assert (tmn.ratio.clip_low, tmn.ratio.clip_high, tmn.ratio.dual_clip) == (0.2, 0.28, 3.0)
    optimizer = tmn.train.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.weight_decay, optimizer.grad_norm) == (2e-6, 5, 0.1, 1.0)
    assert (tmn.loss.aggregation, tmn.kl.beta, tmn.sampling["max_new_tokens"]) == ("token_mean", 0.0, 16384)
    method = plan("tmn_reweight_qwen3_4b").stack.methods["tmn_reweight"].config
    assert (method.smoothing, method.gamma, method.difficulty_reweight) == (0.8, 1.0, True)
    seed = plan("seed_grpo_qwen2_5_math_7b").config
    assert (seed.train.prompts_per_step, seed.train.group_size, seed.sampling["max_new_tokens"]) == (128, 8, 3000)
    assert (seed.advantage.std, seed.loss.aggregation, seed.kl.beta) == ("none", "fixed_length", 0.0)
    assert seed.method[1]["seed_grpo"]["strength"] == 0.02
    fg = plan("fg_expo_r1_distill_qwen_1_5b").config
    assert (fg.train.prompts_per_step, fg.train.group_size, fg.kl.beta, fg.kl.estimator) == (256, 8, 0.02, "k3")
    assert (fg.advantage.std, fg.ratio.clip_low, fg.ratio.clip_high) == ("population", 0.2, 0.2)
    table = plan("fg_expo_r1_distill_qwen_1_5b").stack.methods["fg_expo"].config
    assert (table.decay, table.sigma) == (0.9, 0.35)
    assert plan("redit_qwen2_5_7b").stack.methods["redit"].config.std == 0.05


TINY = ["balanced_aggregation", "lambda_grpo", "tmn_reweight", "seed_grpo", "fg_expo", "redit"]


@pytest.mark.parametrize("method", TINY)
def test_a_step_of_the_tiny_recipe(method: str, tmp_path: Path) -> None:
    """On the real tiny LM, with the self-test, fewer and shorter answers."""
    over = {"train.prompts_per_step": 4, "train.group_size": 4, "train.micro_batch": 16, "sampling.max_new_tokens": 16}
    made = plan(f"{method}_text_tiny", over)
    assert method in [name for item in made.config.method for name in item]
    folder = RunFolder.create(tmp_path / "runs", made.config.name, config_yaml=to_yaml(made.config))
    trainer = build_trainer(made, folder, Ranks())
    trainer.iteration()
    (metrics,) = [record["metrics"] for record in folder.read_metrics("train")]
    trainer.suite.close()
    trainer.writer.close()
    assert 0 <= metrics["reward/total"] <= 1
    assert all(bool(torch.isfinite(v).all()) for v in trainer.policy.trainable.values())
