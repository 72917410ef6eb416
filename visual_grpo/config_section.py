"""What every configuration section shares: frozen, unknown keys refused, no truth value in place of a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        kind = str(cls.model_fields[info.field_name or ""].annotation)
        inner: Iterable[Any] = value if isinstance(value, list | tuple) else ()
        if isinstance(value, Mapping) and "dict[" in kind:  # and no section, whose own fields are looked at there
            inner = value.values()
        within = "Any" not in kind and any(isinstance(item, bool) for item in inner)
        if "bool" not in kind and (within or isinstance(value, bool)):
            raise ValueError("a truth value stands where something else is meant")
        return value
