"""`visual-grpo score`: pairing samples with prompts, groups, states, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from visual_grpo.cli import main
from visual_grpo.cli.samples import image_samples, read_prompts, read_texts, text_samples
from visual_grpo.cli.score import batches, load_images
from visual_grpo.errors import UserError

MODULE = '''
def red(images, prompts, metadata):
    """Mean of the red channel; not applicable to prompts about nothing."""
    return [None if p == "nothing" else float(v) for v, p in zip(images[:, 0].mean((1, 2)), prompts)]

def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def broken(images, prompts, metadata):
    raise RuntimeError("engine lost")
'''


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vg_test_rewards.py").write_text(MODULE)
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.fromarray(np.full((8, 8, 3), 51 * i, dtype=np.uint8)).save(tmp_path / "images" / f"{i:03}.png")
    (tmp_path / "prompts.txt").write_text("a cat\nnothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def score(*args: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["score", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_images_in_order_with_states(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--reward", "vg_test_rewards:red", "--images", "images", "--prompts", "prompts.txt"]
    result = score(*args, "--batch", "1", capsys=capsys)
    (summary,) = result["rewards"]
    assert summary["ok"] == 2
    assert summary["not_applicable"] == 2
    assert summary["failed"] == 0
    assert summary["mean"] == pytest.approx(0.1)
    values = [row[summary["reward"]] for row in result["rows"]]
    assert values == [pytest.approx(0.0), pytest.approx(0.2), None, None]
    assert result["rows"][1]["image"].endswith("001.png")
    assert main(["score", *args]) == 0
    assert "0.1000" in capsys.readouterr().out


def test_texts_of_a_trl_function(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "texts.jsonl").write_text('{"text": "abc"}\n{"text": ""}\n')
    result = score(
        "--reward", "vg_test_rewards:length", "--texts", "texts.jsonl", "--prompts", "prompts.txt", capsys=capsys
    )
    assert result["rewards"][0]["mean"] == pytest.approx(1.5)
    assert [row["text"] for row in result["rows"]] == ["abc", ""]


def test_a_reward_gets_its_settings(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "texts.txt").write_text("two words\nnow three words\n")
    args = ["--reward", "length", "--texts", "texts.txt", "--prompts", "prompts.txt"]
    settings = ["length.params.ceiling=2", "length.params.unit=words", "length.timeout_s=60"]
    result = score(*args, *settings, capsys=capsys)
    assert [row["length"] for row in result["rows"]] == [1.0, pytest.approx(0.5)]
    assert main(["score", *args, "ocr.params.lang=en"]) == 2
    assert "'ocr' is set, but it is not one of the rewards named here (length)" in capsys.readouterr().err


def test_a_reward_that_fails_everywhere_is_status_1(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--reward", "vg_test_rewards:broken", "--images", "images", "--prompts", "prompts.txt"]) == 1
    printed = capsys.readouterr().err
    assert "engine lost" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--reward", "vg_test_rewards:blue", "--images", "images"], "no 'blue'"),
        (["--reward", ",", "--images", "images"], "at least one name"),
        (["--reward", "vg_test_rewards:red"], "neither was given"),
        (["--reward", "vg_test_rewards:red", "--images", "images", "--texts", "prompts.txt"], "both were given"),
        (["--reward", "vg_test_rewards:length", "--images", "images"], "reads texts"),
        (["--reward", "vg_test_rewards:red", "--images", "."], "holds no image"),
    ],
)
def test_wrong_input_is_status_2(
    args: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if args[-1] == ".":
        for file in (world / "images").iterdir():
            file.unlink()
    assert main(["score", *args, "--prompts", "prompts.txt"]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_counts_that_do_not_divide_are_refused(world: Path) -> None:
    (world / "three.txt").write_text("a\nb\nc\n")
    with pytest.raises(UserError, match="4 images do not belong to 3 prompts"):
        image_samples(world / "images", world / "three.txt")
    with pytest.raises(UserError, match="2 texts do not belong to 3 prompts"):
        text_samples(world / "prompts.txt", world / "three.txt")


def test_names_with_numbers_are_in_the_order_of_the_numbers(world: Path) -> None:
    for file in (world / "images").iterdir():
        file.rename(file.with_name(f"{int(file.stem) + 8}.png"))  # 8, 9, 10, 11
    samples = image_samples(world / "images", world / "prompts.txt")
    assert [sample.image.stem for sample in samples if sample.image] == ["8", "9", "10", "11"]


def test_a_column_names_the_image(world: Path) -> None:
    (world / "rows.jsonl").write_text(
        '{"prompt": "a", "image": "002.png", "tag": "x"}\n{"prompt": "b", "image": "000.png"}\n'
    )
    samples = image_samples(world / "images", world / "rows.jsonl")
    assert [sample.image.name for sample in samples if sample.image] == ["002.png", "000.png"]
    assert samples[0].metadata["tag"] == "x"
    (world / "rows.jsonl").write_text('{"prompt": "a", "image": "009.png"}\n')
    with pytest.raises(UserError, match=r"009\.png', which does not exist"):
        image_samples(world / "images", world / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n", "holds no prompt"),
        ("binary.txt", b"\xff\xfe\x00", "cannot read prompt file"),
        ("bad.jsonl", b'{"prompt": "a"}\n{oops\n', "line 2: not valid JSON"),
        ("other.jsonl", b'{"caption": "a"}\n', "columns caption"),
        ("prompts.lst", b"a\n", "is no prompt file"),
    ],
)
def test_broken_prompt_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("binary.txt", b"\xff\xfe\x00", "cannot read the texts"),
        ("bad.jsonl", b'{"text": "a"}\n{oops\n', "line 2 of .* is not a JSON object"),
        ("other.jsonl", b'{"caption": "a"}\n', "they have caption"),
        ("number.jsonl", b'{"text": "a"}\n{"text": 3}\n', "row 2: 'text' must be a text, got 3"),
    ],
)
def test_broken_text_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_texts(tmp_path / name)


def test_batches_keep_the_samples_of_a_prompt_together(world: Path) -> None:
    samples = image_samples(world / "images", world / "prompts.txt")
    assert [len(part) for part in batches(samples, 1)] == [2, 2]
    assert [len(part) for part in batches(samples, 3)] == [4]
    assert [len(part) for part in batches(samples, 64)] == [4]


def test_images_of_two_sizes_and_broken_images_are_named(world: Path) -> None:
    Image.new("RGB", (4, 6)).save(world / "images" / "004.png")
    files = sorted((world / "images").iterdir())
    with pytest.raises(UserError, match=r"000\.png is 8x8 and .*004\.png is 4x6"):
        load_images(files)
    files[0].write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot read the image .*000\.png"):
        load_images(files)
