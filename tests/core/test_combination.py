"""Combinations of rewards: hand-computed values, degenerate cases, checks of the config, and the gate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
from test_caption_gdpo import batch, close, config

from visual_grpo.advantages import group_advantages
from visual_grpo.combination import (
    BY_GROUP,
    BY_ROW,
    check_combination,
    combined_advantages,
    function_total,
    product_total,
    row_combination,
    signal,
)
from visual_grpo.config import CombineConfig, RewardConfig, RunConfig, validate
from visual_grpo.errors import RunError, UserError
from visual_grpo.normalise import Normalisers, RunningMoments
from visual_grpo.reward import RewardError, RewardRequest
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardBatch, RewardStatus

NAN = float("nan")
ALL = (*BY_ROW, *BY_GROUP, "test_combination:smallest")


def smallest(values: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """The weakest part decides."""
    return torch.stack([torch.nan_to_num(v, nan=torch.inf) * weights[n] for n, v in values.items()]).amin(0)


def made(how: str, rewards: RewardBatch) -> RewardBatch:
    rewards.combine = row_combination(CombineConfig(how=how))
    return rewards


def advantages(how: str, rewards: RewardBatch, ids: Tensor, **options: Any) -> Tensor:
    return combined_advantages(made(how, rewards), ids, torch.ones(len(ids)), config(how, **options))


IDS = torch.tensor([0, 0, 0, 1, 1, 1])
A, B = [1.0, 0.0, 0.5, 0.2, 0.2, 0.2], [0.5, 1.0, 0.5, 0.1, 0.3, 0.2]


# -- by hand ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "weights", "total"),
    [
        ("sum", [1, 1], [1.5, 1.0, 1.0, 0.3, 0.5, 0.4]),
        ("gate", [1, 2], [2.0, 2.0, 1.5, 0.4, 0.8, 0.6]),
        ("product", [1, 1], [0.5, 0.0, 0.25, 0.02, 0.06, 0.04]),
        ("product", [2, 0], [1.0, 0.0, 0.25, 0.04, 0.04, 0.04]),
        ("test_combination:smallest", [1, 1], [0.5, 0.0, 0.5, 0.1, 0.2, 0.2]),
    ],
)
def test_one_number_a_row(how: str, weights: list[float], total: list[float]) -> None:
    rewards = made(how, batch(A, B, weights=weights))
    close(rewards.total(), total)
    close(advantages(how, rewards, IDS), group_advantages(torch.tensor(total).double(), IDS).tolist())


def test_ranks() -> None:
    """Ranks of A: 2 0 1 | equal; of B: 0.5 2 0.5 | 0 2 1; centred by 1 and divided by 3."""
    rewards = batch(A, B, weights=[1, 2])
    expected = [1 / 3 - 1 / 3, -1 / 3 + 2 / 3, -1 / 3, -2 / 3, 2 / 3, 0]
    close(signal(rewards, IDS, config("rank")), expected)
    close(
        advantages("rank", rewards, IDS),
        group_advantages(torch.tensor(expected, dtype=torch.float64), IDS).tolist(),
    )
    stretched = batch([x**3 for x in A], [10 * x - 2 for x in B], weights=[1, 2])
    assert torch.equal(advantages("rank", stretched, IDS), advantages("rank", rewards, IDS))


def test_scope_and_std_are_those_of_every_reward() -> None:
    rewards = batch(A, B)
    centred = [1.5 - 7 / 6, 1 - 7 / 6, 1 - 7 / 6, -0.1, 0.1, 0.0]
    close(advantages("sum_of_advantages", rewards, IDS, std="none"), centred)
    by_batch = sum(group_advantages(rewards.values[:, k], IDS, scope="batch") for k in range(2))
    close(advantages("sum_of_advantages", rewards, IDS, scope="batch"), by_batch.tolist())


# -- degenerate cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ALL)
def test_a_constant_reward_changes_nothing_and_constant_groups_get_exactly_0(how: str) -> None:
    constant = [1.0] * 6
    found = advantages(how, batch(B, constant), IDS)
    if how != "test_combination:smallest":
        alone = advantages(how, batch(B), IDS)
        torch.testing.assert_close(found.sign(), alone.sign())
        if how not in ("gdpo",):  # its batch step normalises the sum once more
            torch.testing.assert_close(found, alone)
    assert advantages(how, batch(constant, [0.1 + 0.2] * 6), IDS).tolist() == [0] * 6


@pytest.mark.parametrize("how", ALL)
def test_a_reward_that_applies_to_some_rows(how: str) -> None:
    """The others keep their signal; a row without any part gets 0 and counts nowhere."""
    rewards = batch([1.0, 0.0, 0.5, NAN, 0.3, 0.2], [0.5, NAN, NAN, NAN, 0.3, 0.2])
    found = advantages(how, rewards, IDS)
    assert bool(found.isfinite().all())
    assert float(found[3]) == 0
    kept = torch.tensor([0, 1, 2, 4, 5])
    torch.testing.assert_close(found[kept], advantages(how, rewards.select(kept), IDS[kept]))
    assert float(found[4]) > 0 > float(found[5])
    assert torch.isnan(signal(rewards, IDS, config(how))[3])


@pytest.mark.parametrize("how", ALL)
def test_a_failed_part_takes_its_row_out(how: str) -> None:
    rewards = batch(A, B)
    rewards.values[1, 1] = NAN
    rewards.status[1, 1] = int(RewardStatus.FAILED)
    found = advantages(how, rewards, IDS)
    assert float(found[1]) == 0
    assert bool(found.isfinite().all())
    kept = torch.tensor([0, 2, 3, 4, 5])
    torch.testing.assert_close(found[kept], advantages(how, rewards.select(kept), IDS[kept]))


@pytest.mark.parametrize("how", ALL)
def test_one_row_and_no_row_that_counts(how: str) -> None:
    assert advantages(how, batch([0.3], [0.7]), torch.tensor([0])).tolist() == [0]
    assert advantages(how, batch([NAN, NAN], [NAN, NAN]), torch.tensor([0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize("how", ALL)
def test_the_order_of_rows_and_other_groups_do_not_matter(how: str) -> None:
    rewards, order = batch(A, B), torch.tensor([4, 0, 3, 5, 2, 1])
    found = advantages(how, rewards, IDS)
    torch.testing.assert_close(advantages(how, rewards.select(order), IDS[order]), found[order])


def test_batches_keep_their_combination() -> None:
    rewards = made("product", batch(A, B))
    halves = [rewards.select(torch.arange(3)), rewards.select(torch.arange(3, 6))]
    assert torch.equal(RewardBatch.concat(halves).total(), rewards.total())


# -- what is refused ----------------------------------------------------------------------------------------------------------


def test_a_product_refuses_what_two_bad_scores_would_turn_good() -> None:
    with pytest.raises(RunError, match=r"'b' is -1 on row 1; set rewards.b.normalise"):
        product_total(batch([2.0, 1.0], [NAN, -1.0]))


def test_a_product_beyond_float32_is_no_total() -> None:
    with pytest.raises(RunError, match=r"beyond float32 on row 1"):
        product_total(batch([1.0, 1e200], [1.0, 1e200]))


def test_a_function_that_raises_is_named() -> None:
    with pytest.raises(RunError, match=r"combine\.how=m:f raised KeyError: 'c'"):
        function_total(batch(A, B), lambda v, w: v["c"], "m:f")


def test_a_function_that_returns_something_else() -> None:
    with pytest.raises(RunError, match=r"returned \[1\]; it must return a tensor \[6\]"):
        function_total(batch(A, B), lambda v, w: torch.zeros(1), "m:f")
    with pytest.raises(RunError, match="returned float"):
        function_total(batch(A, B), lambda v, w: 0.5, "m:f")  # type: ignore[arg-type,return-value]
    broken = batch(A, [0.5, NAN, 0.5, 0.1, 0.3, 0.2])
    with pytest.raises(RunError, match=r"nan for row 1, where the rewards are \{'a': 0.0, 'b': nan\}"):
        function_total(broken, lambda v, w: v["a"] + v["b"], "m:f")


def run(rewards: Any = ("a", "b"), **combine: Any) -> RunConfig:
    return RunConfig(
        model={"adapter": "toy", "path": "toy"},
        data={"source": "x"},
        rewards=rewards if isinstance(rewards, dict) else list(rewards),
        combine=combine,
    )


@pytest.mark.parametrize(
    ("config", "by", "message"),
    [
        (run(how="gdop"), None, r"combine.how is 'gdop'. Did you mean 'gdpo'\?"),
        (run(how="gdpo"), "mine", "makes the advantages, and so does method 'mine'"),
        (run(how="product", rewards={"a": 1, "b": -1}), None, r"rewards.b.weight \(-1.0\) must be 0 or more"),
        (run(how="gate"), None, "needs combine.gate"),
        (run(gate={"c": 1.0}), None, "'c', which is no reward that is trained on"),
        (run(gate={"a": 1.0, "b": 0.0}), None, "none left to compute behind it"),
        (run(how="gate", gate={"a": 1}, rewards={"a": {"eval_only": True}, "b": 1}), None, "no reward that is trained"),
        (run(how="sum", level="tokens"), None, "belongs to combine.how=gdpo"),
        (run(params={"x": 1}), None, "arguments of a function of your own"),
        (run(how="test_combination:nothing"), None, "has no 'nothing'"),
        (run(how="test_combination:ALL"), None, "cannot be called"),
        (run(how="test_combination:batch", params={"scale": 1}), None, "'scale': 1}, which it does not take"),
    ],
)
def test_a_config_that_cannot_work(config: RunConfig, by: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_combination(config, by)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "min_max", "low": 1}, "min_max needs both"),
        ({"kind": "clip"}, "clip needs"),
        ({"kind": "clip", "low": 2, "high": 1}, "low must be less"),
        ("zscore", "normalise"),
    ],
)
def test_a_normaliser_that_cannot_work(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(RewardConfig, {"normalise": given})


# -- the gate -----------------------------------------------------------------------------------------------------------------


class Dear:
    """Counts its calls; `None` on the text 'x'."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, texts: list[str]) -> list[float | None]:
        self.seen += texts
        return [None if text == "x" else len(text) / 10 for text in texts]


