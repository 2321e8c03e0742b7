"""Simulations of a plan: each is made once, in other processes as in this one, and no process is left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataflow.errors import PolicyError
from dataflow.planning.planner import predict
from dataflow.planning.simulation import outcomes
from dataflow.planning.simulation.outcomes import Job, Outcomes
from dataflow.planning.workload import Workload
from dataflow.policy import SchedulingPolicy, preset
from tests.rigs.processes import below, command, until
from tests.rigs.simulated import job

POLICIES = {name: preset(name, 4) for name in ("baseline", "both", "both+stream")}


def others() -> list[object]:
    """The processes of plans that run."""
    return [p for p in below() if "dataflow.planning.simulation" in command(p)]


@pytest.fixture
def _any_size_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "WORTH", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("_any_size_pays")
@pytest.mark.timeout(60)
def test_other_processes_give_the_same_to_the_last_digit_and_end() -> None:
    workload = job()
    with Outcomes(3) as several:
        wanted = [Job.of(workload, policy) for policy in POLICIES.values()]
        several.begin(wanted)
        assert until(lambda: len(others()) == 2, 20)  # a new process has the command line of this one at first
        found = predict(workload, POLICIES, outcomes=several)
        # Those that another process has not begun are made here.
        elsewhere = [several.of(each.workload, each.policy) for each in wanted]
    assert not others()
    assert found == predict(workload, POLICIES)
    assert elsewhere == [each.run() for each in wanted]


@pytest.mark.slow
@pytest.mark.usefixtures("_any_size_pays")
@pytest.mark.timeout(60)
def test_a_process_that_dies_costs_nothing_but_its_time() -> None:
    workload = job()
    with Outcomes(2) as two:
        two.begin([Job.of(workload, policy) for policy in POLICIES.values()])
        for process in others():
            process.kill()  # type: ignore[attr-defined]
        assert predict(workload, POLICIES, outcomes=two) == predict(workload, POLICIES)


@pytest.mark.slow
@pytest.mark.usefixtures("_any_size_pays")
@pytest.mark.timeout(60)
def test_an_interrupt_ends_the_processes() -> None:
    long = Job.of(replace(job(), steps=500), POLICIES["both"])

    def interrupted() -> None:
        with Outcomes(2) as two:
            two.begin([long])
            assert until(others, 20)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not others()


def test_each_simulation_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Job] = []
    run = Job.run
    monkeypatch.setattr(Job, "run", lambda self: made.append(self) or run(self))
    once = Outcomes()
    few = replace(job(), steps=2)
    for _ in range(2):
        predict(few, POLICIES, outcomes=once)
    assert len(made) == 2 * len(POLICIES), "a run and its critical path for each policy"
    # A critical path depends on no limit, and the words about a workload change nothing.
    more = replace(few, rewards=replace(few.rewards, concurrency=3), assumptions=("a sentence",))
    predict(more, POLICIES, outcomes=once)
    assert len(made) == 3 * len(POLICIES)


def test_one_process_starts_no_other_and_small_plans_none(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Job.of(replace(job(), steps=2), POLICIES["both"])
    with Outcomes(8) as many:
        many.begin([small])
        assert not others()
    monkeypatch.setattr(outcomes, "WORTH", 1)
    with Outcomes(1) as one:
        one.begin([small])
        assert not others()
        assert one.of(small.workload, small.policy) == small.run()


@pytest.mark.slow
@pytest.mark.usefixtures("_any_size_pays")
@pytest.mark.timeout(60)
def test_a_policy_that_does_not_fit_is_an_error_wherever_it_is_simulated() -> None:
    workload: Workload = replace(job(), steps=2)
    with Outcomes(2) as two:
        two.begin([Job.of(workload, SchedulingPolicy(3, 0))])
        with pytest.raises(PolicyError, match="split=3 does not divide"):
            two.of(workload, SchedulingPolicy(3, 0))
