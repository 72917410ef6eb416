"""Random pipelines of the other diffusers families, each small enough to be built in every test run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def _clip(tokenizer: Any, kind: str, **options: Any) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **options,
    )
    return getattr(transformers, kind)(config)


def _vae(**options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        **options,
    )


def _shaken(network: nn.Module) -> nn.Module:
    """Fresh outputs are small: larger weights make the prediction depend on prompt and level."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return network


def flux(folder: Path, parts: Any, *, guidance_embeds: bool = True, **scheduler: Any) -> Any:
    """FLUX with one block of each kind, width 32; pictures of 16 x 16 pixels must be asked for."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    tokenizer = parts._clip_tokenizer(folder / "clip")
    words = T5Config(
        vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        transformer=_shaken(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or {"shift": 3.0, "use_dynamic_shifting": True})),
        vae=_vae(scaling_factor=0.36, shift_factor=0.12, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=_clip(tokenizer, "CLIPTextModel"),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(words),
        tokenizer_2=parts._t5_tokenizer(),
    )


def _gemma(tokenizer: Any) -> tuple[Any, Any]:
    """A random Gemma 2 of width 8, and the tokenizer with Gemma's habit of starting with <bos>."""
    from tokenizers.processors import TemplateProcessing
    from transformers import Gemma2Config, Gemma2Model

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Gemma2Model(config), tokenizer


def sana(folder: Path, tokenizer: Any, *, dpm: bool = False) -> Any:
    """SANA of one block; pictures of 32 x 32 pixels, 16 x 16 latents."""
    from diffusers import (
        AutoencoderDC,
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        SanaPipeline,
        SanaTransformer2DModel,
    )

    torch.manual_seed(0)
    encoder, tokenizer = _gemma(tokenizer)
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=16,
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock"),
        decoder_block_types=("ResBlock", "ResBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), ()),
        decoder_qkv_multiscales=((), ()),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        upsample_block_type="interpolate",
        downsample_block_type="conv",
        scaling_factor=0.41,
    )
    published = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=1
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=vae,
        transformer=_shaken(transformer),
        scheduler=published if dpm else FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def lumina2(folder: Path, tokenizer: Any) -> Any:
    """Lumina-Image 2.0 of one block and a refiner a side; the pipeline's VAE factor is 8, whatever the VAE."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    torch.manual_seed(0)
    encoder, tokenizer = _gemma(tokenizer)
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=8,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        cap_feat_dim=8,
    )
    return Lumina2Pipeline(
        transformer=_shaken(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=_vae(scaling_factor=0.36, shift_factor=0.12),
        text_encoder=encoder,
        tokenizer=tokenizer,
    )


def qwen_image(folder: Path, tokenizer: Any) -> Any:
    """Qwen-Image of two blocks with its video autoencoder of factor 2; the published schedule."""
    import transformers
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(0)
    shared = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = shared | {"num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    text["rope_scaling"] = {"rope_type": "default", "type": "default", "mrope_section": [2, 1, 1]}
    vision = {"hidden_size": 16, "out_hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, pad_token_id=0)
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    published = {"shift_terminal": 0.02, "max_shift": 0.9, "max_image_seq_len": 8192}
    return QwenImagePipeline(
        transformer=_shaken(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **published),
        vae=vae,
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
    )


def z_image(folder: Path, text_lm: Any, tokenizer: Any) -> Any:
    """Z-Image of one block and a refiner a side; `text_lm` is a tiny Qwen3."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=text_lm.config.hidden_size,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    for padding in (transformer.x_pad_token, transformer.cap_pad_token):  # not set there
        nn.init.normal_(padding)
    return ZImagePipeline(
        transformer=_shaken(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(scaling_factor=0.36, shift_factor=0.12),
        text_encoder=text_lm,
        tokenizer=tokenizer,
    )


def _unet(**options: Any) -> Any:
    from diffusers import UNet2DConditionModel

    settings: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 2,
    }
    return _shaken(UNet2DConditionModel(**settings | options))


def _ddim(**options: Any) -> Any:
    from diffusers import DDIMScheduler

    published: dict[str, Any] = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }
    return DDIMScheduler(**published | options)


def sd15(folder: Path, parts: Any, **scheduler: Any) -> Any:
    """Stable Diffusion 1.5 of two levels, 8 x 8 latents, with DDIM's published settings unless others are given."""
    from diffusers import StableDiffusionPipeline

    torch.manual_seed(0)
    tokenizer = parts._clip_tokenizer(folder / "clip")
    return StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=16),
        scheduler=_ddim(**scheduler),
        vae=_vae(scaling_factor=0.18),
        text_encoder=_clip(tokenizer, "CLIPTextModel"),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(folder: Path, parts: Any, **scheduler: Any) -> Any:
    """Stable Diffusion XL of two levels with both text encoders and the size embedding."""
    from diffusers import StableDiffusionXLPipeline

    torch.manual_seed(0)
    tokenizer = parts._clip_tokenizer(folder / "clip")
    unet = _unet(
        cross_attention_dim=32,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    )
    return StableDiffusionXLPipeline(
        unet=unet,
        scheduler=_ddim(**scheduler),
        vae=_vae(scaling_factor=0.13),
        text_encoder=_clip(tokenizer, "CLIPTextModel"),
        tokenizer=tokenizer,
        text_encoder_2=_clip(tokenizer, "CLIPTextModelWithProjection"),
        tokenizer_2=tokenizer,
        add_watermarker=False,
    )
