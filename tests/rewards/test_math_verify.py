"""The process that judges mathematics: it survives what would hang a trainer."""

import sys
import time

import pytest

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, to_output
from visual_grpo.rewards import child_process
from visual_grpo.rewards.math_judge import judge
from visual_grpo.rewards.math_verify import MathVerify
from visual_grpo.scoring import RewardSuite

TOWER = r"\boxed{9^{9^{9^{9}}}}"
"""Its integer power never ends and never lets another thread run."""


def request(texts, golds):
    return RewardRequest.build(["q"] * len(texts), texts=texts, metadata=[{"solution": gold} for gold in golds])


@pytest.fixture(scope="module")
def reward():
    built = MathVerify(limit_s=60.0)
    yield built
    built.close()


def score(reward, texts, golds):
    return to_output(reward(request(texts, golds)), len(texts), "math_verify")


def test_the_answer_must_be_anchored_unless_any_expression_counts():
    assert judge("42", "I guess 42", "latex", alarms=True) is False
    assert judge("42", "I guess 42", "any", alarms=True) is True
    assert judge("nothing", r"\boxed{1}", "latex", alarms=True) is None
    assert judge("5 + 7 = 12 #### 1,234", r"\boxed{1234}", "latex", alarms=True) is True


def test_boxed_comes_first_and_gold_comes_first(reward):
    output = score(reward, [r"$3$ or $4$, so \boxed{5}", r"\boxed{x=3}"], ["5", "3"])
    assert output.values[0] == 1.0


def test_an_endless_power_scores_zero_and_the_next_row_is_judged(reward):
    output = score(reward, [TOWER, r"\boxed{7}"], ["7", "7"])
    assert output.values.tolist() == [0.0, 1.0]


def test_a_process_past_its_limit_is_killed_and_replaced():
    quick = MathVerify(limit_s=3.0)
    score(quick, [r"\boxed{1}"], ["1"])
    first = quick._process._process.pid
    output = score(quick, [TOWER, r"\boxed{7}"], ["7", "7"])
    assert output.values[0] == 0.0
    assert output.details["timed_out"][0] == 1.0
    assert quick._process._process.pid != first
    quick.close()


def test_off_the_main_thread(reward):
    with RewardSuite({"math": {"reward": reward}}) as suite:
        batch = suite.submit(request([r"\boxed{0.5}", r"\boxed{2}"], ["1/2", "1"])).result(120)
    assert batch.values[:, 0].tolist() == [1.0, 0.0]


def test_it_starts_where_the_package_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fresh = MathVerify()
    assert score(fresh, [r"\boxed{1}"], ["1"]).values.tolist() == [1.0]
    fresh.close()


def test_a_process_that_cannot_start_is_reported(monkeypatch):
    monkeypatch.setattr(child_process.sys, "executable", "/bin/false")
    broken = MathVerify()
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match="did not start"):
        score(broken, [r"\boxed{1}"], ["1"])
    assert time.perf_counter() - began < 30


def test_mistakes(monkeypatch):
    with pytest.raises(UserError, match="extraction is 'strict'"):
        MathVerify("strict")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'visual-grpo\[text\]'"):
        MathVerify()
