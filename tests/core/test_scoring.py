"""The engine: retries, limits, the three states, and what ends a run."""

import logging
from types import SimpleNamespace

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import GroupReward, Reward, RewardError, RewardOutput, RewardRequest
from visual_grpo.scoring import RewardSpec, RewardSuite
from visual_grpo.types import RewardStatus

OK, NOT_APPLICABLE, FAILED = (int(state) for state in RewardStatus)
NAN = float("nan")


def request(count: int = 4, **changes) -> RewardRequest:
    values = {
        "images": torch.arange(count).reshape(-1, 1, 1, 1).expand(count, 3, 4, 4) / count,
        "texts": [f"text {i}" for i in range(count)],
        "metadata": [{"id": i, "tag": "even" if i % 2 == 0 else "odd"} for i in range(count)],
    }
    return RewardRequest.build([f"prompt {i}" for i in range(count)], **{**values, **changes})


def one(reward, **settings) -> RewardSuite:
    return RewardSuite({"r": {"reward": reward, **settings}})


def ids(metadata):
    return [float(row["id"]) for row in metadata]


class Flaky:
    """A function that raises on its first `times` calls; `sizes` keeps how many rows each call had."""

    def __init__(self, times: int) -> None:
        self.times, self.sizes = times, []

    def __call__(self, metadata):
        self.sizes.append(len(metadata))
        if len(self.sizes) <= self.times:
            raise ConnectionError("the judge is away")
        return ids(metadata)


