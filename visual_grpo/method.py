"""Methods: the hooks of the loop, and what they may look at. `stack` makes one of several.

`Method` itself is vanilla GRPO: every hook has its default here. A method is a subclass in one file of `pipelines/` that fills
only the hooks it changes; methods never inherit from each other. Hooks return values; none calls `backward`, the optimizer or
the process group.

- Exclusive hooks (`rollout`, `score`, `advantages`, `surrogate`, `aggregate`): at most one method of a stack fills each.
- Chained hooks: run in stack order, each on the result of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.aggregation import Totals, aggregation_coefficients
from visual_grpo.combination import combined_advantages, on_all_processes
from visual_grpo.config import RatioConfig, RunConfig, Section
from visual_grpo.errors import UserError
from visual_grpo.importance import micro_difference, summed_log_weight
from visual_grpo.objectives import Metrics, cispo_surrogate, clipped_surrogate, sapo_surrogate, vespo_surrogate
from visual_grpo.seeding import seeded_generator
from visual_grpo.types import MicroBatch, PromptBatch, RewardBatch, RolloutBatch

if TYPE_CHECKING:
    from visual_grpo.adapters.protocol import SamplingConfig
    from visual_grpo.data import PromptRow
    from visual_grpo.distributed import Ranks
    from visual_grpo.loss import LossInputs
    from visual_grpo.policy import Policy


class MethodConfig(Section):
    """Base of a method's own options. Unknown keys are refused."""

    def refuse_idle(self, method: str, keys: Sequence[str], read_with: str) -> None:
        """Refuse options that were set though `method` reads them with other settings only.

        Args:
            method: its name, for the message.
            keys: the options.
            read_with: what they are read with, such as `form=focal`.

        Raises:
            UserError: naming those that differ from their defaults.
        """
        fields = type(self).model_fields
        given = [k for k in keys if getattr(self, k) != fields[k].get_default(call_default_factory=True)]
        if given:
            names = " and ".join(f"method.{method}.{key}" for key in given)
            raise UserError(f"{names} would not be read without {read_with}: leave it out, or set {read_with}")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method asks of the loop and of the adapter."""

    unit_kinds: frozenset[str] = frozenset({"token", "transition", "noise_pair"})
    """It can work on adapters that replay one of these units."""
    kinds: frozenset[str] = frozenset({"diffusion", "autoregressive", "next_scale"})
    weight_sets: frozenset[str] = frozenset()
    """Named sets it reads: `old` (the weights that sampled), `ema`."""
    reference: bool = False
    """It reads `MicroBatch.reference` also when `kl.beta` is 0."""
    whole_groups: bool = False
    """All rows of a group must meet in one micro-batch."""
    couples_units: bool = False
    """Its unit losses depend on other units of the row, so units may not be replayed one by one."""
    input_gradients: bool = False
    """It asks the adapter how much units depend on their inputs (`Policy.input_scores`)."""
    single_samples: bool = False
    """It needs no group: `group_size` may be 1."""
    given_rows: bool = False
    """Its rows are given texts and not samples (`PolicyAdapter.rows_from_texts`)."""
    compares_rewards: bool = True
    """False: it learns from something else than differences of rewards, so that equal rewards, or none, are no fault."""
    idle_steps: bool = False
    """Steps may sample no unit to train; the self-test then waits for one that has some."""


@dataclass(kw_only=True)
class LoopState:
    """What hooks may look at: the run and where it stands."""

    config: RunConfig
    policy: Policy
    ranks: Ranks
    sampling: SamplingConfig
    tasks: tuple[str, ...] = ()
    """names of `data.sources`; the row tag `task` counts in this order."""
    prompt_tasks: Tensor | None = None
    """[P] int64, the task of each training prompt; None where there is one prompt set."""
    step: int = 0
    """0-based iteration; draws of a hook are keyed by (config.train.seed, step, row), never by the process."""
    on_policy: bool = True
    """the present weights are those that sampled (the first update of an iteration, nothing reused)."""
    kl_scale: float = 1.0
    """factor of `kl.beta` in this iteration (the hook of that name)."""
    log: Callable[[Metrics], None] = field(default=lambda _: None)
    """add (sum, count) figures to the step's metrics, named METHOD/FIGURE."""
    generate: Callable[[PromptBatch], RolloutBatch] = field(default=lambda _: _no_service("generate"))
    """sample further rows with the stack's own rollout hooks."""
    score: Callable[[RolloutBatch], RewardBatch] = field(default=lambda _: _no_service("score"))
    """score and shape rows with the stack's own hooks."""
    draw: Callable[[], PromptBatch] = field(default=lambda: _no_service("draw"))
    """this process's share of the next `prompts_per_step` prompts, `group_size` rows each, after the stack's `before_rollout`."""

    def generator(self, *key: int) -> torch.Generator:
        """A CPU generator that depends on (seed, step, key) alone."""
        return seeded_generator(self.config.train.seed, self.step, *key)

    def figure(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Log the mean of `values` (any shape) over `where`; several calls of a step add up."""
        kept = values.detach().double() if where is None else values.detach().double()[where]
        self.log({name: (kept.sum(), torch.tensor(kept.numel()))})


def _no_service(name: str) -> Any:
    raise RuntimeError(f"state.{name} is only available inside the loop")


C = TypeVar("C", bound=MethodConfig)


class Method(Generic[C]):
    """Vanilla GRPO; subclasses fill what they change.

    `defaults` are the core options of the method's paper, as a nested dict of config sections; the user's own values win.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    defaults: ClassVar[Mapping[str, Any]] = {}
    needs: ClassVar[Needs] = Needs()

    def __init__(self, config: C) -> None:
        self.config = config

    def check(self, run: RunConfig, sampling: SamplingConfig) -> None:
        """Refuse a run that cannot work, before any weights are loaded.

        Raises:
            UserError: what does not fit, and what to change.
        """

    def unread(self, run: RunConfig) -> Sequence[str]:
        """Dotted core options that do nothing beside this method; a run that sets one is refused."""
        return ()

    def check_prompts(self, rows: Sequence[PromptRow]) -> None:
        """Refuse training prompts that lack a column, before any weights are loaded.

        Raises:
            UserError: naming the column and a prompt.
        """

    def setup(self, state: LoopState) -> None:
        """Chained. Once, before the first step or the resumption: load further weights, which no checkpoint holds.

        Raises:
            UserError: they are not there, or do not fit.
        """

    def units_per_row(self, sampling: SamplingConfig) -> int | None:
        """How many units a row will have, for the memory plan of a dry run; None = as the adapter samples."""
        return None

    def passes_matter(self) -> bool:
        """True where the loss depends on which rows share a forward pass; rows then keep the order in which they were drawn."""
        return False

    # -- data and rollout ---------------------------------------------------------------------------------------------------

    def select_prompts(self, weights: Tensor, state: LoopState) -> Tensor:
        """Chained. Sampling weights of the training prompts, [P] float64; 0 leaves a prompt out. All equal: shuffled epochs."""
        return weights

    def before_rollout(self, prompts: PromptBatch, state: LoopState) -> PromptBatch:
        """Chained. Change contexts, add hints or tags; once for each draw, so a step that refills its batch calls it again."""
        return prompts

    def rollout(self, prompts: PromptBatch, state: LoopState) -> RolloutBatch:
        """Exclusive. Sample and decode every row."""
        return state.policy.sample(
            prompts, seed=rollout_seed(state), sampling=state.sampling, batch=state.config.train.rollout_batch
        )

    def after_rollout(self, rollouts: RolloutBatch, state: LoopState) -> RolloutBatch:
        """Chained. Edit, add or replace rows; draw noise pairs."""
        return rollouts

    # -- scores ---------------------------------------------------------------------------------------------------------------

    def score(
        self, rollouts: RolloutBatch, rewards: Callable[[RolloutBatch], RewardBatch], state: LoopState
    ) -> RewardBatch:
        """Exclusive. Every reward on every row."""
        return rewards(rollouts)

    def shape_rewards(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> RewardBatch:
        """Chained. Penalties, noise, calibration; the clean scores stay in `rewards.clean`, which is there from the first on."""
        return rewards

    def after_score(
        self, rollouts: RolloutBatch, rewards: RewardBatch, state: LoopState
    ) -> tuple[RolloutBatch, RewardBatch]:
        """Chained. May sample and score again (`state.draw`, `state.generate`, `state.score`)."""
        return rollouts, rewards

    def filter_groups(self, keep: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Chained. [N] bool, the rows that stay."""
        return keep

    # -- advantages -----------------------------------------------------------------------------------------------------------

    def advantages(self, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Exclusive. [N], [N, T] or [N, T, *map], over the rows of all processes."""
        ranks = state.ranks
        everywhere = combined_advantages(
            on_all_processes(rewards, ranks),
            ranks.gather(rollouts.group_ids),
            ranks.gather(rollouts.unit_mask.sum(1).cpu()),
            state.config,
        )
        return ranks.mine(everywhere, len(rewards))

    def adjust_advantages(
        self, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Chained, after the core's own clamps (`advantage.clip`, `advantage.soft_clip`)."""
        return advantages

    def filter_rows(
        self, keep: Tensor, advantages: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Chained. [N] bool, the rows that are trained; advantages and unit weights are those of all rows."""
        return keep

    # -- loss -----------------------------------------------------------------------------------------------------------------

    def unit_weights(self, weights: Tensor, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Chained. [N, T] factors of the unit losses, once a rollout batch; divisors keep counting plain units."""
        return weights

    def kl_scale(self, scale: float, rewards: RewardBatch, rollouts: RolloutBatch, state: LoopState) -> float:
        """Chained. Factor of `kl.beta` for all updates of a rollout batch; the same number on every process."""
        return scale

    def before_updates(self, rows: LossInputs, rewards: RewardBatch, state: LoopState) -> LossInputs:
        """Chained. Complete groups, all settled: what the loss needs may be put into `rows.rollouts.data`, one entry a row."""
        return rows

    def live_weights(self, weights: Tensor, micro: MicroBatch, state: LoopState) -> Tensor:
        """Chained. [n, u] factors that need the present policy."""
        return weights

    def surrogate(self, micro: MicroBatch, state: LoopState) -> tuple[Tensor, Metrics]:
        """Exclusive. Loss per unit [n, u, *map] (or [n, 1] for a sequence-level ratio) and its figures."""
        ratio, loss = state.config.ratio, state.config.loss
        args = (micro.log_prob.value, micro.old_log_prob, micro.advantages, micro.mask)
        if loss.surrogate == "cispo":
            return cispo_surrogate(*args, level=ratio.level, ratio_cap=ratio.clip_high)
        if loss.surrogate == "sapo":
            return sapo_surrogate(*args, level=ratio.level)
        if loss.surrogate == "vespo":
            return vespo_surrogate(*args, sampler_log_ratio=_sampler_log_ratio(micro, ratio))
        return clipped_surrogate(
            *args,
            level=ratio.level,
            clip_low=ratio.clip_low,
            clip_high=ratio.clip_high,
            dual_clip=ratio.dual_clip,
            delta=ratio.delta,
        )

    def aggregate(self, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState) -> Tensor:
        """Exclusive. Coefficients [n, T] of a micro-batch's unit losses; their weighted sum over the step is the loss."""
        loss = state.config.loss
        limit = loss.max_length or getattr(state.sampling, "max_new_tokens", None)
        return aggregation_coefficients(mask, totals, mode=loss.aggregation, max_length=limit)

    def regulariser_coefficients(
        self, coefficients: Tensor, mask: Tensor, totals: Totals, rollouts: RolloutBatch, state: LoopState
    ) -> Tensor:
        """Chained. Coefficients [n, T] of the KL and the stack's terms; default: those of `aggregate`."""
        return coefficients

    def regularise(
        self, micro: MicroBatch, coefficients: Tensor, weights: Tensor, state: LoopState
    ) -> dict[str, Tensor]:
        """Chained (added). Named terms to add to the loss; `coefficients` [n, u] aggregate, `weights` [n, u] weigh units."""
        return {}

    # -- after the update -------------------------------------------------------------------------------------------------------

    def after_step(self, metrics: Mapping[str, float], state: LoopState) -> None:
        """Chained. Schedules, curricula, weight sets."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of the method: numbers, text, lists and tensors."""
        return {}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


def _sampler_log_ratio(micro: MicroBatch, ratio: RatioConfig) -> Tensor | None:
    """[n] summed log-weight against the engine that sampled; None without one."""
    difference = micro_difference(micro)
    if difference is None or ratio.correction == "none":
        return None
    return summed_log_weight(difference, mode=ratio.correction, upper=ratio.correction_max, lower=ratio.correction_min)


def rollout_seed(state: LoopState) -> int:
    """The sampling seed of this iteration."""
    return (state.config.train.seed * 1_000_003 + state.step) & 0x7FFF_FFFF_FFFF_FFFF
