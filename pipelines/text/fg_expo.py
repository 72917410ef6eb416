"""FG-ExPO: "Frontier-Guided Exploration-Prioritized Policy Optimization via Adaptive KL and Gaussian Curriculum",
arXiv 2605.11403.

What differs from GRPO: two controllers around it. The KL coefficient follows the batch, `kl.beta * (tanh(accuracy) + 1) / 2`: a
batch that fails is held less tightly to the reference. Questions are drawn in proportion to a Gaussian of their running pass rate
around 0.5, so that compute goes to the frontier. GRPO is as printed: population std, symmetric clip, k3, token mean.
Departures, where the paper is silent: eps 1e-6; questions are drawn without replacement within a batch; one accuracy holds for
all updates of a rollout batch; rows without a score count nowhere, and a question without any keeps its rate. While all rates are
equal (at the start), prompts come in shuffled epochs, as without the method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    KlConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import RunError, UserError
from visual_grpo.method import LoopState, Method, MethodConfig
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import RewardBatch, RewardStatus, RolloutBatch

START = 0.5
"""Pass rate of a question that was never drawn, and the middle of the Gaussian."""
LEAST = 1e-30
"""Weight of a question however far its rate is from the middle."""


def kl_factor(accuracy: float) -> float:
    """Factor of the KL coefficient, rising from 0.5 at accuracy 0 to 0.880797 at 1: `(tanh(x) + 1) / 2`.

    Example:
        >>> round(kl_factor(0.375), 6)
        0.679179
    """
    return (math.tanh(accuracy) + 1) / 2


def question_weights(rates: Tensor, sigma: float) -> Tensor:
    """Weights `exp(-(rate - 0.5)^2 / (2 sigma^2))` of questions with pass rates [P], to be drawn in proportion.

    Example:
        >>> question_weights(torch.tensor([0.5, 1.0]), 0.35)
        tensor([1.0000, 0.3604])
    """
    # Not down to 0, which would leave a question out for good.
    return torch.exp(-((rates - START) ** 2) / (2 * sigma**2)).clamp(min=LEAST)


class FgExpoConfig(MethodConfig):
    """Options of FG-ExPO."""

    adaptive_kl: bool = Field(True, description="scale kl.beta by the accuracy of the batch; false = the plain kl.beta")
    sigma: float | None = Field(0.35, gt=0, description="width of the Gaussian over pass rates; null = no curriculum")
    decay: float = Field(0.9, ge=0, lt=1, description="share of the old pass rate when a question is drawn again")
    correct: str | None = Field(
        None, description="reward that says from 0 to 1 whether an answer is right; null = the total of all"
    )


class FgExpo(Method[FgExpoConfig]):
    """Adaptive KL and Gaussian curriculum."""

    Config: ClassVar[type[MethodConfig]] = FgExpoConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "population", "eps": 1e-6},
        "ratio": {"clip_low": 0.2, "clip_high": 0.2},
        "loss": {"aggregation": "token_mean"},
        "kl": {"beta": 0.02, "estimator": "k3"},
    }

    def __init__(self, config: FgExpoConfig) -> None:
        super().__init__(config)
        self._rates = torch.zeros(0, dtype=torch.float64)
        self._seen: dict[int, tuple[int, float]] = {}
        """{group: (question, rate)} of this step and process."""

    def check(self, run: RunConfig, sampling: Any) -> None:
        """A KL to scale, and a reward that says what is right; refuse what would not be read."""
        if self.config.sigma is None:
            self.config.refuse_idle("fg_expo", ["decay"], "sigma")
        if self.config.adaptive_kl and run.kl.beta == 0:
            raise UserError(
                "fg_expo scales the pull to the reference model, but kl.beta is 0: set kl.beta (paper: 0.02), or "
                "method.fg_expo.adaptive_kl=false to keep the curriculum alone"
            )
        trained = [name for name, reward in run.rewards.items() if not reward.eval_only]
        if self.config.correct is not None and self.config.correct not in trained:
            raise UserError(
                f"method.fg_expo.correct is {self.config.correct!r}, which is no reward that is trained on; "
                f"give one of {', '.join(trained)}"
            )

    def select_prompts(self, weights: Tensor, state: LoopState) -> Tensor:
        """Gaussian weights of the questions by their pass rates."""
        if len(self._rates) == 0:
            self._rates = torch.full((len(weights),), START, dtype=torch.float64)
        if len(self._rates) != len(weights):
            raise UserError(
                f"the checkpoint of fg_expo holds the pass rates of {len(self._rates)} questions, and data.source has "
                f"{len(weights)}; resume with the prompt set that the run began with"
            )
        if self.config.sigma is None:
            return weights
        return weights * question_weights(self._rates, self.config.sigma)

    def shape_rewards(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """Note the pass rates of whole groups, those that are dropped later too; the rewards stay as they are."""
        correct = self._correct(rewards)
        for group in torch.unique(rollouts.group_ids).tolist():
            rows = rollouts.group_ids == group
            scored = correct[rows][~correct[rows].isnan()]
            if len(scored):
                question = int(rollouts.prompts.tags["index"][rows][0])
                self._seen.setdefault(group, (question, float(scored.mean())))
        return rewards

    def kl_scale(self, scale: float, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> float:
        """The factor of the batch's accuracy, over all processes; unchanged where nothing was scored."""
        correct = self._correct(rewards)
        scored = ~correct.isnan()
        total, count = state.ranks.sum(torch.stack([correct[scored].sum(), scored.sum().double()])).tolist()
        if not self.config.adaptive_kl or count == 0:
            return scale
        factor = scale * kl_factor(total / count)
        one = torch.tensor(1.0)
        state.log({"fg_expo/kl_beta": (torch.tensor(state.config.kl.beta * factor), one)})
        return factor

    def after_step(self, metrics: Mapping[str, float], state: LoopState) -> None:
        """Move the pass rates of the questions that were drawn, in the order of their groups."""
        everywhere = state.ranks.gather_objects([(group, *seen) for group, seen in self._seen.items()])
        for _, question, rate in sorted(everywhere):
            self._rates[question] = self.config.decay * self._rates[question] + (1 - self.config.decay) * rate
        self._seen = {}

    def state_dict(self) -> dict[str, Any]:
        """The pass rates."""
        return {"rates": self._rates.clone()}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take the pass rates back."""
        self._rates = values["rates"].clone() if "rates" in values else torch.zeros(0, dtype=torch.float64)

    def _correct(self, rewards: RewardBatch) -> Tensor:
        """[N] float64, how right each answer is by its clean score; NaN where nothing says so."""
        clean = rewards if rewards.clean is None else rewards.clean
        if self.config.correct is None:
            found = clean.total().double()
        else:
            column = clean.names.index(self.config.correct)
            ok = clean.usable & (clean.status[:, column] == RewardStatus.OK)
            found = torch.where(ok, clean.values[:, column].double(), torch.nan)
        outside = (found < 0) | (found > 1)
        if bool(outside.any()):
            raise RunError(
                f"fg_expo reads rewards as 0 (wrong) to 1 (right), but row {int(outside.nonzero()[0])} has "
                f"{float(found[outside][0]):g}; set method.fg_expo.correct to the reward that says whether an answer is right"
            )
        return found


def fg_expo_text_tiny() -> RunConfig:
    """FG-ExPO on the tiny LM's arithmetic."""
    return arithmetic(
        "fg_expo_text_tiny",
        "fg_expo",
        "FG-ExPO on the tiny LM's arithmetic: KL by accuracy, questions by pass rate",
    )


