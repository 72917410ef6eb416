"""What every registered reward must do; a new reward is tested the day it is in the table."""

import copy

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.functional import pil_to_tensor

from visual_grpo import rewards
from visual_grpo.registry import REWARDS
from visual_grpo.reward import Reward, RewardRequest, as_reward, to_output
from visual_grpo.scoring import RewardSuite
from visual_grpo.types import RewardStatus

PARAMS = {
    "length": {"target": 10},
    "overlong": {"max_length": 20, "cache": 10},
    "ocr": {"engine_params": {"detection_side": 96}},
    "cosine_length": {"max_length": 20},
    "iou": {"gold_key": "box"},
    "multiple_choice": {"gold_key": "letter"},
    "reasoning_gym": {"entry_key": "puzzle"},
    "repetition": {"unit": "words"},
    "rubric": {"criteria": ["It is short.", {"text": "It is rude.", "weight": -2, "required": True}]},
    "pickscore": "pickscore_params",
    "cider": "cider_params",
    "hps_v3": "hps_v3_params",
    "remote": "remote_params",
    **dict.fromkeys(("caption_correctness", "caption_coverage", "caption_language"), "judge_params"),
    **dict.fromkeys(("deqa", "llm_judge", "unified_reward", "vlm_judge", "vqa_score"), "judge_params"),
}
"""Arguments of rewards that cannot be built without, or the fixture that makes them; a rubric also gets `judge_params`."""


def card(word: str, color: str) -> torch.Tensor:
    image = Image.new("RGB", (128, 64), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((104, 40, 124, 60), fill=color)
    draw.text((8, 6), word, fill="black", font=ImageFont.load_default(40))
    return pil_to_tensor(image).float() / 255


ROW = {
    "box": [1, 2, 30, 40],
    "letter": "B",
    "references": ["so the answer is 12 cats"],
    "puzzle": {"question": "2 + 2 =", "answer": "4", "metadata": {"source_dataset": "chain_sum"}},
}


def request() -> RewardRequest:
    words, colors = ["SALE", "OPEN", "NOW", ""], ["red", "blue", "black", "white"]
    texts = ["<think>a</think> so \\boxed{4}", "the answer is <answer>12 cats</answer>", "", "#### 7 or 5"]
    metadata = [
        {
            **ROW,
            "answer": "4",
            "tag": "single_object",
            "include": [{"class": "square", "count": 1, "color": "red"}],
            "reference": Image.new("RGB", (48, 40), "red"),
        },
        {**ROW, "answer": "12 cats", "tag": "counting", "include": [{"class": "square", "count": 2}]},
        {"answer": "5", "tests": [{"input": "", "output": "4"}]},
        {},
    ]
    prompts = ['a sign that says "SALE"', 'a sign that says "OPEN"', "no quoted text", 'an empty wall with "NOTHING"']
    return RewardRequest.build(
        prompts,
        images=torch.stack([card(w, c) for w, c in zip(words, colors, strict=True)]),
        texts=texts,
        metadata=metadata,
        group_ids=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([8, 12, 0, 25]),
    )


WEIGHTS = {
    "aesthetic", "clip_score", "dino_similarity", "hps_v2", "image_reward", "iqa", "nsfw", "pickscore",
}  # fmt: skip
"""Rewards of downloaded weights: fixture `<name>_params` gives small random ones of the same class."""


def names() -> list[str]:
    return sorted(rewards.TABLE)


def cases() -> list:
    return [pytest.param(name, marks=pytest.mark.iqa) if name == "iqa" else name for name in names()]


@pytest.fixture(scope="module", params=cases())
def reward(request) -> Reward:
    name = request.param
    params = request.getfixturevalue(f"{name}_params") if name in WEIGHTS else PARAMS.get(name)
    if isinstance(params, str):
        params = request.getfixturevalue(params)
    if name == "rubric":
        params = {**params, **request.getfixturevalue("judge_params")}
    built = as_reward(request.param, params=params)
    built.name = request.param
    yield built
    built.close()


def score(reward, made):
    return to_output(reward(made), len(made), reward.name)


def test_table_and_decorator_agree():
    for name in names():
        found = REWARDS.get(name)
        assert f"{found.__module__}:{found.__qualname__}" == rewards.TABLE[name][0]
        assert rewards.TABLE[name][1].endswith(".")


def test_it_says_what_it_reads(reward):
    assert reward.needs or reward.name == "remote"  # which sends what there is
    assert reward.needs <= {"images", "texts"}


def test_documented_with_source_and_range(reward):
    module = __import__(type(reward).__module__, fromlist=["x"])
    assert "ange" in module.__doc__
    assert type(reward).__doc__


def test_values_and_states(reward):
    output = score(reward, request())
    assert output.values.dtype == torch.float32
    assert output.values.shape == (4,)
    ok = output.status == RewardStatus.OK
    assert ok.any()
    assert torch.isfinite(output.values[ok]).all()
    assert torch.isnan(output.values[~ok]).all()
    assert not (output.status == RewardStatus.FAILED).any()
    for figure in output.details.values():
        assert figure.shape == (4,)


def test_it_changes_nothing(reward):
    made = request()
    images, metadata, texts = made.images.clone(), copy.deepcopy(made.metadata), list(made.texts)
    score(reward, made)
    assert torch.equal(made.images, images)
    assert (made.metadata, made.texts) == (metadata, texts)


def test_it_is_deterministic(reward):
    first, second = score(reward, request()), score(reward, request())
    torch.testing.assert_close(first.values, second.values, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [1], [2, 2, 0]])
def test_rows_are_scored_by_their_own_content(reward, order):
    made = request()
    whole, part = score(reward, made), score(reward, made.take(order))
    torch.testing.assert_close(part.values, whole.values[order], equal_nan=True)
    assert part.status.tolist() == whole.status[order].tolist()
    for key, figure in part.details.items():
        torch.testing.assert_close(figure, whole.details[key][order], equal_nan=True)


def test_it_runs_in_a_suite_off_the_main_thread(reward):
    with RewardSuite({"r": {"reward": reward, "weight": 2.0}}) as suite:
        batch = suite.submit(request()).result(120)
    torch.testing.assert_close(batch.values[:, 0], score(reward, request()).values, equal_nan=True)


def test_it_can_be_used_after_close(reward):
    before = score(reward, request())
    reward.close()
    torch.testing.assert_close(score(reward, request()).values, before.values, equal_nan=True)
