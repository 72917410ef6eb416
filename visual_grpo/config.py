"""The configuration tree of a run: frozen models, unknown keys refused with a did-you-mean, `key=value` overrides.

Precedence, weakest first: field defaults, the defaults of the stack's methods in stack order, the recipe or file, overrides.
`resolve` applies it once; the result is written into the run folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from visual_grpo.config_merge import merge as merge
from visual_grpo.config_merge import method_list, reward_map
from visual_grpo.config_rewards import CombineConfig, RewardConfig
from visual_grpo.config_section import Decay, Positive, Section, Seed
from visual_grpo.config_selection import Best, EarlyStop
from visual_grpo.config_selection import EvalConfig as EvalConfig
from visual_grpo.config_text import dump_yaml
from visual_grpo.errors import UserError


class LoraConfig(Section):
    """Low-rank adapters (peft)."""

    rank: Positive = 32
    alpha: Positive = 64
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: list[str] | None = Field(None, description="module-name suffixes; null = the adapter's own list")
    init: Literal["gaussian", "default"] = "gaussian"


class ModelConfig(Section):
    """Which generator is trained."""

    adapter: str = Field(description="a name of `visual-grpo list models`, or package.module:Class")
    path: str = Field(description="a folder, a hub id, or testbed/NAME")
    revision: str | None = None
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field("float32", description="of frozen weights")
    lora: LoraConfig | None = Field(None, description="null = full weights")
    init: str | None = Field(
        None, description="an exported LoRA (folder or hub id) that `lora` starts from; null = a fresh one"
    )
    train_layers: list[str] | None = Field(
        None, description="full weights: train only parameters whose name contains one of these"
    )
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _init_is_of_a_lora(self) -> ModelConfig:
        if self.init is not None and self.lora is None:
            raise ValueError(
                f"init {self.init!r} is the start of a LoRA, but lora is null: set lora, or for full weights give the exported "
                "folder as path"
            )
        if self.train_layers is not None and self.lora is not None:
            raise ValueError(
                "train_layers chooses among full weights, but lora is set: say where it goes with lora.targets, or set lora=null"
            )
        return self


class PromptSet(Section):
    """One prompt set and how its records are read."""

    source: str | None = Field(
        None, description="testbed/NAME, reasoning_gym/NAME, a .txt, .jsonl or .parquet file, or a hub data set id"
    )
    split: str = "train"
    prompt_column: str = "prompt"
    answer_column: str | None = Field(
        None, description="copied to metadata['answer']; a dot leads into a record: reward_model.ground_truth"
    )
    system_prompt: str | None = None
    limit: Positive | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="of a reasoning_gym data set: max_terms: 3")


class TaskSource(PromptSet):
    """One of several prompt sets."""

    heldout: str | None = Field(None, description="held-out prompts, as source; null = split eval.split of source")

    @model_validator(mode="after")
    def _has_a_source(self) -> TaskSource:
        if self.source is None:
            raise ValueError("a task needs its source, such as testbed/scenes or a file")
        return self


def _task_sources(value: Any) -> Any:
    """`{task: source}` as `{task: {source: source}}`."""
    if not isinstance(value, Mapping):
        return value
    return {name: {"source": item} if isinstance(item, str) else item for name, item in value.items()}


class DataConfig(PromptSet):
    """Where the training prompts come from: one set, or several as tasks."""

    sources: Annotated[dict[str, TaskSource], BeforeValidator(_task_sources)] = Field(
        default_factory=dict,
        description="{task: source or settings of the set}, in place of source; rows carry the task's name as "
        "metadata['task'] and its place here as the tag `task`",
    )
    shuffle: bool = True
    balance: str | None = Field(None, description="metadata key whose values take turns, for example tag or task")

    @model_validator(mode="after")
    def _one_kind_of_source(self) -> DataConfig:
        if (self.source is None) == (not self.sources):
            raise ValueError(
                "give source (testbed/NAME, a file or a data set id), or for several tasks sources: {TASK: SOURCE, ...}"
                + ("" if self.source is None else ", and not both: set data.source=null or data.sources={}")
            )
        for key, field in PromptSet.model_fields.items():
            if self.sources and key != "source" and getattr(self, key) != field.get_default(call_default_factory=True):
                raise ValueError(f"{key} is of each task's own set where there are sources: give sources.TASK.{key}")
        return self

    def sets(self) -> list[tuple[str | None, PromptSet]]:
        """(task, prompt set) in order; a single set has no task."""
        return [*self.sources.items()] if self.sources else [(None, self)]


class AdvantageConfig(Section):
    """How rewards become advantages (card grpo_core)."""

    scope: Literal["group", "batch", "none"] = Field(
        "group", description="whose std divides; the mean is always the group's"
    )
    std: Literal["bessel", "population", "none"] = "bessel"
    eps: Annotated[float, Field(ge=0)] = 1e-4
    single_group: Literal["zero", "raw"] = "zero"
    drop_flat: bool = Field(False, description="drop groups of equal rewards before the update")
    clip: Annotated[float, Field(gt=0)] | None = Field(None, description="clamp to [-clip, clip]")
    soft_clip: Annotated[float, Field(gt=0)] | None = Field(None, description="c * tanh(A / c)")


class RatioConfig(Section):
    """The importance ratio and its clip range [1 - clip_low, 1 + clip_high]."""

    level: Literal["token", "sequence", "sequence_token"] = "token"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = Field(
        0.2, description="with loss.surrogate=cispo: cap of the ratio itself"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    delta: Annotated[float, Field(gt=1)] | None = None
    old: Literal["auto", "sampler"] = Field(
        "auto",
        description="auto: on-policy updates take the detached new log-prob, and tokens in half precision are replayed before "
        "several updates; sampler: always what sampling stored",
    )
    correction: Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate", "none"] = Field(
        "sequence_mask",
        description="with sampling.engine=vllm: the loss is weighted by the model's probability of a row (or token) over the "
        "engine's; outside its bounds the weight is 0 (mask) or the bound (truncate)",
    )
    correction_max: Annotated[float, Field(gt=0)] = 3.0
    correction_min: Annotated[float, Field(ge=0)] | None = None


class LossConfig(Section):
    """Surrogate and aggregation."""

    surrogate: Literal["clipped", "cispo", "sapo", "vespo"] = "clipped"
    aggregation: Literal[
        "sequence_mean_token_mean",
        "token_mean",
        "fixed_length",
        "sequence_mean_token_sum",
        "token_sum_over_length",
        "micro_batch_token_mean",
    ] = "sequence_mean_token_mean"
    max_length: Positive | None = Field(None, description="divisor of fixed_length; null = the sampler's limit")
    mask_truncated: bool = Field(False, description="samples that hit the length limit are masked out of the loss")
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="share of the step's tokens that the surrogate trains, those with the highest entropy before the updates, "
        "at the price of one more forward pass; divisors stay (arXiv 2506.01939; TRL's top_entropy_quantile)",
    )
    off_policy_max: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="nats: the surrogate leaves out answers with a negative advantage whose mean old minus new log-prob is "
        "above it (DeepSeek-V3.2; TRL's off_policy_mask_threshold)",
    )


class KlConfig(Section):
    """Pull to the reference model (the start weights, or the disabled LoRA)."""

    beta: Annotated[float, Field(ge=0)] = 0.0
    estimator: Literal["k1", "k2", "k3", "k3_k2_gradient", "gaussian", "prediction", "velocity"] = Field(
        "k3",
        description="gaussian: transitions; prediction: mean squared difference of the network's predictions (x0 of a noise "
        "pair, velocity of a transition); velocity: of its velocities",
    )
    importance: bool = Field(
        False,
        description="multiply an estimate from log-probs by the ratio to the sampling policy, with gradient, which makes its "
        "gradient that of the KL itself (DeepSeek-V3.2; TRL's use_bias_correction_kl)",
    )
    weighted: bool = Field(False, description="the methods' unit weights weigh this term as they weigh the surrogate")


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class EmaConfig(Section):
    """Averaged weights; evaluation and export use them."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    every: Positive = 8


