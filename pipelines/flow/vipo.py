"""ViPO: "Seeing What Matters: Visual Preference Policy Optimization for Visual Generation", arXiv 2511.18719.

What differs from GRPO: a map of the finished picture (principal components of a frozen backbone's patch features) spreads the
advantage of a row over the positions of its latents, and each position has a ratio and a clip of its own. A plug-in: put it
behind `flow_grpo` or another method of noisy steps, `method: [flow_grpo, vipo]`.

While the ratio is 1 (the first update) a map of ones gives the gradient of the base method with the reduction `channel_mean`;
later updates differ, because positions are clipped one by one. The paper finds a map of ones worse than no map (`maps: ones`).

Departures: the sign of a component is fixed by the border of the picture (`orient`, see `structure_maps`); log-probs are the MEAN
over channels with a clip of 1e-4 (the published code sums them: `sampling.reduction=channel_sum` with a clip near 1e-2); a pull
to the reference is allowed, not weighted by the map. `maps: colours` needs no download: mean and spread of the colours of each
patch go through the same steps in place of DINOv2's features; it suits flat drawings, not photographs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from visual_grpo.config import (
    AdvantageConfig,
    KlConfig,
    RatioConfig,
    RewardConfig,
    RunConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.flow.dancegrpo import dancegrpo_training
from visual_grpo.pipelines.flow.flow_grpo import paper_training, scenes, sd35_medium, tiny_training
from visual_grpo.pipelines.flow.mixgrpo import flux1_dev
from visual_grpo.pipelines.flow.structure_maps import clip_map, feature_source, structure_map, token_grid
from visual_grpo.types import RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)


class VipoConfig(MethodConfig):
    """Options of ViPO."""

    maps: str = Field(
        "dinov2",
        description="source of the patch features: dinov2, colours (no download), package.module:function; ones = no map",
    )
    model: str = Field("facebook/dinov2-large", description="of dinov2: hub id or folder")
    edge: int | None = Field(
        None, ge=14, description="of dinov2: shorter side it sees, in pixels; null = the picture's"
    )
    patch: int = Field(
        3, ge=1, description="of colours: side of a patch in pixels, small enough that few objects touch the border"
    )
    components: int = Field(3, ge=1, description="principal components")
    smoothing: float = Field(1.0, ge=0, description="Gaussian filter of the map, in patches")
    orient: Literal["border", "loading"] = Field("border", description="what fixes the sign of a component")
    pooling: Literal["variance", "average", "first_pc"] = Field("variance", description="how components are joined")
    mean_one: bool = Field(False, description="divide each map by its mean, so that the step does not shrink")
    advantage_clip: float | None = Field(5.0, gt=0, description="clamp of the advantages after the map")

    @model_validator(mode="after")
    def _options_of_the_source(self) -> VipoConfig:
        """What another source reads would do nothing."""
        owners = {"model": "dinov2", "edge": "dinov2", "patch": "colours"}
        shape = ("components", "smoothing", "orient", "pooling", "mean_one") if self.maps == "ones" else ()
        for key in (*(key for key, owner in owners.items() if owner != self.maps), *shape):
            if getattr(self, key) != type(self).model_fields[key].default:
                reads = f"is of maps={owners[key]}" if key in owners else "shapes a map"
                raise ValueError(f"{key} {reads}, but maps is {self.maps!r}, which does not read it: leave it out")
        return self


class Vipo(Method[VipoConfig]):
    """Maps of the pictures, and advantages with a map."""

    Config: ClassVar[type[MethodConfig]] = VipoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"transition"}), kinds=frozenset({"diffusion"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {"reduction": "channel_mean"},
        "eval": {"sampling": {"solver": "ode"}},
        "advantage": {"clip": None},
        "ratio": {"level": "token", "clip_low": 1e-4, "clip_high": 1e-4},
        "kl": {"estimator": "gaussian"},
    }

    def __init__(self, config: VipoConfig) -> None:
        """Prepare the source of the features; nothing is loaded yet."""
        super().__init__(config)
        self._features: Callable[[Tensor], Tensor] | None = None
        if config.maps != "ones":
            self._features = feature_source(config.maps, model=config.model, edge=config.edge, patch=config.patch)
        self._warned = False

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Log-probs need a map, and every position a ratio of its own."""
        if sampling.reduction not in ("channel_mean", "channel_sum"):
            raise UserError(
                f"vipo needs one log-prob a position, but sampling.reduction is {sampling.reduction!r}; use channel_mean (its "
                "default) or channel_sum, and put vipo behind the method that samples: method=[flow_grpo, vipo]"
            )
        if sampling.deterministic:
            raise UserError(f"vipo weighs noisy steps, but sampling.solver is {sampling.solver!r}; use flow_sde")
        if run.ratio.level != "token":
            raise UserError(f"vipo has one ratio a position: set ratio.level to token, not {run.ratio.level}")
        if run.kl.beta > 0 and run.kl.estimator not in ("gaussian", "prediction", "velocity"):
            raise UserError(f"vipo allows no kl.estimator={run.kl.estimator}, which compares log-probs; use gaussian")

    def after_rollout(self, rollouts: RolloutBatch, state: LoopState) -> RolloutBatch:
        """Store each row's map `structure_map` [N, *map], and whether its picture had one."""
        assert rollouts.images is not None
        final = rollouts.data["final"]
        channel = getattr(state.policy.adapter, "channel_dim", 1) % final.ndim
        shape = tuple(size for axis, size in enumerate(final.shape) if axis not in (0, channel))
        old = rollouts.old_log_prob
        if old is not None and tuple(old.shape[2:]) != shape:
            raise UserError(
                f"vipo's maps are {list(shape)}, but the rollout's log-probs {list(old.shape[2:])}; set sampling.reduction"
            )
        maps, found, centre = self.maps(rollouts.images, shape)
        data = {"structure_map": maps.to(final.device), "structure_found": found, "structure_centre": centre}
        return replace(rollouts, data=rollouts.data | data)

    def maps(self, images: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Maps of pictures [N, 3, H, W] or clips [N, 3, F, H, W].

        Returns:
            The maps [N, *shape]; which rows have one (the others are ones), [N] bool; their mean in the middle half, [N].
        """
        clips = images.ndim == 5
        pictures = images.transpose(1, 2).flatten(0, 1) if clips else images
        size = token_grid(shape, *images.shape[-2:])
        flat, found = self._picture_maps(pictures, size)
        if clips:
            frames = images.shape[2]
            flat = torch.stack([clip_map(clip, shape[0]) for clip in flat.split(frames)])
            found = found.view(-1, frames).all(1)
        if self.config.mean_one:
            dims = tuple(range(1, flat.ndim))
            flat = flat / flat.mean(dims, keepdim=True).clamp(min=1e-8)
        high, wide = size
        middle = flat[..., high // 4 : high - high // 4, wide // 4 : wide - wide // 4]
        return flat.reshape(len(images), *shape), found, middle.flatten(1).mean(1)

    def _picture_maps(self, pictures: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(pictures), *size), torch.zeros(len(pictures), dtype=torch.bool)
        if self._features is None:
            return ones
        try:
            features = self._features(pictures)
        except (UserError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any backbone's
            self._warn(f"the source {self.config.maps!r} failed ({type(error).__name__}: {error})")
            return ones
        config = self.config
        options: dict[str, Any] = {
            "components": config.components,
            "smoothing": config.smoothing,
            "orient": config.orient,
            "pooling": config.pooling,
        }
        made = [structure_map(one, size, **options) for one in features]
        found = torch.tensor([has for _, has in made], dtype=torch.bool)
        if not bool(found.all()):
            self._warn(f"{int((~found).sum())} of {len(found)} pictures have constant or non-finite features")
        return torch.stack([one.cpu() for one, _ in made]), found

    def _warn(self, reason: str) -> None:
        if not self._warned:
            logger.warning("vipo: %s; such rows get a map of ones. Watch reward/vipo/found", reason)
        self._warned = True

    def after_score(
        self, rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState
    ) -> tuple[RolloutBatch, RewardBatch]:
        """Log the share of pictures with a map, and the maps' mean in the middle of the pictures."""
        seen = rewards if rewards.clean is None else rewards.clean
        seen.details["vipo/found"] = rollouts.data["structure_found"].float().cpu()
        seen.details["vipo/centre"] = rollouts.data["structure_centre"].float().cpu()
        return rollouts, rewards

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """`A [N]` or `[N, T]` times the row's map: [N, 1 or T, *map]."""
        maps = rollouts.data["structure_map"].to(advantages)
        units = advantages if advantages.ndim > 1 else advantages[:, None]
        spatial = maps.ndim - 1
        units = units.reshape(*units.shape, *([1] * (2 + spatial - units.ndim)))
        dense = units * maps[:, None]
        limit = self.config.advantage_clip
        return dense if limit is None else dense.clamp(-limit, limit)


def vipo_tiny() -> RunConfig:
    """Flow-GRPO with ViPO on the tiny SD3: batch, steps and pull of `flow_grpo_tiny`, maps from the pictures' own colours.

    The clip range is wider, since the ratio of a position (4 channels) spreads more than that of a picture (2,304 numbers).
    """
    made = scenes(
        "vipo_tiny",
        "flow_grpo",
        "Flow-GRPO with ViPO's maps on the testbed's scenes",
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.7, "reduction": "channel_mean"},
        ratio=RatioConfig(clip_low=1e-2, clip_high=1e-2),
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=tiny_training(48),
    )
    return made.model_copy(update={"method": [{"flow_grpo": {}}, {"vipo": {"maps": "colours", "patch": 3}}]})


