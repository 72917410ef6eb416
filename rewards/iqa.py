"""Image quality without a reference image, by the package pyiqa: MUSIQ, MANIQA, CLIP-IQA, NIQE or BRISQUE.

Source: chaofengc/IQA-PyTorch (the extra `iqa`; its licence and those of its weights are non-commercial). Every measure is turned
so that higher is better: NIQE and BRISQUE, which count faults, are negated. Range: musiq about 0 to 100, maniqa 0 to 1, clipiqa 0
to 1, niqe about -100 to 0, brisque about -150 to 0. Every row is applicable; the prompt is not read.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.reward import RewardRequest, register_reward
from visual_grpo.rewards.loading import ModelReward, eight_bit, resident

__all__ = ["METRICS", "Iqa", "Metric"]

Name = Literal["musiq", "maniqa", "clipiqa", "niqe", "brisque"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What we need to know about one measure of pyiqa."""

    file: str
    """its weights, as pyiqa names them in its cache."""
    option: str = "pretrained_model_path"
    """pyiqa's argument for a path of one's own."""
    statistics: bool = False
    """no network: its arithmetic is double precision whatever the dtype."""
    least_side: int = 1


METRICS: dict[str, Metric] = {
    "musiq": Metric(file="musiq_koniq_ckpt-e95806b9.pth"),
    "maniqa": Metric(file="ckpt_koniq10k.pt", least_side=224),
    "clipiqa": Metric(file="RN50.pt", option="backbone"),
    # Blocks of 96 pixels at full and half size: fewer than two in the image give no covariance.
    "niqe": Metric(file="niqe_modelparameters.mat", statistics=True, least_side=192),
    "brisque": Metric(file="brisque_svm_weights.pth", statistics=True, least_side=32),
}


@register_reward("iqa")
class Iqa(ModelReward):
    """Quality of the image by one measure of pyiqa, higher is better.

    Details: `raw`, the measure with its own sign.
    """

    label = "iqa"

    def __init__(
        self,
        metric: Name = "musiq",
        *,
        weights: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
    ) -> None:
        """Choose the measure; nothing is loaded before the first call.

        Args:
            metric: "musiq", "maniqa", "clipiqa", "niqe" or "brisque".
            weights: path of its weights (clipiqa: of OpenAI's RN50.pt); None: pyiqa's own cache or download. pyiqa reads
                pickled files: give it only files that you trust.
            device, batch_size: see `ModelReward`.
            dtype: a half runs the network under autocast; niqe and brisque have no network and take float32 only.
        """
        super().__init__(device=device, dtype=dtype, batch_size=batch_size)
        if metric not in METRICS:
            raise UserError(f"iqa: metric is {metric!r}; give one of {', '.join(get_args(Name))}.")
        if METRICS[metric].statistics and dtype != "float32":
            raise UserError(f"iqa: {metric} has no network to run in {dtype}; leave dtype at float32.")
        self.metric, self.weights = metric, weights

    def load(self) -> Any:
        """Build pyiqa's measure with its weights."""
        try:
            import pyiqa
        except ImportError as error:
            raise UserError(
                f"the reward 'iqa' needs the package pyiqa ({error}); install it with: pip install 'visual-grpo[iqa]'"
            ) from error
        known = METRICS[self.metric]
        options: dict[str, Any] = {}
        if self.weights is not None:
            if not Path(self.weights).expanduser().is_file():
                raise UserError(
                    f"iqa's weights: {known.file!r} was looked for at {self.weights!r}, where there is no file. Give its "
                    f"path, or leave weights out for pyiqa's cache."
                )
            options[known.option] = str(Path(self.weights).expanduser())

        def build() -> Any:
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # pyiqa prints what it loads
                    return pyiqa.create_metric(self.metric, device=self.device, **options)
            except Exception as error:  # errors of urllib, torch, scipy and the hub's client
                reason = (str(error).strip() or repr(error)).splitlines()[0][:200]
                place = self.weights or str(
                    Path(torch.hub.get_dir()) / ("clip" if self.metric == "clipiqa" else "pyiqa")
                )
                raise UserError(
                    f"iqa's weights: {known.file!r} of {self.metric} could not be loaded from {place!r} nor fetched "
                    f"({reason}). Run pyiqa.create_metric({self.metric!r}) once where there is network and copy that "
                    f"folder, or give weights=PATH."
                ) from error

        return resident(("pyiqa", self.metric, self.weights, str(self.device)), build)

    def score(self, loaded: Any, request: RewardRequest) -> dict[str, Tensor]:
        """Measure the rows."""
        assert request.images is not None
        side, least = min(request.images.shape[-2:]), METRICS[self.metric].least_side
        if side < least:
            raise UserError(
                f"iqa: {self.metric} needs images of {least} pixels or more a side; these have {side}. Take another metric."
            )
        halved = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype if halved else torch.bfloat16, enabled=halved):
            raw: Tensor = loaded(eight_bit(request.images.to(self.device))).float().reshape(-1)
        return {"values": -raw if loaded.lower_better else raw, "raw": raw}
