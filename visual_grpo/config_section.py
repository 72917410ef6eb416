"""What every configuration section shares: frozen, unknown keys refused, no truth value in place of a number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """Base of every configuration section."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `on` and `yes` as True, which pydantic would take for 1."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("a truth value stands where something else is meant")
        return value
