"""ImageReward: the network against its equations, the published names and shapes, and a checkpoint that is not one."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import conv2d, gelu, layer_norm, linear
from transformers import BertTokenizer

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward, to_output
from visual_grpo.rewards.image_reward import ARCHITECTURE, build_network, clip_transform
from visual_grpo.rewards.loading import load_strict

PROMPTS = ["a cat", "two red cats", "x y z " * 20, ""]


@pytest.fixture
def made():
    return RewardRequest.build(PROMPTS, images=torch.rand(4, 3, 48, 40, generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def state(image_reward_params):
    return torch.load(f"{image_reward_params['weights']}/ImageReward.pt", weights_only=True)


class Reference:
    """ImageReward written down from BLIP's equations, in float64, reading parameters by their published names."""

    def __init__(self, state):
        self.state = {key: value.double() if value.is_floating_point() else value for key, value in state.items()}

    def linear(self, name, x):
        return linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, name, x, eps):
        return layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)

    @staticmethod
    def attend(query, key, value, mask=None, heads=2):
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].double()) * -10000.0
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def image(self, pixels):
        p = "blip.visual_encoder"
        patches = conv2d(
            pixels, self.state[f"{p}.patch_embed.proj.weight"], self.state[f"{p}.patch_embed.proj.bias"], stride=8
        )
        patches = patches.flatten(2).transpose(1, 2)
        x = torch.cat([self.state[f"{p}.cls_token"].expand(len(patches), -1, -1), patches], 1)
        x = x + self.state[f"{p}.pos_embed"]
        for i in range(2):
            block = f"{p}.blocks.{i}"
            qkv = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", x, 1e-6)).chunk(3, -1)
            x = x + self.linear(f"{block}.attn.proj", self.attend(*qkv))
            hidden = gelu(self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", x, 1e-6)))
            x = x + self.linear(f"{block}.mlp.fc2", hidden)
        return self.norm(f"{p}.norm", x, 1e-6)

    def block(self, name, x, source, mask):
        query, key, value = (
            self.linear(f"{name}.self.{part}", given)
            for part, given in (("query", x), ("key", source), ("value", source))
        )
        return self.norm(
            f"{name}.output.LayerNorm",
            self.linear(f"{name}.output.dense", self.attend(query, key, value, mask)) + x,
            1e-12,
        )

    def __call__(self, ids, mask, pixels):
        image = self.image(pixels.double())
        p = "blip.text_encoder"
        embeddings = f"{p}.embeddings"
        x = self.state[f"{embeddings}.word_embeddings.weight"][ids]
        x = x + self.state[f"{embeddings}.position_embeddings.weight"][: ids.shape[1]]
        x = self.norm(f"{embeddings}.LayerNorm", x, 1e-12)
        for i in range(2):
            layer = f"{p}.encoder.layer.{i}"
            x = self.block(f"{layer}.attention", x, x, mask)
            x = self.block(f"{layer}.crossattention", x, image, None)
            hidden = self.linear(f"{layer}.output.dense", gelu(self.linear(f"{layer}.intermediate.dense", x)))
            x = self.norm(f"{layer}.output.LayerNorm", hidden + x, 1e-12)
        score = x[:, 0]
        for layer in (0, 2, 4, 6, 7):
            score = self.linear(f"mlp.layers.{layer}", score)
        return (score[:, 0] - 0.16717362830052426) / 1.0333394966054072


def test_against_the_equations(image_reward_params, state, made):
    tokenizer = BertTokenizer.from_pretrained(image_reward_params["tokenizer"])
    tokens = tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    pixels = torch.stack([clip_transform(32)(image) for image in made.pil_images])
    expected = Reference(state)(tokens["input_ids"], tokens["attention_mask"], pixels)
    output = to_output(as_reward("image_reward", params=image_reward_params)(made), 4, "image_reward")
    torch.testing.assert_close(output.values, expected.float(), atol=1e-5, rtol=0)
    assert output.values.std() > 1e-5


def test_the_image_and_the_text_both_count(image_reward_params, made):
    reward = as_reward("image_reward", params=image_reward_params)
    values = reward(made).values
    swapped = RewardRequest.build(PROMPTS, images=made.images.flip(0))
    assert (reward(swapped).values - values).abs().max() > 1e-6
    renamed = RewardRequest.build(PROMPTS[::-1], images=made.images)
    assert (reward(renamed).values - values).abs().max() > 1e-6


def test_the_batch_changes_nothing_and_halves_are_near(image_reward_params, made):
    whole = as_reward("image_reward", params=image_reward_params)(made).values
    one = as_reward("image_reward", params={**image_reward_params, "batch_size": 1})(made).values
    torch.testing.assert_close(one, whole, atol=1e-5, rtol=0)
    half = as_reward("image_reward", params={**image_reward_params, "dtype": "bfloat16"})(made).values
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole, atol=0.02, rtol=0)


