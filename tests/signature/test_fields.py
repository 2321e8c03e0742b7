"""The step that a field is read from follows from the type of its parameter, however that type is written."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, NewType, Optional, TypeVar, Union

import pytest

import dataflow.graph as module
from dataflow.errors import PipelineError
from dataflow.stage import Carried, Latest, Read, stage

if TYPE_CHECKING:
    from dataflow.stage import Carried as Hidden

Version = Annotated[int, Carried]
State = Latest
Weights = NewType("Weights", Carried)
Bound = TypeVar("Bound", bound=Carried)
Quoted = TypeVar("Quoted", bound="Carried")
OneOf = TypeVar("OneOf", Latest, int)


class Old(Carried):
    """A marker with a documentation of its own."""


T = TypeVar("T")


class Typed(Carried, Generic[T]):
    """A marker that also says the type."""


WAYS: dict[str, tuple[Any, str]] = {
    "the class": (Carried, "carried"),
    "an instance": (Latest(), "latest"),
    "a subclass": ("Old", "carried"),
    "Annotated, a subclass": ("Annotated[int, Old]", "carried"),
    "Annotated, an instance of a subclass": (Annotated[int, Old()], "carried"),
    "its name": ("Carried", "carried"),
    "by its module": ("module.Latest", "latest"),
    "an alias": ("State", "latest"),
    "an alias of Annotated": ("Version", "carried"),
    "Annotated": (Annotated[int, Carried], "carried"),
    "generic": ("Typed[int]", "carried"),
    "Annotated, generic": ("Annotated[int, Typed[int]]", "carried"),
    "a generic one or None": ("Typed[int] | None", "carried"),
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


def test_names_of_the_enclosing_function_are_known_where_a_helper_makes_the_stage() -> None:
    Version = Annotated[int, Latest]  # another than that of this module

    def reads(version: Version) -> None: ...

    def helper(fn: Callable[..., Any]) -> Any:
        return stage(on="gpu")(fn)

    assert stage(on="gpu")(reads).reads == helper(reads).reads == made(reads).reads == (Read("version", "latest"),)
    assert Version


def made(fn: Callable[..., Any]) -> Any:
    return stage(on="gpu")(fn)


def test_options_and_services_need_not_be_resolved() -> None:
    @stage(on="gpu")
    def draws(prompts: list[int], *, engine: Hidden) -> None: ...

    assert draws.reads == (Read("prompts"),)


WRONG = {
    "Hidden": "the annotation 'Hidden' of field 'actor' cannot be resolved (name 'Hidden' is not defined)",
    **dict.fromkeys(
        (
            "list[Carried]",
            "Annotated[dict, 'Carried']",
            "Bound",
            "Quoted",
            "OneOf",
            "Callable[[Carried], int]",
            "Annotated[int, (Carried, 'of the engine')]",
            "Annotated[int, [Latest]]",
            "Annotated[int, {'lag': Carried}]",
            "Annotated[int, {Latest: 1}]",
        ),
        "has Carried or Latest inside another type or a text; write Annotated[TYPE, Carried], or Carried alone.",
    ),
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
    assert Callable


def test_names_where_a_stage_is_made_are_not_those_of_its_function() -> None:
    Version = int  # another than that of this module

    assert stage(on="gpu")(samples).reads[0].lag == "carried"
    assert Version


def samples(version: Version) -> None: ...


class Called:
    def __call__(self, prompts: int) -> None: ...


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (partial(samples, 1), "@stage above a partial: it has no name; write a function that calls it"),
        (Called(), "@stage above a Called: it has no name"),
        (Called, "@stage above Called: this is no function; give a function"),
        (3, "@stage above 3: this is no function"),
        (stage(on="gpu")(samples), r"'samples' is a stage already; bind\(name=\.\.\.\) makes another"),
    ],
)
def test_what_is_no_function_is_refused(given: Any, why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        stage(on="gpu")(given)


def test_a_single_name_may_stand_for_a_sequence_of_one() -> None:
    @stage(on="gpu", writes="x", after="rollout")
    def reads(prompts: int) -> None: ...

    assert (reads.writes, reads.after, reads.bind(after="sync").after) == (("x",), ("rollout",), ("sync",))
    assert module.Pipeline([reads.bind(after=())], inputs="prompts").inputs == ("prompts",)


def test_a_role_is_one_there_is() -> None:
    with pytest.raises(PipelineError, match=r"'samples' \(.*\): there is no role 'sample'; did you mean 'samples'"):
        stage(on="gpu", role="sample")(samples)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"on": 4}, "stage 'samples': on=4; give a name."),
        ({"name": 3}, "stage '3': name=3; give a name."),
        ({"name": "a[1]"}, "'a[1]' cannot be the name of a stage"),
        ({"after": 5}, "stage 'samples': after: 5 is no name; give a name, or a list of names."),
        ({"after": ["x", 5]}, "stage 'samples': after: 5 is no name"),
        ({"renamed": {"out": 3}}, "stage 'samples': renamed: 3 is no name"),
    ],
)
def test_what_is_no_name_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(PipelineError) as raised:
        stage(writes="out", on="gpu")(samples).bind(**given)
    assert why in str(raised.value)


@pytest.mark.parametrize("given", [{"writes": 3}, {"after": 3}, {"imports": 3}])
def test_what_is_no_list_of_names_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PipelineError, match=f"stage 'samples' .*: {next(iter(given))}: 3 is no name; give"):
        stage(on="gpu", **given)(samples)