def vipo_sd35_medium() -> RunConfig:
    """Flow-GRPO with ViPO on SD3.5-medium, HPS v2.1: Flow-GRPO's settings for SD3.5 with the paper's maps and reward.

    The paper trains FLUX.1-dev; its clip range was not found.
    """
    made = sd35_medium(
        "vipo_sd35_medium",
        "flow_grpo",
        "Flow-GRPO with ViPO's DINOv2 maps on SD3.5-medium, HPS v2.1",
        "hps_v2",
        rewards={"hps_v2": RewardConfig()},
        sampling={"steps": 10, "guidance": 4.5, "reduction": "channel_mean"},
        advantage=AdvantageConfig(scope="batch"),
        ratio=RatioConfig(clip_low=1e-4, clip_high=1e-4),
        kl=KlConfig(beta=0.01, estimator="gaussian"),
        train=paper_training(),
    )
    return made.model_copy(update={"method": [{"flow_grpo": {}}, {"vipo": {}}]})


def vipo_flux1_dev() -> RunConfig:
    """The paper's image run: DanceGRPO on FLUX.1-dev with DINOv2 maps and HPS v2.1.

    Its learning rate, group size and clip range were not found; they are those of DanceGRPO's run.
    """
    made = flux1_dev(
        "vipo_flux1_dev",
        "dancegrpo",
        "DanceGRPO with ViPO's DINOv2 maps on FLUX.1-dev, HPS v2.1",
        rewards={"hps_v2": RewardConfig()},
        sampling={"steps": 16},
        train=dancegrpo_training(),
    )
    return made.model_copy(update={"method": [{"dancegrpo": {}}, {"vipo": {}}]})