def published():
    """Names and shapes of ImageReward.pt, but for the buffer `position_ids`."""
    names = {}

    def pair(name, *shape):
        names[f"{name}.weight"], names[f"{name}.bias"] = list(shape), list(shape[:1])

    p = "blip.visual_encoder"
    names[f"{p}.cls_token"], names[f"{p}.pos_embed"] = [1, 1, 1024], [1, 197, 1024]
    pair(f"{p}.patch_embed.proj", 1024, 3, 16, 16)
    pair(f"{p}.norm", 1024)
    for i in range(24):
        pair(f"{p}.blocks.{i}.norm1", 1024)
        pair(f"{p}.blocks.{i}.attn.qkv", 3072, 1024)
        pair(f"{p}.blocks.{i}.attn.proj", 1024, 1024)
        pair(f"{p}.blocks.{i}.norm2", 1024)
        pair(f"{p}.blocks.{i}.mlp.fc1", 4096, 1024)
        pair(f"{p}.blocks.{i}.mlp.fc2", 1024, 4096)
    p = "blip.text_encoder"
    names[f"{p}.embeddings.word_embeddings.weight"] = [30524, 768]
    names[f"{p}.embeddings.position_embeddings.weight"] = [512, 768]
    pair(f"{p}.embeddings.LayerNorm", 768)
    for i in range(12):
        layer = f"{p}.encoder.layer.{i}"
        for kind, width in (("attention", 768), ("crossattention", 1024)):
            pair(f"{layer}.{kind}.self.query", 768, 768)
            pair(f"{layer}.{kind}.self.key", 768, width)
            pair(f"{layer}.{kind}.self.value", 768, width)
            pair(f"{layer}.{kind}.output.dense", 768, 768)
            pair(f"{layer}.{kind}.output.LayerNorm", 768)
        pair(f"{layer}.intermediate.dense", 3072, 768)
        pair(f"{layer}.output.dense", 768, 3072)
        pair(f"{layer}.output.LayerNorm", 768)
    pair("blip.vision_proj", 256, 1024)
    pair("blip.text_proj", 256, 768)
    for place, (wide, narrow) in {0: (1024, 768), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}.items():
        pair(f"mlp.layers.{place}", wide, narrow)
    return names


@pytest.fixture(scope="module")
def network():
    """The published sizes, without weights."""
    return build_network()


def test_published_names_and_shapes(network):
    assert {key: list(value.shape) for key, value in network.state_dict().items()} == published()
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    assert ARCHITECTURE["vocab_size"] == 30524


def test_a_checkpoint_of_the_published_names_and_shapes_loads_strictly(network):
    state = {name: torch.empty(shape, device="meta") for name, shape in published().items()}
    load_strict("image_reward's weights", network, state, Path("ImageReward.pt"))
    for name in ("blip.visual_encoder.cls_token", "blip.text_proj.bias", "mlp.layers.0.weight"):
        less = {key: value for key, value in state.items() if key != name}
        with pytest.raises(UserError, match=rf"'ImageReward\.pt' is not .* \(without {re.escape(name)}\)"):
            load_strict("image_reward's weights", network, less, Path("ImageReward.pt"))
        more = {**state, f"{name}2": state[name]}
        with pytest.raises(UserError, match=rf"\(unknown {re.escape(name)}2\)"):
            load_strict("image_reward's weights", network, more, Path("ImageReward.pt"))
        wrong = {**state, name: torch.empty(3, device="meta")}
        with pytest.raises(UserError, match=rf"\(wrong shape: {re.escape(name)} \[3\] instead of"):
            load_strict("image_reward's weights", network, wrong, Path("ImageReward.pt"))


def test_a_checkpoint_that_is_not_one_is_refused_by_name(image_reward_params, state, made, tmp_path):
    state["blip.text_encoder.encoder.layer.0.crossattention.gate"] = torch.ones(1)
    del state["mlp.layers.7.bias"]
    torch.save(state, tmp_path / "ImageReward.pt")
    expected = r"without mlp\.layers\.7\.bias; unknown blip\.text_encoder\.encoder\.layer\.0\.crossattention\.gate"
    with pytest.raises(UserError, match=expected):
        as_reward("image_reward", params={**image_reward_params, "weights": str(tmp_path)})(made)
    with pytest.raises(UserError, match=r"architecture has no 'text_layer'\. Did you mean 'text_layers'\?"):
        build_network({"text_layer": 2})
