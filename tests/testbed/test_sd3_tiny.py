"""The autoencoder of the shipped SD3 keeps scenes and words; what all shipped pipelines have in common: test_shipped.py."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from visual_grpo.testbed.denoiser_build import WEIGHTS_DIR as SHIPPED
from visual_grpo.testbed.detector import SceneDetector
from visual_grpo.testbed.scene_scores import is_correct
from visual_grpo.testbed.scenes import KINDS, all_prompts, draw_prompt
from visual_grpo.testbed.vae_pretraining import decode_latents, encode_images
from visual_grpo.testbed.words import all_word_prompts, draw_word

WEIGHTS_DIR = SHIPPED / "sd3_tiny"


@pytest.fixture(scope="module")
def pipeline():
    return StableDiffusion3Pipeline.from_pretrained(WEIGHTS_DIR)


def test_autoencoder_keeps_scenes_recognisable(pipeline):
    rng = np.random.default_rng(0)
    by_kind = [[entry for entry in all_prompts() if entry["tag"] == kind] for kind in KINDS]
    entries = [by_kind[i % 6][rng.integers(len(by_kind[i % 6]))] for i in range(240)]
    images = torch.from_numpy(np.stack([draw_prompt(entry, rng) for entry in entries])).permute(0, 3, 1, 2)
    decoded = decode_latents(pipeline.vae, encode_images(pipeline.vae, images.float() / 127.5 - 1))
    verdicts = [is_correct(entry, found) for entry, found in zip(entries, SceneDetector().detect(decoded), strict=True)]
    assert np.mean(verdicts) >= VAE_ACCURACY
    assert float((decoded - images / 255).abs().mean()) < 0.01


VAE_ACCURACY = 0.99


def test_words_are_read_by_a_real_ocr_engine(pipeline):
    import rapidocr

    engine = rapidocr.RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.use_cls": False,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        }
    )

    def read(images):
        big = torch.nn.functional.interpolate(images, size=(192, 192), mode="bicubic").clamp(0, 1)
        outputs = [engine((image.permute(1, 2, 0) * 255).byte().numpy()) for image in big]
        return ["".join(output.txts or ()).upper() for output in outputs]

    words = [entry["word"] for entry in all_word_prompts()[:12]]
    drawn = torch.from_numpy(np.stack([draw_word(word) for word in words])).permute(0, 3, 1, 2).float() / 255
    assert np.mean([a == b for a, b in zip(read(drawn), words, strict=True)]) >= 0.9
    decoded = decode_latents(pipeline.vae, encode_images(pipeline.vae, drawn[::3] * 2 - 1))
    assert np.mean([a == b for a, b in zip(read(decoded), words[::3], strict=True)]) >= 0.75
