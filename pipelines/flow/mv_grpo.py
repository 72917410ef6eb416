"""MV-GRPO: "From Sparse to Dense: Multi-View GRPO for Flow Models via Augmented Condition Space", arXiv 2603.12648.

What differs from GRPO: further captions near the prompt are made, and the SAME samples are scored and compared under each.
A row becomes 1 + captions rows that share their stored transitions: own caption, own reward, own group (prompt, caption), own
log-probs. A plug-in: put it behind `flow_grpo` or another method of flow models, `method: [flow_grpo, mv_grpo]`.

The ratio compares new and old weights under the same caption, so it is 1 before the first update; for later updates the old
log-probs of the added rows are computed once after the rollout. The paper's code was not published when this was written; these
are choices: same-caption ratio, equal weight of views (`view_weight`), std inside each view, all views trained at every step (the
training forwards grow by 1 + captions), no bound on how far a caption may lie from the prompt. Held in memory: the transitions
once for each view.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import (
    AdvantageConfig,
    KlConfig,
    RatioConfig,
    RewardConfig,
    RunConfig,
)
from visual_grpo.errors import RunError, UserError
from visual_grpo.groups import segment_count, segment_range
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.flow.dancegrpo import dancegrpo_training
from visual_grpo.pipelines.flow.enhancers import build_enhancer, distinct, most_captions
from visual_grpo.pipelines.flow.flow_grpo import paper_training, scenes, sd35_medium, tiny_training
from visual_grpo.pipelines.flow.mixgrpo import flux1_dev
from visual_grpo.types import PromptBatch, RewardBatch, RolloutBatch

logger = logging.getLogger(__name__)


class MvGrpoConfig(MethodConfig):
    """Options of MV-GRPO."""

    captions: int = Field(4, ge=0, description="further captions a prompt; 0 = the base method")
    enhancer: str = Field(
        "llm",
        description="llm: rewrites the prompt; vlm: describes samples; scenes, scenes_seen: rules of testbed/scenes, the second "
        "with what was drawn; or package.module:function(prompt, images, count)",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="of llm and vlm: model, endpoint, dtype, ... (fields of JudgeSettings)"
    )
    deduplicate: bool = Field(True, description="drop empty captions, and those that are the prompt or came before")
    view_weight: float = Field(1.0, ge=0, description="weight of an added view; the prompt's own has 1")


class MvGrpo(Method[MvGrpoConfig]):
    """Rows of further captions."""

    Config: ClassVar[type[MethodConfig]] = MvGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"transition", "noise_pair"}), kinds=frozenset({"diffusion"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "eval": {"sampling": {"solver": "ode"}},
        "advantage": {"scope": "group", "std": "population", "eps": 1e-4, "drop_flat": False},
        "ratio": {"clip_low": 1e-4, "clip_high": 1e-4},
        "kl": {"estimator": "gaussian"},
    }

    def __init__(self, config: MvGrpoConfig) -> None:
        """Prepare the enhancer; no model is loaded yet."""
        super().__init__(config)
        self._enhance = build_enhancer(config.enhancer, config.options)
        self._compared = False
        self._first_step: int | None = None

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Captions differ in the scale of their rewards; a model gives so many at most."""
        if run.advantage.scope == "batch" and self.config.captions > 0:
            raise UserError(
                "mv_grpo compares samples under one caption: set advantage.scope to group (its default), since captions differ "
                "in the scale of their rewards; and put mv_grpo behind the method that samples: method=[flow_grpo, mv_grpo]"
            )
        most = most_captions(self.config.enhancer)
        if most is not None and self.config.captions > most:
            raise UserError(
                f"method.mv_grpo.captions ({self.config.captions}) must be at most {most} with enhancer "
                f"{self.config.enhancer!r}, which varies {most} attributes"
            )

    def after_rollout(self, rollouts: RolloutBatch, state: LoopState) -> RolloutBatch:
        """Add the rows of the further captions, behind those of their group."""
        if self.config.captions == 0:
            return rollouts
        groups = torch.unique(rollouts.group_ids).tolist()
        rows_of = {group: torch.nonzero(rollouts.group_ids == group).flatten() for group in groups}
        views = self._views(rollouts, rows_of, state)
        index, captions, metadata, numbers = [], [], [], []
        for group in groups:
            for number, view in enumerate([None, *views[group]]):
                for row in rows_of[group].tolist():
                    index.append(row)
                    numbers.append(number)
                    captions.append(rollouts.prompts.prompts[row] if view is None else view[0])
                    metadata.append(rollouts.prompts.metadata[row] if view is None else view[1])
        rows = rollouts.select(torch.tensor(index, dtype=torch.int64))
        view_of = torch.tensor(numbers, dtype=torch.int64)
        rows.prompts = self._own_captions(rows.prompts, captions, metadata, view_of)
        return self._with_old(rows, view_of, state)

    def _views(
        self, rollouts: RolloutBatch, rows_of: Mapping[int, Tensor], state: LoopState
    ) -> dict[int, list[tuple[str, dict[str, Any]]]]:
        assert rollouts.images is not None
        firsts = [int(rows[0]) for rows in rows_of.values()]
        prompts = [rollouts.prompts.prompts[row] for row in firsts]
        made = self._enhance(
            prompts,
            [rollouts.prompts.metadata[row] for row in firsts],
            [rollouts.images[rows] for rows in rows_of.values()],
            self.config.captions,
            [state.generator(13, group) for group in rows_of],
        )
        if not any(made):
            raise RunError(
                f"mv_grpo: enhancer {self.config.enhancer!r} gave no caption for any of {len(prompts)} prompts, such as "
                f"{prompts[0]!r}"
            )
        views = {}
        for group, prompt, each in zip(rows_of, prompts, made, strict=True):
            if self.config.deduplicate:
                kept = set(distinct([caption for caption, _ in each], prompt))
                by_caption = {caption: metadata for caption, metadata in reversed(each) if caption in kept}
                each = [
                    (caption, by_caption[caption]) for caption in dict.fromkeys(c for c, _ in each) if caption in kept
                ]
            views[group] = each[: self.config.captions]
        return views

    def _own_captions(
        self, prompts: PromptBatch, captions: list[str], metadata: list[dict[str, Any]], view_of: Tensor
    ) -> PromptBatch:
        """The rows' own captions and groups; what they were sampled under stays in the context `behaviour`."""
        contexts = dict(prompts.contexts)
        contexts["behaviour"] = prompts.context("behaviour")
        if "training" in contexts:
            pairs = zip(contexts["training"], captions, view_of.tolist(), strict=True)
            contexts["training"] = [caption if view else own for own, caption, view in pairs]
        return replace(
            prompts,
            prompts=captions,
            metadata=metadata,
            group_ids=prompts.group_ids * (self.config.captions + 1) + view_of,
            tags=prompts.tags | {"view": view_of},
            contexts=contexts,
        )

    @torch.no_grad()
    def _with_old(self, rows: RolloutBatch, view_of: Tensor, state: LoopState) -> RolloutBatch:
        """Old log-probs of the added rows under their own captions; none for a single update, whose ratio is 1.

        The first step of a process has them always: its self-test compares sampling and replay.
        """
        if self._first_step is None:
            self._first_step = state.step
        train = state.config.train
        single = train.updates_per_step * train.epochs_per_step == 1 and state.config.ratio.old == "auto"
        unread = single and state.sampling.replays_the_sampler and state.step != self._first_step
        if rows.old_log_prob is None or unread:
            return replace(rows, old_log_prob=None)
        old = rows.old_log_prob.clone()
        added = torch.nonzero(view_of > 0).flatten()
        for index in added.split(train.micro_batch):
            part = rows.select(index).to(state.policy.device)
            for units in torch.arange(rows.num_units).split(train.units_per_pass or rows.num_units):
                found = state.policy.log_prob(part, units).value.to(old)
                old[index.to(old.device)[:, None], units.to(old.device)] = found
        return replace(rows, old_log_prob=old)

    def after_score(
        self, rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState
    ) -> tuple[RolloutBatch, RewardBatch]:
        """Warn once of a reward that gives a sample the same score under every caption."""
        if not self._compared and "view" in rollouts.prompts.tags:
            self._compared = True
            total = rewards.total()
            _, samples = torch.unique(rollouts.prompts.row_ids, return_inverse=True)
            scored = ~total.isnan()
            several = segment_count(samples, mask=scored) > 1
            spread = segment_range(torch.nan_to_num(total), samples, mask=scored)
            if bool(several.any()) and float(spread.max()) <= 1e-8:
                logger.warning(
                    "mv_grpo: every sample has the same reward under all its captions, so the rewards (%s) ignore the text and "
                    "further captions are useless; use a reward that reads the prompt",
                    ", ".join(rewards.names),
                )
        return rollouts, rewards

    def unit_weights(self, weights: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Added views count `view_weight`."""
        view_of = rollouts.prompts.tags.get("view")
        if view_of is None or self.config.view_weight == 1:
            return weights
        return weights * torch.where(view_of > 0, self.config.view_weight, 1.0).to(weights)[:, None]


def mv_grpo_tiny() -> RunConfig:
    """Flow-GRPO with two further captions on the tiny SD3: `flow_grpo_tiny`'s samples and steps, three times its trained rows."""
    made = scenes(
        "mv_grpo_tiny",
        "flow_grpo",
        "Flow-GRPO with MV-GRPO's further captions on the testbed's scenes",
        sampling={"steps": 6, "guidance": 1.0, "noise_scale": 0.7},
        advantage=AdvantageConfig(scope="group"),
        kl=KlConfig(beta=0.3, estimator="gaussian"),
        train=tiny_training(48),
    )
    return made.model_copy(
        update={"method": [{"flow_grpo": {}}, {"mv_grpo": {"captions": 2, "enhancer": "scenes_seen"}}]}
    )


def mv_grpo_sd35_medium() -> RunConfig:
    """Flow-GRPO with MV-GRPO on SD3.5-medium, HPS v3 and captions of a VLM; Flow-GRPO's settings for SD3.5.

    The paper trains FLUX.1-dev and gives neither the number of captions nor learning rate and clip range.
    """
    made = sd35_medium(
        "mv_grpo_sd35_medium",
        "flow_grpo",
        "Flow-GRPO with MV-GRPO's captions of a VLM on SD3.5-medium, HPS v3",
        "hps_v3",
        rewards={"hps_v3": RewardConfig()},
        advantage=AdvantageConfig(scope="group"),
        ratio=RatioConfig(clip_low=1e-4, clip_high=1e-4),
        kl=KlConfig(beta=0.01, estimator="gaussian"),
        train=paper_training(),
    )
    options = {"model": "Qwen/Qwen3-VL-8B-Instruct", "endpoint": "http://localhost:8000/v1"}
    return made.model_copy(
        update={
            "method": [{"flow_grpo": {}}, {"mv_grpo": {"captions": 4, "enhancer": "vlm", "options": options}}],
        }
    )


def mv_grpo_flux1_dev() -> RunConfig:
    """The paper's run: FLUX.1-dev, HPS v3, captions of a VLM; what the paper does not give is that of DanceGRPO's run."""
    made = flux1_dev(
        "mv_grpo_flux1_dev",
        "dancegrpo",
        "DanceGRPO with MV-GRPO's captions of a VLM on FLUX.1-dev, HPS v3",
        rewards={"hps_v3": RewardConfig()},
        sampling={"steps": 16},
        train=dancegrpo_training(),
    )
    options = {"model": "Qwen/Qwen3-VL-8B-Instruct", "endpoint": "http://localhost:8000/v1"}
    views = {"captions": 4, "enhancer": "vlm", "options": options}
    return made.model_copy(update={"method": [{"dancegrpo": {}}, {"mv_grpo": views}]})
