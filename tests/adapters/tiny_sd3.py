"""A `StableDiffusion3Pipeline` of random weights, small enough to be built in every test run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def _clip_tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=8)


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=10)


def build(folder: Path, *, t5: bool = True, dual: bool = True, seed: int = 0) -> Any:
    """Random pipeline of two layers, width 32, 8 x 8 latents of 4 channels, pictures of 16 x 16 pixels, shift 3."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    tokenizer = _clip_tokenizer(folder / "clip")
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    words = T5Config(
        vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        dual_attention_layers=(0,) if dual else (),
        qk_norm="rms_norm",
    )
    # Fresh modulations and outputs are small: larger weights make the velocity depend on prompt and level.
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=1.5,
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(clip),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(clip),
        tokenizer_2=tokenizer,
        text_encoder_3=T5EncoderModel(words) if t5 else None,
        tokenizer_3=_t5_tokenizer() if t5 else None,
    )
