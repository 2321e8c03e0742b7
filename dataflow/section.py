"""Section: what every group of configuration keys has in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from dataflow.overrides import accepts

Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A group of keys. Unknown ones are errors, defaults are validated as values are."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None
    """The key that a plain value given to the section sets (``policy=both`` sets ``policy.preset``)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and not accepts(annotation, bool, dict):
            raise ValueError("give a number, not true or false")
        return value
