"""The step that a field is read from follows from the type of its parameter, however that type is written."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Annotated, Any, NewType, Optional, Union

import pytest

import dataflow.graph as module
from dataflow.errors import PipelineError
from dataflow.stage import Carried, Latest, Read, stage

if TYPE_CHECKING:
    from dataflow.stage import Carried as Hidden

Version = Annotated[int, Carried]
State = Latest
Weights = NewType("Weights", Carried)

WAYS: dict[str, tuple[Any, str]] = {
    "the class": (Carried, "carried"),
    "its name": ("Carried", "carried"),
    "by its module": ("module.Latest", "latest"),
    "an alias": ("State", "latest"),
    "an alias of Annotated": ("Version", "carried"),
    "Annotated": (Annotated[int, Carried], "carried"),
    "Annotated, an instance": ("Annotated[dict[str, Any], Latest()]", "latest"),
    "Annotated, its type": (Annotated[Carried, "of the engine"], "carried"),
    "or None": ("Latest | None", "latest"),
    "Optional": (Optional[Carried], "carried"),  # noqa: UP045
    "Union": (Union[Latest, int, None], "latest"),  # noqa: UP007
    "a union of Annotated": ("Annotated[int, Carried] | None", "carried"),
    "a NewType": ("Weights", "carried"),
    "a string in Optional": ("Optional['Latest']", "latest"),
    "none": ("dict[str, Any] | None", "none"),
    "a name like it": ("types.SimpleNamespace", "none"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_lag_may_be_written_in_any_way(way: str) -> None:
    annotation, lag = WAYS[way]

    def reads(actor) -> None: ...  # type: ignore[no-untyped-def]

    reads.__annotations__["actor"] = annotation
    assert stage(on="gpu")(reads).reads == (Read("actor", lag),)
    assert {types, module}


def test_names_of_the_enclosing_function_are_known() -> None:
    Mine = Annotated[int, Carried]

    @stage(on="gpu")
    def reads(weights: Mine, actor: Latest, plain: int, bare) -> None: ...  # type: ignore[no-untyped-def]

    assert [read.lag for read in reads.reads] == ["carried", "latest", "none", "none"]


def test_options_and_services_need_not_be_resolved() -> None:
    @stage(on="gpu")
    def draws(prompts: list[int], *, engine: Hidden) -> None: ...

    assert draws.reads == (Read("prompts"),)


WRONG = {
    "Hidden": "the annotation 'Hidden' of field 'actor' cannot be resolved (name 'Hidden' is not defined)",
    "list[Carried]": "has Carried or Latest inside another type; write Annotated[TYPE, Carried], or Carried alone.",
    "Carried | Latest": "says both Carried and Latest; give one of them.",
    "int |": "cannot be resolved",
}


@pytest.mark.parametrize("annotation", WRONG)
def test_what_may_be_a_lag_is_never_taken_for_none(annotation: str) -> None:
    def reads(actor) -> None: ...  # type: ignore[no-untyped-def]

    reads.__annotations__["actor"] = annotation
    with pytest.raises(PipelineError) as raised:
        stage(on="gpu")(reads)
    assert WRONG[annotation] in str(raised.value)
    assert str(raised.value).startswith("stage 'reads': the annotation")


def test_a_role_is_one_there_is() -> None:
    with pytest.raises(PipelineError, match="no such role; did you mean 'samples'"):
        stage(on="gpu", role="sample")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r'role="collects"'):
        stage(on="gpu", forms_parts=True)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r"per_emission=True\) is stage\(per_chunk=True\) now"):
        stage(on="gpu", per_emission=True)  # type: ignore[arg-type]
