"""Every world of the testbed loads by the name that configs use, with prompts to train on and others held out."""

from __future__ import annotations

import pytest

from visual_grpo.config import DataConfig
from visual_grpo.data import TESTBED, load_prompts


@pytest.mark.parametrize("name", sorted(TESTBED))
def test_world_loads(name: str) -> None:
    train, heldout = (
        {row.prompt for row in load_prompts(DataConfig(source=f"testbed/{name}", split=split))}
        for split in ("train", "heldout")
    )
    assert train
    assert heldout
    assert not train & heldout