class TestCombination:
    def test_weights_names_details(self):
        class Detailed(Reward):
            def __call__(self, request):
                values = torch.arange(4.0)
                return RewardOutput(values=values, details={"double": values * 2})

        suite = RewardSuite(
            {"a": {"reward": Detailed, "weight": 2.0}, "b": {"reward": ids, "weight": -0.5}, "brightness": 0}
        )
        batch = suite.score(request())
        assert batch.names == ("a", "b", "brightness")
        assert batch.values.shape == (4, 3)
        assert batch.values.dtype == torch.float32
        assert batch.status.dtype == torch.int8
        assert batch.total().tolist() == [0.0, 1.5, 3.0, 4.5]
        assert batch.details["a/double"].tolist() == [0.0, 2.0, 4.0, 6.0]

    def test_parts_that_do_not_apply_are_left_out_of_the_sum(self):
        def odd_only(metadata):
            return [float(row["id"]) if row["tag"] == "odd" else None for row in metadata]

        batch = RewardSuite({"odd": odd_only, "id": {"reward": ids, "weight": 0.5}}).score(request())
        assert batch.status[:, 0].tolist() == [NOT_APPLICABLE, OK, NOT_APPLICABLE, OK]
        assert batch.total().tolist() == [0.0, 1.5, 1.0, 4.5]
        alone = RewardSuite({"odd": odd_only}).score(request())
        assert alone.usable.tolist() == [False, True, False, True]
        assert torch.isnan(alone.total()[0])

    def test_applies_by_metadata_and_by_function(self):
        calls = []

        def counted(metadata):
            calls.append([row["id"] for row in metadata])
            return ids(metadata)

        batch = one(counted, applies={"tag": "odd"}).score(request())
        assert batch.status[:, 0].tolist() == [NOT_APPLICABLE, OK, NOT_APPLICABLE, OK]
        assert calls == [[1, 3]]
        one(counted, applies={"id": [0, 2]}).score(request())
        one(counted, applies=lambda row: row["id"] > 1).score(request())
        assert calls == [[1, 3], [0, 2], [2, 3]]

    def test_a_reward_that_applies_to_no_row_is_not_called(self):
        flaky = Flaky(99)
        batch = one(flaky, applies={"tag": "none"}).score(request())
        assert flaky.sizes == []
        assert batch.status[:, 0].tolist() == [NOT_APPLICABLE] * 4

    def test_batch_size_splits_calls(self):
        flaky = Flaky(0)
        batch = one(flaky, batch_size=3).score(request(7))
        assert flaky.sizes == [3, 3, 1]
        assert batch.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]

    def test_a_reward_may_ask_for_small_calls_and_the_config_overrides(self):
        sizes = []

        class Slow(Reward):
            rows_per_call = 2

            def __call__(self, request):
                sizes.append(len(request))
                return [0.0] * len(request)

        one(Slow).score(request())
        one(Slow, batch_size=3).score(request())
        assert sizes == [2, 2, 3, 1]

    def test_eval_only(self):
        suite = RewardSuite({"a": ids, "b": {"reward": ids, "eval_only": True}})
        assert suite.score(request()).names == ("a",) == suite.names()
        assert suite.score(request(), evaluation=True).names == ("a", "b") == suite.names(evaluation=True)
        with pytest.raises(UserError, match="every reward is eval_only"):
            one(ids, eval_only=True).score(request())

    def test_group_rewards_get_one_whole_group_a_call(self):
        seen = []

        class Rank(GroupReward):
            def __call__(self, request):
                seen.append((request.group_ids.unique().tolist(), len(request)))
                return request.images.mean((1, 2, 3)).argsort().argsort().float()

        made = request(6, group_ids=torch.tensor([7, 3, 7, 3, 7, 5]))
        batch = one(Rank, batch_size=1).score(made)
        assert seen == [([7], 3), ([3], 2), ([5], 1)]
        assert batch.values[:, 0].tolist() == [0, 0, 1, 1, 2, 0]

    def test_nothing_in_the_request_changes(self):
        made = request()
        before = made.images.clone()
        RewardSuite({"brightness": 1.0, "jpeg_compressibility": 1.0, "id": ids}).score(made)
        assert torch.equal(made.images, before)

    def test_changing_shared_images_is_an_error(self):
        def darken(images):
            return images.mul_(0.5).mean((1, 2, 3))

        with pytest.raises(RewardError, match=r"reward 'r' changed the images in place.*images\.clone\(\)"):
            one(darken).score(request(images=torch.rand(4, 3, 4, 4)))

    @pytest.mark.parametrize("timeout_s", [5.0, None])
    def test_no_gradient_in_any_thread(self, timeout_s):
        def check(images):
            assert not torch.is_grad_enabled()
            return images.mean((1, 2, 3))

        images = torch.rand(4, 3, 4, 4, requires_grad=True)
        batch = one(check, timeout_s=timeout_s, retries=0).score(request(images=images))
        assert not batch.values.requires_grad


