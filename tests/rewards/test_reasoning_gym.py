"""Puzzles scored by the package itself, in its own process."""

import json

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward, to_output


@pytest.fixture(scope="module")
def reward():
    built = as_reward("reasoning_gym", params={"entry_key": "entry", "limit_s": 60.0})
    yield built
    built.close()


def score(reward, texts, entries):
    made = RewardRequest.build(["q"] * len(texts), texts=texts, metadata=[{"entry": entry} for entry in entries])
    return to_output(reward(made), len(texts), "reasoning_gym")


def entry(dataset, answer, **metadata):
    return {"question": "?", "answer": answer, "metadata": {"source_dataset": dataset, **metadata}}


COUNTDOWN = entry("countdown", "94*4 - 61 - 6", numbers=[6, 61, 94, 4], target=309)


def test_scores_of_the_package(reward):
    texts = ["so <answer>12</answer>", "12", "<answer>13</answer>", "", "4*94 - 61 - 6", "x"]
    entries = [entry("chain_sum", "12")] * 4 + [COUNTDOWN, json.dumps(entry("chain_sum", "x"))]
    torch.testing.assert_close(score(reward, texts, entries).values, torch.tensor([1.0, 1, 0, 0, 1, 1]))
    assert score(reward, ["1", "1", "1"], [None, "no json", {"answer": "1"}]).status.tolist() == [1, 1, 1]


def test_malformed_answers_never_raise(reward):
    junk = ["", "NaN", "٣", "[[[", "\ud800", "x" * 100_000, "1/0", "__import__('os')", "<answer></answer>"]
    for one in (COUNTDOWN, entry("chain_sum", "12")):
        output = score(reward, junk, [one] * len(junk))
        assert output.status.tolist() == [0] * len(junk)
        assert output.values.max() <= 0.05


def test_junk_on_which_the_scorer_raises_is_wrong(reward):
    import reasoning_gym

    made = dict(reasoning_gym.create_dataset("boxnet", size=1, seed=1)[0])
    output = score(reward, ["[1]", '{"a": 1}'], [made] * 2)
    assert output.details["raised"].tolist() == [1, 1]
    assert output.values.tolist() == [0, 0]


def test_an_entry_on_whose_own_answer_the_scorer_raises_is_failed(reward):
    broken = {"question": "?", "answer": "[1]", "metadata": {"source_dataset": "boxnet"}}
    output = score(reward, ["[1]", "12"], [broken, entry("chain_sum", "12")])
    assert output.status.tolist() == [2, 0]


def test_an_answer_that_hangs_scores_nothing(reward):
    """The integer power never ends and would hold Python's lock; its process is killed, and the next row gets a new one."""
    reward.limit_s = 3.0
    output = score(reward, ["9**9**9**9*6*61*94*4"], [COUNTDOWN])
    reward.limit_s = 60.0
    assert output.details["timed_out"].tolist() == [1]
    assert output.values.tolist() == [0]
    assert score(reward, ["12"], [entry("chain_sum", "12")]).values.item() == 1.0


def test_unknown_data_sets(reward):
    with pytest.raises(UserError, match="nosuch"):
        score(reward, ["1"], [entry("nosuch", "1")])
    with pytest.raises(UserError, match=r"set params\.dataset"):
        score(reward, ["1"], [{"answer": "1", "metadata": {}}])
    with pytest.raises(UserError, match="limit_s is 0"):
        as_reward("reasoning_gym", params={"limit_s": 0})
