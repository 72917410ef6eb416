"""Several prompt sets as tasks: rows carry the task, rewards apply to some, a cycle chooses, evaluations tell them apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from toy_run import toy_config, toy_trainer

import visual_grpo as vg
from visual_grpo.api import plan
from visual_grpo.build import read_prompts
from visual_grpo.config import DataConfig, validate
from visual_grpo.data import PromptRow, PromptSource, evaluation_batch, load_prompts
from visual_grpo.dry_run import print_dry_run
from visual_grpo.errors import UserError
from visual_grpo.evaluation import main_figures, summarise
from visual_grpo.pipelines.flow.task_cycle import TaskCycle, TaskCycleConfig
from visual_grpo.selftest import _rewards_apply
from visual_grpo.types import RewardStatus


def two_tasks(folder: Path, **over: Any) -> dict[str, Any]:
    """The toy's prompts as task `say`, and twelve others without tags as task `shout`."""
    config = toy_config(folder)
    for name, numbers in (("shout", range(12)), ("shout_test", range(12, 16))):
        lines = [json.dumps({"prompt": f"shout {i}", "answer": str(i % 10)}) for i in numbers]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    said, shouted = config["data"]["source"], str(folder / "shout.jsonl")
    data = {
        "sources": {
            "say": {"source": said, "heldout": config["eval"].pop("source")},
            "shout": {"source": shouted, "heldout": str(folder / "shout_test.jsonl")},
        }
    }
    rewards = {
        "exact_match": {"applies": {"task": "say"}},
        "length": {"params": {"target": 1}, "applies": {"task": "shout"}},
    }
    return config | {"data": data, "rewards": rewards} | over


def trainer(folder: Path, **over: Any) -> Any:
    """A trainer on both tasks."""
    config = two_tasks(folder, **over)
    empty = {"data": {"source": None}, "eval": {"source": None}}
    return toy_trainer(
        folder, **{key: {**config[key], **empty.get(key, {})} if key in empty else config[key] for key in config}
    )


def test_rows_carry_the_task_and_rewards_apply_to_theirs(tmp_path: Path) -> None:
    made = trainer(tmp_path, method=["task_cycle"])
    assert made.state.tasks == ("say", "shout")
    assert torch.equal(made.state.prompt_tasks, torch.tensor([0] * 16 + [1] * 12))
    for step, task in enumerate(["say", "shout", "say"]):
        made.state.step = step
        rollouts, rewards = made.collect(made._draw())
        number = made.state.tasks.index(task)
        assert torch.equal(rollouts.prompts.tags["task"], torch.full((32,), number))
        assert {row["task"] for row in rollouts.prompts.metadata} == {task}
        assert all(prompt.startswith(task) for prompt in rollouts.prompts.prompts)
        assert bool((rewards.status[:, number] == RewardStatus.OK).all())
        assert bool((rewards.status[:, 1 - number] == RewardStatus.NOT_APPLICABLE).all())
        assert bool(rewards.usable.all())
        check = _rewards_apply(rewards, made.state)
        assert check.status == "ok"  # the other reward has its turn in another step


def test_a_run_evaluates_each_task_apart(tmp_path: Path) -> None:
    made = trainer(tmp_path, method=[{"task_cycle": {"steps": {"shout": 2, "say": 1}}}], train={"steps": 1})
    found = made.evaluate(16)
    tasks = [row["task"] for row in found.rows]
    assert tasks == ["say", "shout"] * 8
    assert [row["tag"] for row in found.rows[::2]] == ["even", "odd"] * 4
    assert "exact_match/task/say" in found.metrics
    assert "exact_match/task/shout" not in found.metrics
    shouted = [row["values"]["length"] for row in found.rows if row["task"] == "shout"]
    assert found.metrics["length/task/shout"] == pytest.approx(sum(shouted) / len(shouted))
    assert set(main_figures(found.metrics)) == {name for name in found.metrics if "/task/" in name}
    # The first rows are the same whatever the number of samples.
    _, held = read_prompts(plan(two_tasks(tmp_path)))
    short, long = (evaluation_batch(held, n) for n in (7, 16))
    assert short.prompts == long.prompts[:7]


