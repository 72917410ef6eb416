"""GRAIL through the loop, on the tiny LM in float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.errors import UserError
from visual_grpo.loss import LossInputs, make_micro
from visual_grpo.pipelines.text.grail import CONTENT, MARKER, answer_parts, saliency_weights
from visual_grpo.run_folder import RunFolder
from visual_grpo.stack import MethodStack
from visual_grpo.trainer import Trainer

_spec = importlib.util.spec_from_file_location("toy_run", Path(__file__).parents[1] / "core" / "toy_run.py")
assert _spec is not None
assert _spec.loader is not None
toy_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy_run)
prepared, gradient, logged = toy_run.prepared, toy_run.gradient, toy_run.logged


@pytest.fixture(scope="module")
def grail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, LossInputs]]:
    """The tiny LM in float64, two prompts x 4, moved away from the policy that sampled."""
    small = {"prompts_per_step": 2, "group_size": 4, "micro_batch": 8}
    made = plan("grail_text_tiny", {"model.dtype": "float64", **{f"train.{k}": v for k, v in small.items()}})
    folder = RunFolder.create(tmp_path_factory.mktemp("grail"), "grail", config_yaml=to_yaml(made.config))
    trainer = build_trainer(made, folder, Ranks())
    rows, _ = prepared(trainer, torch.tensor([1, 0, 0, 1, 0, 0, 1, 0]))
    generator = torch.Generator().manual_seed(3)
    trainer.state.on_policy = False
    with torch.no_grad():
        for parameter in trainer.policy.trainable.values():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    yield trainer, rows
    trainer.suite.close()
    trainer.writer.close()


def configured(trainer: Trainer, **options: Any) -> MethodStack:
    """The stack with other options of the method."""
    method = trainer.stack.methods["grail"]
    return MethodStack({"grail": type(method)(method.config.model_copy(update=options))})


def test_grail_does_not_depend_on_the_split(grail: tuple[Trainer, LossInputs]) -> None:
    trainer, rows = grail
    whole = gradient(trainer, rows)
    assert float(whole[0].abs().max()) > 1e-4
    for size in (3, 1):
        found = gradient(trainer, rows, size)
        # The prompt's part is summed over the rows that share a pass, through norms that compute in float32.
        torch.testing.assert_close(found[0], whole[0], rtol=0, atol=1e-8)
        assert found[1] == pytest.approx(whole[1], abs=1e-10)
    train = trainer.config.train.model_copy(update={"units_per_pass": 9})
    kept, trainer.state.config = trainer.state.config, trainer.config.model_copy(update={"train": train})
    chunked = gradient(trainer, rows)
    trainer.state.config = kept
    # Chunks read texts of other lengths, and the model's norms round to single precision whatever its dtype.
    torch.testing.assert_close(chunked[0], whole[0], rtol=0, atol=1e-8)


def test_grail_with_equal_weights_is_its_base(grail: tuple[Trainer, LossInputs]) -> None:
    trainer, rows = grail
    base = gradient(trainer, rows, stack=MethodStack({}))
    equal = gradient(trainer, rows, stack=configured(trainer, weight_std=0.0, weight_max=1.0))
    torch.testing.assert_close(equal[0], base[0], rtol=0, atol=1e-12)
    weighted = gradient(trainer, rows)
    assert not torch.allclose(weighted[0], base[0], atol=1e-4)


@pytest.mark.parametrize(("align", "first"), [("predictor", 0), ("own", 1)])
def test_grail_reads_the_score_of_the_input_before_a_token_or_its_own(
    grail: tuple[Trainer, LossInputs], align: str, first: int
) -> None:
    trainer, rows = grail
    stack, units = configured(trainer, align=align, mode="both"), torch.arange(rows.rollouts.num_units)
    micro = make_micro(stack, rows, units, trainer.policy.log_prob(rows.rollouts, units), trainer.state)
    found = stack.chain("live_weights", torch.ones(micro.mask.shape), micro, trainer.state)
    parts = torch.stack(answer_parts(rows.rollouts, trainer.state, "hashes"))
    scores = trainer.policy.input_scores(rows.rollouts, (parts == MARKER) | (parts == CONTENT))
    scores = scores[:, first : first + len(units)]
    config = stack.methods["grail"].config
    wanted = saliency_weights(scores, parts, micro.mask != 0, micro.advantages.expand_as(micro.mask), config)
    torch.testing.assert_close(found, wanted.weights.to(found))
    ends = [int(torch.nonzero(row == CONTENT).max()) for row in parts if bool((row == CONTENT).any())]
    last = [float(score[end]) for score, end in zip(scores[(parts == CONTENT).any(1)], ends, strict=True)]
    assert all((value > 0) == (align == "predictor") for value in last), "no token depends on itself"


def test_grail_weighs_the_answer_and_logs_it(grail: tuple[Trainer, LossInputs]) -> None:
    trainer, rows = grail
    stats = logged(trainer)
    gradient(trainer, rows)
    figures = stats.reduce(trainer.ranks)
    assert figures["grail/answer_weight"] > figures["grail/weight"] > 0.5
    assert 0 < figures["grail/fallback"] < 1, "right rows fall back, wrong ones are weighted"


def test_grail_makes_no_pass_for_rows_without_an_advantage(
    grail: tuple[Trainer, LossInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rows = grail
    monkeypatch.setattr(trainer.policy.adapter, "input_scores", lambda *_, **__: pytest.fail("a pass was made"))
    _, loss = gradient(trainer, replace(rows, advantages=torch.zeros_like(rows.advantages)))
    assert loss == 0.0


def test_grail_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it needs gradients to the model's inputs, which this adapter does not give"):
        toy_run.toy_trainer(tmp_path, method=["grail"])
    with pytest.raises(UserError, match=r"weight_min \(6\) must be at most weight_max \(5\)"):
        plan("grail_text_tiny", {"method.grail.weight_min": 6.0})
    with pytest.raises(UserError, match=r"leaf=first needs model\.gradient_checkpointing=false"):
        plan("grail_text_tiny", {"method.grail.leaf": "first", "model.gradient_checkpointing": True})
