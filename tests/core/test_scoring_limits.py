"""The engine: rewards that hang, and scoring in the background."""

import threading
import time

import pytest

from visual_grpo.reward import RewardError, RewardRequest
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

OK, _, FAILED = (int(state) for state in RewardStatus)


def request(count: int = 4) -> RewardRequest:
    return RewardRequest.build([f"prompt {i}" for i in range(count)], metadata=[{"id": i} for i in range(count)])


def one(reward, **settings) -> RewardSuite:
    return RewardSuite({"r": {"reward": reward, **settings}})


def ids(metadata):
    return [float(row["id"]) for row in metadata]


def unreachable(metadata):
    raise ConnectionError("the judge is away")


class TestTimeouts:
    def test_a_reward_that_hangs_is_given_up(self):
        release = threading.Event()

        def hang(prompts):
            release.wait(30)
            return [0.0] * len(prompts)

        suite = one(hang, timeout_s=1.0, retries=3)
        began = time.perf_counter()
        with pytest.raises(RewardError, match=r"reward 'r' did not return within timeout_s = 1 s"):
            suite.score(request())
        assert time.perf_counter() - began < 5  # no retry of a call that hangs
        assert suite.counts["r"].timeouts == 1
        release.set()

    def test_only_the_rows_of_the_hung_call_are_lost(self):
        release = threading.Event()

        def hang_on_two(metadata):
            if metadata[0]["id"] == 2:
                release.wait(30)
            return ids(metadata)

        suite = one(hang_on_two, timeout_s=1.0, batch_size=2)
        batch = suite.score(request(6))
        assert batch.status[:, 0].tolist() == [OK, OK, FAILED, FAILED, OK, OK]
        assert "did not return" in suite.failures[0].error
        release.set()

    def test_a_reward_that_keeps_hanging_is_called_no_more(self):
        release = threading.Event()

        def hang(prompts):
            release.wait(30)
            return [0.0]

        with pytest.raises(RewardError, match="4 calls that never came back"):
            one(hang, timeout_s=0.05, batch_size=1).score(request(6))
        release.set()

    def test_the_rewards_own_timeout_error_is_an_ordinary_failure(self):
        calls = []

        def slow_server(metadata):
            calls.append(1)
            if len(calls) == 1:
                raise TimeoutError("server")
            return ids(metadata)

        suite = one(slow_server)
        assert suite.score(request()).values[:, 0].tolist() == [0, 1, 2, 3]
        assert suite.counts["r"].timeouts == 0


class TestOverlap:
    def test_submit_returns_before_the_scores_are_there(self):
        release = threading.Event()

        def waits(metadata):
            assert release.wait(30)
            return ids(metadata)

        with one(waits) as suite:
            futures = [suite.submit(request()), suite.submit(request(2))]
            assert not futures[0].done()
            release.set()
            assert futures[0].result(30).values[:, 0].tolist() == [0, 1, 2, 3]
            assert futures[1].result(30).values[:, 0].tolist() == [0, 1]

    def test_errors_arrive_with_the_result(self):
        with one(unreachable, retries=0) as suite, pytest.raises(RewardError, match="failed on every row"):
            suite.submit(request()).result(30)

    def test_calls_of_one_reward_never_overlap(self):
        inside = []
        most = []

        def counted(metadata):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()
            return ids(metadata)

        with RewardSuite({"r": counted}, workers=4) as suite:
            for future in [suite.submit(request()) for _ in range(6)]:
                future.result(30)
        assert max(most) == 1

    def test_the_suite_can_be_used_after_it_was_closed(self):
        suite = RewardSuite({"r": ids})
        suite.submit(request()).result(30)
        suite.close()
        assert suite.submit(request()).result(30).values[:, 0].tolist() == [0, 1, 2, 3]
        suite.close()