def gated(texts: list[str], closed: float = 0.0, **options: Any) -> tuple[RewardBatch, list[str]]:
    """Gate: the text starts with a letter; NaN where it starts with '!', not applicable where it is 'y'."""

    def cheap(texts: list[str]) -> list[float | None]:
        return [None if t == "y" else NAN if t.startswith("!") else float(t[:1].isalpha()) for t in texts]

    dear = Dear()
    rewards = {"dear": {"reward": lambda texts: dear(texts), "weight": 2.0}, "cheap": {"reward": cheap, "retries": 0}}
    with RewardSuite(rewards, gate={"cheap": 1.0}, closed=closed) as suite:
        request = RewardRequest.build([str(i) for i in range(len(texts))], texts=texts)
        return suite.score(request, **options), dear.seen


def test_the_dear_reward_is_computed_where_the_gate_is_open() -> None:
    found, seen = gated(["abc", "12", "x", "y", "ab"])
    assert seen == ["abc", "x", "y", "ab"]
    assert found.names == ("dear", "cheap")
    torch.testing.assert_close(found.values[:, 0], torch.tensor([0.3, 0.0, NAN, 0.1, 0.2]), equal_nan=True)
    assert found.status[:, 0].tolist() == [0, 0, 1, 0, 0]
    torch.testing.assert_close(found.total(), torch.tensor([1.6, 0.0, 1.0, 0.2, 1.4]))
    assert found.details["dear/open"].tolist() == [1, 0, 1, 1, 1]
    torch.testing.assert_close(found.details["dear/scored"], torch.tensor([0.3, NAN, NAN, 0.1, 0.2]), equal_nan=True)


