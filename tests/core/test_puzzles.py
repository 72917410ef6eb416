"""reasoning-gym as a prompt source."""

from __future__ import annotations

from typing import Any

import pytest

from visual_grpo.config import DataConfig
from visual_grpo.data import load_prompts
from visual_grpo.errors import UserError

SUMS = {
    "source": "reasoning_gym/chain_sum",
    "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
}


def load(**changed: Any) -> list[Any]:
    return load_prompts(DataConfig(**{**SUMS, **changed}))


def test_puzzles_are_the_packages_and_splits_share_none() -> None:
    heldout, train = load(split="heldout", limit=40), load(limit=400)
    assert len(heldout) == len({r.prompt for r in heldout})
    assert heldout
    assert train
    assert not {r.prompt for r in heldout} & {r.prompt for r in train}
    row = heldout[0]
    first, sign, second = row.metadata["metadata"]["expression"].split()
    assert int(row.metadata["answer"]) == (int(first) + int(second) if sign == "+" else int(first) - int(second))
    assert row.prompt.endswith(f"{row.metadata['metadata']['expression']} =")
    assert row.metadata["tag"] == "chain_sum"
    assert load(split="heldout", limit=40) == heldout


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"source": "reasoning_gym/chain_sun"}, "no data set 'chain_sun'. Did you mean 'chain_sum'"),
        ({"split": "test"}, "has the splits train and heldout, not 'test'"),
        ({"options": {"terms": 3}}, "do not fit reasoning_gym/chain_sum: .*'terms'"),
        ({"options": {**SUMS["options"], "max_digits": 1}, "limit": 5}, "so few puzzles that all are held out"),
        ({"options": {"min_terms": 0}}, "min_terms must be positive"),
        ({"source": "testbed/arithmetic"}, "data.options belong to a reasoning_gym/NAME source"),
    ],
)
def test_wrong_sources_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(**changed)