class TrainConfig(Section):
    """Batch geometry and length of the run; what is derived from it is printed, never set."""

    steps: Positive = 100
    prompts_per_step: Positive = 8
    group_size: Positive = 8
    updates_per_step: Positive = Field(1, description="optimizer steps that one rollout batch is split into")
    epochs_per_step: Positive = Field(1, description="times the rollout batch is gone through")
    micro_batch: Positive = Field(32, description="rows in one forward and backward pass of a process")
    units_per_pass: Positive | None = Field(None, description="units replayed in one pass; null = all")
    rollout_batch: Positive | None = Field(None, description="rows sampled at once; null = all of the process")
    max_minutes: Annotated[float, Field(gt=0)] | None = Field(None, description="stop after this training time")
    early_stop: EarlyStop = Field(
        None, description="figure of the evaluations (or {metric, patience, ...}) that ends the run"
    )
    seed: Seed = 0
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = None


class CheckpointConfig(Section):
    """How often the complete state is written, and how many are kept."""

    every: Positive = 10
    keep: Positive = 2
    best: Best = Field(
        None, description="figure of the evaluations (or {metric, mode}) whose best weights are kept and exported"
    )


class AlarmConfig(Section):
    """Each alarm warns, stops the run, or is off; limits are on the step's means."""

    non_finite: Literal["off", "warn", "stop"] = "stop"
    zero_gradient: Literal["off", "warn", "stop"] = "warn"
    flat_groups: Literal["off", "warn", "stop"] = "warn"
    flat_groups_steps: Positive = 5
    clip_fraction: Literal["off", "warn", "stop"] = "warn"
    clip_fraction_max: float = 0.9
    kl: Literal["off", "warn", "stop"] = "warn"
    kl_max: float = 10.0
    reward_failed: Literal["off", "warn", "stop"] = "warn"
    reward_failed_max: float = Field(0.1, description="share of rows whose reward failed")
    sampler: Literal["off", "warn", "stop"] = Field("warn", description="sampling.engine and model differ in log-probs")
    sampler_max: Annotated[float, Field(gt=0)] = Field(0.1, description="largest mean |difference| of a token, in nats")
    hacking: Literal["off", "warn", "stop"] = Field(
        "warn", description="evaluations: the trained reward rose, an eval_only reward or the diversity fell"
    )
    hacking_margin: Annotated[float, Field(ge=0)] = Field(
        0.1, description="by how much it may fall, in standard deviations of its samples in the first evaluation"
    )


