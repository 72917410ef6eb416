"""MicroCoder-GRPO: "Breaking Training Bottlenecks: Effective and Stable Reinforcement Learning for Coding Models", arXiv
2603.07777.

What differs from GRPO: a small random share of the answers that were cut off, were not judged wrong and do not loop gets
advantage 0, so that answers can grow longer; the training temperature is chosen by the diversity of answers, in rare steps of
one candidate; a higher upper clip bound, token mean, no KL. Departures and our readings, as the paper gives no code:
token-level ratio and clip 0.2 / 0.28 as in DAPO; Bessel std, eps 1e-6; diversity is one minus the overlap of token 4-grams;
the pilot takes the prompts of the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.aggregation import expand_units
from visual_grpo.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from visual_grpo.errors import RunError, UserError
from visual_grpo.method import LoopState, Method, MethodConfig, Needs, rollout_seed
from visual_grpo.pipelines.text.grpo import arithmetic
from visual_grpo.types import PromptBatch, RewardBatch, RolloutBatch

MASK_DRAW, PILOT_DRAW = 2603, 7777
"""Keys of this method's random numbers."""
NGRAM = 4


class MicroCoderGrpoConfig(MethodConfig):
    """Options of MicroCoder-GRPO."""

    mask_share: float = Field(0.1, ge=0, le=1, description="chance that an eligible truncated answer gets advantage 0")
    repeat_window: int = Field(
        128, ge=1, description="an answer loops if its last so many tokens equal those before them"
    )
    correct_from: float = Field(1.0, description="clean score from which an answer is right")
    complete_detail: str | None = Field(
        None,
        description="detail of a reward that is 1 where there was something to judge, such as code/complete; a truncated answer "
        "without it is incomplete, not wrong; null = every scored answer was judged",
    )
    diversity_target: float | None = Field(
        None, gt=0, le=1, description="diversity at which runs settle, from a short pilot; null = constant temperature"
    )
    temperatures: list[float] = Field(
        [0.6, 0.8, 1.0, 1.2, 1.4], min_length=1, description="candidates, rising; read with diversity_target"
    )
    pilot_prompts: int = Field(64, ge=1)
    stage: int = Field(20, ge=1, description="steps between looks at the diversity")
    patience: int = Field(3, ge=1, description="looks in a row below low_share of the target before one candidate up")
    low_share: float = Field(0.8, gt=0, le=1)