def fg_expo_r1_distill_qwen_1_5b() -> RunConfig:
    """FG-ExPO on DeepSeek-R1-Distill-Qwen-1.5B and DAPO-17K, the paper's settings: 256 questions x 8, 30 epochs, KL 0.02.

    An epoch is counted as |D| / B steps, since a weighted draw has none. Qwen3-8B-Base has the same settings.
    """
    return RunConfig(
        name="fg_expo_r1_distill_qwen_1_5b",
        summary="FG-ExPO on DeepSeek-R1-Distill-Qwen-1.5B, the paper's settings",
        model=ModelConfig(
            adapter="text_lm",
            path="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
            dtype="bfloat16",
            gradient_checkpointing=True,
        ),
        method=["fg_expo"],
        data=DataConfig(source="data/dapo_math_17k.jsonl", answer_column="answer"),
        rewards={"math_verify": RewardConfig()},
        sampling={"max_new_tokens": 3072, "temperature": 1.0},
        kl=KlConfig(beta=0.02),
        train=TrainConfig(
            steps=2040, prompts_per_step=256, group_size=8, micro_batch=8, optimizer=OptimizerConfig(lr=1e-6)
        ),
        eval=EvalConfig(source="data/aime25.jsonl", every=100, samples=960, final_samples=960, batch=64),
    )
