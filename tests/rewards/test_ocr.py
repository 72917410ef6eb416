"""The OCR reward with its real engine, on cards drawn with Pillow's own font."""

import sys

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.functional import pil_to_tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, to_output
from visual_grpo.rewards.ocr import Ocr, RapidOcrEngine
from visual_grpo.types import RewardStatus

SMALL = {"detection_side": 128}


def card(text: str, size: tuple[int, int], points: int = 40) -> Image.Image:
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((8, 8), text, fill="black", font=ImageFont.load_default(points))
    return image


def request(cards, prompts, **more) -> RewardRequest:
    images = torch.stack([pil_to_tensor(image).float() / 255 for image in cards])
    return RewardRequest.build(prompts, images=images, **more)


def test_the_engine_reads_rendered_cards():
    engine = RapidOcrEngine(**SMALL)
    for word, width in [("SALE", 128), ("NASA 2049", 256), ("Hello World", 256)]:
        lines = engine.recognise(card(word, (width, 64)))
        assert "".join(line[0] for line in lines).replace(" ", "") == word.replace(" ", "")
        _, confidence, (x1, y1, x2, y2) = lines[0]
        assert confidence > 0.9
        assert 0 <= x1 < x2 <= width + 8
        assert 0 <= y1 < y2 <= 72
    assert engine.recognise(Image.new("RGB", (128, 64), "white")) == []


def test_the_default_settings_read_a_card():
    assert "OPEN" in Ocr().read(card("OPEN", (128, 64)))


def test_without_detection_the_image_is_one_line():
    ((text, confidence, box),) = RapidOcrEngine(detect=False).recognise(card("OPEN", (128, 56)))
    assert (text, box) == ("OPEN", (0.0, 0.0, 128.0, 56.0))
    assert confidence > 0.9


def assert_same_lines(found, expected):
    assert [[line[0] for line in lines] for lines in found] == [[line[0] for line in lines] for lines in expected]
    for lines, others in zip(found, expected, strict=True):
        for (_, confidence, box), (_, other, place) in zip(lines, others, strict=True):
            assert confidence == pytest.approx(other, abs=1e-4)
            assert box == pytest.approx(place)


def test_batches_give_the_lines_of_single_calls():
    pictures = [
        card(text, (128, 64), points) for text, points in (("SALE", 40), ("OPEN", 36), ("", 40), ("Tea Bus", 24))
    ]
    pictures.append(card("NASA 2049", (256, 64)))  # another size
    engine = RapidOcrEngine(**SMALL, coarse_side=None)
    assert_same_lines(engine.recognise_many(pictures), [engine.recognise(picture) for picture in pictures])
    assert engine.recognise_many([]) == []
    coarse = RapidOcrEngine(**SMALL, coarse_side=64)
    texts = [[line[0] for line in found] for found in engine.recognise_many(pictures)]
    assert [[line[0] for line in found] for found in coarse.recognise_many(pictures)] == texts
    with pytest.raises(UserError, match="must be at least 1 and 32"):
        RapidOcrEngine(batch=0)


def test_a_batch_without_detection():
    engine = RapidOcrEngine(detect=False)
    pictures = [card("OPEN", (128, 56)), card("SALE", (128, 56))]
    assert_same_lines(engine.recognise_many(pictures), [engine.recognise(picture) for picture in pictures])


def test_scores_states_and_details():
    cards = [card(word, (128, 64)) for word in ("SALE", "SALE", "SALE", "", "SALE")]
    prompts = ['sign "Sale"', 'sign "SALT"', "a plain sign", 'sign "SALE"', 'sign ""']
    output = to_output(Ocr(engine_params=SMALL)(request(cards, prompts)), 5, "ocr")
    ok, absent = int(RewardStatus.OK), int(RewardStatus.NOT_APPLICABLE)
    assert output.status.tolist() == [ok, ok, absent, ok, absent]
    assert output.values[[0, 1, 3]].tolist() == [1.0, 0.75, 0.0]
    assert output.details["exact"][[0, 1, 3]].tolist() == [1.0, 0.0, 0.0]
    assert output.details["distance"][[0, 1, 3]].tolist() == [0.0, 1.0, 4.0]


def test_target_from_metadata_and_tiny_images():
    tiny = [card("OK", (32, 24), 14)]
    made = request(tiny, ["a word"], metadata=[{"word": "ok"}])
    reward = Ocr(engine_params=SMALL, target_key="word", upscale_to=64)
    assert reward(made).values.tolist() == [1.0]


class FixedEngine:
    def __init__(self, lines):
        self.lines, self.sizes = lines, []

    def recognise(self, image):
        self.sizes.append(image.size)
        return self.lines


def test_the_engine_is_interchangeable():
    lines = [("World", 0.9, (0, 50, 40, 60)), ("noise", 0.0, (0, 0, 9, 9)), ("Hello ", 0.4, (0, 5, 40, 15))]
    made = request([Image.new("RGB", (20, 10))], ['"Hello World"'])
    engine = FixedEngine(lines)
    in_order = Ocr(engine=engine, upscale_to=40)(made)  # "WorldHello": the engine's order
    assert in_order.values.item() == pytest.approx(0.2)
    assert engine.sizes == [(80, 40)]
    assert Ocr(engine=engine, reading_order=True)(made).values.item() == 1.0
    assert Ocr(engine=engine, reading_order=True, min_confidence=0.5)(made).values.item() == 0.5


def test_mistakes_in_the_engine_setting():
    made = request([Image.new("RGB", (20, 10))], ['"a"'])
    with pytest.raises(UserError, match=r"no method recognise"):
        Ocr(engine=object())(made)
    with pytest.raises(UserError, match="cannot be built with engine_params"):
        Ocr(engine_params={"thread": 2})(made)
    with pytest.raises(UserError, match="cannot import the OCR engine"):
        Ocr(engine="no_such_module:Engine")(made)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(UserError, match=r"pip install 'visual-grpo\[ocr\]'"):
        Ocr()(request([Image.new("RGB", (20, 10))], ['"a"']))
