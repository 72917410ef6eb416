"""Small random models of the classes that rewards load, so that no test needs a download."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

# Before a hub client is imported: a test of missing weights must not wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def judge_params(judges):
    """A server that has a sensible reply to every built-in prompt."""
    server = judges.JudgeServer(judges.answer_anything)
    yield {"endpoint": server.endpoint}
    server.close()


@pytest.fixture(scope="session")
def hps_v3_params(judges, tmp_path_factory):
    folder = judges.tiny_hps_v3(tmp_path_factory.mktemp("hps_v3"))
    return {"model": str(folder), "base": str(folder / "base"), "pixels": 56 * 56, "device": "cpu"}


@pytest.fixture(scope="session")
def cider_params(tmp_path_factory):
    path = tmp_path_factory.mktemp("cider") / "corpus.jsonl"
    images = [["the answer is cats", "a cat"], ["so it goes"], ["two dogs run"]]
    path.write_text("".join(json.dumps({"references": captions}) + "\n" for captions in images))
    return {"corpus": str(path)}


@pytest.fixture(scope="session")
def image_server():
    """A reward server with `jpeg_incompressibility`."""
    sys.path.insert(0, str(Path(__file__).parent))  # the server imports rewards of this module by name
    from serving import serving

    with serving("jpeg_incompressibility") as server:
        yield server


@pytest.fixture(scope="session")
def remote_params(image_server):
    return {"url": image_server.url, "columns": ["answer"]}


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    """Folder of a random `CLIPModel` with processor; its tokenizer knows single characters."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer
    from transformers.models.clip.configuration_clip import CLIPTextConfig, CLIPVisionConfig

    letters = [chr(i) for i in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    start, end = len(words) - 2, len(words) - 1
    text = CLIPTextConfig(
        vocab_size=len(words),
        max_position_embeddings=24,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        **sizes,
    )
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16))
    for parameter in model.parameters():  # wide enough that rows differ
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("clip")
    model.eval().save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=24)
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pickscore_params(tiny_clip):
    return {"model": str(tiny_clip), "processor": str(tiny_clip), "device": "cpu"}


@pytest.fixture(scope="session")
def clip_score_params(tiny_clip):
    return {"model": str(tiny_clip), "device": "cpu"}


def widen(module, seed=0):
    """Random parameters large enough that rows differ."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 and ("norm" in name.lower() or "ln_" in name) and name.endswith("weight"):
            parameter.data += 1.0
    return module.eval()


@pytest.fixture(scope="session")
def aesthetic_params(tiny_clip, tmp_path_factory):
    from visual_grpo.rewards.aesthetic import AestheticHead

    path = tmp_path_factory.mktemp("aesthetic") / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(widen(AestheticHead(16)).state_dict(), path)
    return {"model": str(tiny_clip), "head": str(path), "device": "cpu"}


HPS_TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="session")
def hps_v2_params(tmp_path_factory):
    """A checkpoint as published: the state dict under "state_dict", beside other things."""
    import open_clip

    folder = tmp_path_factory.mktemp("hps")
    model = widen(open_clip.CLIP(**HPS_TINY))
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    return {"weights": str(folder), "architecture": HPS_TINY, "device": "cpu"}


IMAGE_REWARD_TINY = {
    "image_size": 32,
    "patch_size": 8,
    "vision_width": 24,
    "vision_layers": 2,
    "vision_heads": 2,
    "vocab_size": 40,
    "text_width": 16,
    "text_layers": 2,
    "text_heads": 2,
    "text_mlp_width": 32,
    "text_positions": 40,
    "projection": 8,
}


@pytest.fixture(scope="session")
def image_reward_params(tmp_path_factory):
    from transformers import BertTokenizer

    from visual_grpo.rewards.image_reward import ImageRewardNetwork

    folder = tmp_path_factory.mktemp("image_reward")
    state = widen(ImageRewardNetwork(IMAGE_REWARD_TINY)).state_dict()
    # As in the published file, which transformers of its time wrote.
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    torch.save(state, folder / "ImageReward.pt")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "##s", "cat", "two", "red"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    return {
        "weights": str(folder),
        "tokenizer": str(folder),
        "architecture": IMAGE_REWARD_TINY,
        "device": "cpu",
    }


@pytest.fixture(scope="session")
def dino_similarity_params(tmp_path_factory):
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("dino")
    config = Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
    widen(Dinov2Model(config)).save_pretrained(folder)
    size, crop = {"shortest_edge": 36}, {"height": 32, "width": 32}
    BitImageProcessor(
        size=size, crop_size=crop, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    ).save_pretrained(folder)
    return {"model": str(folder), "device": "cpu"}


@pytest.fixture(scope="session")
def nsfw_params(tmp_path_factory):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    folder = tmp_path_factory.mktemp("nsfw")
    config = ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
        id2label={0: "normal", 1: "nsfw"}, label2id={"normal": 0, "nsfw": 1},
    )  # fmt: skip
    widen(ViTForImageClassification(config)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return {"model": str(folder), "device": "cpu"}


@pytest.fixture(scope="session")
def iqa_params(tmp_path_factory):
    """MUSIQ with random weights; needs pyiqa."""
    import pyiqa

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("iqa") / "musiq.pth"
    torch.save(pyiqa.create_metric("musiq", device="cpu", pretrained=False).net.state_dict(), path)
    return {"metric": "musiq", "weights": str(path), "device": "cpu"}
