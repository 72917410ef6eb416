"""Small random models of the classes that rewards load, so that no test needs a download."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def judges():
    """Helper module: pytest's importlib mode does not let test files import each other by name."""
    full = "visual_grpo_tests_rewards_judges"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / "judges.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture
def serve(judges):
    """Start a judge's server with a given way to answer."""
    started = []

    def start(answer):
        started.append(judges.JudgeServer(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def judge_params(judges):
    """A server that has a sensible reply to every built-in prompt."""
    server = judges.JudgeServer(judges.answer_anything)
    yield {"endpoint": server.endpoint}
    server.close()


@pytest.fixture(scope="session")
def tiny_vlm(judges, tmp_path_factory):
    return judges.tiny_vlm(tmp_path_factory.mktemp("vlm"))


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
    return {"model": str(tiny_clip), "processor": str(tiny_clip)}
