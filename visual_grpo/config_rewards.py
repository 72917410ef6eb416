"""Configuration of rewards: each by itself, the scale it is brought to, and how several are combined."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from visual_grpo.config_section import Positive, Section


class NormaliseConfig(Section):
    """How one reward's values are brought to a common scale before they are combined; raw values stay in the logs."""

    kind: Literal["z_score", "min_max", "clip"] = Field(
        description="z_score: by the mean and std of all values so far; min_max: low -> 0 and high -> 1; clip: into [low, high]"
    )
    low: float | None = None
    high: float | None = None
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="z_score: factor of the earlier steps' weight at each step; 1 = all steps count alike"
    )
    eps: Annotated[float, Field(gt=0)] = Field(1e-4, description="z_score: added to the std")

    @model_validator(mode="after")
    def _ends(self) -> NormaliseConfig:
        """A scale needs both ends, a clip at least one."""
        ends = [end for end in (self.low, self.high) if end is not None]
        if self.kind == "min_max" and len(ends) < 2:
            raise ValueError("min_max needs both low and high, the values that become 0 and 1")
        if self.kind == "clip" and not ends:
            raise ValueError("clip needs low, high or both")
        if len(ends) == 2 and not ends[0] < ends[1]:
            raise ValueError("low must be less than high")
        return self


def _normaliser(value: Any) -> Any:
    """`z_score` as `{kind: z_score}`."""
    return {"kind": value} if isinstance(value, str) else value


class RewardConfig(Section):
    """One reward of a run."""

    reward: str | None = Field(None, description="name or package.module:Name; null = the key")
    weight: float = 1.0
    url: str | list[str] | None = Field(None, description="server(s) that have the reward: http://HOST:PORT")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the reward's constructor")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(120.0, description="of one call; null = none")
    retries: Annotated[int, Field(ge=0)] = 2
    on_failed: Literal["drop", "stop"] = "drop"
    eval_only: bool = Field(False, description="scored in evaluations, never trained on")
    batch_size: Positive | None = None
    applies: dict[str, Any] | None = Field(
        None, description="{metadata key: value or list of values} of the rows it scores; null = all"
    )
    normalise: Annotated[NormaliseConfig | None, BeforeValidator(_normaliser)] = Field(
        None, description="name or settings of a scale; null = raw values"
    )


class CombineConfig(Section):
    """How several rewards become one number or one advantage (docs/combining_rewards.md)."""

    how: str = Field(
        "sum", description="sum, product, gate, sum_of_advantages, gdpo, rank, or a function package.module:function"
    )
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    gate: dict[str, float] = Field(
        default_factory=dict,
        description="{reward: least value}: the other rewards are computed only on rows that reach all of these",
    )
    closed: float = Field(0.0, description="value of the other rewards on rows that do not")
    batch_step: bool = Field(True, description="gdpo: normalise the sums over the whole batch")
    level: Literal["rows", "tokens"] = Field(
        "rows", description="gdpo: what the batch step counts; tokens = as verl does"
    )
    zero_flat: bool = Field(True, description="gdpo over tokens: groups without any signal get exactly 0")
