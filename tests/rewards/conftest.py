"""Small random models of the classes that rewards load, so that no test needs a download."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from serving import serving


@pytest.fixture(scope="session")
def image_server():
    """A reward server with `jpeg_incompressibility`."""
    with serving("jpeg_incompressibility") as server:
        yield server


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
