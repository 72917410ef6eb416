"""SEED-GRPO: "Semantic Entropy EnhanceD GRPO for Uncertainty-Aware Policy Optimization", arXiv 2505.12346.

What differs from GRPO: the answers of a group are clustered by meaning (equal final answers), and all advantages of the group are
shrunk by one factor that falls with the entropy of the clusters: small steps where the model is of many minds. The paper's base
is Dr. GRPO: stack `[dr_grpo, seed_grpo]`. No code was published; the printed entropy is a mean over clusters, not Shannon's sum.
Departures, where the paper is silent or its text contradicts itself: a cluster's mass is its share of the answers, the
only reading that has both stated limits (`mass=probability` normalises the sequence probabilities in the group); the linear
factor is 1 - x; an answer that cannot be extracted is a cluster of its own. With the paper's `strength` of 0.02 the factor is
never below 0.98; effects can be expected from 0.5 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RolloutBatch

Form = Literal["linear", "exponential", "focal"]


def semantic_entropy(
    labels: Sequence[Hashable | None], log_prob: Tensor | None = None, *, shannon: bool = False
) -> float:
    """Entropy of the clusters of one group: `-(1 / K) sum_k log p_k`, or Shannon's `-sum_k p_k log p_k`.

    Args:
        labels: one an answer; equal labels are one cluster, None is a cluster of its own.
        log_prob: [G] summed log-probs of the answers, whose probabilities then make the masses; None: the answers count alike.
        shannon: Shannon's form.

    Returns:
        Nats; 0 for one cluster or no answer.

    Example:
        >>> round(semantic_entropy(["7", "8", "8", None]), 6)
        1.155245
    """
    if not labels:
        return 0.0
    keys: dict[object, int] = {}
    cluster = [keys.setdefault((i,) if label is None else (None, label), len(keys)) for i, label in enumerate(labels)]
    scores = torch.zeros(len(labels), dtype=torch.float64) if log_prob is None else log_prob.detach().double().cpu()
    weight = scores.log_softmax(0)
    members = torch.tensor(cluster)
    log_mass = torch.stack([weight[members == k].logsumexp(0) for k in range(len(keys))])
    entropy = -(log_mass.exp() * log_mass).sum() if shannon else -log_mass.mean()
    return max(float(entropy), 0.0)


def modulation(entropy: float, size: int, *, strength: float, form: Form = "linear", gamma: float = 2.0) -> float:
    """Factor of a group of `size` answers, with `x = strength * min(entropy / log(size), 1)`: in [0, 1], 1 at x = 0.

    Example:
        >>> round(modulation(1.155245, 4, strength=0.02), 6)
        0.983333
    """
    x = strength * min(entropy / math.log(size), 1.0) if size > 1 else 0.0
    if form == "exponential":
        return math.exp(-x)
    return max(1.0 - x, 0.0) ** (gamma if form == "focal" else 1.0)


class SeedGrpoConfig(MethodConfig):
    """Options of SEED-GRPO."""

    strength: float = Field(0.02, ge=0, description="alpha of the paper: how much the factor falls at full entropy")
    form: Form = Field("linear", description="1 - x, exp(-x), or (1 - x)^gamma")
    gamma: float = Field(2.0, gt=0, description="power of the focal form")
    mass: Literal["count", "probability"] = Field(
        "count", description="of a cluster: its share of the answers, or of their probabilities when they were sampled"
    )
    shannon: bool = Field(False, description="Shannon's entropy in place of the printed mean over clusters")
    extraction: Literal["auto", "answer_tag", "boxed", "hashes", "last_number", "letter", "whole"] = Field(
        "auto", description="where the final answer stands, as for the reward exact_match"
    )


class SeedGrpo(Method[SeedGrpoConfig]):
    """One factor a group, from the spread of its final answers."""

    Config: ClassVar[type[MethodConfig]] = SeedGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Refuse what would not be read."""
        if self.config.form != "focal":
            self.config.refuse_idle("seed_grpo", ["gamma"], "form=focal")

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Multiply each group by its factor."""
        labels, log_prob = self._labels(rollouts, state), self._log_prob(rollouts)
        factors = torch.ones(len(rollouts), dtype=torch.float64)
        entropies = []
        for group in torch.unique(rollouts.group_ids).tolist():
            rows = torch.nonzero(rollouts.group_ids == group).flatten()
            entropy = semantic_entropy(
                [labels[i] for i in rows.tolist()],
                None if log_prob is None else log_prob[rows],
                shannon=self.config.shannon,
            )
            options = self.config
            factors[rows] = modulation(
                entropy, len(rows), strength=options.strength, form=options.form, gamma=options.gamma
            )
            entropies.append(entropy)
        state.log(
            {
                "seed_grpo/entropy": (torch.tensor(entropies).sum(), torch.tensor(len(entropies))),
                "seed_grpo/factor": (factors.sum(), torch.tensor(len(factors))),
            }
        )
        return advantages * factors.to(advantages).reshape(-1, *([1] * (advantages.ndim - 1)))

    def _labels(self, rollouts: RolloutBatch, state: LoopState) -> list[Hashable | None]:
        from visual_grpo.rewards.answers import answer_label, extract_answer

        if rollouts.texts is None:
            raise UserError(
                f"seed_grpo compares the final answers of texts, and adapter {state.config.model.adapter!r} makes none; "
                "remove the method"
            )
        found = [extract_answer(text, self.config.extraction) for text in rollouts.texts]
        return [None if answer is None else answer_label(answer) for answer in found]

    def _log_prob(self, rollouts: RolloutBatch) -> Tensor | None:
        """[N] summed log-probs of the answers where these make the masses."""
        if self.config.mass == "count":
            return None
        if rollouts.old_log_prob is None:
            raise UserError("method.seed_grpo.mass=probability needs the log-probs of the sampler; use mass=count")
        kept = rollouts.unit_mask.to(rollouts.old_log_prob.device)
        return torch.where(kept, rollouts.old_log_prob.double(), 0.0).sum(1).cpu()


def seed_grpo_text_tiny() -> RunConfig:
    """SEED-GRPO on the tiny LM's arithmetic, with a strength that can be seen (the paper's 0.02 changes 2 % at most)."""
    return arithmetic(
        "seed_grpo_text_tiny",
        ["dr_grpo", {"seed_grpo": {"strength": 0.5}}],
        "SEED-GRPO on the tiny LM's arithmetic: smaller steps where answers differ",
    )


def seed_grpo_qwen2_5_math_7b() -> RunConfig:
    """SEED-GRPO on Qwen2.5-Math-7B, the paper's settings: 128 prompts x 8, strength 0.02, at most 3,000 tokens."""
    return RunConfig(
        name="seed_grpo_qwen2_5_math_7b",
        summary="SEED-GRPO on Qwen2.5-Math-7B, the paper's settings",
        model=ModelConfig(
            adapter="text_lm", path="Qwen/Qwen2.5-Math-7B", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=["dr_grpo", {"seed_grpo": {"strength": 0.02, "extraction": "boxed"}}],
        data=DataConfig(source="data/math_lvl3to5_8k.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 3000, "temperature": 1.0},
        train=TrainConfig(
            steps=500, prompts_per_step=128, group_size=8, micro_batch=8, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/math500.jsonl", every=20, samples=500, final_samples=500, batch=64),
    )