def test_figures_of_a_task_are_means_of_its_tags() -> None:
    rows = [
        {"task": "a", "tag": tag, "values": {"r": value}, "details": {}}
        for tag, value in (("x", 1.0), ("x", 0.0), ("x", 0.0), ("y", 1.0))
    ]
    rows.append({"task": "b", "tag": "z", "values": {"r": 0.5}, "details": {}})
    metrics, by_tag = summarise(rows)
    assert metrics["r/task/a"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["r/task/b"] == 0.5
    assert metrics["r/by_tag"] == pytest.approx((1 / 3 + 1 + 0.5) / 3)
    assert sorted(by_tag) == ["x", "y", "z"]
    only = [row for row in rows if row["task"] == "a"]
    assert not [name for name in summarise(only)[0] if "/task/" in name]


def test_a_filter_keeps_epochs_and_turns() -> None:
    rows = [PromptRow(prompt=str(i), metadata={"tag": "ab"[i % 2]}) for i in range(12)]
    allowed = torch.tensor([float(i < 8) for i in range(12)])
    for balance in (None, "tag"):
        source = PromptSource(rows, DataConfig(source="x.txt", balance=balance), 3)
        drawn = [source.draw(4, allowed) for _ in range(6)]
        flat = [i for part in drawn for i in part]
        assert max(flat) < 8
        assert all(len(set(part)) == 4 for part in drawn)
        assert max(flat.count(i) for i in range(8)) - min(flat.count(i) for i in range(8)) <= 1
        if balance:
            assert sum(i % 2 for i in flat) == 12
        again = PromptSource(rows, DataConfig(source="x.txt", balance=balance), 3)
        again.draw(4, allowed)
        assert again.draw(4, allowed) == drawn[1]
    with pytest.raises(UserError, match="only 8 prompts are left"):
        source.draw(9, allowed)


def test_the_cycle() -> None:
    """Card Flow-OPD, section 4: the index modulo the sum selects the set."""
    cycle = TaskCycle(TaskCycleConfig(steps={"ocr": 1, "geneval": 3}))
    names = ("geneval", "ocr")
    assert [cycle.task_of(i, names) for i in range(6)] == ["ocr", "geneval", "geneval", "geneval", "ocr", "geneval"]
    assert [TaskCycle(TaskCycleConfig()).task_of(i, names) for i in range(3)] == ["geneval", "ocr", "geneval"]


def test_forms_of_sources(tmp_path: Path) -> None:
    config = two_tasks(tmp_path)
    made = plan(config)
    train, held = read_prompts(made)
    assert [row.task for row in train] == [0] * 16 + [1] * 12
    assert [row.task for row in held] == [0] * 8 + [1] * 4
    assert plan(made.config.model_dump(mode="json")).config == made.config
    short = validate(DataConfig, {"sources": {"a": "testbed/words", "b": {"source": "testbed/arithmetic", "limit": 3}}})
    assert [row.metadata["task"] for row in load_prompts(short)][-4:] == ["a", "b", "b", "b"]
    print_dry_run(plan(two_tasks(tmp_path)))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"data.source": "x.jsonl"}, "and not both: set data.source=null"),
        ({"data.sources": {}}, "give source"),
        ({"data.sources": {"a": {}}}, "a task needs its source"),
        ({"data.sources": {"a": {"source": "x", "sourse": "y"}}}, "Did you mean 'source'"),
        ({"eval.source": "x.jsonl"}, "set data.sources.TASK.heldout"),
        (
            {"rewards.length.applies": {"task": "shuot"}},
            "names task 'shuot', but data.sources has say, shout. Did you mean",
        ),
        ({"method": {"task_cycle": {"steps": {"shuot": 1}}}}, "method.task_cycle.steps names task 'shuot'"),
        ({"method": {"task_cycle": {"steps": {"say": 0}}}}, "greater than or equal to 1"),
    ],
)
def test_bad_tasks(tmp_path: Path, over: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        read_prompts(plan(two_tasks(tmp_path), over))


def test_the_cycle_needs_the_prompts_of_a_step_in_every_task(tmp_path: Path) -> None:
    """Refused at the start, and not when the turn of the short task comes, five steps later."""
    cycle = {"method": {"task_cycle": {"steps": {"say": 5, "shout": 1}}}, "train.prompts_per_step": 14}
    with pytest.raises(UserError, match=r"task 'shout' has 12 for train.prompts_per_step=14: use 12 or fewer"):
        vg.train(two_tasks(tmp_path), overrides=cycle, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("applies", "message"),
    [
        ({"tsk": "say"}, r"no prompt has the column 'tsk'. Did you mean 'task'"),
        ({"task": "say", "tag": "none"}, "fits none of the 28 prompts: no value is so"),
        ({"task": []}, "no value is so"),
    ],
)
def test_a_reward_that_applies_to_no_prompt_is_refused(tmp_path: Path, applies: dict[str, Any], message: str) -> None:
    config = two_tasks(tmp_path)
    config["rewards"]["exact_match"] = {"applies": applies}
    with pytest.raises(UserError, match=message):
        vg.train(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_cycle_needs_tasks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task_cycle needs several tasks"):
        plan(toy_config(tmp_path, method="task_cycle"))
