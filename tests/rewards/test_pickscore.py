"""PickScore on a small random model of the true class."""

import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward

PROMPTS = ["a cat", "two red dogs", "a very long prompt that goes on and on beyond the end of the window", "x"]


@pytest.fixture
def request_():
    return RewardRequest.build(PROMPTS, images=torch.rand(4, 3, 48, 40, generator=torch.Generator().manual_seed(1)))


def build(folder, **params):
    return as_reward("pickscore", params={"model": str(folder), "processor": str(folder), "device": "cpu", **params})


def test_formula(tiny_clip, request_):
    model, processor = CLIPModel.from_pretrained(tiny_clip), CLIPProcessor.from_pretrained(tiny_clip)
    inputs = processor(
        text=PROMPTS,
        images=request_.pil_images,
        padding="max_length",
        truncation=True,
        max_length=24,
        return_tensors="pt",
    )
    with torch.no_grad():
        output = model(**inputs)
    cosine = torch.nn.functional.cosine_similarity(output.text_embeds, output.image_embeds)
    expected = model.logit_scale.detach().exp() * cosine / 26
    values = build(tiny_clip)(request_).values
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert values.std() > 1e-4
    torch.testing.assert_close(build(tiny_clip, divisor=1)(request_).values, 26 * expected, atol=1e-4, rtol=0)


def test_rows_do_not_depend_on_the_batch(tiny_clip, request_):
    whole = build(tiny_clip)(request_).values
    torch.testing.assert_close(build(tiny_clip, batch_size=1)(request_).values, whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(build(tiny_clip)(request_.take([2, 0])).values, whole[[2, 0]], atol=1e-5, rtol=0)


def test_missing_weights(tiny_clip, tmp_path, request_):
    absent = str(tmp_path / "absent")
    with pytest.raises(UserError, match=r"pickscore's model could not be loaded from .*absent.*hf download"):
        build(tiny_clip, model=absent)(request_)
    with pytest.raises(UserError, match="pickscore's processor"):
        build(tiny_clip, processor=absent)(request_)


@pytest.mark.parametrize("params", [{"dtype": "int8"}, {"batch_size": 0}, {"divisor": 0}])
def test_wrong_parameters(params):
    with pytest.raises(UserError, match="pickscore"):
        as_reward("pickscore", params=params)
