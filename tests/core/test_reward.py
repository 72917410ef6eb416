"""The seam: requests, outputs, and plain functions as rewards."""

import asyncio
import functools

import numpy as np
import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import Reward, RewardError, RewardOutput, RewardRequest, as_reward, to_output, to_pil
from visual_grpo.types import RewardStatus

NAN = float("nan")


def request(count: int = 3, **changes) -> RewardRequest:
    values = {"images": torch.rand(count, 3, 8, 8), "texts": [f"text {i}" for i in range(count)]}
    return RewardRequest.build([f"prompt {i}" for i in range(count)], **{**values, **changes})


class TestRequest:
    def test_an_empty_batch_is_refused_with_a_message(self):
        with pytest.raises(ValueError, match="at least one row"):
            RewardRequest.build([])

    def test_columns_of_another_length_are_named(self):
        with pytest.raises(ValueError, match=r"3 prompts needs 3 rows.*'metadata': 2"):
            request(3, metadata=[{}, {}])
        with pytest.raises(ValueError, match="'lengths': 1"):
            request(3, lengths=[4])

    @pytest.mark.parametrize(
        ("images", "hint"),
        [
            (torch.full((2, 3, 4, 4), -0.5), r"a VAE gives \[-1, 1\]"),
            (torch.full((2, 3, 4, 4), 200.0), "divide by 255"),
            (torch.zeros(2, 4, 4, 3), "must be float"),
            (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "must be float"),
        ],
    )
    def test_images_of_another_convention_are_refused(self, images, hint):
        with pytest.raises(ValueError, match=hint):
            RewardRequest.build(["a", "b"], images=images)

    def test_rounding_outside_the_range_is_accepted(self):
        made = request(1, images=torch.full((1, 3, 4, 4), 1.0005))
        assert made.pil_images[0].getpixel((0, 0)) == (255, 255, 255)

    def test_pixels_are_rounded_and_not_truncated(self):
        values = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 254.5001 / 255, 1.0])
        images = values.reshape(1, 1, 1, 5).expand(1, 3, 1, 5)
        assert np.asarray(to_pil(images)[0])[0, :, 0].tolist() == [0, 0, 1, 255, 255]

    def test_pil_images_are_made_once_and_shared_with_parts(self):
        whole = request(3)
        part = whole.take([2, 0])
        assert part.pil_images[0] is whole.pil_images[2]
        assert part.pil_images[1] is whole.pil_images[0]
        assert whole.pil_images is whole.pil_images

    def test_take_selects_every_column(self):
        whole = request(3, metadata=[{"k": i} for i in range(3)], lengths=torch.tensor([5, 6, 7]), shared={"scale": 2})
        part = whole.take([2, 0])
        assert part.prompts == ["prompt 2", "prompt 0"]
        assert [row["k"] for row in part.metadata] == [2, 0]
        assert part.extra["lengths"].tolist() == [7, 5]
        assert part.extra["shared"] == {"scale": 2}
        assert torch.equal(part.images, whole.images[[2, 0]])
        assert whole.take([0, 1, 2]) is whole


