"""Options by name: types by annotation, before anything runs."""

import enum
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.option_types import check_types
from visual_grpo.pictures import to_rgb
from visual_grpo.reward import RewardError, RewardOutput, as_reward, to_output
from visual_grpo.reward_runner import RewardSpec
from visual_grpo.scoring import RewardSuite


class Kind(enum.Enum):
    A = "a"


class Owner:
    def __init__(self, count: int = 1, share: float = 0.5, name: str | None = None, path: Path = Path(), kind: Kind = Kind.A,
                 pair: tuple[float, ...] = (), free=None, device: str | None = None) -> None:  # fmt: skip
        self.count = count


@dataclass
class Settings:
    count: int = 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", "3"), ("count", True), ("count", 1.5), ("share", "1e-4"), ("share", math.nan), ("share", math.inf),
        ("name", ["a"]), ("name", 3), ("path", 3), ("kind", "b"), ("pair", (1.0, math.nan)), ("pair", "12"),
        ("pair", [1.0, "2"]), ("pair", [True, 1.0]),
    ],
)  # fmt: skip
def test_what_is_refused(key, value):
    with pytest.raises(UserError, match=f"thing: option {key} is "):
        check_types(Owner, {key: value}, "thing")


def test_what_passes():
    good = {"count": 3, "share": 1, "name": None, "path": "a/b", "kind": "a", "pair": [1.0, 2], "free": math.nan}
    check_types(Owner, {**good, "device": torch.device("cpu"), "unknown": 1}, "thing")
    with pytest.raises(UserError, match="option count"):
        check_types(Settings, {"count": "1"}, "thing")
    check_types(type("Bare", (), {}), {"count": "1"}, "thing")


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("anls", {"gold_key": ["answer"]}), ("cider", {"corpus": "batch", "sigma": "6"}), ("code", {"seconds": math.nan}),
        ("code", {"output_kb": 1.5}), ("code", {"packages": "no"}), ("iou", {"threshold": 1.0}),
        ("jpeg_compressibility", {"quality": 0}),
        ("math_verify", {"limit_s": 0}), ("ocr", {"min_confidence": 1.0}), ("ocr", {"upscale_to": 0}),
        ("geneval", {"threshold": 1.5}), ("geneval", {"max_objects": 0}), ("llm_judge", {"batch_size": 1.5}),
        ("llm_judge", {"chat_template_kwargs": "enable_thinking"}), ("llm_judge", {"trust_remote_code": "no"}),
        ("llm_judge", {"api_key_env": 5}), ("repetition", {"n": True}), ("cosine_length", {"max_length": 9, "wrong": ["a", 1]}),
    ],
)  # fmt: skip
def test_wrong_parameters_of_rewards_are_refused_when_they_are_built(name, params):
    with pytest.raises(UserError):
        as_reward(name, params=params)


@pytest.mark.parametrize(
    "settings",
    [
        {"timeout_s": "abc"}, {"retries": 1.5}, {"retries": "2"}, {"batch_size": "x"}, {"params": 5}, {"applies": 5},
        {"completions": "chat"}, {"eval_only": "no"}, {"retry_wait_s": -1.0}, {"url": 5}, {"timeout_s": math.nan},
    ],
)  # fmt: skip
def test_wrong_settings_of_a_reward_are_refused(settings):
    with pytest.raises(UserError, match=r"rewards\.brightness"):
        RewardSpec.parse("brightness", settings)


def test_a_device_that_does_not_exist():
    with pytest.raises(UserError, match="device 'gpu'"):
        RewardSuite({"brightness": 1.0}, device="gpu")


def test_an_output_that_holds_no_tensors_is_named():
    with pytest.raises(RewardError, match="whose values is list"):
        to_output(RewardOutput(values=[1.0]), 1, "mine")
    with pytest.raises(RewardError, match="whose x is list"):
        to_output(RewardOutput(values=torch.zeros(1), details={"x": [1.0]}), 1, "mine")


class TestPictures:
    """Pillow's own conversion shows 16-bit grey as white, and the colours under transparent pixels."""

    def test_grey_of_16_bits(self, tmp_path):
        Image.new("I;16", (2, 2), 32768).save(tmp_path / "a.png")
        with Image.open(tmp_path / "a.png") as opened:
            assert to_rgb(opened).getpixel((0, 0)) == (128, 128, 128)
        assert to_rgb(Image.new("I", (1, 1), 32768)).getpixel((0, 0)) == (128, 128, 128)

    def test_transparent_parts_are_white(self):
        image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
        image.putpixel((1, 0), (10, 20, 30, 0))
        assert [to_rgb(image).getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30), (255, 255, 255)]
        palette = Image.new("P", (1, 1), 3)
        palette.info["transparency"] = 3
        assert to_rgb(palette).getpixel((0, 0)) == (255, 255, 255)

    def test_turned_photographs_and_other_kinds(self):
        tall = Image.new("RGB", (1, 2))
        tall.getexif()[0x0112] = 6
        assert to_rgb(tall).size == (2, 1)
        assert to_rgb(Image.new("CMYK", (1, 1), (0, 255, 255, 0))).getpixel((0, 0)) == (255, 0, 0)
        assert to_rgb(Image.new("1", (1, 1), 1)).getpixel((0, 0)) == (255, 255, 255)
        with pytest.raises(ValueError, match="floating-point"):
            to_rgb(Image.new("F", (1, 1), 0.5))
