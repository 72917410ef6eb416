"""Every recipe resolves, survives its own YAML, and dry-runs: the real architectures on the meta device, without network."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import visual_grpo as vg
from visual_grpo.api import Plan, any_plan, plan
from visual_grpo.config import RunConfig, to_yaml
from visual_grpo.dry_run import print_any_dry_run, print_dry_run
from visual_grpo.errors import UserError

RECIPES = vg.list_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_its_own_yaml(name: str, tmp_path: Path) -> None:
    """What `recipe show` prints is a config file of the same run."""
    made = any_plan(name)
    assert made.config.name == name
    assert made.config.summary
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(made.config))
    assert any_plan(path).config == made.config
    shown = yaml.safe_load(path.read_text())
    stages = shown["stages"].values() if "stages" in shown else [shown]
    written = [stage["model"]["adapter"] for stage in stages if "model" in stage]
    assert written == [run.model.adapter for run in runs(name)]


def runs(name: str) -> list[RunConfig]:
    """The config of a recipe, or those of a pipeline's training stages."""
    made = any_plan(name)
    if isinstance(made, Plan):
        return [made.config]
    return [stage.plan.config for stage in made.stages if stage.plan is not None]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_dry_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_any_dry_run(any_plan(name))
    shown = capsys.readouterr().out
    assert "parameters" in shown
    assert shown.count("memory of one process") == len(runs(name))


def test_the_real_sd35_medium(capsys: pytest.CaptureFixture[str]) -> None:
    """About 2.24 B parameters, LoRA rank 32 on its attention, batch geometry of the paper."""
    print_dry_run(plan("v_grpo_sd35_medium"))
    shown = capsys.readouterr().out
    assert "2.243 B" in shown
    assert "1152" in shown
    assert "text encoders" in shown


@pytest.mark.parametrize("method", vg.list_methods())
def test_every_method_has_a_tiny_and_a_real_recipe(method: str) -> None:
    users = [name for name in RECIPES for run in runs(name) if method in [next(iter(m)) for m in run.method]]
    assert any("tiny" in name or name == "quickstart" for name in users), users
    assert any("tiny" not in name and name != "quickstart" for name in users), users


