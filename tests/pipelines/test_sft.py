"""Supervised fine-tuning through the loop: rows of the data set, negative log-likelihood, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
import toy_run

import visual_grpo as vg
from visual_grpo.adapters.toy import ToyAdapter
from visual_grpo.api import plan
from visual_grpo.config import merge
from visual_grpo.errors import UserError
from visual_grpo.testbed.arithmetic import is_correct
from visual_grpo.testbed.arithmetic_modes import SHORT, THINK, split_prompts
from visual_grpo.testbed.lm_build import build_tokenizer


def answers(folder: Path, column: Any) -> str:
    """Sixteen prompts with given answers."""
    path = folder / "given.jsonl"
    lines = [{"prompt": f"say {i}", "answer": str(i % 10), **column(i)} for i in range(16)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def sft_run(folder: Path, column: Any, **over: Any) -> dict[str, Any]:
    config = toy_run.toy_config(folder, method=["sft"], train={"group_size": 2, "micro_batch": 8})
    return merge(config, {"data": {"source": answers(folder, column)}, **over})


def two(i: int) -> dict[str, Any]:
    return {"completion": [str(i % 10), f"{i % 10}{i % 10}"]}


def test_the_loss_is_the_mean_negative_log_likelihood(tmp_path: Path) -> None:
    """Rows of a group take the answers in turn; every token counts alike, also the end; rewards do not matter."""
    over = sft_run(tmp_path, two, model={"dtype": "float64"})
    trainer = toy_run.toy_trainer(tmp_path, **over)
    rows, advantages = toy_run.prepared(trainer, torch.tensor([0.0, 1.0] * 4))
    found, loss = toy_run.gradient(trainer, rows, 3)
    whole, again = toy_run.gradient(trainer, rows, 8)
    trainer.writer.close()
    assert advantages.tolist() == [1.0] * 8
    texts = rows.rollouts.texts
    assert texts is not None
    assert [len(text) for text in texts] == [1, 2] * 4
    assert [text[0] for text in texts] == [row["answer"] for row in rows.rollouts.prompts.metadata]
    assert rows.rollouts.unit_mask.sum(1).tolist() == [2, 3] * 4
    value = trainer.policy.log_prob(rows.rollouts, torch.arange(3)).value
    wanted = -value[rows.rollouts.unit_mask].mean()
    assert loss == pytest.approx(wanted.item(), abs=1e-12)
    assert again == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    slope = torch.autograd.grad(wanted, list(trainer.policy.trainable.values()))
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in slope]), rtol=0, atol=1e-12)


def test_it_learns_the_given_answers(tmp_path: Path) -> None:
    """One answer a prompt, no group: the loss falls; equal rewards are no fault."""
    config = sft_run(
        tmp_path,
        lambda i: {"completion": str(i % 10)},
        train={"steps": 30, "prompts_per_step": 16, "group_size": 1, "optimizer": {"lr": 0.1}},
    )
    result = vg.train(config, out=tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [r["metrics"]["nll"] for r in records if r["kind"] == "train"]
    assert losses[-1] < 0.5 * losses[0]
    assert result.step == 30
    assert not [r for r in records if r["kind"] == "alarm"]
    checks = {c["name"]: c["status"] for c in json.loads((tmp_path / "run" / "self_test.json").read_text())}
    assert set(checks.values()) == {"ok"}
    assert "groups with unequal rewards" not in checks


def test_a_set_without_gold_answers_can_be_learned(tmp_path: Path) -> None:
    """No reward applies to any row; all are trained."""
    path = tmp_path / "plain.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {i}", "completion": "7"}) + "\n" for i in range(16)))
    config = sft_run(tmp_path, two, data={"source": str(path)}, train={"steps": 2, "group_size": 1})
    vg.train(config, out=tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [r["metrics"] for r in records if r["kind"] == "train"]
    assert [m["units"] for m in steps] == [8.0, 8.0]  # four answers of a digit and the end
    assert steps[0]["grad_norm"] > 0


def test_a_high_temperature_does_not_change_the_likelihood(tmp_path: Path) -> None:
    trainer = toy_run.toy_trainer(tmp_path, **sft_run(tmp_path, two, sampling={"temperature": 2.0}))
    rows, _ = toy_run.prepared(trainer, torch.zeros(8))
    trainer.writer.close()
    assert set(rows.rollouts.data["temperature"].tolist()) == {1.0}


@pytest.mark.parametrize(
    ("column", "given"),
    [
        ({}, "None"),
        ({"completion": ""}, "''"),
        ({"completion": []}, r"\[\]"),
        ({"completion": ["1", 2]}, r"\['1', 2\]"),
    ],
)
def test_a_prompt_without_an_answer_is_refused(tmp_path: Path, column: dict[str, Any], given: str) -> None:
    """Before the model is loaded, wherever the prompt stands in its set."""
    over = sft_run(tmp_path, lambda i: column if i == 15 else two(i))
    with pytest.raises(UserError, match=rf"method.sft.column is 'completion', and prompt 'say 15' holds {given} there"):
        toy_run.toy_trainer(tmp_path, **over)


class SamplesOnly(ToyAdapter):
    """Does not read given texts."""

    given_rows = False


def test_it_needs_a_model_that_reads_given_texts(tmp_path: Path) -> None:
    config = sft_run(tmp_path, two, model={"adapter": "test_sft:SamplesOnly"})
    with pytest.raises(UserError, match="it trains on texts that are given, which this adapter does not read"):
        plan(config)


def test_two_samplers_cannot_be_stacked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'sft' and 'real' cannot be stacked: both fill the exclusive hook"):
        plan(sft_run(tmp_path, two, method=["sft", "real"]))


def test_the_world_of_two_modes() -> None:
    """Every prompt has a right answer of each mode; the control token is one token, the first; easy and hard kinds."""
    train, heldout = split_prompts(20)
    assert {row["tag"] for row in train} == {row["tag"] for row in heldout} == {"one", "add", "sub", "mul", "mixed"}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    tokenizer = build_tokenizer()
    starts = {tokenizer.convert_tokens_to_ids(token) for token in (SHORT, THINK)}
    for row in train:
        brief, long = row["completion"]
        first = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (brief, long)]
        assert {ids[0] for ids in first} == starts
        assert len(first[0]) < len(first[1]) <= 39
        assert is_correct(brief, row["answer"])
        assert is_correct(long, row["answer"])
