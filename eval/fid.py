"""Frechet distance of image features to a reference set (FID with Inception features), by torchmetrics.

FID falls with the number of images: compare only sets of one size. Its interval is the spread over resamples of the generated
images around the value, for a resample has doubled images and so a larger distance itself. Needs the extra `fid`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.errors import UserError
from visual_grpo.eval.features import feature_rows, load_features, pack, unpack
from visual_grpo.eval.images import ImageSample, find_pictures
from visual_grpo.eval.protocol import finish, score_samples

__all__ = ["evaluate", "frechet_distance"]

logger = logging.getLogger(__name__)


class _Given(nn.Module):
    """Features that are ready: the metric gets [N, D] in place of images."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, rows: Tensor) -> Tensor:
        return rows


def _metric(feature: Any) -> Any:
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance

        return FrechetInceptionDistance(feature=feature)
    except ImportError as error:  # of torchmetrics, or of torch-fidelity for Inception
        raise UserError(
            f"the evaluation 'fid' needs torchmetrics (and torch-fidelity for features=inception): {error}. Install them with: "
            f"pip install 'visual-grpo[fid]'"
        ) from error


def frechet_distance(generated: Tensor, reference: Tensor) -> float:
    """Frechet distance of two Gaussians fitted to features [N, D] and [M, D], with Bessel's correction; N, M > 1."""
    metric = _metric(_Given(generated.shape[1]))
    metric.update(reference.double(), real=True)
    metric.update(generated.double(), real=False)
    return float(metric.compute())


def _inception(images: Tensor) -> Tensor:
    network = _inception_network()
    found: Tensor = network((images * 255).round().clamp(0, 255).byte())
    return found


_networks: dict[str, Any] = {}


def _inception_network() -> Any:
    if "inception" not in _networks:
        try:
            _networks["inception"] = _metric(2048).inception.eval()
        except (OSError, RuntimeError) as error:  # the weights are fetched at the first use
            raise UserError(
                f"features=inception needs the Inception weights, which could not be fetched ({str(error).splitlines()[0]}); "
                f"load them once where there is network, or give features=dino, or package.module:Name."
            ) from error
    return _networks["inception"]


def evaluate(
    *,
    images: str | Path | None = None,
    prompts: str | Path | None = None,
    out: str | Path | None = None,
    reference: str | Path | None = None,
    features: Any = "inception",
    resamples: int = 20,
    batch_size: int = 32,
    model: str | None = None,
    adapter: str | Path | None = None,
) -> dict[str, Any]:
    """Compare a folder of images with a folder of reference images.

    Args:
        images: folder; all images in it and below count.
        prompts: not used.
        out: result folder; it keeps the features, so that an interrupted run goes on.
        reference: folder of the reference images.
        features: "inception" (published FID), "clip", "dino", "pixels", "package.module:Name" or a function; see `load_features`.
        resamples: of the interval; 0 for none.
        batch_size: images at a time.
        model, adapter: not used; a model is sampled before this is called.

    Returns:
        fid, features, images, reference_images, table.

    Raises:
        UserError: a folder is missing or has fewer than two images, or a package is.
    """
    if images is None or reference is None:
        raise UserError("fid needs images (--images DIR) or a model, and a folder of reference images (reference=DIR).")
    extract = _inception if features == "inception" else load_features(features)
    name = features if isinstance(features, str) else getattr(features, "__name__", type(features).__name__)
    lines = _features(images, extract, name, out, batch_size)
    known = _features(reference, extract, name, None if out is None else Path(out) / "reference", batch_size)
    generated, real = unpack(lines), unpack(known)
    for where, rows in ((images, generated), (reference, real)):
        if not bool(torch.isfinite(rows).all()):
            raise UserError(
                f"fid: the features {name!r} of an image in {str(where)!r} are not finite; look at the images."
            )
    if min(len(generated), len(real)) <= generated.shape[1]:
        logger.warning(
            "fid: %d and %d images are too few for %d features: the covariances are singular and the figure is biased upward; "
            "compare it only with figures of as many images.", len(generated), len(real), generated.shape[1],
        )  # fmt: skip
    value = frechet_distance(generated, real)
    row = {"figure": f"FID ({name})", "group": "", "value": value, "low": None, "high": None}
    if resamples > 1:
        generator = torch.Generator().manual_seed(0)
        drawn = [
            frechet_distance(generated[torch.randint(len(generated), (len(generated),), generator=generator)], real)
            for _ in range(resamples)
        ]
        reach = 1.96 * float(torch.tensor(drawn, dtype=torch.float64).std())
        row |= {"low": max(value - reach, 0.0), "high": value + reach}
    row |= {"images": len(lines), "prompts": len(lines)}
    summary = {"fid": value, "features": name, "images": len(lines), "reference_images": len(known), "table": [row]}
    return finish(summary, lines, out=out)


def _features(
    folder: str | Path, extract: Callable[[Tensor], Tensor], name: str, out: Any, batch_size: int
) -> list[dict[str, Any]]:
    def score(samples: list[ImageSample], pictures: Tensor) -> list[dict[str, Any]]:
        with torch.no_grad():
            return [{"features": pack(row)} for row in feature_rows(extract, pictures)]

    samples = find_pictures(folder)
    if len(samples) < 2:
        raise UserError(f"fid needs at least two images in {str(folder)!r}; it has {len(samples)}.")
    settings = {"features": name}
    return score_samples(samples, score, name="fid", out=out, settings=settings, batch_size=batch_size)