def test_published_hyperparameters() -> None:
    """The cards' tables: Flow-GRPO GenEval, V-GRPO stage 1, DAPO."""
    flow = plan("flow_grpo_sd35_medium_geneval").config
    assert (flow.train.prompts_per_step, flow.train.group_size, flow.train.updates_per_step) == (48, 24, 2)
    assert (flow.kl.beta, flow.ratio.clip_low, flow.ratio.clip_high) == (0.04, 1e-4, 1e-4)
    assert flow.model.lora is not None
    assert (flow.model.lora.rank, flow.model.lora.alpha) == (32, 64)
    assert (flow.sampling["steps"], flow.sampling["guidance"], flow.sampling["noise_scale"]) == (10, 4.5, 0.7)
    assert flow.train.optimizer.lr == 3e-4
    assert (flow.sampling["height"], flow.sampling["width"], flow.sampling["max_sequence_length"]) == (512, 512, 128)
    fast = plan("flow_grpo_fast_sd35_medium_geneval").config
    assert (fast.sampling["solver"], fast.sampling["noise_scale"], fast.sampling["guidance"]) == ("cps", 0.8, 1.0)
    assert (fast.ratio.clip_low, fast.ratio.clip_high, fast.kl.beta) == (1e-5, 1e-5, 0.0)
    assert fast.method == [{"flow_grpo": {"window": 3, "window_high": 5}}]
    for made in (flow, fast):
        assert (made.advantage.scope, made.advantage.std, made.advantage.eps) == ("batch", "population", 1e-4)
        assert (made.advantage.clip, made.advantage.drop_flat) == (5.0, True)
        assert made.train.ema is not None
        assert (made.train.ema.decay, made.train.ema.every) == (0.9, 8)
    v = plan("v_grpo_sd35_medium").config
    assert (v.sampling["steps"], v.sampling["guidance"], v.advantage.soft_clip) == (40, 1.0, 3.0)
    assert (v.method, v.ratio.level, v.train.updates_per_step) == ([{"v_grpo": {"pairs": 4}}], "sequence", 1)
    assert v.sampling["max_sequence_length"] == 128
    assert v.train.ema == flow.train.ema
    dapo = plan("dapo_qwen2_5_7b").config
    assert (dapo.train.prompts_per_step, dapo.train.group_size, dapo.ratio.clip_high) == (512, 16, 0.28)
    assert (dapo.loss.aggregation, dapo.sampling["max_new_tokens"]) == ("token_mean", 20480)
    gspo = plan("gspo_qwen3_8b").config
    assert (gspo.ratio.level, gspo.ratio.clip_low, gspo.ratio.clip_high) == ("sequence", 3e-4, 4e-4)
    dr = plan("dr_grpo_qwen2_5_math_7b").config
    assert (dr.advantage.std, dr.loss.aggregation, dr.sampling["max_new_tokens"]) == ("none", "fixed_length", 3000)
    flux = plan("flow_grpo_flux1_dev_pickscore").config
    assert (flux.sampling["steps"], flux.sampling["noise_scale"], flux.sampling["embedded_guidance"]) == (6, 0.9, 3.5)
    assert flux.model.lora is not None
    assert (flux.model.lora.rank, flux.model.lora.alpha, flux.kl.beta) == (64, 128, 0.0)
    assert flux.eval.sampling["steps"] == 28
    fast = plan("flow_grpo_fast_flux1_dev_pickscore").config
    assert (fast.sampling["steps"], fast.sampling["solver"], fast.sampling["noise_scale"]) == (6, "cps", 0.8)
    assert (fast.method, fast.advantage.scope) == ([{"flow_grpo": {"window": 3, "window_high": 3}}], "group")
    assert (fast.ratio.clip_low, fast.ratio.clip_high, fast.kl.beta) == (1e-5, 1e-5, 0.0)
    assert (fast.model, fast.train, fast.eval) == (flux.model, flux.train, flux.eval)
    assert set(v.rewards) == {"hps_v2", "pickscore", "clip_score"}
    v_flux = plan("v_grpo_flux1_dev").config
    assert (v_flux.sampling["steps"], v_flux.sampling["solver"], v_flux.train.steps) == (16, "dpm", 300)
    assert (v_flux.train.prompts_per_step, v_flux.train.group_size, v_flux.model.lora) == (32, 12, None)
    assert (v_flux.ratio.clip_low, v_flux.advantage.soft_clip, v_flux.train.optimizer.lr) == (6e-3, 3.0, 1e-5)
    assert set(v_flux.rewards) == {"hps_v2", "pickscore", "image_reward", "unified_reward"}
    student = runs("flow_opd_sd35_medium")[-1]
    assert (student.train.prompts_per_step, student.train.group_size, student.train.updates_per_step) == (16, 16, 2)
    assert student.method[1]["flow_opd"]["anchor_beta"] == 0.04
    assert student.method[2] == {"task_cycle": {"steps": {"ocr": 1, "geneval": 3}}}
    assert (student.train.optimizer.lr, student.train.optimizer.weight_decay) == (1e-4, 1e-4)
    assert (student.sampling["steps"], student.sampling["guidance"], student.sampling["noise_scale"]) == (10, 4.5, 0.7)
    assert (student.model.init, student.advantage.drop_flat) == ("stage://mean", False)
    grpo = plan("grpo_deepseekmath_7b").config
    assert (grpo.kl.beta, grpo.kl.estimator, grpo.train.group_size) == (0.04, "k3", 64)


def test_the_default_clip_range_is_no_cap_for_cispo() -> None:
    with pytest.raises(UserError, match=r"ratio\.clip_high \(0\.2\) as the cap"):
        plan("grpo_text_tiny", {"loss.surrogate": "cispo"})
    assert plan("grpo_text_tiny", {"loss.surrogate": "cispo", "ratio.clip_high": 5}).config.ratio.clip_high == 5


@pytest.mark.parametrize("key", ["ratio.delta", "ratio.clip_low"])
def test_bounds_of_the_ratio_are_checked_before_a_run(key: str) -> None:
    with pytest.raises(UserError, match=key):
        plan("grpo_text_tiny", {key: 1.0 if key == "ratio.delta" else 1.5})
