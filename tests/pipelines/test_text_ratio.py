"""The ratio of later updates compares two passes of one kind, also in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from visual_grpo.api import plan
from visual_grpo.build import build_trainer
from visual_grpo.config import to_yaml
from visual_grpo.distributed import Ranks
from visual_grpo.loss import settle_old
from visual_grpo.metrics import Stats
from visual_grpo.run_folder import RunFolder
from visual_grpo.trainer import Trainer

SMALL = {
    "train.prompts_per_step": 4,
    "train.group_size": 4,
    "train.updates_per_step": 2,
    "train.micro_batch": 3,
    "train.optimizer.lr": 1e-30,
}


@pytest.fixture
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    """GSPO on the tiny LM in bfloat16, with weights that do not move."""
    made = plan("gspo_text_tiny", {**SMALL, "model.dtype": "bfloat16", **request.param})
    folder = RunFolder.create(tmp_path / "runs", made.config.name, config_yaml=to_yaml(made.config))
    built = build_trainer(made, folder, Ranks())
    yield built
    built.suite.close()
    built.writer.close()


def updated(trainer: Trainer) -> dict[str, float]:
    rollouts, rewards = trainer.collect(trainer._draw())
    rewards.values = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(4)[:, None]
    rows, _ = trainer.prepare(rollouts, rewards, Stats())
    kept, stats = rollouts.old_log_prob.clone(), Stats()
    trainer.update(rows, stats)
    assert torch.equal(rollouts.old_log_prob, kept), "the sampler's own log-probs stay as they were"
    return stats.reduce(trainer.ranks)


@pytest.mark.parametrize("trainer", [{}], indirect=True)
def test_unmoved_weights_have_ratio_one_in_every_update(trainer: Trainer) -> None:
    figures = updated(trainer)
    assert figures["clip_fraction"] == 0.0
    assert figures["ratio"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("trainer", [{"ratio.old": "sampler"}], indirect=True)
def test_the_sampler_is_off_by_more_than_the_clip_range(trainer: Trainer) -> None:
    """Why the replay is there: against the log-probs of the cached sampler many units are clipped with unmoved weights.

    How many depends on which rows share a pass: 0.07 by length, over 0.1 in the order of the batch.
    """
    assert updated(trainer)["clip_fraction"] > 0.03


@pytest.mark.parametrize(
    "trainer",
    [{"model.dtype": "float32"}, {"train.updates_per_step": 1}, {"ratio.old": "sampler"}],
    ids=["float32", "one update", "sampler"],
    indirect=True,
)
def test_no_second_pass_where_none_is_needed(trainer: Trainer) -> None:
    rollouts, rewards = trainer.collect(trainer._draw())
    rows: Any = trainer.prepare(rollouts, rewards, Stats())[0]
    everything = [torch.arange(len(rows))]
    assert settle_old(rows, everything, trainer.state, lambda: pytest.fail("a pass was made")) is rows
