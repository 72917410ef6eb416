"""DiffusionNFT: "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", arXiv 2509.16117.

What differs from GRPO: no log-prob, no ratio and no clip. A reward becomes the probability r that a sample is good; the finished
sample is noised again, and the velocity is fitted so that a mixture with the sampler's velocity moves towards good samples
(weight r) and its mirror image away from bad ones (weight 1 - r). Units are noise pairs at the sampler's own levels, drawn
without repeats, with fresh noise for each. Three sets of weights: the trained ones, `sampler` (their slow average, which samples)
and the reference (LoRA off). Where both first ones are equal, the gradient is that of the advantage-weighted flow-matching loss.

It follows the published code where the paper differs: r from the std of all rewards of the step, the self-normalised x0 loss
times the advantage limit over the strength, a pull to the reference. Departures: all levels of a row in one update (the code goes
through them one after the other within one, which is the same sum); float32 mathematics with a float32 model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import (
    DataConfig,
    EmaConfig,
    EvalConfig,
    KlConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs, rollout_seed
from visual_grpo.objectives import Metrics, elbo_pair_loss
from visual_grpo.pipelines.flow.flow_grpo import scenes, sd35_medium
from visual_grpo.types import MicroBatch, PromptBatch, RewardBatch, RolloutBatch

SAMPLER = "sampler"
"""The set of weights that samples (`old` in the paper); the loop's own `old` is a plain copy."""

Branches = Literal["all", "positive_only", "negative_only", "binary", "one_only"]


class DiffusionNftConfig(MethodConfig):
    """Options of DiffusionNFT. Advantages are limited by `advantage.clip`, the pull to the reference is `kl`."""

    strength: float = Field(
        1.0, gt=0, description="beta of the paper: share of the trained velocity in the mixtures; 1, or 0.1 on OCR"
    )
    branches: Branches = Field("all", description="what is done to advantages before they become probabilities")
    negative_weight: float = Field(
        1.0, ge=0, description="factor of the loss of the bad side; 0 is the ablation that collapses in the paper"
    )
    levels: int | None = Field(
        None, ge=1, description="noise levels trained a sample; null = all of the schedule but 1 % (at least one)"
    )
    noisy_share: float = Field(1.0, gt=0, le=1, description="share of the schedule, from the noisy end, to draw from")
    old_decay_start: int = Field(0, ge=0, description="optimizer steps during which the sampler is a plain copy")
    old_decay_rate: float = Field(0.001, ge=0, description="growth of the sampler's decay with each further step")
    old_decay_max: float = Field(0.5, ge=0, le=1, description="its limit; 1 = the sampler never moves")


def good_probability(advantages: Tensor, limit: float) -> Tensor:
    """Probability that a sample is good: advantages (any shape), clamped to +-limit, mapped to [0, 1].

    >>> good_probability(torch.tensor([-9.0, 0.0, 2.5]), 5.0)
    tensor([0.0000, 0.5000, 0.7500])
    """
    return (advantages.clamp(-limit, limit) / (2 * limit) + 0.5).clamp(0, 1)


def branch_advantages(advantages: Tensor, branches: Branches) -> Tensor:
    """Advantages of any shape as `branches` sees them; `one_only` gives 1 to what is above 0 and 0 to the rest."""
    if branches == "positive_only":
        return advantages.clamp(min=0)
    if branches == "negative_only":
        return advantages.clamp(max=0)
    if branches == "binary":
        return advantages.sign()
    if branches == "one_only":
        return (advantages > 0).to(advantages.dtype)
    return advantages