def test_all_rows_gated_out_and_a_value_of_their_own() -> None:
    found, seen = gated(["1", "2"], closed=-1.0)
    assert seen == []
    assert found.total().tolist() == [-2.0, -2.0]
    assert torch.isnan(found.details["dear/scored"]).all()


def test_a_failed_gate_is_shut_and_its_row_fails() -> None:
    found, seen = gated(["!", "ab"])
    assert seen == ["ab"]
    assert found.status.tolist() == [[0, 2], [0, 0]]
    assert found.usable.tolist() == [False, True]


def test_one_open_row_that_fails_is_dropped_and_named_by_its_own_number() -> None:
    def cheap(texts: list[str]) -> list[float]:
        return [float(text == "ab") for text in texts]

    def broken(texts: list[str]) -> list[float]:
        raise ConnectionError("away")

    rewards = {"cheap": cheap, "dear": {"reward": broken, "retries": 0}}
    with RewardSuite(rewards, gate={"cheap": 1.0}) as suite:
        found = suite.score(RewardRequest.build(["p", "q", "r"], texts=["1", "ab", "2"]))
        assert found.usable.tolist() == [True, False, True]
        assert [(f.row, f.prompt) for f in suite.failures] == [(1, "q")]
        with pytest.raises(RewardError, match="failed on every row that it applies to"):
            suite.score(RewardRequest.build(["p", "q", "r"], texts=["ab", "ab", "2"]))


