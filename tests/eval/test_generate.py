"""Samples of an evaluation: the same pictures whatever the batch, kept after an interruption, refused under other settings."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visual_grpo.errors import UserError
from visual_grpo.eval.generate import generate

_path = Path(__file__).resolve().parents[1] / "adapters" / "tiny_sd3.py"
_spec = importlib.util.spec_from_file_location("tiny_sd3_for_eval", _path)
tiny_sd3 = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_sd3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_sd3.build(folder / "parts").save_pretrained(folder / "model")
    return str(folder / "model")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "tag": "t"}) + "\n" for text in ("a cat", "a dog", "a bus")))
    return str(path)


def pixels(folder: Path, prompt: int, sample: int) -> np.ndarray:
    with Image.open(folder / f"{prompt:05d}" / "samples" / f"{sample:04d}.png") as image:
        return np.asarray(image).astype(int)


def test_pictures(model, prompts, tmp_path, capsys):
    options = {"prompts": prompts, "sampling": {"steps": 2}, "seed": 7}
    one, many = tmp_path / "one", tmp_path / "many"
    generate(model, out=one, samples=1, batch=1, **options)
    generate(model, out=many, samples=2, batch=8, **options)
    # A model is judged by its ODE samples with guidance, not by the noisy ones that training draws.
    assert json.loads((one / "settings.json").read_text())["sampling"] == {"solver": "ode", "steps": 2, "guidance": 4.5}
    assert "sampling 3 prompts x 1" in (told := capsys.readouterr().err)
    assert "solver=ode, steps=2, guidance=4.5" in told
    for prompt in range(3):
        assert np.abs(pixels(one, prompt, 0) - pixels(many, prompt, 0)).max() <= 1
        assert np.abs(pixels(many, prompt, 0) - pixels(many, prompt, 1)).max() > 3
    assert json.loads((one / "00001" / "metadata.jsonl").read_text()) == {"prompt": "a dog", "tag": "t"}
    before = {p: p.stat().st_mtime_ns for p in many.rglob("*.png")}
    lost = many / "00001" / "samples" / "0001.png"
    wanted = pixels(many, 1, 1)
    lost.unlink()
    generate(model, out=many, samples=2, batch=2, **options)
    assert np.abs(pixels(many, 1, 1) - wanted).max() <= 1
    kept = {p: t for p, t in before.items() if "00001" not in p.parts}
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    with pytest.raises(UserError, match=r"other settings \(seed was 7 and is now 8\)"):
        generate(model, out=many, samples=2, **{**options, "seed": 8})
    with pytest.raises(UserError, match="samples and batch must be at least 1"):
        generate(model, out=many, samples=0, **options)


def test_texts_after_a_line_that_was_cut_off(prompts, tmp_path):
    options = {"prompts": prompts, "family": "toy", "samples": 3, "out": tmp_path / "texts"}
    path = generate("unused", batch=4, **options)
    whole = path.read_text()
    assert len(whole.splitlines()) == 9
    path.write_text(whole[: len(whole) // 2])
    assert generate("unused", batch=2, **options).read_text() == whole