class TestOutput:
    @pytest.mark.parametrize(
        "given",
        [
            [1.0, None, 0.25],
            (True, None, np.float32(0.25)),
            [torch.tensor(1.0), None, np.array(0.25)],
            np.array([1.0, None, 0.25], dtype=object),
        ],
    )
    def test_none_is_not_applicable(self, given):
        output = to_output(given, 3, "r")
        assert output.values.dtype == torch.float32
        assert output.status.tolist() == [0, 1, 0]
        torch.testing.assert_close(output.values, torch.tensor([1.0, NAN, 0.25]), equal_nan=True)

    def test_values_that_are_not_finite_have_failed(self):
        output = to_output(torch.tensor([1.0, NAN, float("inf")], dtype=torch.float64), 3, "r")
        assert output.status.tolist() == [0, RewardStatus.FAILED, RewardStatus.FAILED]
        assert torch.isnan(output.values[1:]).all()

    def test_numpy_arrays_and_a_given_status(self):
        assert to_output(np.array([1, 2]), 2, "r").values.tolist() == [1.0, 2.0]
        output = to_output(
            RewardOutput(values=torch.tensor([3.0, 4.0]), status=torch.tensor([1, 0], dtype=torch.int8)), 2, "r"
        )
        torch.testing.assert_close(output.values, torch.tensor([NAN, 4.0]), equal_nan=True)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([1.0, 2.0], r"reward 'r' returned 2 values for 3 rows; expected \[3\]"),
            (torch.ones(3, 1), r"values of shape \[3, 1\] for 3 rows"),
            (torch.tensor(1.0), r"values of shape \[\]"),
            ([1.0, "2", 3.0], "'2' among its values"),
            ({"values": [1, 2, 3]}, "returned dict"),
            (None, "returned NoneType"),
            (RewardOutput(values=torch.ones(3), details={"x": torch.ones(2)}), r"2 details\['x'\]"),
        ],
    )
    def test_what_is_wrong_is_named(self, given, message):
        with pytest.raises(RewardError, match=message):
            to_output(given, 3, "r")


class TestPlainFunctions:
    def test_images_prompts_metadata(self):
        def bright(images, prompts, metadata):
            assert prompts == ["prompt 0", "prompt 1", "prompt 2"]
            return images.mean((1, 2, 3))

        reward = as_reward(bright)
        assert reward.needs == {"images"}
        made = request()
        torch.testing.assert_close(reward(made).values, made.images.mean((1, 2, 3)))

    def test_any_fields_in_any_order(self):
        reward = as_reward(
            lambda metadata, texts, group_ids: [len(t) + int(g) for t, g in zip(texts, group_ids, strict=True)]
        )
        assert reward.needs == {"texts"}
        assert reward(request()).values.tolist() == [6.0, 7.0, 8.0]

    def test_the_whole_request(self):
        assert as_reward(lambda request: [1.0] * len(request))(request()).values.tolist() == [1.0, 1.0, 1.0]

    def test_params_are_fixed_and_checked(self):
        def scaled(images, scale=1.0):
            return images.amax((1, 2, 3)) * 0 + scale

        assert as_reward(scaled, params={"scale": 3.0})(request()).values.tolist() == [3.0] * 3
        with pytest.raises(UserError, match=r"no parameter 'scal'. Did you mean 'scale'\? It takes: scale"):
            as_reward(scaled, params={"scal": 3.0})

    def test_metadata_and_lists_are_copies(self):
        def greedy(images, prompts, metadata):
            prompts.clear()
            for row in metadata:
                row["seen"] = True
            return [0.0] * 3

        made = request()
        as_reward(greedy)(made)
        assert made.prompts[0] == "prompt 0"
        assert made.metadata == [{}, {}, {}]

    def test_an_unknown_signature_is_explained(self):
        with pytest.raises(UserError, match=r"takes \(picture, caption\), which is no known signature.*TRL"):
            as_reward(lambda picture, caption: [0.0])
        with pytest.raises(UserError, match="no known signature"):
            as_reward(lambda images, threshold: [0.0])
        with pytest.raises(UserError, match="cannot be called"):
            as_reward(3)

    def test_classes_and_names(self):
        class Constant(Reward):
            def __init__(self, value=1.0):
                self.value = value

            def __call__(self, request):
                return [self.value] * len(request)

        assert as_reward(Constant, params={"value": 2.0})(request()) == [2.0] * 3
        assert as_reward(Constant()).value == 1.0
        with pytest.raises(UserError, match="already built"):
            as_reward(Constant(), params={"value": 2.0})
        with pytest.raises(UserError, match="no parameter 'valu'"):
            as_reward(Constant, params={"valu": 2.0})
        assert as_reward("brightness").needs == {"images"}
        assert as_reward("visual_grpo.rewards.brightness:Brightness").needs == {"images"}
        with pytest.raises(UserError, match="Did you mean 'brightness'"):
            as_reward("brigthness")