def nft_loss(
    prediction: Tensor,
    old_prediction: Tensor,
    x0: Tensor,
    good: Tensor,
    *,
    strength: float,
    limit: float,
    negative_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of noise pairs (arXiv 2509.16117, the self-normalised x0 regression of its published code).

    `limit / strength * (good l+ + (1 - good) l-)`, with `l` the squared error over its detached mean absolute value of the
    mixtures `strength new + (1 - strength) old` and `(1 + strength) old - strength new`.

    Args:
        prediction: clean latents [N, M, *latent] by the trained weights, with gradient.
        old_prediction: by the weights that sample, detached here.
        x0: the finished latents [N, *latent].
        good: probabilities [N, M] or [N, 1].
        strength: beta of the paper.
        limit: of the advantages; undoes the division in `good_probability`.
        negative_weight: factor of the second part.

    Returns:
        The loss [N, M], and its parts l+ and l- [N, M].
    """
    old = old_prediction.detach()
    better = elbo_pair_loss(strength * prediction + (1 - strength) * old, x0)
    worse = elbo_pair_loss((1 + strength) * old - strength * prediction, x0)
    mixed = good * better + negative_weight * (1 - good) * worse
    return limit * mixed / strength, better, worse


def old_decay(updates: int, *, start: int, rate: float, maximum: float) -> float:
    """Share of the sampler's weights that stays after `updates` optimizer steps: 0 before `start`, then rising to `maximum`.

    >>> [old_decay(n, start=75, rate=0.0075, maximum=0.999) for n in (0, 75, 100)]
    [0.0, 0.0, 0.1875]
    """
    return min(max(updates - start, 0) * rate, maximum)


class DiffusionNft(Method[DiffusionNftConfig]):
    """Samples with the slow weights, trains on noised copies of what they drew."""

    Config: ClassVar[type[MethodConfig]] = DiffusionNftConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"noise_pair"}), kinds=frozenset({"diffusion"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling": {"solver": "dpm", "guidance": 1.0},
        "eval": {"sampling": {"solver": "ode"}},
        "advantage": {"scope": "batch", "std": "population", "eps": 1e-4, "clip": 5.0, "drop_flat": False},
        "kl": {"beta": 1e-4, "estimator": "velocity"},
        "train": {"ema": {"decay": 0.9, "every": 1}},
    }

    def check(self, run: RunConfig, sampling: Any) -> None:
        """The loss has no ratio, and its advantages need a limit."""
        if run.advantage.clip is None:
            raise UserError("diffusion_nft turns advantages into probabilities by advantage.clip; set it (paper: 5)")
        if run.ratio.level != "token":
            raise UserError("diffusion_nft has no ratio; leave ratio.level out")
        if not sampling.self_normalize:
            raise UserError(
                "diffusion_nft always divides its loss by the mean error; leave sampling.self_normalize out"
            )
        if run.kl.beta > 0 and run.kl.estimator not in ("velocity", "prediction"):
            raise UserError(
                f"diffusion_nft has no log-prob, so kl.estimator={run.kl.estimator} says nothing; use velocity or prediction"
            )
        most = self._candidates(sampling.steps)
        if self.config.levels is not None and self.config.levels > most:
            raise UserError(
                f"method.diffusion_nft.levels ({self.config.levels}) must be at most {most}, the noise levels to draw from "
                "(sampling.steps times noisy_share)"
            )

    def units_per_row(self, sampling: Any) -> int:
        """The noise levels."""
        return self._count(sampling.steps)

    def _candidates(self, steps: int) -> int:
        return math.ceil(self.config.noisy_share * steps)

    def _count(self, steps: int) -> int:
        return min(self.config.levels or max(int(0.99 * steps), 1), self._candidates(steps))

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Sample with the slow weights; before the first step they are the trained ones."""
        if SAMPLER not in state.policy.sets:
            state.policy.snapshot(SAMPLER)
        with state.policy.weights(SAMPLER):
            return state.policy.sample(
                prompts, seed=rollout_seed(state), sampling=state.sampling, batch=state.config.train.rollout_batch
            )

    def after_rollout(self, rollouts: RolloutBatch, state: LoopState) -> RolloutBatch:
        """Replace the sampler's units by noise pairs, those of a row drawn by its id alone."""
        final = rollouts.data["final"]
        levels = rollouts.shared["sigmas"][:-1].to(final.device)
        count, candidates = self._count(len(levels)), self._candidates(len(levels))
        sigmas, noises = [], []
        for row in rollouts.prompts.row_ids.tolist():
            generator = state.generator(12, row)
            order = torch.randperm(candidates, generator=generator)[:count]
            sigmas.append(levels[order.to(levels.device)])
            noises.append(torch.randn(count, *final.shape[1:], generator=generator, dtype=torch.float32).to(final))
        sigma = torch.stack(sigmas)
        return replace(
            rollouts,
            unit_kind="noise_pair",
            unit_mask=torch.ones(sigma.shape, dtype=torch.bool),
            old_log_prob=None,
            unit_tags={},
            data={"final": final, "pair_sigma": sigma, "pair_noise": torch.stack(noises)},
        )

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Keep the sides that `branches` asks for."""
        return branch_advantages(advantages, self.config.branches)

    def surrogate(self, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
        """The loss of both mixtures; runs the slow weights once."""
        now, limit = micro.log_prob.prediction, state.config.advantage.clip
        assert now is not None
        assert limit is not None
        with torch.no_grad(), state.policy.weights(SAMPLER):
            old = state.policy.log_prob(micro.rollouts, micro.units).prediction
        assert old is not None
        good = good_probability(micro.advantages, limit)
        loss, better, worse = nft_loss(
            now, old, micro.rollouts.data["final"].to(now.device), good, strength=self.config.strength, limit=limit,
            negative_weight=self.config.negative_weight,
        )  # fmt: skip
        kept = micro.mask > 0
        count = kept.sum()
        figures = {"good": good.expand_as(loss), "loss_good": better, "loss_bad": worse}
        return loss, {f"nft/{name}": (value.detach()[kept].sum(), count) for name, value in figures.items()}

    def after_step(self, metrics: Mapping[str, float], state: LoopState) -> None:
        """Let the slow weights follow."""
        train, config = state.config.train, self.config
        updates = (state.step + 1) * train.updates_per_step * train.epochs_per_step
        decay = old_decay(
            updates, start=config.old_decay_start, rate=config.old_decay_rate, maximum=config.old_decay_max
        )
        state.policy.average_into(SAMPLER, decay)


def diffusion_nft_tiny() -> RunConfig:
    """DiffusionNFT on the tiny SD3, on `flow_grpo_tiny`'s batch and steps, with V-GRPO's learning rate and pull.

    Both because its first gradient is V-GRPO's. Euler steps, as the evaluation and the base model's training have them.
    """
    return scenes(
        "diffusion_nft_tiny",
        "diffusion_nft",
        "DiffusionNFT on the testbed's scenes",
        sampling={"steps": 6, "guidance": 1.0, "solver": "ode"},
        kl=KlConfig(beta=0.3, estimator="prediction"),
        train=TrainConfig(
            steps=48,
            prompts_per_step=8,
            group_size=12,
            micro_batch=96,
            units_per_pass=1,
            optimizer=OptimizerConfig(lr=3e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear"),
            ema=EmaConfig(decay=0.9, every=1),
        ),
    )


def _paper(
    name: str, summary: str, reward: str, options: dict[str, Any], *, steps: int, updates: int = 1, **over: Any
) -> RunConfig:
    """SD3.5-medium without guidance, 48 prompts x 24 images; evaluated with 40 Euler steps."""
    settings: dict[str, Any] = {
        "sampling": {"steps": 10, "guidance": 1.0, "solver": "dpm"},
        "kl": KlConfig(beta=1e-4, estimator="velocity"),
        "train": TrainConfig(
            steps=steps,
            prompts_per_step=48,
            group_size=24,
            updates_per_step=updates,
            micro_batch=9,
            units_per_pass=1,
            rollout_batch=48,
            optimizer=OptimizerConfig(lr=3e-4, weight_decay=1e-4),
            ema=EmaConfig(decay=0.9, every=1),
        ),
    }
    return sd35_medium(name, {"diffusion_nft": options}, summary, reward, **(settings | over))


def diffusion_nft_sd35_medium_geneval() -> RunConfig:
    """DiffusionNFT, SD3.5-medium, GenEval: strength 1, 10 steps."""
    return _paper(
        "diffusion_nft_sd35_medium_geneval",
        "DiffusionNFT on SD3.5-medium, GenEval",
        "geneval",
        {"strength": 1.0},
        steps=1000,
        rewards={"geneval": RewardConfig(params={"mode": "partial", "detector": "mask2former"})},
    )


def diffusion_nft_sd35_medium_pickscore() -> RunConfig:
    """DiffusionNFT, SD3.5-medium, PickScore / 26: strength 1, 10 steps."""
    return _paper(
        "diffusion_nft_sd35_medium_pickscore",
        "DiffusionNFT on SD3.5-medium, PickScore",
        "pickscore",
        {"strength": 1.0},
        steps=2000,
    )


def diffusion_nft_sd35_medium_ocr() -> RunConfig:
    """DiffusionNFT, SD3.5-medium, text rendering: strength 0.1, two updates a step, the second decay schedule."""
    return _paper(
        "diffusion_nft_sd35_medium_ocr",
        "DiffusionNFT on SD3.5-medium, OCR",
        "ocr",
        {"strength": 0.1, "old_decay_start": 75, "old_decay_rate": 0.0075, "old_decay_max": 0.999},
        steps=150,
        updates=2,
    )


def diffusion_nft_sd35_medium_multi() -> RunConfig:
    """DiffusionNFT, SD3.5-medium, three preference rewards: strength 0.1, the paper's 40 steps (its code: 25).

    The first of the paper's five stages; then GenEval beside the three (300 iterations), the three (200), GenEval (200) and OCR
    (100; decay limit 0.95) beside them.
    """
    return _paper(
        "diffusion_nft_sd35_medium_multi",
        "DiffusionNFT on SD3.5-medium, PickScore + HPSv2.1 + CLIPScore",
        "pickscore",
        {"strength": 0.1},
        steps=800,
        data=DataConfig(source="data/pickapic/train.txt"),
        rewards={"pickscore": RewardConfig(), "hps_v2": RewardConfig(), "clip_score": RewardConfig()},
        sampling={"steps": 40, "guidance": 1.0, "solver": "dpm"},
        eval=EvalConfig(
            source="data/pickapic/test.txt", every=30, samples=480, final_samples=2048, batch=16, sampling={"steps": 40}
        ),
    )


def diffusion_nft_flux1_dev() -> RunConfig:
    """DiffusionNFT on FLUX.1-dev, PickScore: the settings of a third party (Flow-Factory); the paper trains SD3.5-medium alone.

    384 px, 8 Euler steps, 48 prompts x 16, LoRA of rank 64, two levels of the noisier 70 %, no pull to the reference.
    """
    return sd35_medium(
        "diffusion_nft_flux1_dev",
        {"diffusion_nft": {"strength": 1.0, "levels": 2, "noisy_share": 0.7}},
        "DiffusionNFT on FLUX.1-dev, PickScore, settings of a third party",
        "pickscore",
        model=ModelConfig(
            adapter="flux",
            path="black-forest-labs/FLUX.1-dev",
            dtype="bfloat16",
            lora=LoraConfig(rank=64, alpha=128),
            gradient_checkpointing=True,
        ),
        sampling={
            "steps": 8,
            "solver": "ode",
            "embedded_guidance": 3.5,
            "height": 384,
            "width": 384,
            "max_sequence_length": 512,
        },
        kl=KlConfig(beta=0.0, estimator="velocity"),
        train=TrainConfig(
            steps=1000,
            prompts_per_step=48,
            group_size=16,
            micro_batch=4,
            rollout_batch=16,
            optimizer=OptimizerConfig(lr=3e-4, weight_decay=1e-4),
            ema=EmaConfig(decay=0.9, every=1),
        ),
        eval=EvalConfig(
            source="data/pickscore/test.jsonl",
            every=50,
            samples=480,
            final_samples=2048,
            batch=8,
            sampling={"steps": 28},
        ),
    )
