"""Stable Diffusion 3 and 3.5 (any `StableDiffusion3Pipeline`: medium, large, the packaged tiny one, with or without T5)."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from importlib import resources
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from visual_grpo.adapters.diffusion import DiffusionAdapter, DiffusionSampling
from visual_grpo.adapters.memory import (
    BlockShape,
    diffusion_rollout_bytes,
    dtype_size,
    folder_elements,
    training_parts,
    transformer_activation_bytes,
)
from visual_grpo.adapters.paths import loading, read_config, resolve_model_path, without_progress_bars
from visual_grpo.adapters.protocol import MemoryPlan, SamplingConfig
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError

PIPELINE = "StableDiffusion3Pipeline"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
CLIP_TOKENS = 77
T5_TOKENS = 256
"""As the published pipelines are called; a tokenizer of a smaller model allows fewer."""


class SD3Adapter(DiffusionAdapter):
    """Adapter of diffusers' `StableDiffusion3Pipeline`; its transformer is trained, all else stays frozen."""

    eval_sampling: ClassVar[dict[str, Any]] = {"solver": "ode", "steps": 40, "guidance": 4.5}  # Flow-GRPO's evaluation
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def __init__(self, pipeline: Any, sampling: SamplingConfig) -> None:
        """Take a pipeline as it is, freeze all of it and keep `sampling` as the default."""
        super().__init__(sampling)
        self.pipeline = pipeline
        pipeline.set_progress_bar_config(disable=True)
        for name in (*TEXT_ENCODERS, "vae", "transformer"):
            if getattr(pipeline, name) is not None:
                getattr(pipeline, name).requires_grad_(False).eval()

    @classmethod
    def load(cls, config: ModelConfig, *, device: torch.device, sampling: SamplingConfig) -> SD3Adapter:
        """Build from `config.path`; see `PolicyAdapter.load`. The VAE is float32 at least: half precision bands pictures."""
        from diffusers import StableDiffusion3Pipeline

        resolved = resolve_model_path(config.path, marker="model_index.json", what=PIPELINE)
        _check_class(config, resolved)
        dtype = getattr(torch, config.dtype)
        with loading(config.path, resolved), warnings.catch_warnings():
            # The new name of the argument is not known to every supported version of diffusers, which would ignore it.
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            pipeline = StableDiffusion3Pipeline.from_pretrained(
                resolved,
                torch_dtype={"default": dtype, "vae": torch.promote_types(dtype, torch.float32)},
                use_safetensors=True,
                revision=config.revision,
            ).to(device)
        if config.gradient_checkpointing:
            pipeline.transformer.enable_gradient_checkpointing()
        return cls(pipeline, sampling)

    @classmethod
    def load_meta(cls, config: ModelConfig) -> nn.Module:
        """The transformer on the meta device, from a folder's, the hub cache's or the published config."""
        from diffusers import SD3Transformer2DModel

        values = _part_config(config, "transformer")
        with torch.device("meta"):
            module = SD3Transformer2DModel.from_config(values)
        # Not the model's own `to`: diffusers logs a warning there about layers to be kept in float32, of which SD3 has none.
        return nn.Module.to(module, getattr(torch, config.dtype))

    @classmethod
    def plan_memory(cls, config: ModelConfig, module: nn.Module, *, sampling: Any, rows: int, units: int) -> MemoryPlan:
        """See `PolicyAdapter.plan_memory`; each part's formula stands in the notes or in `memory`."""
        options: DiffusionSampling = cls._checked(sampling)
        net, vae = _part_config(config, "transformer"), _part_config(config, "vae")
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        height = (options.height or net["sample_size"] * factor) // factor
        width = (options.width or net["sample_size"] * factor) // factor
        frozen = _frozen_elements(config)
        size = dtype_size(config.dtype)
        guided = options.guidance != 1 and options.logprob_mode == "guided"
        sequences = rows * units if options.forward_batch is None else min(rows * units, options.forward_batch)
        activations, note = transformer_activation_bytes(
            BlockShape(
                layers=net["num_layers"],
                width=net["num_attention_heads"] * net["attention_head_dim"],
                image_tokens=(height // net["patch_size"]) * (width // net["patch_size"]),
                text_tokens=_text_tokens(config, options),
                extra_attention=len(net.get("dual_attention_layers") or ()),
            ),
            sequences=sequences * (2 if guided and options.guidance_gradient == "both" else 1),
            element_size=size,
            checkpointing=config.gradient_checkpointing,
            lora=config.lora is not None,
        )
        parts = training_parts(module, config)
        parts["text encoders"] = size * sum(frozen.get(name, 0) for name in TEXT_ENCODERS)
        parts["VAE"] = max(size, 4) * frozen.get("vae", 0)
        parts["activations"] = activations
        latent = (net["in_channels"], height, width)
        parts["rollout storage"] = diffusion_rollout_bytes(rows, units, math.prod(latent))
        notes = [
            note,
            f"rollout storage is of {rows} rows; every further row kept between rollout and update adds its share",
        ]
        if not frozen:
            notes.append("text encoders and VAE are not counted: no weight files and no published sizes for this path")
        return MemoryPlan(parts=parts, notes=tuple(notes))

    @property
    def trainable_module(self) -> nn.Module:
        """The `SD3Transformer2DModel`."""
        module: nn.Module = self.pipeline.transformer
        return module

    def save(self, path: str) -> None:
        """Write the whole pipeline with `save_pretrained`."""
        with without_progress_bars():
            self.pipeline.save_pretrained(path, safe_serialization=True)

    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        """[C, height / f, width / f] with the VAE's factor f."""
        config, factor = self.pipeline.transformer.config, self.pipeline.vae_scale_factor
        default = config.sample_size * factor
        height, width = sampling.height or default, sampling.width or default
        cell, most = factor * config.patch_size, config.pos_embed_max_size * config.patch_size * factor
        for name, pixels in (("height", height), ("width", width)):
            if pixels % cell or pixels > most:
                below = max(min(pixels, most) // cell * cell, cell)
                raise UserError(
                    f"sampling.{name} ({pixels}) must be a multiple of {cell} and at most {most} for this model; "
                    f"use {below}, or leave it out for {default}"
                )
        return (config.in_channels, height // factor, width // factor)

    def noise_levels(self, sampling: DiffusionSampling) -> Tensor:
        """The schedule of the pipeline's `FlowMatchEulerDiscreteScheduler`, or the static `sampling.shift`."""
        scheduler = self.pipeline.scheduler
        if sampling.shift is not None or not _is_special(scheduler.config):
            shift = sampling.shift if sampling.shift is not None else scheduler.shift
            return super().noise_levels(sampling.model_copy(update={"shift": shift}))
        options: dict[str, float] = {}
        if scheduler.config.use_dynamic_shifting:  # the shift grows with the number of image tokens
            _, height, width = self.latent_shape(sampling)
            tokens = (height * width) // self.pipeline.transformer.config.patch_size**2
            low, high = scheduler.config.base_image_seq_len, scheduler.config.max_image_seq_len
            slope = (scheduler.config.max_shift - scheduler.config.base_shift) / (high - low)
            options["mu"] = scheduler.config.base_shift + slope * (tokens - low)
        scheduler.set_timesteps(sampling.steps, device="cpu", **options)
        levels: Tensor = scheduler.sigmas.to(self.step_dtype)
        return levels

    def predict_velocity(self, latents: Tensor, sigma: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """Velocity [n, C, h, w]; the network's time input is `1000 * sigma`."""
        velocity: Tensor = self.pipeline.transformer(
            hidden_states=latents,
            timestep=sigma * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=condition["tokens"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def encode_texts(self, texts: list[str], sampling: DiffusionSampling) -> dict[str, Tensor]:
        """`tokens` [P, L, D] and `pooled` [P, D']; over-long texts are cut, and diffusers logs what was cut off."""
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=texts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self._text_length(sampling),
        )
        return {"tokens": tokens, "pooled": pooled}

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Images [n, 3, H, W] of latents [n, C, h, w]."""
        vae = self.pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images: Tensor = vae.decode(scaled, return_dict=False)[0]
        return images / 2 + 0.5

    def _text_length(self, sampling: DiffusionSampling) -> int:
        """T5 tokens: as asked, or what the tokenizer allows, at most what the published pipelines use."""
        if sampling.max_sequence_length is not None:
            return sampling.max_sequence_length
        tokenizer = self.pipeline.tokenizer_3
        return T5_TOKENS if tokenizer is None else min(T5_TOKENS, tokenizer.model_max_length)


def published(path: str) -> Mapping[str, Any] | None:
    """Published config values of a hub id, packaged with this library; None where there are none."""
    owner, _, name = path.partition("/")
    file = resources.files("visual_grpo.adapters") / "published" / f"{name}.json"
    if not owner or not name or "/" in name or not file.is_file():
        return None
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values if values.get("source") == path and values.get("class") == PIPELINE else None


def _published_ids() -> list[str]:
    folder = resources.files("visual_grpo.adapters") / "published"
    values = [json.loads(f.read_text(encoding="utf-8")) for f in folder.iterdir() if f.name.endswith(".json")]
    return sorted(v["source"] for v in values if isinstance(v, dict) and v.get("class") == PIPELINE)


def _check_class(config: ModelConfig, resolved: str) -> None:
    index = read_config(resolved, "model_index.json", revision=config.revision)
    if index is not None and index.get("_class_name") != PIPELINE:
        raise UserError(
            f"model.path {config.path!r} is a {index.get('_class_name')}, but adapter {config.adapter!r} needs a {PIPELINE}"
        )


def _part_config(config: ModelConfig, part: str) -> dict[str, Any]:
    """Config of `transformer` or `vae` without network access."""
    resolved = resolve_model_path(config.path, marker="model_index.json", what=PIPELINE)
    _check_class(config, resolved)
    values = read_config(resolved, f"{part}/config.json", revision=config.revision)
    if values is None:
        known = published(config.path)
        values = dict(known[part]) if known is not None else None
    if values is None:
        raise UserError(
            f"no config of the {part} of {config.path!r}: it is in no folder of that name and not in the hub cache. "
            f"Published values are packaged for {', '.join(_published_ids())}."
        )
    return values


def _frozen_elements(config: ModelConfig) -> Mapping[str, int]:
    """Numbers of parameters of text encoders and VAE: from weight files, else as published."""
    known = published(config.path)
    if known is not None:
        sizes: dict[str, int] = known["parameters"]
        return sizes
    resolved = resolve_model_path(config.path, marker="model_index.json", what=PIPELINE)
    return {name: n for name in (*TEXT_ENCODERS, "vae") if (n := folder_elements(f"{resolved}/{name}"))}


def _text_tokens(config: ModelConfig, options: DiffusionSampling) -> int:
    """Tokens of the CLIP encoders and of T5."""
    resolved = resolve_model_path(config.path, marker="model_index.json", what=PIPELINE)
    clip, t5 = (
        (read_config(resolved, f"{name}/tokenizer_config.json", revision=config.revision) or {}).get(
            "model_max_length", most
        )
        for name, most in (("tokenizer", CLIP_TOKENS), ("tokenizer_3", T5_TOKENS))
    )
    return int(clip) + (options.max_sequence_length or min(int(t5), T5_TOKENS))


def _is_special(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler has more than a static shift."""
    names = ("use_dynamic_shifting", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
    return any(scheduler.get(name) for name in names)