def test_evaluations_compute_every_reward_everywhere() -> None:
    found, seen = gated(["abc", "12"], evaluation=True)
    assert seen == ["abc", "12"]
    assert "dear/open" not in found.details


# -- normalisers --------------------------------------------------------------------------------------------------------------


class OneProcess:
    """`Ranks` of one process."""

    world = 1

    @staticmethod
    def gather(rows: Tensor) -> Tensor:
        return rows


def normalisers(**given: Any) -> Normalisers:
    return Normalisers({n: RewardConfig(normalise=v) for n, v in given.items()})


def test_min_max_and_clip_and_what_stays_raw() -> None:
    scale = normalisers(a={"kind": "min_max", "low": 16, "high": 26}, b={"kind": "clip", "low": -1, "high": 1})
    found = scale(batch([21.0, NAN, 26.0], [3.0, -2.0, 0.5], [7.0, 8.0, 9.0]))
    torch.testing.assert_close(found.values[:, 0], torch.tensor([0.5, NAN, 1.0]).double(), equal_nan=True)
    assert found.values[:, 1].tolist() == [1, -1, 0.5]
    assert found.values[:, 2].tolist() == [7, 8, 9]
    assert found.details["b/raw"].tolist() == [3.0, -2.0, 0.5]
    assert found.status[:, 0].tolist() == [0, 1, 0]


def test_running_z_score_is_that_of_all_values_so_far_and_survives_a_checkpoint() -> None:
    scale = normalisers(a={"kind": "z_score", "eps": 1e-4})
    first = scale.observe(batch([1.0, 2.0, NAN, 6.0]), OneProcess())  # type: ignore[arg-type]
    close(first.values[[0, 1, 3], 0], [(x - 3) / (7**0.5 + 1e-4) for x in (1, 2, 6)])
    again = normalisers(a="z_score")
    again.load_state_dict(scale.state_dict())
    values = torch.tensor([1.0, 2.0, 6.0, 4.0, 8.0], dtype=torch.float64)
    for each in (scale, again):
        found = each.observe(batch([4.0, 8.0]), OneProcess())  # type: ignore[arg-type]
        close(found.values[:, 0], ((values[3:] - values.mean()) / (values.std() + 1e-4)).tolist(), 1e-9)
    assert scale.state_dict() == again.state_dict()


def test_running_z_score_of_constant_values_one_value_and_none() -> None:
    scale = normalisers(a="z_score")
    assert scale.observe(batch([5.0]), OneProcess()).values.tolist() == [[0.0]]  # type: ignore[arg-type]
    assert scale.observe(batch([5.0, 5.0]), OneProcess()).values.tolist() == [[0.0], [0.0]]  # type: ignore[arg-type]
    before = scale.state_dict()
    scale.observe(batch([NAN, NAN]), OneProcess())  # type: ignore[arg-type]
    assert scale.state_dict() == before
    capped = normalisers(a={"kind": "z_score", "low": -1, "high": 1})
    assert float(capped.observe(batch([0.0] * 9 + [1.0]), OneProcess()).values.max()) == 1  # type: ignore[arg-type]


def test_decay_forgets_earlier_steps() -> None:
    moments = RunningMoments()
    moments.add(torch.tensor([0.0, 0.0]))
    moments.add(torch.tensor([3.0, 3.0]), decay=0.5)
    assert moments.mean == pytest.approx(2.0)  # weights 1 and 2
    assert moments.weight == pytest.approx(3.0)
    assert moments.squares == pytest.approx(1 * 4 + 2 * 1)
