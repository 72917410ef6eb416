"""Architectures and tokenizers of `sd3_tiny`: a `StableDiffusion3Pipeline` whose every part is the real class, only small.

Sizes: 48 x 48 pixels -> latents 24 x 24 x 4 -> 36 image tokens of patch 4, beside 12 CLIP and 12 T5 tokens.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from visual_grpo.testbed.scenes import IMAGE_SIZE, all_prompts
from visual_grpo.testbed.words import WORDS, all_word_prompts

TEXT_TOKENS = 12
"""Tokens of each text encoder; give it to the pipeline as `max_sequence_length` (its own default pads T5 to 256)."""
LATENT_CHANNELS = 4
VAE_FACTOR = 2
LATENT_SIZE = IMAGE_SIZE // VAE_FACTOR
PATCH = 4
_CLIP_WIDTH = 64
_WORD_GAIN = 25.0


def vocabulary() -> list[str]:
    """Return the distinct words of all captions, sorted, quotation marks removed."""
    captions = [str(entry["prompt"]) for entry in all_prompts() + all_word_prompts()]
    return sorted({word for caption in captions for word in caption.replace('"', " ").split()})


def build_clip_tokenizer(words: Sequence[str]) -> CLIPTokenizer:
    """Build a byte-level BPE tokenizer in which every given word is one token and any other text still has tokens."""
    special = ["<|startoftext|>", "<|endoftext|>"]
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    reference = CLIPTokenizer().backend_tokenizer
    trained.normalizer, trained.pre_tokenizer = reference.normalizer, reference.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=10_000,  # never reached: training stops when each word has become one token
        min_frequency=1,
        end_of_word_suffix="</w>",
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    trained.train_from_iterator([word for word in words for _ in range(2)], trainer)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):  # a lone character at the end of a word
        vocab.setdefault(character + "</w>", len(vocab))
    return CLIPTokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]], model_max_length=TEXT_TOKENS)


def build_t5_tokenizer(words: Sequence[str]) -> T5Tokenizer:
    """Build a unigram tokenizer with one piece a word and single characters for everything else."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [("▁" + word, -2.0) for word in words if word not in WORDS]
    pieces += [(word, -2.0) for word in WORDS]
    known = {piece for piece, _ in pieces}
    pieces += [(character, -10.0) for character in string.printable.strip() if character not in known]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=TEXT_TOKENS)


def build_vae(*, widths: tuple[int, ...] = (8, 16), channels: int = LATENT_CHANNELS) -> AutoencoderKL:
    """Build an untrained autoencoder; its `scaling_factor` and `shift_factor` are set after training.

    Args:
        widths: channels of its levels, each of half the size of the one before: two make a factor of 2.
        channels: of the latents.
    """
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=IMAGE_SIZE,
        scaling_factor=1.0,
        shift_factor=0.0,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _build_clip(tokenizer: CLIPTokenizer, activation: str) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_CLIP_WIDTH,
        intermediate_size=2 * _CLIP_WIDTH,
        projection_dim=_CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModelWithProjection(config)
    # At CLIP's own start (0.02) the first attention drowns the words, and training finds them late.
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(_WORD_GAIN)
    return model


def build_pipeline(vae: AutoencoderKL, *, shift: float = 1.0) -> StableDiffusion3Pipeline:
    """Put an autoencoder together with an untrained transformer and untrained text encoders.

    Args:
        vae: the (trained) autoencoder.
        shift: time shift of the sampling schedule.

    Returns:
        The pipeline, in float32 on the CPU; global random state decides the initial weights.
    """
    words = vocabulary()
    clip_words = sorted({word.lower() for word in words} | {'"'})
    tokenizer, tokenizer_2 = build_clip_tokenizer(clip_words), build_clip_tokenizer(clip_words)
    tokenizer_3 = build_t5_tokenizer(words)
    t5 = T5Config(
        vocab_size=len(tokenizer_3),
        d_model=2 * _CLIP_WIDTH,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=32,
    )
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=PATCH,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=2 * _CLIP_WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=2 * _CLIP_WIDTH,
        pos_embed_max_size=LATENT_SIZE // PATCH,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae,
        text_encoder=_build_clip(tokenizer, "quick_gelu"),
        tokenizer=tokenizer,
        text_encoder_2=_build_clip(tokenizer_2, "gelu"),
        tokenizer_2=tokenizer_2,
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=tokenizer_3,
    )


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
