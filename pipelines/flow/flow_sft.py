"""Supervised fine-tuning of flow models: the flow-matching loss on given pictures, a stage of any pipeline.

Source: the cold start of Flow-OPD (arXiv 2605.08063), which fits the student to its teachers' samples before it is distilled on
its own. What differs from GRPO: rows are not sampled from the policy (`teachers` sample them, each its own task, or the data set
names picture files), and the loss is `mean_d (v - (noise - x0))^2` at noise levels of a logit-normal distribution (0, 1). No
reward, ratio or group is read; rewards are scored for the record. Levels beyond those that a model was trained on (a UNet has
some) are moved to its last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import RunConfig
from visual_grpo.divergences import velocity_mse
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs, rollout_seed
from visual_grpo.objectives import Metrics
from visual_grpo.teachers import by_teacher, check_teachers, load_teachers
from visual_grpo.types import MicroBatch, PromptBatch, RolloutBatch


class FlowSftConfig(MethodConfig):
    """Options of supervised fine-tuning."""

    teachers: dict[str, str] = Field(
        default_factory=dict,
        description="{task: exported weights} that sample the rows; empty = the data set's pictures",
    )
    image_column: str = Field(
        "image", description="without teachers: metadata key of the picture file, from here or absolute"
    )
    pairs: int = Field(4, ge=1, description="noise levels, each with its own noise, that a picture is trained at")


class FlowSft(Method[FlowSftConfig]):
    """Flow matching on pictures of teachers or of the data set."""

    Config: ClassVar[type[MethodConfig]] = FlowSftConfig
    needs: ClassVar[Needs] = Needs(
        unit_kinds=frozenset({"noise_pair"}),
        kinds=frozenset({"diffusion"}),
        single_samples=True,
        compares_rewards=False,
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {"solver": "ode"},
        "eval": {"sampling": {"solver": "ode"}},
        "alarms": {"flat_groups": "off"},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Every task needs a teacher, where there are teachers."""
        if not sampling.self_normalize:
            raise UserError("flow_sft fits velocities, which are never divided; leave sampling.self_normalize out")
        if self.config.teachers:
            check_teachers("flow_sft", self.config.teachers, run)

    def setup(self, state: LoopState) -> None:
        """Load the teachers."""
        load_teachers("flow_sft", self.config.teachers, state)

    def units_per_row(self, sampling: Any) -> int:
        """The pairs."""
        return self.config.pairs

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Finished latents of the teachers' samples or of the data set's pictures, as rows of noise pairs."""
        rows = self._taught(prompts, state) if self.config.teachers else self._given(prompts, state)
        final: Tensor = rows.data["final"]
        adapter: Any = state.policy.adapter
        low, high = adapter.level_range  # a UNet was trained on none beyond 0.94
        levels, noises = [], []
        for row in prompts.row_ids.tolist():
            generator = state.generator(13, row)
            levels.append(torch.randn(self.config.pairs, generator=generator).sigmoid().clamp(low, high))
            noises.append(torch.randn(self.config.pairs, *final.shape[1:], generator=generator))
        return RolloutBatch(
            prompts=prompts,
            unit_kind="noise_pair",
            unit_mask=torch.ones(len(prompts), self.config.pairs, dtype=torch.bool),
            data={
                "final": final,
                "pair_sigma": torch.stack(levels).to(final),
                "pair_noise": torch.stack(noises).to(final),
            },
            shared=rows.shared,
            images=rows.images,
        )

    def _taught(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        order, parts = [], []
        for _, weights, rows in by_teacher(prompts, self.config.teachers, state):
            with state.policy.weights(weights):
                parts.append(
                    state.policy.sample(
                        prompts.select(rows),
                        seed=rollout_seed(state),
                        sampling=state.sampling,
                        units=torch.empty(0, dtype=torch.int64),
                        batch=state.config.train.rollout_batch,
                    )
                )
            order.append(rows)
        return RolloutBatch.concat(parts).select(torch.cat(order).argsort())

    def _given(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        adapter: Any = state.policy.adapter
        found = [_picture(row, self.config.image_column) for row in prompts.metadata]
        for row, picture in zip(prompts.metadata, found, strict=True):
            if picture.shape != found[0].shape:
                raise UserError(
                    f"flow_sft: picture {row[self.config.image_column]!r} has {_size(picture)} pixels, and "
                    f"{prompts.metadata[0][self.config.image_column]!r} {_size(found[0])}: give all pictures one size"
                )
        images = torch.stack(found)
        sampling: Any = state.sampling
        final = torch.cat([adapter.encode_images(part) for part in images.split(sampling.decode_batch)])
        wanted = adapter.latent_shape(state.sampling)
        if tuple(final.shape[1:]) != tuple(wanted):
            raise UserError(
                f"flow_sft: pictures of {_size(images)} pixels give latents {list(final.shape[1:])}, but the model is sampled at "
                f"{list(wanted)}: bring them to that size, or set sampling.height and sampling.width to theirs"
            )
        return RolloutBatch(
            prompts=prompts,
            unit_kind="noise_pair",
            unit_mask=torch.ones(len(prompts), 0, dtype=torch.bool),
            data={"final": final.to(adapter.step_dtype)},
            shared={"sampling": state.sampling},
            images=images,
        )

    def surrogate(self, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
        """The flow-matching loss of each pair, [n, u]."""
        velocity = micro.log_prob.velocity
        assert velocity is not None
        data = micro.rollouts.data
        target = data["pair_noise"].to(velocity)[:, micro.units] - data["final"].to(velocity)[:, None]
        loss = velocity_mse(velocity.flatten(0, 1), target.flatten(0, 1)).view(velocity.shape[:2])
        return loss, {"flow_sft/loss": ((loss.detach() * micro.mask).sum(), micro.mask.sum())}


def _size(picture: Tensor) -> str:
    """Height and width, for messages."""
    return " x ".join(map(str, picture.shape[-2:]))


def _picture(row: Mapping[str, Any], column: str) -> Tensor:
    """[3, H, W] float32 in [0, 1].

    Raises:
        UserError: the row names no picture file that can be read.
    """
    from PIL import Image

    given = row.get(column)
    if not isinstance(given, str):
        raise UserError(
            f"flow_sft: prompt {row.get('prompt')!r} has no picture in column {column!r} (got {given!r}): set "
            "method.flow_sft.image_column, or teachers"
        )
    try:
        with Image.open(Path(given)) as image:
            pixels = np.array(image.convert("RGB"))
    except OSError as error:
        raise UserError(f"flow_sft: cannot read picture {given!r}: {error.strerror or error}") from None
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
