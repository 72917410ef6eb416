"""The two-tower model: its loss, the shipped weights, what they are worth, and the reward that they make."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest
from visual_grpo.rewards.two_tower import TwoTowerReward
from visual_grpo.testbed.scenes import split_prompts
from visual_grpo.testbed.two_tower import WEIGHTS_DIR, TwoTower, contrastive_loss, load_two_tower
from visual_grpo.testbed.two_tower_build import build, draw, embolden, retrieval


@pytest.fixture(scope="module")
def model() -> TwoTower:
    return load_two_tower()


def test_golden_loss() -> None:
    """By hand: cosines 0.6 and 0.8, scale 2: both directions, log(1 + e^(2 (wrong - right))) averaged."""
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    texts = torch.tensor([[0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    logits = np.array([[1.2, 0.0], [1.6, 2.0]])
    rows = [np.log(np.exp(row).sum()) - row[i] for i, row in enumerate(logits)]
    columns = [np.log(np.exp(row).sum()) - row[i] for i, row in enumerate(logits.T)]
    assert float(contrastive_loss(images, texts, 2.0)) == pytest.approx((sum(rows) + sum(columns)) / 4, abs=1e-12)
    assert float(contrastive_loss(images, texts, 2.0)) == pytest.approx(0.4540602, abs=1e-6)


def test_weights_are_small_safe_and_logged() -> None:
    files = {path.name: path.stat().st_size for path in WEIGHTS_DIR.iterdir()}
    assert set(files) == {"model.safetensors", "config.json", "build_log.jsonl"}
    assert sum(files.values()) < 1.5e6
    records = [json.loads(line) for line in (WEIGHTS_DIR / "build_log.jsonl").read_text().splitlines()]
    assert {"setup", "train", "retrieval", "proxy"} <= {record["stage"] for record in records}


def test_it_finds_the_right_caption_of_scenes_it_never_saw(model: TwoTower) -> None:
    """Measured on 600: 0.83 against one caption with wrong words, 0.14 among all 592 held-out captions."""
    found = retrieval(model, 150, seed=3)
    assert 0.7 < found["of_two"] < 0.95
    assert 0.05 < found["of_all"] < 0.4


def test_it_trusts_bold_pictures(model: TwoTower) -> None:
    """The flaw that a policy exploits: the same scenes with more contrast have larger cosines with their captions."""
    images, entries = draw(split_prompts()[1], 60, np.random.default_rng(2))
    texts = model.text_features([str(entry["prompt"]) for entry in entries])
    faint, plain, bold = (
        float((model.image_features(embolden(images.float() / 255, factor)) * texts).sum(1).mean())
        for factor in (0.7, 1.0, 1.5)
    )
    assert faint < plain < bold


def test_features_are_unit_and_of_each_row_alone(model: TwoTower) -> None:
    images, entries = draw(split_prompts()[1], 6, np.random.default_rng(0))
    pictures, captions = images.float() / 255, [str(entry["prompt"]) for entry in entries]
    seen, read = model.image_features(pictures), model.text_features([*captions[:5], ""])
    for found in (seen, read):
        torch.testing.assert_close(found.norm(dim=1), torch.ones(6))
    torch.testing.assert_close(model.image_features(pictures[2:3]), seen[2:3])
    torch.testing.assert_close(model.text_features(captions[2:3]), read[2:3])
    torch.testing.assert_close(model.text_features([captions[0].upper()]), read[:1])
    assert model.image_features(torch.rand(1, 3, 64, 96)).shape == (1, model.dim)
    assert len(model.tokens(["word " * 40])[0]) == 12


def test_a_build_is_seeded_and_what_it_writes_is_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(tmp_path / name, seed=3, steps=2, scenes=24, proxy=False)
    first, second = load_two_tower(tmp_path / "a"), load_two_tower(tmp_path / "b")
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    records = [json.loads(line) for line in (tmp_path / "a/build_log.jsonl").read_text().splitlines()]
    assert [record["stage"] for record in records] == ["setup", "drawn", "train", "train", "retrieval"]


def test_the_reward_is_the_scaled_cosine(model: TwoTower) -> None:
    images, entries = draw(split_prompts()[1], 4, np.random.default_rng(1))
    request = RewardRequest.build([str(entry["prompt"]) for entry in entries], images=images.float() / 255)
    plain, scaled = TwoTowerReward(device="cpu")(request), TwoTowerReward(device="cpu", scale=5.0)(request)
    expected = (model.image_features(request.images) * model.text_features(request.prompts)).sum(1)
    torch.testing.assert_close(plain.values, expected)
    torch.testing.assert_close(scaled.values, 5 * expected)


def test_wrong_settings_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="scale must be above 0"):
        TwoTowerReward(scale=0.0)
    with pytest.raises(UserError, match=r"no two-tower model could be read from .*testbed build two_tower"):
        load_two_tower(tmp_path)
