"""Picture grids: what is written comes back, tiny and large samples, odd input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from visual_grpo import grid
from visual_grpo.errors import UserError
from visual_grpo.grid import before_after, load_grid, mark_color, save_grid


def images(n: int, height: int = 8, width: int = 8) -> torch.Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(0))


def pixels(tile: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(tile)).permute(2, 0, 1)


def test_tiny_pictures_are_enlarged_and_come_back_exactly(tmp_path):
    given = images(7)
    path = save_grid(
        given, [f"a {i}" for i in range(7)], [0.0, 0.5, 1.0, None, 2.0, -1.0, float("nan")], tmp_path / "g.png", 3
    )
    with Image.open(path) as sheet:
        assert sheet.width == 3 * 128 + 4 * 10
    read = load_grid(path)
    assert read.captions == [f"a {i}" for i in range(7)]
    assert read.marks == [0.0, 0.5, 1.0, None, 2.0, -1.0, None]
    for tile, image in zip(read.tiles, given, strict=True):
        assert torch.equal(pixels(tile), image.mul(255).round().byte())


def test_large_pictures_are_reduced(tmp_path):
    read = load_grid(save_grid(images(1, 600, 1200), ["wide"], None, tmp_path / "g.png"))
    assert read.tiles[0].size == (512, 256)


def test_own_factor(tmp_path):
    path = save_grid(images(2, 16, 16), ["", ""], None, tmp_path / "g.png", columns=2, upscale=3)
    with Image.open(path) as sheet:
        assert sheet.width == 2 * 48 + 3 * 10


def test_long_html_and_unicode_captions(tmp_path):
    captions = ["<b>word</b> " * 50, "x" * 500, "a red circle ΔΩ 一", "", "\n\t"]
    assert load_grid(save_grid(images(5), captions, None, tmp_path / "g.png")).captions == captions


def test_wrapped_lines_fit(tmp_path):
    from PIL import ImageFont

    font = ImageFont.load_default(12)
    lines = grid._wrap("a photo of three red circles above a large blue square and a cross", 128, font)
    assert len(lines) == 2
    assert all(font.getlength(line) <= 128 for line in lines)
    assert lines[1].endswith("…")


def test_values_outside_the_range_are_clamped(tmp_path):
    bad = torch.full((1, 3, 4, 4), 7.0)
    bad[0, 0] = float("nan")
    tile = load_grid(save_grid(bad, ["x"], None, tmp_path / "g.png")).tiles[0]
    assert tile.getpixel((0, 0)) == (0, 255, 255)


def test_before_after_stands_side_by_side(tmp_path):
    before, after = images(3), 1 - images(3)
    read = load_grid(before_after(before, after, ["a", "b", "c"], [0.0, 0.0, 1.0], None, tmp_path / "g.png", columns=2))
    assert read.captions[:2] == ["before: a", "after: a"]
    assert read.marks == [0.0, None, 0.0, None, 1.0, None]
    assert torch.equal(pixels(read.tiles[4]), before[2].mul(255).round().byte())
    assert torch.equal(pixels(read.tiles[5]), after[2].mul(255).round().byte())


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (2, 1, 8, 8), (3, 8, 8)])
def test_wrong_shape(tmp_path, shape):
    with pytest.raises(ValueError, match=r"images must be \[n, 3, H, W\]"):
        save_grid(torch.zeros(shape), ["a"] * shape[0], None, tmp_path / "g.png")


def test_wrong_lengths(tmp_path):
    with pytest.raises(ValueError, match="2 images, 1 captions and 2 marks"):
        save_grid(images(2), ["a"], None, tmp_path / "g.png")
    with pytest.raises(ValueError, match="2 images before, 3 after"):
        before_after(images(2), images(3), ["a", "b"], None, None, tmp_path / "g.png")


def test_foreign_files_are_refused(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "plain.png")
    with pytest.raises(UserError, match="not written by"):
        load_grid(tmp_path / "plain.png")
    (tmp_path / "text.png").write_text("no picture")
    for name in ("text.png", "missing.png"):
        with pytest.raises(UserError, match="cannot read picture"):
            load_grid(tmp_path / name)


def test_colours_go_from_red_to_green():
    assert mark_color(-5) == mark_color(0.0) == (200, 62, 62)
    assert mark_color(0.5) == (214, 158, 46)
    assert mark_color(7) == (47, 133, 90)


def test_scores_outside_the_unit_interval_use_their_own_range():
    assert [grid.mark_scale([0.2, None, 0.9])(m) for m in (0.2, 0.9)] == [0.2, 0.9]
    assert [grid.mark_scale([20.0, 22.0, float("nan")])(m) for m in (20.0, 21.0, 22.0)] == [0.0, 0.5, 1.0]
    assert grid.mark_scale([5.0])(5.0) == 0.5
