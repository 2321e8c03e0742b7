"""Stages: the step that a field is read from follows from its annotation, however written; what is wrong is said."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NewType

import pytest

import dataflow.graph as module
from dataflow.errors import PipelineError
from dataflow.stage import Carried, Hosted, Latest, Read, Stage, stage

Version = Annotated[int, Carried]
State = Latest
Weights = NewType("Weights", Carried)


class Old(Carried):
    """A marker with a documentation of its own."""


WAYS: dict[str, tuple[Any, str]] = {
    "the class": (Carried, "carried"),
    "a subclass": ("Old", "carried"),
    "its name": ("Carried", "carried"),
    "an alias": ("State", "latest"),
    "Annotated": (Annotated[int, Carried], "carried"),
    "or None": ("Latest | None", "latest"),
    "a NewType": ("Weights", "carried"),
    "none": ("dict[str, Any] | None", "none"),
}


def reading(annotation: Any) -> Stage:
    def reads(actor) -> None: ...  # type: ignore[no-untyped-def]

    reads.__annotations__["actor"] = annotation
    return stage(on="gpu")(reads)


@pytest.mark.parametrize("way", WAYS)
def test_a_lag_may_be_written_in_any_way(way: str) -> None:
    annotation, lag = WAYS[way]
    assert reading(annotation).reads == (Read("actor", lag),)


def test_names_of_the_enclosing_function_are_known_also_where_a_helper_makes_the_stage() -> None:
    Version = Annotated[int, Latest]  # another than that of this module

    def reads(version: Version, weights: Carried, plain: int, bare) -> None: ...  # type: ignore[no-untyped-def]

    def helper(fn: Callable[..., Any]) -> Stage:
        return stage(on="gpu")(fn)

    assert [read.lag for read in stage(on="gpu")(reads).reads] == ["latest", "carried", "none", "none"]
    assert stage(on="gpu")(reads).reads == helper(reads).reads
    assert helper(samples).reads[0].lag == "carried"
    assert Version


def samples(version: Version) -> None: ...


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("Hidden", "cannot be resolved (name 'Hidden' is not defined)"),
        ("int |", "cannot be resolved"),
        ("Carried | Latest", "says both Carried and Latest; give one of them."),
    ],
)
def test_what_may_be_a_lag_is_never_taken_for_none(annotation: str, why: str) -> None:
    with pytest.raises(PipelineError) as raised:
        reading(annotation)
    assert str(raised.value).startswith(f"stage 'reads': the annotation '{annotation}' of field 'actor' {why}")


@pytest.mark.parametrize(
    ("given", "what"),
    [(partial(samples, 1), "partial"), (Hosted, "type"), (stage(on="gpu")(samples), "Stage")],
)
def test_what_is_no_function_is_refused(given: Any, what: str) -> None:
    with pytest.raises(PipelineError, match=f"this is an? {what}, no function; write a function that calls it"):
        stage(on="gpu")(given)


def test_a_single_name_may_stand_for_a_sequence_of_one() -> None:
    @stage(on="gpu", writes="x", after="rollout")
    def reads(prompts: int) -> None: ...

    assert (reads.writes, reads.after, reads.bind(after="sync").after) == (("x",), ("rollout",), ("sync",))
    assert module.Pipeline([reads.bind(after=())], inputs="prompts").inputs == ("prompts",)
    with pytest.raises(PipelineError, match="stage 'reads': after: 5 is no name; give a name, or a list of names"):
        reads.bind(after=["x", 5])  # type: ignore[list-item]


def test_a_role_is_one_there_is() -> None:
    with pytest.raises(PipelineError, match=r"'samples' \(.*\): there is no role 'sample'; did you mean 'samples'"):
        stage(on="gpu", role="sample")(samples)  # type: ignore[arg-type]


def test_a_service_is_given_unbuilt() -> None:
    with pytest.raises(PipelineError, match=r"Hosted\('judge', \.\.\.\): a dict builds no service; give the class or"):
        Hosted("judge", {})  # type: ignore[arg-type]
    with pytest.raises(
        PipelineError, match=r"Hosted\('judge', \.\.\.\): options is an int; give the factory's arguments"
    ):
        Hosted("judge", dict, 5)  # type: ignore[arg-type]
