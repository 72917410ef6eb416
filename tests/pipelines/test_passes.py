"""Rows of like length share a forward pass: fewer tokens are read, and loss and gradient stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.api import plan
from visual_grpo.batching import micro_batches
from visual_grpo.build import build_trainer
from visual_grpo.config import merge, to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.loss import passes, step_totals
from visual_grpo.metrics import Stats
from visual_grpo.run_folder import RunFolder
from visual_grpo.trainer import Trainer
from visual_grpo.types import RowTokens

SMALL: dict[str, Any] = {
    "model": {"dtype": "float64"},
    "train": {"prompts_per_step": 2, "group_size": 8, "micro_batch": 4},
    "advantage": {"std": "none"},
    "kl": {"beta": 0.1},
}


@pytest.fixture
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    """GRPO on the tiny LM in float64."""
    made = plan("grpo_text_tiny", merge(SMALL, request.param))
    folder = RunFolder.create(tmp_path / "runs", made.config.name, config_yaml=to_yaml(made.config))
    built = build_trainer(made, folder, Ranks())
    yield built
    built.suite.close()
    built.writer.close()


def prepared(trainer: Trainer) -> Any:
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = torch.tensor([1.0, 0.0, 0.5, 1.0]).repeat(4)[:, None]
    rows = trainer.prepare(rollouts, rewards, Stats())[0]
    lengths = rows.rollouts.data["lengths"]
    assert len(set(lengths.tolist())) > 4
    return rows


def loss_and_gradient(trainer: Trainer, rows: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    totals, parameters = step_totals(rows, len(parts)), list(trainer.policy.trainable.values())
    for parameter in parameters:
        parameter.grad = None
    loss = torch.zeros((), dtype=torch.float64)
    for part in parts:
        for one, _ in passes(trainer.stack, rows.select(part), totals, trainer.state):
            one.backward()
            loss += one.detach()
    return torch.cat([loss[None], *(p.grad.flatten() for p in parameters if p.grad is not None)])


@pytest.mark.parametrize("trainer", [{}, {"loss": {"aggregation": "token_mean"}}], indirect=True)
def test_any_order_gives_the_same_loss_and_gradient(trainer: Trainer) -> None:
    rows = prepared(trainer)
    whole = loss_and_gradient(trainer, rows, [torch.arange(16)])
    by_length = trainer._passes(rows)
    assert not torch.equal(torch.cat(by_length), torch.arange(16)), "the order of the batch was kept"
    shuffled = list(torch.randperm(16, generator=torch.Generator().manual_seed(0)).split(5))
    for parts in (by_length, shuffled):
        assert sorted(torch.cat(parts).tolist()) == list(range(16))
        # Qwen3's norms compute in float32 whatever the dtype.
        assert (loss_and_gradient(trainer, rows, parts) - whole).abs().max() <= 1e-6 * whole.abs().max()


@pytest.mark.parametrize("trainer", [{}], indirect=True)
def test_fewer_tokens_are_read(trainer: Trainer) -> None:
    rows = prepared(trainer)
    read = 0

    def count(_: Any, __: Any, options: dict[str, Any]) -> None:
        nonlocal read
        read += options["input_ids"].numel()

    handle = trainer.policy.adapter.model.base_model.register_forward_pre_hook(count, with_kwargs=True)  # type: ignore[attr-defined]
    found = []
    for parts in (list(torch.arange(16).split(4)), trainer._passes(rows)):
        read = 0
        with torch.no_grad():
            for part in parts:
                trainer.policy.log_prob(rows.rollouts.select(part), torch.arange(rows.rollouts.num_units))
        found.append(read)
    handle.remove()
    assert found[1] < found[0]


@pytest.mark.parametrize(
    "trainer",
    [
        {"loss": {"aggregation": "micro_batch_token_mean"}},
        {"method": [{"degrpo": {"divisors": "micro_batch"}}]},
    ],
    ids=["micro_batch_token_mean", "degrpo"],
    indirect=True,
)
def test_losses_that_depend_on_the_passes_keep_the_order(trainer: Trainer) -> None:
    assert torch.equal(torch.cat(trainer._passes(prepared(trainer))), torch.arange(16))


IDS = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("own", "context", "wanted"),
    [
        # Every order reads as many tokens: that of the batch stays.
        ([5, 5, 5, 5, 5, 5], [9, 9, 9, 9, 9, 9], [[0, 1], [2, 3], [4, 5]]),
        # Short prompts: rows by length, 2 * (9 + 5 + 1) tokens and six prompts of 1.
        ([9, 1, 9, 1, 5, 5], [1, 1, 1, 1, 1, 1], [[0, 2], [4, 5], [1, 3]]),
        # Long prompts are worth more than the padding: no group is cut.
        ([9, 1, 9, 1, 5, 5], [99, 99, 99, 99, 99, 99], [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_the_order_that_reads_the_fewest_tokens(own: list[int], context: list[int], wanted: list[list[int]]) -> None:
    tokens = RowTokens(own=torch.tensor(own), context=torch.tensor(context))
    assert [part.tolist() for part in micro_batches(IDS, 2, False, tokens)] == wanted


def test_groups_that_must_stay_whole_are_ordered_by_their_longest_row() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    tokens = RowTokens(own=torch.tensor([1, 2, 9, 1, 2, 2, 8, 9]), context=torch.ones(8, dtype=torch.int64))
    parts = micro_batches(ids, 4, True, tokens)
    assert [sorted(part.tolist()) for part in parts] == [[2, 3, 6, 7], [0, 1, 4, 5]]


def test_no_row_and_one_pass() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert micro_batches(none, 4, False, RowTokens(own=none, context=none)) == []
    one = micro_batches(IDS, 8, False, RowTokens(own=torch.arange(6), context=torch.arange(6)))
    assert [part.tolist() for part in one] == [list(range(6))]
