"""Which positions of a picture matter: principal components of patch features become a map at the latents' resolution.

ViPO's perceptual structuring module (arXiv 2511.18719), as its published code has it, plus a rule for the sign of a component,
which a singular value decomposition leaves open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from scipy import ndimage
from torch import Tensor
from torch.nn import functional

from visual_grpo.errors import UserError
from visual_grpo.registry import load_object

Orient = Literal["border", "loading"]
Pooling = Literal["variance", "average", "first_pc"]

RANGE = 1e-8
"""A map that varies by less says nothing."""


def oriented(vectors: Tensor, projections: Tensor, grid: tuple[int, int], orient: Orient) -> Tensor:
    """Fix the sign of each component.

    Args:
        vectors: right singular vectors [K, D].
        projections: of the centred patches on them, [P, K], row-major over the grid.
        grid: (Hp, Wp) with Hp * Wp = P.
        orient: "loading": the largest loading is positive (reproducible, without meaning). "border": the outermost ring of
            patches, mostly background, projects above the rest, hence lies below it in the reversed map; "loading" where the
            grid has no inside.

    Returns:
        The projections [P, K], some columns negated; the same for any signs of the input.
    """
    largest = vectors.abs().argmax(dim=1, keepdim=True)
    fixed = projections * vectors.gather(1, largest).flatten().sign()
    ring = torch.ones(grid, dtype=torch.bool, device=projections.device)
    ring[1:-1, 1:-1] = False
    inside = ~ring.flatten()
    if orient == "loading" or not bool(inside.any()):
        return fixed
    return torch.where(fixed[~inside].mean(0) >= fixed[inside].mean(0), fixed, -fixed)


def patch_scores(
    features: Tensor, *, components: int = 3, orient: Orient = "border", pooling: Pooling = "variance"
) -> Tensor:
    """Score each patch by the leading components of its features.

    Args:
        features: [Hp, Wp, D], finite.
        components: K, at most min(P - 1, D) are used.
        orient: see `oriented`.
        pooling: "variance": reversed min-max of each component, weighted by its share of the variance; "average" and
            "first_pc": the mean, or the first, of the negated projections, min-max.

    Returns:
        [Hp, Wp] in [0, 1], float32 or wider.
    """
    height, width, dimensions = features.shape
    flat = features.flatten(0, 1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    centred = flat - flat.mean(0)
    _, singular, vectors = torch.linalg.svd(centred, full_matrices=False)
    count = min(components, len(flat) - 1, dimensions)
    singular, vectors = singular[:count], vectors[:count]
    projections = oriented(vectors, centred @ vectors.T, (height, width), orient)
    if pooling != "variance":
        chosen = projections.mean(1) if pooling == "average" else projections[:, 0]
        return min_max(-chosen)[0].view(height, width)
    share = singular.square() / (singular.square().sum() + 1e-8)
    low, high = projections.amin(0), projections.amax(0)
    spread = high - low
    reversed_ = (high - projections) / torch.where(spread > 0, spread, 1.0)
    scores = torch.where(spread > 0, reversed_, 0.5) @ share
    return scores.clamp(0, 1).view(height, width)


def min_max(values: Tensor) -> tuple[Tensor, bool]:
    """`values` of any shape brought to [0, 1], and whether they vary at all; ones if not, or if one is not finite."""
    low, high = values.min(), values.max()
    if not bool(torch.isfinite(values).all()) or float(high - low) < RANGE:
        return torch.ones_like(values), False
    return (values - low) / (high - low), True


def structure_map(
    features: Tensor,
    size: tuple[int, int],
    *,
    components: int = 3,
    smoothing: float = 1.0,
    orient: Orient = "border",
    pooling: Pooling = "variance",
) -> tuple[Tensor, bool]:
    """Map of one picture.

    Args:
        features: patch features [Hp, Wp, D].
        size: (h, w) of the latents.
        components, orient, pooling: see `patch_scores`.
        smoothing: standard deviation of a Gaussian filter, in patches; 0 = none.

    Returns:
        [h, w] in [0, 1], and True; ones and False where the features are constant or not finite.
    """
    nothing = features.new_ones(size, dtype=torch.float32), False
    if not bool(torch.isfinite(features).all()):
        return nothing
    scores = patch_scores(features, components=components, orient=orient, pooling=pooling)
    if float(scores.max() - scores.min()) < RANGE:
        return nothing
    if smoothing > 0:
        scores = torch.from_numpy(ndimage.gaussian_filter(scores.cpu().numpy(), smoothing)).to(scores)
    scores, varies = min_max(scores)
    if not varies:
        return nothing
    if size != tuple(scores.shape):
        scaled = functional.interpolate(scores[None, None], size=size, mode="bilinear", antialias=True)
        scores, varies = min_max(scaled[0, 0])
    return (scores.float(), True) if varies else nothing


def clip_map(frames: Tensor, length: int) -> Tensor:
    """Maps of a clip's pictures [F, h, w] at the latents' `length` in time: [length, h, w], min-max over the clip."""
    if len(frames) != length:
        frames = functional.interpolate(frames[None, None], size=(length, *frames.shape[1:]), mode="trilinear")[0, 0]
    return min_max(frames)[0]


def token_grid(shape: tuple[int, ...], height: int, width: int) -> tuple[int, int]:
    """(h, w) of a map: the last two of `shape`, or of packed tokens [L] the grid with the picture's proportions.

    >>> token_grid((6,), 20, 30), token_grid((8, 4), 64, 32)
    ((2, 3), (8, 4))

    Raises:
        UserError: L tokens make no such grid.
    """
    if len(shape) > 1:
        return shape[-2], shape[-1]
    high = round((shape[0] * height / width) ** 0.5)
    if high == 0 or shape[0] % high:
        raise UserError(
            f"vipo: {shape[0]} latent tokens make no grid with the proportions of {height} x {width} pixels"
        )
    return high, shape[0] // high


def colour_patches(images: Tensor, patch: int) -> Tensor:
    """Mean and standard deviation of each colour in each patch of about `patch` pixels: [N, Hp, Wp, 6] of [N, 3, H, W]."""
    grid = max(images.shape[-2] // patch, 1), max(images.shape[-1] // patch, 1)
    mean = functional.adaptive_avg_pool2d(images.double(), grid)
    square = functional.adaptive_avg_pool2d(images.double().square(), grid)
    spread = (square - mean.square()).clamp(min=0).sqrt()
    return torch.cat([mean, spread], dim=1).permute(0, 2, 3, 1).float()


def feature_source(maps: str, *, model: str, edge: int | None, patch: int) -> Callable[[Tensor], Tensor]:
    """Function from images [N, 3, H, W] in [0, 1] to patch features [N, Hp, Wp, D].

    Args:
        maps: "dinov2", "colours", or `package.module:function`.
        model: weights of dinov2.
        edge: shorter side of the pictures that dinov2 sees.
        patch: of colours.

    Raises:
        UserError: unknown, or the function cannot be imported.
    """
    if maps == "dinov2":
        from visual_grpo.rewards.image_features import DinoPatches

        return DinoPatches(model=model, edge=edge)
    if maps == "colours":
        return lambda images: colour_patches(images, patch)
    if ":" not in maps:
        raise UserError(
            f"method.vipo.maps is {maps!r}; known: dinov2, colours, ones, or a function of your own as package.module:function"
        )
    function = load_object(maps, "source of patch features")
    if not callable(function):
        raise UserError(f"method.vipo.maps: {maps!r} is {type(function).__name__}, which cannot be called")
    return function  # type: ignore[no-any-return]
