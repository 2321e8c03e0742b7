"""Section: the base class of every group of configuration keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from dataflow.errors import nearest

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
"""Several texts, or a single one."""


Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
"""A share that is not 0."""


def one_of(names: Iterable[str]) -> AfterValidator:
    """Returns what checks that a text is one of a table's names."""
    known = tuple(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"give {', '.join(known)}{nearest(name, known).removesuffix('?')}")
        return name

    return AfterValidator(check)


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; defaults are validated like given values."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None
    """The key that a plain value given to the section sets (``policy=both`` sets ``policy.preset``)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value