class MicroCoderGrpo(Method[MicroCoderGrpoConfig]):
    """Conditional truncation masking and staged temperature."""

    Config: ClassVar[type[MethodConfig]] = MicroCoderGrpoConfig
    needs: ClassVar[Needs] = Needs(unit_kinds=frozenset({"token"}))
    defaults: ClassVar[Mapping[str, Any]] = {
        "advantage": {"std": "bessel", "eps": 1e-6},
        "ratio": {"clip_low": 0.2, "clip_high": 0.28},
        "loss": {"aggregation": "token_mean"},
        "kl": {"beta": 0.0},
    }

    def __init__(self, config: MicroCoderGrpoConfig) -> None:
        super().__init__(config)
        self.temperature: float | None = None  # the chosen candidate
        self.low_looks = 0
        self._diversity = float("nan")

    def check(self, run: RunConfig, sampling: Any) -> None:
        """Masking every truncated answer leaves nothing to choose from; candidates must rise."""
        if run.loss.mask_truncated:
            raise UserError(
                "method microcoder_grpo masks a random share of the truncated answers, and loss.mask_truncated=true masks all; "
                "set it to false"
            )
        given = self.config.temperatures
        if min(given) <= 0 or sorted(set(given)) != given:
            raise UserError(f"method.microcoder_grpo.temperatures must rise from above 0, got {given}")
        if self.config.diversity_target is None:
            staged = ["temperatures", "pilot_prompts", "stage", "patience", "low_share"]
            self.config.refuse_idle("microcoder_grpo", staged, "diversity_target")

    # -- temperature --------------------------------------------------------------------------------------------------------

    def before_rollout(self, prompts: PromptBatch, state: LoopState) -> PromptBatch:
        """Sample this step at the stage's temperature; the first step of a run finds it."""
        if self.config.diversity_target is None:
            return prompts
        if self.temperature is None:
            self.temperature = self._pilot(prompts, state, self.config.diversity_target)
        self._set_temperature(state, self.temperature)
        return prompts

    def _set_temperature(self, state: LoopState, temperature: float) -> None:
        state.sampling = state.sampling.model_copy(update={"temperature": temperature})

    def _pilot(self, prompts: PromptBatch, state: LoopState, target: float) -> float:
        """The lowest candidate whose answers are as diverse as the target, or the highest."""
        few = torch.unique(prompts.group_ids)[: max(self.config.pilot_prompts // state.ranks.world, 1)]
        rows = prompts.select(torch.nonzero(torch.isin(prompts.group_ids, few)).flatten())
        for temperature in self.config.temperatures:
            self._set_temperature(state, temperature)
            rollouts = state.policy.sample(
                rows, seed=rollout_seed(state) + PILOT_DRAW, sampling=state.sampling, batch=state.config.train.rollout_batch
            )  # fmt: skip
            if self._mean_diversity(rollouts, state) >= target:
                return temperature
        return self.config.temperatures[-1]

    def _mean_diversity(self, rollouts: RolloutBatch, state: LoopState) -> float:
        """Over the groups of all processes with at least two rows; NaN without one."""
        found = state.ranks.gather(group_diversities(answer_tokens(rollouts), rollouts.group_ids))
        return float(found.mean())

    def after_step(self, metrics: Mapping[str, float], state: LoopState) -> None:
        """One candidate up after `patience` looks in a row at too little diversity."""
        config = self.config
        if config.diversity_target is None or self.temperature is None or (state.step + 1) % config.stage:
            return
        low = self._diversity < config.low_share * config.diversity_target
        self.low_looks = self.low_looks + 1 if low else 0
        if self.low_looks >= config.patience:
            place = config.temperatures.index(self.temperature)
            self.temperature = config.temperatures[min(place + 1, len(config.temperatures) - 1)]
            self.low_looks = 0

    def state_dict(self) -> dict[str, Any]:
        """The stage."""
        return {"temperature": self.temperature, "low_looks": self.low_looks}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Go on in the stage; candidates that the user has changed since are started anew."""
        self.temperature, self.low_looks = values.get("temperature"), values.get("low_looks", 0)
        if self.temperature not in self.config.temperatures:
            self.temperature, self.low_looks = None, 0

    # -- truncation mask ----------------------------------------------------------------------------------------------------

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Advantage 0 for a random share of the eligible rows; the others keep theirs."""
        tokens = answer_tokens(rollouts)
        self._diversity = self._mean_diversity(rollouts, state)
        state.figure("microcoder_grpo/diversity", torch.tensor(self._diversity))
        state.figure(
            "microcoder_grpo/temperature", torch.tensor(self.temperature or getattr(state.sampling, "temperature", 1.0))
        )
        if rollouts.truncated is None:
            return advantages
        truncated, verdict = rollouts.truncated.cpu(), self._verdicts(rewards, rollouts.truncated.cpu())
        looping = torch.tensor([repeats(answer, self.config.repeat_window) for answer in tokens], dtype=torch.bool)
        rows = rollouts.prompts.row_ids.tolist()
        draws = torch.tensor([float(torch.rand((), generator=state.generator(MASK_DRAW, row))) for row in rows])
        masked = truncation_mask(truncated, verdict, looping, draws, self.config.mask_share)
        state.figure("microcoder_grpo/masked", masked.double())
        return torch.where(expand_units(masked.to(advantages.device), advantages, "masked"), 0.0, advantages)

    def _verdicts(self, rewards: RewardBatch, truncated: Tensor) -> Tensor:
        clean = rewards if rewards.clean is None else rewards.clean
        judged = torch.ones(len(clean), dtype=torch.bool)
        key = self.config.complete_detail
        if key is not None:
            if key not in clean.details:
                known = ", ".join(sorted(clean.details)) or "none"
                raise RunError(f"method.microcoder_grpo.complete_detail: no reward gives {key!r}; there are: {known}")
            judged = clean.details[key].cpu() != 0
        return verdicts(clean.total(), truncated, judged, self.config.correct_from)


CORRECT, INCOMPLETE, WRONG = 0, 1, 2
"""Verdicts on an answer."""


def verdicts(scores: Tensor, truncated: Tensor, judged: Tensor, correct_from: float) -> Tensor:
    """Verdict of each row, [N] int64: CORRECT, WRONG, or INCOMPLETE where nothing could be judged.

    Args:
        scores: clean, [N]; NaN (the judge gave none) is incomplete.
        truncated: [N] bool.
        judged: [N] bool, there was a complete answer to judge.
        correct_from: least score of a right answer.
    """
    incomplete = scores.isnan() | (truncated & ~judged)
    judgement = torch.where(scores >= correct_from, CORRECT, WRONG)
    return torch.where(incomplete & (judgement != CORRECT), INCOMPLETE, judgement)


def truncation_mask(truncated: Tensor, verdict: Tensor, looping: Tensor, draws: Tensor, share: float) -> Tensor:
    """[N] bool, rows whose advantage becomes 0: cut off, not wrong, not looping, and their draw ([N]) below `share`."""
    return truncated & (verdict != WRONG) & ~looping & (draws < share)


def answer_tokens(rollouts: RolloutBatch) -> list[list[int]]:
    """Token ids of each answer, without padding."""
    ids, lengths = rollouts.data["completion_ids"].tolist(), rollouts.unit_mask.sum(1).tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def repeats(tokens: Sequence[int], window: int) -> bool:
    """Whether the last `window` tokens equal the `window` before them; an answer shorter than both does not repeat.

    Example:
        >>> repeats([1, 2, 3, 1, 2, 3], 3), repeats([1, 2, 3, 1, 2, 4], 3), repeats([1, 2, 3, 1, 2], 3)
        (True, False, False)
    """
    return len(tokens) >= 2 * window and list(tokens[-window:]) == list(tokens[-2 * window : -window])


def diversity(answers: Sequence[Sequence[int]]) -> float:
    """One minus the mean Jaccard overlap of the sets of token 4-grams, over all pairs of `answers` (at least two).

    Two answers without any 4-gram overlap fully if they are equal, and else not at all.

    Example:
        >>> round(diversity([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9, 10]]), 6)
        0.888889
    """
    grams = [{tuple(a[i : i + NGRAM]) for i in range(len(a) - NGRAM + 1)} for a in answers]
    overlaps = []
    for i in range(len(answers)):
        for j in range(i):
            union = grams[i] | grams[j]
            same = float(list(answers[i]) == list(answers[j]))
            overlaps.append(len(grams[i] & grams[j]) / len(union) if union else same)
    return 1 - sum(overlaps) / len(overlaps)


def group_diversities(answers: Sequence[Sequence[int]], group_ids: Tensor) -> Tensor:
    """`diversity` of each group with at least two rows, [g] float64."""
    groups: dict[int, list[Sequence[int]]] = {}
    for group, answer in zip(group_ids.tolist(), answers, strict=True):
        groups.setdefault(group, []).append(answer)
    return torch.tensor([diversity(rows) for rows in groups.values() if len(rows) > 1], dtype=torch.float64)


def microcoder_grpo_text_tiny() -> RunConfig:
    """MicroCoder-GRPO on the tiny LM's arithmetic, with a limit that cuts many workings off."""
    return arithmetic(
        "microcoder_grpo_text_tiny",
        [{"microcoder_grpo": {"repeat_window": 4, "complete_detail": "exact_match/answered"}}],
        "MicroCoder-GRPO on the tiny LM's arithmetic, short of room: a share of the cut answers is masked",
        rewards={"exact_match": RewardConfig(params={"extraction": "hashes"})},
        sampling={"max_new_tokens": 24, "temperature": 1.0},
    )


def microcoder_grpo_qwen3_4b() -> RunConfig:
    """MicroCoder-GRPO on Qwen3-4B-Instruct-2507: 64 problems, temperature 1.2, 4,096 tokens; 8 answers, lr, updates are ours.

    The paper also trains with 8,192 tokens, and a model of 8 B with 16,384.
    """
    return RunConfig(
        name="microcoder_grpo_qwen3_4b",
        summary="MicroCoder-GRPO on Qwen3-4B-Instruct-2507, the paper's settings",
        model=ModelConfig(
            adapter="text_lm", path="Qwen/Qwen3-4B-Instruct-2507", dtype="bfloat16", gradient_checkpointing=True
        ),
        method=[{"microcoder_grpo": {"mask_share": 0.1, "repeat_window": 128, "complete_detail": "code/complete"}}],
        data=DataConfig(source="data/microcoder_train.jsonl"),
        rewards={"code": RewardConfig(params={"score": "all"})},
        sampling={"max_new_tokens": 4096, "temperature": 1.2},
        train=TrainConfig(
            steps=400,
            prompts_per_step=64,
            group_size=8,
            updates_per_step=2,
            micro_batch=8,
            optimizer=OptimizerConfig(lr=1e-6),
        ),
        eval=EvalConfig(source="data/livecodebench_v6.jsonl", every=20, samples=175, final_samples=175, batch=64),
    )
