"""The requests of a run add up, even if its agent was rebuilt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.running.reporting.reward_totals import RewardTotals
from dataflow.timeline.spans import Mark, Span, Trace

HOWS = ("", "hedged", "ledger", "shared", "failed", "cancelled")


def asked(requests: int, *hows: str, step: int = 1, noted: bool = True) -> Trace:
    """Returns a trace of a step that sent a number of requests, with marks of those that were answered."""
    args = {"requests": requests} if noted else {}
    trace = Trace([Span("reward_request", step, 0, 1, "controller", 0, 1, args)])
    for i, how in enumerate(hows):
        facts: dict[str, Any] = {"step": step, "group": i, "tries": 2, **({"how": how} if how else {})}
        seconds = 0.0 if how in ("ledger", "shared") else 99.0 if how in ("failed", "cancelled") else 2.0
        trace.add(Mark("reward", "reward", 1, 1 + seconds, facts))
    return trace


@given(st.lists(st.sampled_from(HOWS)), st.integers(0, 5))
def test_each_request_ends_in_exactly_one_way(hows: list[str], left: int) -> None:
    counts = RewardTotals().counts([asked(len(hows) + left, *hows)])
    if not hows and not left:
        assert counts == {}
        return
    assert counts["requested"] == len(hows) + left
    assert counts["requested"] == counts["scored"] + counts["failed"] + counts["cancelled"]
    how = Counter(hows)
    assert (counts["failed"], counts["cached"], counts["shared"]) == (how["failed"], how["ledger"], how["shared"])
    assert counts["cancelled"] == how["cancelled"] + left


def test_latencies_are_of_calls() -> None:
    counts = RewardTotals().counts([asked(6, *HOWS)])
    assert counts["latency_s"] == {"p50": 2.0, "p95": 2.0, "p99": 2.0}
    assert counts["retried"] == 6


def test_a_rebuilt_agent_takes_nothing_away() -> None:
    """An agent died after 256 of 384 requests; the new one counts what it did itself."""
    totals = RewardTotals()
    assert totals.seen({"requested": 256, "scored": 200, "tokens": 1000, "running": 9})["tokens"] == 1000
    shown = totals.seen({"requested": 128, "scored": 64, "tokens": 100, "running": 3})
    assert (shown["requested"], shown["scored"], shown["tokens"], shown["running"]) == (256, 200, 1000, 3)
    assert totals.seen({"requested": 256, "scored": 256, "tokens": 600})["tokens"] == 1500
    counts = totals.counts([asked(384, *[""] * 384)], {"requested": 256, "scored": 256, "tokens": 600})
    assert (counts["requested"], counts["scored"], counts["tokens"]) == (384, 384, 1500)


def test_failures_of_the_step_that_ended_a_run_are_counted() -> None:
    totals = RewardTotals()
    first = [asked(4, "", "failed", "", ""), asked(4)]  # the second step failed, so that the trace has none of it
    counts = totals.counts(first, {"failed": 3})
    assert (counts["scored"], counts["failed"], counts["cancelled"]) == (3, 3, 2)
    totals.restarted([first[0]])  # from the checkpoint of step 1
    counts = totals.counts([first[0], asked(4, "", "failed", "", "")], {"failed": 1})
    assert (counts["scored"], counts["failed"], counts["cancelled"]) == (6, 2, 0)
    assert totals.counts([first[0], asked(4)], {"failed": 9})["cancelled"] == 0


def test_each_attempt_and_each_process_adds_what_it_paid() -> None:
    totals = RewardTotals()
    trace = [asked(4, *[""] * 4)]
    totals.step({"reward/tokens": 300.0})
    totals.resumed({"tokens": 340}, {})  # 40 of them after the last log
    totals.restarted(trace)
    totals.step({"reward/tokens": 100.0})
    assert totals.counts(trace, {"tokens": 150})["tokens"] == 340 + 150
    totals.restarted(trace)  # in the same process, with a new agent
    assert totals.counts(trace)["tokens"] == 340 + 150
    assert totals.counts(trace, {"tokens": 200})["tokens"] == 340 + 150 + 200
    killed = RewardTotals()
    killed.step({"reward/tokens": 300.0})
    killed.resumed({}, {"tokens": 30})
    assert killed.counts(trace, {"tokens": 50})["tokens"] == 380


def test_what_steps_logged_counts_where_no_agent_can_be_asked() -> None:
    totals = RewardTotals()
    for tokens in (300.0, 500.0):
        totals.step({"reward/tokens": tokens, "reward/hedged": 1.0})
    totals.step({"val-core/x": 1.0})
    counts = totals.counts([asked(4, ""), asked(2, "", "")])
    assert (counts["tokens"], counts["hedged"]) == (800, 2)
    assert (counts["requested"], counts["scored"], counts["cancelled"]) == (6, 3, 3)


@given(st.lists(st.integers(0, 100)))
def test_no_sum_ever_falls(said: list[int]) -> None:
    totals = RewardTotals()
    shown = [totals.seen({"tokens": tokens})["tokens"] for tokens in said]
    assert shown == sorted(shown)
    assert not said or shown[-1] >= max(said)


def test_stages_that_tell_the_trace_nothing() -> None:
    stats = {"requested": 8, "scored": 7, "failed": 1, "latency_s": {"p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 4.0}}
    counts = RewardTotals().counts([Trace()], stats)
    assert (counts["requested"], counts["scored"], counts["tokens"]) == (8, 7, 0)
    assert counts["latency_s"] == {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    assert RewardTotals().counts([Trace()]) == {}


@pytest.mark.parametrize("noted", [True, False])
def test_marks_count_where_the_request_was_not_noted(noted: bool) -> None:
    counts = RewardTotals().counts([asked(2, "", "failed", noted=noted)])
    assert (counts["requested"], counts["scored"], counts["failed"], counts["cancelled"]) == (2, 1, 1, 0)
