"""simulate: the seconds of each stage, and how many groups the reward service computes at once."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow import Carried, Latest, Pipeline, expand, preset, simulate, stage
from dataflow.errors import ConfigError


@stage(writes="text", on="gpu", role="samples")
def write(prompts: object, weights: Carried) -> None: ...


@stage(writes="ticket", on="controller", role="requests")
def ask(text: object) -> None: ...


@stage(writes="scores", on="reward", role="collects")
def collect(text: object, ticket: object) -> None: ...


@stage(writes="weights", on="gpu", role="trains", per_mini_batch=True)
def train(text: object, scores: object, weights: Latest) -> None: ...


SECONDS = {"write": 2.0, "ask": 0.0, "collect": 6.0, "train": 1.0}


def wall(policy: str, asks: bool = True, **options: Any) -> float:
    stages = [write, ask, collect, train] if asks else [write, collect.bind(renamed={"ticket": "text"}), train]
    graph = expand(Pipeline(stages, inputs=["prompts"]), preset(policy, 2), steps=10, mini_batches=2, groups=4)
    return simulate(graph, {s.name: SECONDS[s.name] for s in stages}, **options).wall


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_steps_share_what_the_service_computes_at_once(asks: bool, capacity: int) -> None:
    assert wall("baseline", asks, capacity=capacity) == pytest.approx(90.0), "a step alone takes its seconds"
    together = wall("off-policy", asks, capacity=capacity)
    if capacity == 1:
        assert together >= 60.0, "10 steps of 6 s each, one after the other"
    assert together >= wall("off-policy", asks)


def test_without_a_capacity_steps_do_not_wait_for_each_other() -> None:
    assert wall("off-policy") < 60.0


def test_a_capacity_is_at_least_1() -> None:
    with pytest.raises(ConfigError, match="give a whole number of at least 1"):
        wall("baseline", capacity=0)
