"""Diversity in held-out evaluations, the alarm for an exploited reward, and the recipes that show both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from test_processes import close, pair
from toy_flow import flow_config, flow_trainer

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.config import RunConfig, merge, resolve
from visual_grpo.data import PromptRow, evaluation_batch
from visual_grpo.diversity import group_diversity, mean_pairwise_distance
from visual_grpo.eval.features import pixel_features
from visual_grpo.hacking import hacking_message
from visual_grpo.run_folder import read_metrics

DIVERSE = {"eval": {"group_size": 3, "samples": 12, "final_samples": 24}}


def test_golden_pairwise_distances() -> None:
    """Three unit vectors at 90, 45 and 45 degrees: 1 - (0 + 2 cos 45) / 3; opposite ones; one that is twice as long."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert mean_pairwise_distance(rows) == pytest.approx(0.528595479, abs=1e-9)
    assert mean_pairwise_distance(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])) == pytest.approx(2.0, abs=1e-12)
    assert mean_pairwise_distance(torch.tensor([[1.0, 2.0], [2.0, 4.0]])) == pytest.approx(0.0, abs=1e-12)
    groups = torch.tensor([4, 4, 4, 1, 9, 9])
    found = group_diversity(torch.cat([rows, rows]), groups)
    assert found == {0: pytest.approx(0.528595479, abs=1e-9), 4: pytest.approx(1 - 0.5**0.5, abs=1e-9)}


def test_samples_of_a_prompt_stand_side_by_side() -> None:
    rows = [PromptRow(prompt=p, metadata={"tag": p[0]}) for p in ("a1", "a2", "b1")]
    few, many = evaluation_batch(rows, 9, 3), evaluation_batch(rows, 18, 3)
    assert many.prompts[:9] == few.prompts
    assert [len(set(many.prompts[i : i + 3])) for i in range(0, 18, 3)] == [1] * 6
    assert [p[0] for p in few.prompts[::3]] == ["a", "b", "a"]
    assert many.tags["sample"].tolist() == [0, 1, 2] * 3 + [3, 4, 5] * 2 + [6, 7, 8]
    pairs = list(zip(many.tags["index"].tolist(), many.tags["sample"].tolist(), strict=True))
    assert len(set(pairs)) == 18
    plain = evaluation_batch(rows, 5)
    assert [p[0] for p in plain.prompts] == ["a", "b", "a", "b", "a"]