# The four below are shaped like reward functions of TRL's documentation and tests.
def trl_len(completions, **kwargs):
    return [-float(abs(20 - len(completion))) for completion in completions]


def trl_messages(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def trl_columns(prompts, completions, solution, difficulty=None, **kwargs):
    assert len(prompts) == len(completions) == len(solution)
    return [None if s is None else float(s in c) for c, s in zip(completions, solution, strict=True)]


async def trl_async(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions]


class TestTrlFunctions:
    def test_plain_strings(self):
        reward = as_reward(trl_len)
        assert reward.needs == {"texts"}
        assert reward(request(texts=["a" * 20, "b", ""])).values.tolist() == [0.0, -19.0, -20.0]

    def test_messages_by_annotation_by_data_and_by_setting(self):
        assert as_reward(trl_messages)(request()).values.tolist() == [6.0] * 3

        def untyped(completions, **kwargs):
            return [len(c[0]["content"]) for c in completions]

        assert as_reward(untyped, completions="messages")(request()).values.tolist() == [6.0] * 3
        chats = [{"prompt": [{"role": "user", "content": "hi"}]}] * 3
        assert as_reward(untyped)(request(metadata=chats)).values.tolist() == [6.0] * 3

    def test_conversational_prompts_are_passed_as_messages(self):
        chat = [{"role": "user", "content": "hi"}]

        def check(prompts, completions):
            assert prompts == [chat] * 3
            return [1.0] * 3

        as_reward(check)(request(metadata=[{"prompt": chat}] * 3))

    def test_columns_reach_the_function(self):
        rows = [{"solution": "text 0", "id": 1}, {"solution": "nothing"}, {}]
        output = as_reward(trl_columns)(request(metadata=rows))
        assert output.status.tolist() == [0, 0, 1]
        assert output.values[:2].tolist() == [1.0, 0.0]

    def test_named_columns_only(self):
        def named(completions, solution):
            return [float(c == s) for c, s in zip(completions, solution, strict=True)]

        rows = [{"solution": "text 0", "other": 1}] * 3
        assert as_reward(named)(request(metadata=rows)).values.tolist() == [1.0, 0.0, 0.0]

    def test_a_missing_column_is_named(self):
        with pytest.raises(
            RewardError, match=r"needs the data-set column\(s\) solution, which no row has; the rows have id"
        ):
            as_reward(trl_columns)(request(metadata=[{"id": 1}] * 3))

    def test_async(self):
        reward = as_reward(trl_async)
        assert reward(request()).values.tolist() == [6.0] * 3

        async def inside_a_loop():
            return reward(request())

        assert asyncio.run(inside_a_loop()).values.tolist() == [6.0] * 3

    def test_extra_columns_and_log_extra(self):
        def ids(completions, completion_ids, log_extra, **kwargs):
            log_extra("tokens", [len(row) for row in completion_ids])
            log_extra("names", ["a", "b", "c"])
            return [0.0] * 3

        output = as_reward(ids)(request(completion_ids=[[1], [1, 2], [1, 2, 3]]))
        assert {key: row.tolist() for key, row in output.details.items()} == {"tokens": [1.0, 2.0, 3.0]}

    def test_a_callable_object_and_a_partial(self):
        class Scorer:
            def __call__(self, prompts, completions, **kwargs):
                return [1.0] * len(completions)

        assert as_reward(Scorer())(request()).values.tolist() == [1.0] * 3
        partial = functools.partial(trl_columns, difficulty="hard")
        assert as_reward(partial)(request(metadata=[{"solution": "t"}] * 3)).values.tolist() == [1.0] * 3


def test_a_decorated_function_is_a_reward_by_name():
    import visual_grpo as vg
    from visual_grpo.scoring import RewardSuite

    @vg.register_reward("tests_redness")
    def redness(images, prompts, metadata):
        return images[:, 0].mean((1, 2))

    made = request(2, images=torch.ones(2, 3, 4, 4))
    assert RewardSuite({"tests_redness": 2.0}).score(made).total().tolist() == [2.0, 2.0]
