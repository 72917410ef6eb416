"""Architectures of `flux_tiny`, `sd15_tiny` and `sdxl_tiny`: real pipeline classes, small, with parts of the trained `sd3_tiny`.

Text encoders and tokenizers are those of `sd3_tiny`, and so is the autoencoder of the two UNets. FLUX packs 2 x 2 latents into a
token: with latents of factor 2 that would be 144 tokens, so it has an autoencoder of its own, of factor 4 with 16 channels.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextModel

from visual_grpo.testbed.sd3_models import LATENT_CHANNELS, LATENT_SIZE, build_vae

FLUX_LAYERS = 3
_TIME_WIDTH = 8
"""Numbers that each of SDXL's six sizes is spread over."""


def build_flux_vae() -> AutoencoderKL:
    """Build an untrained autoencoder of factor 4 with 16 channels, as many numbers a picture as that of `sd3_tiny`."""
    return build_vae(widths=(8, 16, 32), channels=16)


def unet_vae(shared: AutoencoderKL) -> AutoencoderKL:
    """The same autoencoder without a shift, which UNet pipelines do not know: its two 1 x 1 convolutions take it over."""
    vae = AutoencoderKL.from_config(
        {**shared.config, "use_quant_conv": True, "use_post_quant_conv": True, "shift_factor": None}
    )
    vae.load_state_dict(shared.state_dict(), strict=False)
    shift = float(shared.config.shift_factor)
    with torch.no_grad():
        for convolution in (vae.quant_conv, vae.post_quant_conv):
            nn.init.dirac_(convolution.weight)
            nn.init.zeros_(convolution.bias)
        vae.quant_conv.bias[:LATENT_CHANNELS] -= shift
        vae.post_quant_conv.bias += shift
    return vae


def _without_projection(encoder: Any) -> CLIPTextModel:
    """CLIP's text model with the weights of one that also projects."""
    model = CLIPTextModel(encoder.config)
    getattr(model, "text_model", model).load_state_dict(encoder.text_model.state_dict())  # transformers 5 has it flat
    return model


def build_flux(shared: StableDiffusion3Pipeline, vae: AutoencoderKL) -> FluxPipeline:
    """FLUX without an input for guidance (as FLUX.1-schnell); blocks of two streams start as those of `sd3_tiny`.

    Args:
        shared: the trained `sd3_tiny`.
        vae: trained autoencoder of `build_flux_vae`.
    """
    transformer = FluxTransformer2DModel(
        in_channels=4 * vae.config.latent_channels,
        num_layers=FLUX_LAYERS,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=shared.text_encoder_3.config.d_model,
        pooled_projection_dim=shared.text_encoder.config.hidden_size,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    trained = shared.transformer
    for own, theirs in zip(transformer.transformer_blocks, trained.transformer_blocks, strict=False):
        own.load_state_dict(theirs.state_dict())
    transformer.context_embedder.load_state_dict(trained.context_embedder.state_dict())
    time_embedder = trained.time_text_embed.timestep_embedder
    transformer.time_text_embed.timestep_embedder.load_state_dict(time_embedder.state_dict())
    return FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shared.scheduler.config.shift),
        vae=vae,
        text_encoder=_without_projection(shared.text_encoder),
        tokenizer=shared.tokenizer,
        text_encoder_2=shared.text_encoder_3,
        tokenizer_2=shared.tokenizer_3,
    )


def _unet(**options: Any) -> UNet2DConditionModel:
    """Three levels of 24, 12 and 6 latents a side."""
    settings: dict[str, Any] = {
        "sample_size": LATENT_SIZE,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (32, 48, 80),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 4,
    }
    return UNet2DConditionModel(**settings | options)


def _ddim() -> DDIMScheduler:
    """Stable Diffusion's levels; time steps from the last one on, so that a few steps start from noise."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
    )


def build_sd15(shared: StableDiffusion3Pipeline, vae: AutoencoderKL) -> StableDiffusionPipeline:
    """Stable Diffusion 1.5 with one text encoder.

    Args:
        shared: the trained `sd3_tiny`.
        vae: of `unet_vae`.
    """
    return StableDiffusionPipeline(
        unet=_unet(cross_attention_dim=shared.text_encoder.config.hidden_size),
        scheduler=_ddim(),
        vae=vae,
        text_encoder=_without_projection(shared.text_encoder),
        tokenizer=shared.tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def build_sdxl(shared: StableDiffusion3Pipeline, vae: AutoencoderKL) -> StableDiffusionXLPipeline:
    """Stable Diffusion XL with both text encoders, and two transformer layers on the smallest level.

    Args:
        shared: the trained `sd3_tiny`.
        vae: of `unet_vae`.
    """
    width = shared.text_encoder.config.hidden_size
    unet = _unet(
        cross_attention_dim=2 * width,
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=_TIME_WIDTH,
        projection_class_embeddings_input_dim=shared.text_encoder_2.config.projection_dim + 6 * _TIME_WIDTH,
    )
    return StableDiffusionXLPipeline(
        unet=unet,
        scheduler=_ddim(),
        vae=vae,
        text_encoder=_without_projection(shared.text_encoder),
        tokenizer=shared.tokenizer,
        text_encoder_2=shared.text_encoder_2,
        tokenizer_2=shared.tokenizer_2,
        add_watermarker=False,
    )
