"""Where weights are looked for, what is said when they are not there, and that a model is resident once."""

import gc

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, as_reward
from visual_grpo.rewards.loading import eight_bit, features, find_file, load_strict, read_state, resident


def test_a_file_is_found_by_its_path_and_in_its_folder(tmp_path):
    file = tmp_path / "own name.pt"
    file.touch()
    assert find_file("x", str(file), "published.pt") == file
    assert find_file("x", str(tmp_path), "own name.pt") == file


def test_one_message_says_which_file_where_and_how(tmp_path):
    with pytest.raises(UserError, match=r"x's weights: the folder .* holds no 'a\.pt'\. Put the file there"):
        find_file("x's weights", str(tmp_path), "a.pt")
    with pytest.raises(UserError, match=r"'a\.pt' was looked for at '.*no/such/place'.*Give the path"):
        find_file("x's weights", str(tmp_path / "no/such/place"), "a.pt")
    hub = r"'a\.pt' of the Hub repository 'owner/absent' is neither in the cache .*`hf download owner/absent a\.pt`"
    with pytest.raises(UserError, match=hub):
        find_file("x's weights", "owner/absent", "a.pt")


def test_formats(tmp_path):
    state = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pth")
    for name in ("a.safetensors", "a.pt", "b.pth"):
        read = read_state("x", tmp_path / name)
        assert {key: value.tolist() for key, value in read.items()} == {k: v.tolist() for k, v in state.items()}


def test_what_is_no_state_dict_is_refused_and_no_code_is_run(tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"no weights")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": nn.Linear(1, 1)}, tmp_path / "pickled.pt")
    for name in ("broken.pt", "pickled.pt"):
        with pytest.raises(UserError, match=rf"x: '.*{name}' could not be read as weights"):
            read_state("x", tmp_path / name)
    with pytest.raises(UserError, match="holds no state dict"):
        read_state("x", tmp_path / "list.pt")


def test_every_wrong_key_is_named(tmp_path):
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    state = module.state_dict()
    load_strict("x", module, state, tmp_path / "a.pt")
    wrong = {key: value for key, value in state.items() if key != "0.bias"}
    wrong |= {"head.weight": torch.ones(1), "1.weight": torch.ones(1, 5)}
    expected = r"without 0\.bias; unknown head\.weight; wrong shape: 1\.weight \[1, 5\] instead of \[1, 2\]"
    with pytest.raises(UserError, match=expected):
        load_strict("x", module, wrong, tmp_path / "a.pt")


def test_resident_objects_are_shared_and_let_go():
    first = resident(("test", 1), lambda: nn.Linear(1, 1))
    assert resident(("test", 1), lambda: nn.Linear(1, 1)) is first
    assert resident(("test", 2), lambda: nn.Linear(1, 1)) is not first
    kept = id(first)
    del first
    gc.collect()
    built = []
    again = resident(("test", 1), lambda: built.append(kept) or nn.Linear(1, 1))
    assert built == [kept]
    assert isinstance(again, nn.Linear)


def test_rewards_that_name_the_same_clip_share_it(pickscore_params, clip_score_params, aesthetic_params):
    made = RewardRequest.build(["a cat"], images=torch.rand(1, 3, 32, 32))
    rewards = [
        as_reward("pickscore", params=pickscore_params),
        as_reward("clip_score", params=clip_score_params),
        as_reward("clip_score", params={**clip_score_params, "variant": "paper"}),
        as_reward("aesthetic", params=aesthetic_params),
        as_reward("clip_score", params={**clip_score_params, "dtype": "bfloat16"}),
    ]
    for reward in rewards:
        reward(made)
    models = [reward._loaded[0] for reward in rewards]
    assert all(model is models[0] for model in models[:4])
    assert models[4] is not models[0]
    assert models[4].dtype == torch.bfloat16


def test_features_and_rounding():
    torch.testing.assert_close(features(torch.tensor([[3.0, 4.0], [0.0, 0.0]])), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    pixels = eight_bit(torch.tensor([0.0, 0.4999 / 255, 0.5001 / 255, 1.0005]))
    torch.testing.assert_close(pixels, torch.tensor([0.0, 0.0, 1 / 255, 1.0]))


@pytest.mark.parametrize("name", ["aesthetic", "clip_score", "dino_similarity", "hps_v2", "image_reward", "nsfw"])
def test_wrong_parameters(name):
    for params in ({"dtype": "int8"}, {"batch_size": 0}):
        with pytest.raises(UserError, match=name):
            as_reward(name, params=params)


@pytest.mark.parametrize("name", ["aesthetic", "clip_score", "dino_similarity", "hps_v2", "image_reward", "nsfw"])
def test_without_weights_the_message_says_what_to_fetch(name):
    made = RewardRequest.build(["a"], images=torch.rand(1, 3, 32, 32), metadata=[{"reference": "x.png"}])
    with pytest.raises(UserError, match=rf"{name}'s .*hf download"):
        as_reward(name, params={"device": "cpu"})(made)
