"""Simulations of a plan: each is made once, and the published workload within its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataflow.errors import PolicyError
from dataflow.planning.planner import predict
from dataflow.planning.simulation import Outcome, Outcomes
from dataflow.policy import SchedulingPolicy, preset
from tests.rigs.simulated import job

POLICIES = {name: preset(name, 4) for name in ("baseline", "both", "both+stream")}


def test_each_simulation_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    of = Outcome.of
    monkeypatch.setattr(Outcome, "of", lambda *wanted: made.append(wanted) or of(*wanted))
    once = Outcomes()
    few = replace(job(), steps=2)
    for _ in range(2):
        predict(few, POLICIES, outcomes=once)
    assert len(made) == 2 * len(POLICIES), "a run and its critical path for each policy"
    # A critical path depends on no limit, and the words about a workload change nothing.
    more = replace(few, rewards=replace(few.rewards, concurrency=3), assumptions=("a sentence",))
    predict(more, POLICIES, outcomes=once)
    assert len(made) == 3 * len(POLICIES)


def test_a_policy_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(PolicyError, match="split=3 does not divide"):
        Outcomes().of(job(), SchedulingPolicy(3, 0))
