"""Overrides of a pipeline's own defaults: what is not given keeps the value that the pipeline gave it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.section import Section
from pipelines import dapo


class Inner(Section):
    active: bool = False
    metric: str = "score"


class Middle(Section):
    inner: Inner = Field(default_factory=lambda: Inner(active=True))
    size: int = 1


class Own(BaseModel):
    middle: Middle = Field(default_factory=lambda: Middle(inner=Inner(metric="acc"), size=2))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], (2, False, "acc")),
        (["middle.size=3"], (3, False, "acc")),
        (["middle.inner.active=true"], (2, True, "acc")),
        (["middle.inner={active: true}"], (2, True, "acc")),
        (["middle.inner.metric=length", "middle.size=4"], (4, False, "length")),
    ],
)
def test_defaults_of_a_section_inside_a_section_are_kept(given: list[str], wanted: tuple[Any, ...]) -> None:
    middle = parse_overrides(Own, given).middle
    assert (middle.size, middle.inner.active, middle.inner.metric) == wanted


def test_a_section_around_it_without_defaults_leaves_those_of_the_field() -> None:
    class Plain(BaseModel):
        middle: Middle = Field(default_factory=Middle)

    assert parse_overrides(Plain, ["middle.inner.metric=acc"]).middle.inner == Inner(active=True, metric="acc")


def test_dynamic_sampling_stays_on_when_its_metric_is_given() -> None:
    filtered = parse_overrides(dapo.Config, ["algorithm.filter_groups.metric=score"]).algorithm.filter_groups
    assert (filtered.enable, filtered.metric) == (True, "score")
