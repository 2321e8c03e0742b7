"""Section: the base class of every group of configuration keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, get_args

from annotated_types import Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from dataflow.config.keys.overrides import accepts

LARGEST = 2**31 - 1
"""The largest integer of a key without a bound of its own, as torch, Ray and vLLM use 32 bits."""
LARGEST_FLOAT = 1e9
"""The same for other numbers: in seconds 31 years, close to the longest time-out of Python's locks."""
LARGEST_STEP = 2**24
"""Maximum samples of a step, prompts times responses."""

Text = Annotated[str, Field(min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
"""One of AdamW's two betas."""


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; defaults are validated like given values."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)
    shorthand: ClassVar[str | None] = None
    """The key that a plain value given to the section sets (``policy=both`` sets ``policy.preset``)."""

    @cached_property
    def replaced(self) -> tuple[str, ...]:
        """Arguments whose keys a later one gave again: ``policy=both in place of policy=baseline``."""
        return ()  # where arguments are read, they put theirs in place of it

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

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_text_that_no_file_can_hold(cls, value: Any, info: ValidationInfo) -> Any:
        # A section's own fields are checked where it is built, so that the message names them.
        if isinstance(value, Mapping) and not accepts(cls.model_fields[str(info.field_name)].annotation, dict):
            return value
        for text in _texts(value):
            if "\0" in text:
                raise ValueError("give a text without NUL characters")
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("give a text that is valid UTF-8")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_numbers_out_of_range(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if any(isinstance(bound, Le | Lt) for bound in (*field.metadata, *_metadata(field.annotation))):
            return value
        for number in value if isinstance(value, list | tuple) else (value,):
            if type(number) is int and number > LARGEST:
                raise ValueError(f"give a whole number of at most {LARGEST}")
            if type(number) is float and abs(number) > LARGEST_FLOAT:
                raise ValueError(f"give a number of at most {LARGEST_FLOAT:.0f}")
        return value


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yields the bounds nested in an annotation, such as those of an optional field."""
    for inner in get_args(annotation):
        yield from inner.metadata if isinstance(inner, FieldInfo) else ()
        yield from _metadata(inner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