class TestWrongAnswers:
    def test_a_wrong_length_ends_the_run_at_once_and_names_everything(self):
        calls = []

        def short(prompts):
            calls.append(1)
            return [1.0, 2.0]

        with pytest.raises(RewardError, match=r"reward 'r' returned 2 values for 4 rows; expected \[4\]"):
            one(short, retries=5).score(request())
        assert len(calls) == 1

    def test_a_wrong_type_ends_the_run_at_once(self):
        with pytest.raises(RewardError, match="reward 'r' returned str"):
            one(lambda prompts: "good").score(request())

    def test_a_nan_is_repeated_for_its_row_only_and_then_dropped(self, caplog):
        sizes = []

        def sometimes(metadata):
            sizes.append(len(metadata))
            return [NAN if row["id"] == 2 else float(row["id"]) for row in metadata]

        suite = one(sometimes, retries=2)
        with caplog.at_level(logging.WARNING):
            batch = suite.score(request())
        assert sizes == [4, 1, 1]
        assert batch.status[:, 0].tolist() == [OK, OK, FAILED, OK]
        assert torch.isnan(batch.values[2, 0])
        assert batch.usable.tolist() == [True, True, False, True]
        assert "reward 'r' failed on row(s) 2 of 4 (row 2: 'prompt 2')" in caplog.text
        (failure,) = suite.failures
        assert (failure.reward, failure.row, failure.prompt) == ("r", 2, "prompt 2")
        assert (suite.counts["r"].failed, suite.counts["r"].rows, suite.counts["r"].retried) == (1, 4, 2)

    def test_infinity_and_a_nan_that_goes_away(self):
        calls = []

        def healing(metadata):
            calls.append(1)
            return [float("inf") if len(calls) == 1 and row["id"] == 1 else float(row["id"]) for row in metadata]

        batch = one(healing).score(request())
        assert batch.values[:, 0].tolist() == [0, 1, 2, 3]
        assert len(calls) == 2

    def test_mixed_states_in_one_answer(self):
        batch = one(lambda prompts: [1.0, None, NAN, 0.0], retries=0).score(request())
        assert batch.status[:, 0].tolist() == [OK, NOT_APPLICABLE, FAILED, OK]
        assert batch.usable.tolist() == [True, False, False, True]

    def test_a_failed_part_makes_the_row_unusable(self):
        batch = RewardSuite({"id": ids, "nan": {"reward": lambda prompts: [1, NAN, 1, 1], "retries": 0}}).score(
            request()
        )
        assert batch.usable.tolist() == [True, False, True, True]

    def test_images_with_nan_pixels_fail_and_reach_no_image_reward(self):
        images = torch.rand(4, 3, 4, 4)
        images[1, 0, 0, 0] = NAN
        sizes = []

        def size(images):
            sizes.append(len(images))
            return images.mean((1, 2, 3))

        suite = RewardSuite({"size": size, "text": lambda texts: [1.0] * 4})
        batch = suite.score(request(images=images))
        assert sizes == [3]
        assert batch.status.tolist() == [[OK, OK], [FAILED, OK], [OK, OK], [OK, OK]]
        assert "not finite" in suite.failures[0].error


class TestExceptions:
    def test_raise_once_then_succeed(self):
        flaky = Flaky(1)
        batch = one(flaky).score(request())
        assert flaky.sizes == [4, 4]
        assert batch.values[:, 0].tolist() == [0, 1, 2, 3]

    def test_one_bad_row_does_not_lose_the_batch(self, caplog):
        def picky(metadata):
            if any(row["id"] == 2 for row in metadata):
                raise KeyError("no such clause")
            return ids(metadata)

        suite = one(picky, retries=1)
        with caplog.at_level(logging.WARNING):
            batch = suite.score(request())
        assert batch.status[:, 0].tolist() == [OK, OK, FAILED, OK]
        assert suite.counts["r"].calls == 2 + 4
        assert "KeyError" in suite.failures[0].error

    def test_raise_always_ends_the_run_even_when_rows_may_be_dropped(self):
        flaky = Flaky(99)
        with pytest.raises(
            RewardError, match=r"reward 'r' failed on every row.*ConnectionError: the judge is away"
        ) as caught:
            one(flaky, retries=1, on_failed="drop").score(request())
        assert flaky.sizes == [4, 4, 1, 1, 1, 1]
        assert isinstance(caught.value.__cause__, ConnectionError)

    def test_on_failed_stop_names_reward_row_prompt_and_error(self):
        suite = one(lambda prompts: [1.0, 1.0, 1.0, NAN], on_failed="stop", retries=0)
        with pytest.raises(
            RewardError, match=r"reward 'r' failed on row\(s\) 3 of 4 \(row 3: 'prompt 3'\).*on_failed: drop"
        ):
            suite.score(request())

    def test_a_user_error_is_not_repeated(self):
        calls = []

        def unready(prompts):
            calls.append(1)
            raise UserError("install the extra")

        with pytest.raises(UserError, match="install the extra"):
            one(unready).score(request())
        assert len(calls) == 1

    def test_exceptions_outside_exception_are_failures_too(self):
        class LibraryTimeout(BaseException):
            pass

        def odd(prompts):
            raise LibraryTimeout("took too long")

        with pytest.raises(RewardError, match="LibraryTimeout"):
            one(odd, retries=0).score(request())

    def test_a_group_reward_is_repeated_with_its_whole_group(self):
        sizes = []

        class Fragile(GroupReward):
            def __call__(self, request):
                sizes.append(len(request))
                if request.group_ids[0] == 1:
                    raise ValueError("no")
                return torch.ones(len(request))

        batch = one(Fragile, retries=1).score(request(group_ids=torch.tensor([0, 0, 1, 1])))
        assert sizes == [2, 2, 2]
        assert batch.status[:, 0].tolist() == [OK, OK, FAILED, FAILED]


