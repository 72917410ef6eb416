"""What adapters of diffusers' text-to-image pipelines share: loading, sizes, schedules, decoding, dry runs.

A family is a file with a class that names its pipeline and network and fills `predict_velocity` and `encode_texts`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from visual_grpo.adapters.diffusion import DiffusionAdapter
from visual_grpo.adapters.diffusion_sampling import DiffusionSampling
from visual_grpo.adapters.memory import (
    BlockShape,
    diffusion_rollout_bytes,
    dtype_size,
    folder_elements,
    measured_activation_bytes,
    training_parts,
    transformer_activation_bytes,
)
from visual_grpo.adapters.paths import loading, read_config, resolve_model_path, without_progress_bars
from visual_grpo.adapters.protocol import MemoryPlan, SamplingConfig
from visual_grpo.adapters.published import published, published_ids
from visual_grpo.config import ModelConfig
from visual_grpo.errors import UserError
from visual_grpo.schedules import linear_shift_sigmas


class PipelineAdapter(DiffusionAdapter):
    """Base of the adapters of diffusers' pipelines: `component` is trained, all else stays frozen."""

    pipeline_class: ClassVar[str]
    """Name of the pipeline in diffusers."""
    network_class: ClassVar[str]
    """Name of the trained network in diffusers."""
    text_encoders: ClassVar[tuple[str, ...]]
    """Names of the encoders in the pipeline."""
    load_options: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of `from_pretrained`."""
    linear_start: ClassVar[bool] = False
    """Whether the pipeline hands the scheduler the levels `1 - i / steps` instead of leaving them to it."""
    recomputed: ClassVar[tuple[str, ...]] = ()
    """Class names of the parts that gradient checkpointing computes again; for families with a `meta_call`."""

    def __init__(self, pipeline: Any, sampling: SamplingConfig) -> None:
        """Take a pipeline as it is, freeze all of it and keep `sampling` as the default."""
        super().__init__(sampling)
        self.pipeline = pipeline
        pipeline.set_progress_bar_config(disable=True)
        for name in (*self.text_encoders, "vae", self.component):
            if getattr(pipeline, name) is not None:
                getattr(pipeline, name).requires_grad_(False).eval()

    @classmethod
    def load(cls, config: ModelConfig, *, device: torch.device, sampling: SamplingConfig) -> Self:
        """Build from `config.path`; see `PolicyAdapter.load`. The VAE is float32 at least: half precision bands pictures."""
        import diffusers

        resolved = cls._resolved(config)
        dtype = getattr(torch, config.dtype)
        # Imports transformers, whose progress bars `loading` would not find otherwise.
        kind = getattr(diffusers, cls.pipeline_class)
        with loading(config.path, resolved), warnings.catch_warnings():
            # The new name of the argument is not known to every supported version of diffusers, which would ignore it.
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            pipeline = kind.from_pretrained(
                resolved,
                torch_dtype={"default": dtype, "vae": torch.promote_types(dtype, torch.float32)},
                use_safetensors=True,
                revision=config.revision,
                **cls.load_options,
            )
            pipeline.to(device)
        if config.gradient_checkpointing:
            getattr(pipeline, cls.component).enable_gradient_checkpointing()
        return cls(pipeline, sampling)

    @classmethod
    def load_meta(cls, config: ModelConfig) -> nn.Module:
        """The trained network on the meta device, from a folder's, the hub cache's or the published config."""
        import diffusers

        values = cls._part_config(config, cls.component)
        with torch.device("meta"):
            module = getattr(diffusers, cls.network_class).from_config(values)
        # Not the model's own `to`: diffusers logs a warning there about layers that it would keep in float32.
        return nn.Module.to(module, getattr(torch, config.dtype))

    @classmethod
    def plan_memory(cls, config: ModelConfig, module: nn.Module, *, sampling: Any, rows: int, units: int) -> MemoryPlan:
        """See `PolicyAdapter.plan_memory`; each part's formula stands in the notes or in `memory`."""
        options = cls._checked(sampling)
        net, factor = cls._part_config(config, cls.component), cls.vae_factor(cls._part_config(config, "vae"))
        side = cls.default_side(net) * factor
        height, width = (options.height or side) // factor, (options.width or side) // factor
        guided = options.guidance != 1 and options.logprob_mode == "guided"
        passed = rows * units if options.forward_batch is None else min(rows * units, options.forward_batch)
        activations, note = cls.activation_bytes(
            config,
            module,
            net,
            (height, width),
            text_tokens=cls.text_tokens(config, options),
            sequences=passed * (2 if guided and options.guidance_gradient == "both" else 1),
        )
        frozen, size = cls._frozen_elements(config), dtype_size(config.dtype)
        parts = training_parts(module, config)
        parts["text encoders"] = size * sum(frozen.get(name, 0) for name in cls.text_encoders)
        parts["VAE"] = max(size, 4) * frozen.get("vae", 0)
        parts["activations"] = activations
        latent = (cls.latent_channels(net), height, width)
        parts["rollout storage"] = diffusion_rollout_bytes(rows, units, math.prod(latent))
        notes = [
            note,
            f"rollout storage is of {rows} rows; every further row kept between rollout and update adds its share",
        ]
        if not frozen:
            notes.append("text encoders and VAE are not counted: no weight files and no published sizes for this path")
        return MemoryPlan(parts=parts, notes=tuple(notes))

    # ---- sizes, in latents; `net` and `vae` are configs ---------------------------------------------------------------

    @classmethod
    def default_side(cls, net: Mapping[str, Any]) -> int:
        """Height and width where the user names none."""
        return int(net["sample_size"])

    @classmethod
    def cell(cls, net: Mapping[str, Any]) -> int:
        """Height and width are multiples of it."""
        return int(net["patch_size"])

    @classmethod
    def largest_side(cls, net: Mapping[str, Any]) -> int | None:
        """Largest height and width that the network can take; None = any."""
        return None

    @classmethod
    def latent_channels(cls, net: Mapping[str, Any]) -> int:
        """Channels of the latents."""
        return int(net["in_channels"])

    @classmethod
    def vae_factor(cls, vae: Mapping[str, Any]) -> int:
        """Pixels a latent, in each direction."""
        return int(2 ** (len(vae["block_out_channels"]) - 1))

    @classmethod
    def text_tokens(cls, config: ModelConfig, options: DiffusionSampling) -> int:
        """Text tokens that go through the network's blocks beside the image's, for the memory plan."""
        return 0

    @classmethod
    def blocks(cls, net: Mapping[str, Any], *, image_tokens: int, text_tokens: int) -> BlockShape:
        """The network as equal transformer blocks, for the memory plan."""
        return BlockShape(
            layers=net["num_layers"],
            width=net["num_attention_heads"] * net["attention_head_dim"],
            image_tokens=image_tokens,
            text_tokens=text_tokens,
        )

    @classmethod
    def meta_call(
        cls, net: Mapping[str, Any], size: tuple[int, int], text_tokens: int, **tensor: Any
    ) -> dict[str, Any] | None:
        """Arguments of one call for one sequence, made with `torch.empty(..., **tensor)`; None where `blocks` is as good."""
        return None

    @classmethod
    def activation_bytes(
        cls,
        config: ModelConfig,
        module: nn.Module,
        net: Mapping[str, Any],
        size: tuple[int, int],
        *,
        text_tokens: int,
        sequences: int,
    ) -> tuple[int, str]:
        """What the backward pass keeps for `sequences` latents of `size`, and a note on how it was found."""
        call = cls.meta_call(net, size, text_tokens, device="meta", dtype=getattr(torch, config.dtype))
        if call is not None:
            one = measured_activation_bytes(
                module, call, recomputed=cls.recomputed if config.gradient_checkpointing else ()
            )
            return (
                sequences * one,
                f"activations = {sequences} sequences x {one / 2**20:.0f} MiB, measured on the meta device",
            )
        height, width = (side // cls.cell(net) for side in size)
        return transformer_activation_bytes(
            cls.blocks(net, image_tokens=height * width, text_tokens=text_tokens),
            sequences=sequences,
            element_size=dtype_size(config.dtype),
            checkpointing=config.gradient_checkpointing,
            lora=config.lora is not None,
        )

    def latent_shape(self, sampling: DiffusionSampling) -> tuple[int, ...]:
        """[C, height / f, width / f] with the VAE's factor f."""
        net: Any = self.trainable_module.config
        factor, side = self.pipeline.vae_scale_factor, self.default_side(net)
        cell, most = factor * self.cell(net), (self.largest_side(net) or 2**16) * factor
        height, width = sampling.height or side * factor, sampling.width or side * factor
        for name, pixels in (("height", height), ("width", width)):
            if pixels % cell or pixels > most:
                below = max(min(pixels, most) // cell * cell, cell)
                raise UserError(
                    f"sampling.{name} ({pixels}) must be a multiple of {cell} and at most {most} for this model; "
                    f"use {below}, or leave it out for {side * factor}"
                )
        return (self.latent_channels(net), height // factor, width // factor)

    # ---- the loop -----------------------------------------------------------------------------------------------------

    @property
    def trainable_module(self) -> nn.Module:
        """The network called `component`."""
        module: nn.Module = getattr(self.pipeline, self.component)
        return module

    def save(self, path: str) -> None:
        """Write the whole pipeline with `save_pretrained`."""
        with without_progress_bars():
            self.pipeline.save_pretrained(path, safe_serialization=True)

    def noise_levels(self, sampling: DiffusionSampling) -> Tensor:
        """The schedule of the pipeline's flow-matching scheduler, or the static `sampling.shift`."""
        scheduler = self.pipeline.scheduler
        static = sampling.shift if sampling.shift is not None or _is_special(scheduler.config) else scheduler.shift
        if static is not None:
            if self.linear_start:
                return linear_shift_sigmas(sampling.steps, static, dtype=self.step_dtype)
            return super().noise_levels(sampling.model_copy(update={"shift": static}))
        options: dict[str, Any] = {}
        if scheduler.config.use_dynamic_shifting:
            options["mu"] = self._dynamic_shift(sampling)
        if self.linear_start:
            options["sigmas"] = [1 - step / sampling.steps for step in range(sampling.steps)]
        scheduler.set_timesteps(sampling.steps, device="cpu", **options)
        levels: Tensor = scheduler.sigmas.to(self.step_dtype)
        return levels

    def _dynamic_shift(self, sampling: DiffusionSampling) -> float:
        """The logarithm of the shift: it grows with the number of image tokens."""
        known = self.pipeline.scheduler.config
        slope = (known.max_shift - known.base_shift) / (known.max_image_seq_len - known.base_image_seq_len)
        return float(known.base_shift + slope * (self.shift_tokens(sampling) - known.base_image_seq_len))

    def shift_tokens(self, sampling: DiffusionSampling) -> int:
        """Image tokens that a dynamic shift counts."""
        _, height, width = self.latent_shape(sampling)
        return int(height * width // self.cell(self._config) ** 2)

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Images [n, 3, H, W] of latents [n, C, h, w]."""
        vae = self.pipeline.vae
        x = latents.to(vae.dtype)
        mean, std = (getattr(vae.config, name, None) for name in ("latents_mean", "latents_std"))
        if mean is not None and std is not None:
            mean, std = (x.new_tensor(value).view(1, -1, 1, 1) for value in (mean, std))
            x = x * std / vae.config.scaling_factor + mean
        else:
            x = x / vae.config.scaling_factor + (getattr(vae.config, "shift_factor", None) or 0.0)
        images: Tensor = vae.decode(x, return_dict=False)[0]
        return images / 2 + 0.5

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Latents [n, C, h, w] of pictures [n, 3, H, W] in [0, 1]: the mean of the VAE's posterior, scaled."""
        vae = self.pipeline.vae
        posterior = vae.encode(images.to(self.device, vae.dtype) * 2 - 1, return_dict=False)[0]
        x: Tensor = posterior.mean if hasattr(posterior, "mean") else posterior  # a VAE without a posterior (SANA)
        mean, std = (getattr(vae.config, name, None) for name in ("latents_mean", "latents_std"))
        if mean is not None and std is not None:
            mean, std = (x.new_tensor(value).view(1, -1, 1, 1) for value in (mean, std))
            return (x - mean) * vae.config.scaling_factor / std
        return (x - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor

    # ---- inner --------------------------------------------------------------------------------------------------------

    @property
    def _config(self) -> Any:
        return self.trainable_module.config

    @classmethod
    def _resolved(cls, config: ModelConfig) -> str:
        """The folder or hub id of a pipeline of this class."""
        resolved = resolve_model_path(config.path, marker="model_index.json", what=cls.pipeline_class)
        index = read_config(resolved, "model_index.json", revision=config.revision)
        known = published(config.path)
        found = index.get("_class_name") if index is not None else known["class"] if known is not None else None
        if found not in (None, cls.pipeline_class):
            raise UserError(
                f"model.path {config.path!r} is a {found}, but adapter {config.adapter!r} needs a {cls.pipeline_class}"
            )
        return resolved

    @classmethod
    def _part_config(cls, config: ModelConfig, part: str) -> dict[str, Any]:
        """Config of the network or of the `vae`, without network access."""
        values = read_config(cls._resolved(config), f"{part}/config.json", revision=config.revision)
        if values is None:
            known = published(config.path)
            values = dict(known[part]) if known is not None else None
        if values is None:
            raise UserError(
                f"no config of the {part} of {config.path!r}: it is in no folder of that name and not in the hub cache. "
                f"Published values are packaged for {', '.join(published_ids(cls.pipeline_class))}."
            )
        return values

    @classmethod
    def _frozen_elements(cls, config: ModelConfig) -> Mapping[str, int]:
        """Numbers of parameters of text encoders and VAE: as published, else from weight files."""
        known = published(config.path)
        if known is not None:
            sizes: dict[str, int] = known["parameters"]
            return sizes
        resolved = cls._resolved(config)
        return {name: n for name in (*cls.text_encoders, "vae") if (n := folder_elements(f"{resolved}/{name}"))}

    @classmethod
    def _tokenizer_length(cls, config: ModelConfig, tokenizer: str, default: int) -> int:
        """Tokens that a tokenizer allows, from its config; `default` where there is none."""
        values = read_config(cls._resolved(config), f"{tokenizer}/tokenizer_config.json", revision=config.revision)
        return min(int((values or {}).get("model_max_length", default)), default)


def _is_special(scheduler: Mapping[str, Any]) -> bool:
    """Whether a scheduler has more than a static shift."""
    names = ("use_dynamic_shifting", "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
    return any(scheduler.get(name) for name in names)
