"""Stages: the step that a field is read from follows from its annotation, however written; what is wrong is said."""

from __future__ import annotations

from typing import Annotated, Any, NewType

import pytest

from dataflow.errors import PipelineError
from dataflow.graph import Pipeline
from dataflow.stage import Carried, Latest, Read, Stage, stage

State = Latest
Weights = NewType("Weights", Carried)

WAYS: dict[str, tuple[Any, str]] = {
    "the class": (Carried, "carried"),
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


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("Hidden", "cannot be resolved (name 'Hidden' is not defined)"),
        ("Carried | Latest", "says both Carried and Latest; give one of them."),
    ],
)
def test_what_may_be_a_lag_is_never_taken_for_none(annotation: str, why: str) -> None:
    with pytest.raises(PipelineError) as raised:
        reading(annotation)
    assert str(raised.value).startswith(f"stage 'reads': the annotation '{annotation}' of field 'actor' {why}")


def test_a_single_name_may_stand_for_a_sequence_of_one() -> None:
    @stage(on="gpu", writes="x", after="rollout")
    def reads(prompts: int) -> None: ...

    assert (reads.writes, reads.after, reads.bind(after="sync").after) == (("x",), ("rollout",), ("sync",))
    assert Pipeline([reads.bind(after=())], inputs="prompts").inputs == ("prompts",)


def test_a_role_is_one_there_is() -> None:
    with pytest.raises(PipelineError, match="'reading': there is no role 'sample'; did you mean 'samples'"):
        stage(on="gpu", role="sample")(reading)  # type: ignore[arg-type]