class TestConfig:
    def test_forms_of_a_setting(self):
        section = SimpleNamespace(model_dump=lambda: {"weight": 2.0, "params": {"quality": 50}, "retries": 0})
        suite = RewardSuite({"jpeg_compressibility": section, "brightness": 0.5, "mine": ids})
        assert [spec.weight for spec in suite.specs] == [2.0, 0.5, 1.0]
        assert suite.specs[0].params == {"quality": 50}
        suite = RewardSuite({"visual_grpo.rewards.brightness:Brightness": -1.0})
        assert suite.score(request()).total().tolist() == [0.0, -0.25, -0.5, -0.75]

    def test_one_reward_twice_under_two_names(self):
        suite = RewardSuite(
            {
                "fine": {"reward": "jpeg_incompressibility", "params": {"quality": 95}},
                "coarse": {"reward": "jpeg_incompressibility", "params": {"quality": 10}},
            }
        )
        noise = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        values = suite.score(request(2, images=noise)).values
        assert (values[:, 0] > values[:, 1]).all()

    def test_rewards_that_take_a_device_get_the_suites(self):
        class OnDevice(Reward):
            def __init__(self, device="cpu"):
                self.device = device

            def __call__(self, request):
                return [float(str(self.device) == "meta")] * len(request)

        assert RewardSuite({"r": OnDevice}, device="meta").score(request()).total().tolist() == [1.0] * 4
        given = RewardSuite({"r": {"reward": OnDevice, "params": {"device": "cpu"}}}, device="meta")
        assert given.score(request()).total().tolist() == [0.0] * 4

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({}, "no rewards are configured"),
            ({"nope": 1.0}, "no reward named 'nope'"),
            ({"brightness": True}, "rewards.brightness is True"),
            ({"brightness": "high"}, "rewards.brightness is 'high'"),
            ({"brightness": NAN}, "must be a finite number"),
            ({"brightness": {"wieght": 1}}, r"no setting 'wieght'\. Did you mean 'weight'"),
            ({"brightness": {"timeout_s": 0}}, "timeout_s is 0"),
            ({"brightness": {"retries": -1}}, "retries is -1"),
            ({"brightness": {"batch_size": 0}}, "batch_size is 0"),
            ({"brightness": {"on_failed": "ignore"}}, "give drop or stop"),
            ({"jpeg_compressibility": {"params": {"qualty": 3}}}, r"no parameter 'qualty'\. Did you mean 'quality'"),
        ],
    )
    def test_mistakes_are_found_when_the_suite_is_made(self, config, message):
        with pytest.raises(UserError, match=message):
            RewardSuite(config)

    def test_rewards_for_other_media_are_refused(self):
        suite = RewardSuite({"brightness": 1.0})
        suite.check_media(["images"])
        with pytest.raises(UserError, match="reward 'brightness' reads images, but tiny_lm makes texts"):
            suite.check_media(["texts"], model="tiny_lm")
        with pytest.raises(UserError, match="reads images"):
            suite.score(RewardRequest.build(["a"], texts=["b"]))

    def test_specs_pass_through(self):
        spec = RewardSpec(name="r", reward=ids, weight=3.0)
        assert RewardSuite({"r": spec}).specs == (spec,)
