"""The reader of the testbed's words, as an OCR engine and as partial credit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest
from visual_grpo.rewards.ocr import Ocr
from visual_grpo.rewards.word_likeness import WordLikeness
from visual_grpo.testbed.denoiser_build import WEIGHTS_DIR
from visual_grpo.testbed.scenes import BACKGROUND, draw_scene, sample_scene, split_prompts
from visual_grpo.testbed.vae_pretraining import decode_latents, encode_images
from visual_grpo.testbed.word_reader import LEGIBLE, WordReader, correlations
from visual_grpo.testbed.words import WORDS, draw_word
from visual_grpo.types import RewardStatus


def tensor(pictures: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


@pytest.fixture(scope="module")
def drawn() -> Tensor:
    """Each word ten times, shifted at random."""
    rng = np.random.default_rng(0)
    return tensor([draw_word(word, rng) for word in WORDS for _ in range(10)])


WANTED = torch.arange(len(WORDS)).repeat_interleave(10)


def test_every_drawn_word_is_read(drawn: Tensor) -> None:
    found, places = correlations(drawn)
    assert torch.equal(found.argmax(1), WANTED)
    assert float(found.amax(1).min()) > 0.9999
    assert float(found.topk(2, 1).values[:, 1].max()) < 0.69  # another word
    top = places[torch.arange(len(WANTED)), WANTED]
    for picture, (x, y) in zip(drawn, top.tolist(), strict=True):
        rows, columns = torch.nonzero(picture.mean(0) < (BACKGROUND - 5) / 255, as_tuple=True)
        assert (x, y) == (int(columns.min()), int(rows.min()))


def test_every_word_is_read_after_the_autoencoder(drawn: Tensor) -> None:
    vae = AutoencoderKL.from_pretrained(WEIGHTS_DIR / "sd3_tiny" / "vae")
    again = decode_latents(vae, encode_images(vae, drawn * 2 - 1))
    found, _ = correlations(again.float() / 255 if again.dtype == torch.uint8 else again.clamp(0, 1))
    assert torch.equal(found.argmax(1), WANTED)
    assert float(found.amax(1).min()) > 0.98


def test_scenes_and_empty_pictures_hold_no_word() -> None:
    rng = np.random.default_rng(1)
    scenes = tensor([draw_scene(sample_scene(prompt, rng)) for prompt in split_prompts()[0][:150]])
    assert float(correlations(scenes)[0].max()) < 0.5 < LEGIBLE
    for level in (0.0, BACKGROUND / 255, 1.0):
        assert torch.equal(correlations(torch.full((1, 3, 48, 48), level))[0], torch.zeros(1, len(WORDS)))


def test_the_engine_and_the_rewards(drawn: Tensor) -> None:
    half = draw_word("STOP").copy()
    half[:, 20:] = BACKGROUND
    pictures = tensor([draw_word("STOP"), draw_word("STAR"), half, np.full((48, 48, 3), BACKGROUND, dtype=np.uint8)])
    prompts = ['a sign that says "STOP"'] * 4 + ["a red circle", 'a sign that says "SALE"']
    request = RewardRequest.build(prompts, images=torch.cat([pictures, pictures[:2]]))
    read = Ocr(engine="testbed")(request)
    assert read.values[:4].tolist() == [1.0, 0.5, 0.0, 0.0]  # STAR shares two letters in place with STOP
    assert read.status is not None
    assert read.status[4] == RewardStatus.NOT_APPLICABLE
    like = WordLikeness()(request)
    assert like.status is not None
    assert like.status.tolist() == [0, 0, 0, 0, 1, 1]
    whole, other, part, nothing = like.values[:4].tolist()
    assert whole == pytest.approx(1.0, abs=1e-4)
    assert nothing == 0.0
    assert other < 0.7
    assert 0.3 < part < LEGIBLE
    margins = like.details["margin"][:4].tolist()
    assert margins[0] > 0.3
    assert margins[1] < -0.3


def test_pictures_of_other_sizes_and_wrong_thresholds() -> None:
    big = Image.fromarray(draw_word("TREE")).resize((96, 192), Image.Resampling.BICUBIC)
    ((word, value, box),) = WordReader().recognise(big)
    assert (word, value > 0.95) == ("TREE", True)
    assert 0 <= box[0] < box[2] <= 96
    assert 0 <= box[1] < box[3] <= 192
    assert WordReader(threshold=0.999).recognise(Image.fromarray(draw_word("TREE")))
    with pytest.raises(UserError, match=r"threshold is 1\.5"):
        WordReader(threshold=1.5)
    with pytest.raises(UserError, match="engine_params"):
        _ = Ocr(engine="testbed", engine_params={"treshold": 0.5}).engine