class WatchdogConfig(Section):
    """Seconds after which a phase counts as hung; null = never."""

    timeout_s: Annotated[float, Field(gt=0)] | None = 1800.0
    action: Literal["warn", "stop"] = "stop"


class SelfTestConfig(Section):
    """The checks before the first step."""

    enabled: bool = True
    ratio_tolerance: Annotated[float, Field(gt=0)] | None = Field(None, description="null = by dtype")


class TrackConfig(Section):
    """Experiment trackers, through accelerate."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "dvclive", "swanlab"]] = (
        Field(default_factory=list)
    )
    project: str = "visual_grpo"


def _combination(value: Any) -> Any:
    """`name` as `{how: name}`."""
    return {"how": value} if isinstance(value, str) else value


MethodList = Annotated[list[dict[str, dict[str, Any]]], BeforeValidator(method_list)]
RewardMap = Annotated[dict[str, RewardConfig], BeforeValidator(reward_map)]


class RunConfig(Section):
    """One run. `sampling` is checked by the adapter, the options of a method by the method."""

    name: str = "run"
    summary: str = ""
    model: ModelConfig
    method: MethodList = Field(default=["grpo"], validate_default=True)
    data: DataConfig
    rewards: RewardMap
    combine: Annotated[CombineConfig, BeforeValidator(_combination)] = CombineConfig()
    sampling: dict[str, Any] = Field(default_factory=dict)
    advantage: AdvantageConfig = AdvantageConfig()
    ratio: RatioConfig = RatioConfig()
    loss: LossConfig = LossConfig()
    kl: KlConfig = KlConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    alarms: AlarmConfig = AlarmConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    self_test: SelfTestConfig = SelfTestConfig()
    track: TrackConfig = TrackConfig()

    def explicit(self) -> dict[str, Any]:
        """Only the values that were set, as a nested dict: what a recipe states and a method's defaults must not override."""
        return self.model_dump(mode="python", exclude_unset=True)


def validate(cls: type[BaseModel], values: Mapping[str, Any], *, where: str = "") -> Any:
    """`cls(**values)`, with every fault in one message: the dotted key, what was given, what is expected.

    Raises:
        UserError: naming every fault, with a did-you-mean for unknown keys.
    """
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("\n".join(_explain(cls, e, where) for e in error.errors())) from None


def _explain(cls: type[BaseModel], error: Any, where: str) -> str:
    loc = [str(part) for part in error["loc"]]
    key = ".".join(([where] if where else []) + loc)
    if error["type"] == "extra_forbidden":
        known = _known_keys(cls, loc[:-1])
        close = difflib.get_close_matches(loc[-1], known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"unknown key {key!r}.{hint} Known here: {', '.join(sorted(known))}."
    if error["type"] == "missing":
        return f"{key} is missing: set it in the config file or with {key}=..."
    given = repr(error.get("input"))
    given = given if len(given) <= 200 else f"{given[:200]}..."
    return f"{key}: {error['msg'].removeprefix('Value error, ')} (got {given})"


def _known_keys(cls: type[BaseModel], loc: Sequence[str]) -> list[str]:
    """Field names of the section that `loc` leads to."""
    model: Any = cls
    for part in loc:
        info = getattr(model, "model_fields", {}).get(part)
        if info is None:
            continue
        model = next(
            (a for a in (info.annotation, *getattr(info.annotation, "__args__", ())) if hasattr(a, "model_fields")),
            model,
        )
    return list(getattr(model, "model_fields", {}))


def to_yaml(config: BaseModel) -> str:
    """The config as YAML, in the order of its fields."""
    return dump_yaml(config.model_dump(mode="json"))


def resolve(raw: Mapping[str, Any], method_defaults: Sequence[Mapping[str, Any]] = ()) -> RunConfig:
    """Validate `raw` over the defaults of the stack's methods (in stack order, the later wins).

    Raises:
        UserError: see `validate`.
    """
    base: dict[str, Any] = {}
    for defaults in method_defaults:
        base = merge(base, defaults)
    config: RunConfig = validate(RunConfig, merge(base, raw))
    return config