def test_an_evaluation_has_the_diversity_of_its_pictures(tmp_path: Path) -> None:
    """Whatever the batch; on the first sample of each prompt, so that means and intervals go by prompts."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    trainer = flow_trainer(tmp_path / "a", "flow_grpo", **DIVERSE)
    found = trainer.evaluate(12)
    images = trainer.policy.sample(
        evaluation_batch(trainer.held_out.prompts, 12, 3), seed=1234, sampling=trainer.held_out.sampling
    ).images
    expected = [mean_pairwise_distance(part) for part in pixel_features(images).split(3)]
    assert [row["details"].get("diversity") for row in found.rows[::3]] == pytest.approx(expected, abs=1e-6)
    assert all("diversity" not in row["details"] for i, row in enumerate(found.rows) if i % 3)
    assert found.metrics["diversity"] == pytest.approx(sum(expected) / 4, abs=1e-6)
    assert min(expected) > 1e-4
    other = flow_trainer(tmp_path / "b", "flow_grpo", **merge(DIVERSE, {"eval": {"batch": 5}})).evaluate(24)
    assert [row["details"] for row in other.rows[:12:3]] == [
        pytest.approx(row["details"], abs=1e-6) for row in found.rows[::3]
    ]
    trainer.writer.close()


def test_without_siblings_there_is_no_diversity_and_asking_for_it_is_refused(tmp_path: Path) -> None:
    trainer = flow_trainer(tmp_path, "flow_grpo")
    assert "diversity" not in trainer.evaluate(4).metrics
    trainer.writer.close()
    config = flow_config(tmp_path, "flow_grpo", checkpoint={"best": "diversity"})
    with pytest.raises(
        vg.UserError, match=r"diversity compares several pictures of a prompt; it needs eval\.group_size=4"
    ):
        plan(config)
    with pytest.raises(vg.UserError, match=r"rewards\.diversity: this is the name of a figure"):
        plan(merge(config, {**DIVERSE, "rewards": {"diversity": {"reward": "brightness"}}}))


def test_unknown_features_are_refused_before_step_1(tmp_path: Path) -> None:
    config = flow_config(
        tmp_path, "flow_grpo", **merge(DIVERSE, {"eval": {"features": "visual_grpo.pictures:nothing"}})
    )
    with pytest.raises(vg.UserError, match="nothing"):
        vg.train(config, out=tmp_path / "run")


def config_of(**over: Any) -> RunConfig:
    base = {
        "model": {"adapter": "toy", "path": "toy"},
        "data": {"source": "x.jsonl"},
        "rewards": {"proxy": 2.0, "true": {"eval_only": True}},
    }
    return resolve(merge(base, over))


def rows(proxy: list[float], true: list[float | None], diversity: float | None = None) -> list[dict[str, Any]]:
    details = {} if diversity is None else {"diversity": diversity}
    return [
        {"tag": "t", "values": {"proxy": p, "true": t}, "details": details if i % 2 == 0 else {}}
        for i, (p, t) in enumerate(zip(proxy, true, strict=True))
    ]


FIRST = rows([0.1, 0.3, 0.1, 0.3], [1.0, 0.0, 1.0, 0.0], 0.4)


def test_a_reward_that_rises_alone_is_told_with_causes_and_keys() -> None:
    """A fall of 0.25 is half a standard deviation (0.5) of the samples."""
    told = hacking_message(config_of(), FIRST, rows([0.5] * 4, [1.0, 0.0, 0.0, 0.0], 0.4))
    assert "proxy/by_tag 0.2000 -> 0.5000" in told
    assert "true/by_tag fell from 0.5000 to 0.2500 (0.50 standard deviations of its samples)" in told
    assert "diversity" not in told
    for word in (
        "kl.beta",
        "checkpoint.best=true/by_tag",
        "train.early_stop.metric=true/by_tag",
        "alarms.hacking_margin",
    ):
        assert word in told


def test_a_diversity_that_falls_is_told_too() -> None:
    """All prompts were equally diverse, so there is no spread to measure by."""
    config = config_of(rewards={"proxy": 2.0, "true": {"weight": 0.0}})
    told = hacking_message(config, FIRST, rows([0.5] * 4, [1.0] * 4, 0.1))
    assert "diversity/by_tag fell from 0.4000 to 0.1000:" in told


def test_a_held_out_penalty_is_worse_when_it_rises() -> None:
    """Its weight is negative: the same figures, judged the other way round."""
    penalised = config_of(rewards={"proxy": 2.0, "true": {"eval_only": True, "weight": -1.0}})
    risen = rows([0.5] * 4, [1.0, 1.0, 1.0, 0.0], 0.4)
    told = hacking_message(penalised, FIRST, risen)
    assert "true/by_tag rose, which its negative weight calls worse, from 0.5000 to 0.7500 (0.50" in told
    assert "checkpoint.best={metric: true/by_tag, mode: min}" in told
    assert "train.early_stop={metric: true/by_tag, mode: min}" in told
    assert hacking_message(penalised, FIRST, rows([0.5] * 4, [0.0] * 4, 0.4)) is None


@pytest.mark.parametrize(
    ("now", "over"),
    [
        (rows([0.2] * 4, [0.0] * 4, 0.4), {}),  # the trained reward does not rise
        (rows([0.5] * 4, [1.0, 1.0, 1.0, 0.0], 0.5), {}),  # both rise
        (rows([0.5] * 4, [1.0, 0.0, 0.0, 0.0], 0.4), {"alarms": {"hacking_margin": 0.6}}),
        (rows([0.5] * 4, [None] * 4), {}),  # nothing to compare
    ],
)
def test_no_alarm(now: list[dict[str, Any]], over: dict[str, Any]) -> None:
    assert hacking_message(config_of(**over), FIRST, now) is None


def darkness(images: torch.Tensor) -> torch.Tensor:
    """What falls as brightness rises."""
    return 1 - images.mean((1, 2, 3))


HACKED = {
    "rewards": {"brightness": 1.0, "test_anti_hacking:darkness": {"eval_only": True}},
    "eval": {"every": 2, "samples": 8, "final_samples": 8, "group_size": 2},
    "alarms": {"hacking_margin": 0.0},
    "train": {"steps": 4, "optimizer": {"lr": 0.02}},
}


def test_a_run_that_exploits_its_reward_says_so(tmp_path: Path) -> None:
    result = vg.train(flow_config(tmp_path, "flow_grpo", **HACKED), out=tmp_path / "run")
    alarms = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "alarm" and r["name"] == "hacking"]
    assert [a["step"] for a in alarms] == [2]  # told once in ten steps
    assert "test_anti_hacking:darkness/by_tag fell from" in alarms[0]["message"]
    assert result.after.metrics["brightness"] > result.before.metrics["brightness"]
    page = (tmp_path / "run/report.html").read_text()
    assert "The reward was exploited" in page
    assert "held-out test_anti_hacking:darkness" in page
    assert "held-out diversity" in page


def test_the_alarm_can_stop_the_run_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    config = flow_config(tmp_path, "flow_grpo", **merge(HACKED, {"alarms": {"hacking": "stop"}}))
    with pytest.raises(vg.RunError, match=r"step 2: since the first evaluation .*go on with --resume"):
        vg.train(config, out=tmp_path / "run")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-000002"]
    result = vg.train(merge(config, {"alarms": {"hacking": "off"}}), out=tmp_path / "run", resume=True)
    assert result.step == 4


def test_two_processes_see_one_diversity_and_keep_one_best(tmp_path: Path) -> None:
    """Five prompts of two pictures, so that a prompt lies on both."""
    over = {
        "eval": {"samples": 10, "final_samples": 10, "final": "best"},
        "checkpoint": {"best": "diversity"},
        "train": {"early_stop": {"metric": "test_anti_hacking:darkness", "patience": 1}},
    }
    config = flow_config(tmp_path, "flow_grpo", **merge(HACKED, over))
    one = vg.train(config, out=tmp_path / "one")
    assert pair(config, tmp_path / "two") == [0, 0], (tmp_path / "two-0.log").read_text()
    kept = [[{k: v for k, v in r.items() if k != "time"} for r in read_metrics(tmp_path / name) if r["kind"] == "eval"]
            for name in ("one", "two")]  # fmt: skip
    close(*[[{**r, "stop": bool(r.get("stop"))} for r in records] for records in kept])
    assert one.stopped is not None
    assert "diversity" in kept[0][0]["metrics"]


@pytest.mark.parametrize("name", ["flow_grpo_hacked_tiny", "flow_grpo_guarded_tiny"])
def test_the_recipes_watch_what_they_do_not_train_on(name: str) -> None:
    config = plan(name).config
    trained = [n for n, reward in config.rewards.items() if not reward.eval_only]
    assert (trained, config.eval.group_size > 1) == (["two_tower"], True)
    assert config.alarms.hacking == "warn"
    guarded = name == "flow_grpo_guarded_tiny"
    assert ((config.kl.beta > 0), config.eval.final) == (guarded, "best" if guarded else "last")
    assert (config.checkpoint.best is not None, config.train.early_stop is not None) == (guarded, guarded)
