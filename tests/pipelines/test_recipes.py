"""Every recipe resolves, survives its own YAML, and dry-runs: the real architectures on the meta device, without network."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.config import to_yaml
from visual_grpo.dry_run import print_dry_run

RECIPES = vg.list_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_its_own_yaml(name: str, tmp_path: Path) -> None:
    """What `recipe show` prints is a config file of the same run."""
    made = plan(name)
    assert made.config.name == name
    assert made.config.summary
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(made.config))
    assert plan(path).config == made.config
    assert yaml.safe_load(path.read_text())["model"]["adapter"] == made.config.model.adapter


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_dry_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(plan(name))
    shown = capsys.readouterr().out
    assert "parameters" in shown
    assert "memory of one process" in shown


def test_the_real_sd35_medium(capsys: pytest.CaptureFixture[str]) -> None:
    """About 2.24 B parameters, LoRA rank 32 on its attention, batch geometry of the paper."""
    print_dry_run(plan("v_grpo_sd35_medium"))
    shown = capsys.readouterr().out
    assert "2.243 B" in shown
    assert "1152" in shown
    assert "text encoders" in shown


@pytest.mark.parametrize("method", vg.list_methods())
def test_every_method_has_a_tiny_and_a_real_recipe(method: str) -> None:
    users = [name for name in RECIPES if method in [next(iter(m)) for m in plan(name).config.method]]
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
    v = plan("v_grpo_sd35_medium").config
    assert (v.sampling["steps"], v.sampling["guidance"], v.advantage.soft_clip) == (40, 1.0, 3.0)
    dapo = plan("dapo_qwen2_5_7b").config
    assert (dapo.train.prompts_per_step, dapo.train.group_size, dapo.ratio.clip_high) == (512, 16, 0.28)
    assert (dapo.loss.aggregation, dapo.sampling["max_new_tokens"]) == ("token_mean", 20480)
