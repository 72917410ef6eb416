"""Configuration of what held-out evaluations decide: the weights that are kept, and when a run ends early."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from visual_grpo.config_section import Positive, Section, Seed


def nearest_multiples(value: int, divisor: int) -> str:
    """The legal values next to one that does not divide.

    >>> nearest_multiples(10, 4), nearest_multiples(3, 4)
    ('8 or 12', '4')
    """
    low = value // divisor * divisor
    return " or ".join(str(n) for n in (low, low + divisor) if n > 0)


class BestConfig(Section):
    """The weights with the best figure of an evaluation are kept beside the newest."""

    metric: str = Field(description="a figure of the evaluations: NAME, NAME/detail, diversity, each also with /by_tag")
    mode: Literal["max", "min"] = "max"


class EarlyStopConfig(Section):
    """End the run when a figure of the evaluations has not improved for a while."""

    metric: str = Field(description="as checkpoint.best")
    patience: Positive = Field(3, description="evaluations without an improvement")
    min_delta: Annotated[float, Field(ge=0)] = Field(0.0, description="what counts as an improvement is more than this")
    mode: Literal["max", "min"] = "max"


def _metric(value: Any) -> Any:
    """`NAME` as `{metric: NAME}`."""
    return {"metric": value} if isinstance(value, str) else value


Best = Annotated[BestConfig | None, BeforeValidator(_metric)]
EarlyStop = Annotated[EarlyStopConfig | None, BeforeValidator(_metric)]


class EvalConfig(Section):
    """Held-out evaluation with fixed prompts and noises."""

    source: str | None = Field(None, description="as data.source; null = data.source")
    split: str = "heldout"
    every: Annotated[int, Field(ge=0)] = Field(10, description="steps between evaluations; 0 = only before and after")
    samples: Positive = Field(120, description="samples at each evaluation during training")
    final_samples: Positive = Field(480, description="samples before the first and after the last step")
    group_size: Positive = Field(
        1, description="samples of each prompt side by side; above 1 pictures have a figure `diversity`"
    )
    features: str = Field("pixels", description="of diversity: pixels, clip, dino or package.module:Name")
    final: Literal["last", "best"] = Field(
        "last", description="weights that the last evaluation measures and model/ holds; best: those of checkpoint.best"
    )
    batch: Positive = 120
    sampling: dict[str, Any] = Field(default_factory=dict, description="overrides of `sampling` in evaluations")
    seed: Seed = 1234
    grid: Annotated[int, Field(ge=0)] = Field(24, description="samples kept as a picture grid or text page")

    @model_validator(mode="after")
    def _whole_groups(self) -> EvalConfig:
        """Every prompt has all its samples."""
        for key in ("samples", "final_samples"):
            count = getattr(self, key)
            if count % self.group_size:
                nearest = nearest_multiples(count, self.group_size)
                raise ValueError(f"{key} ({count}) must be a multiple of group_size ({self.group_size}); use {nearest}")
        return self
