"""The requests of a run add up, also if it was killed, or its agent rebuilt."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dataflow.running.summary import reward_counts
from dataflow.timeline.spans import Mark, Span, Trace

HOWS = ("", "hedged", "ledger", "shared", "failed", "cancelled")


def asked(requests: int, *hows: str, agent: str = "reward") -> Trace:
    """Returns a trace of a step that sent a number of requests, with marks of those that were answered."""
    declared = [{"name": agent, "on": agent, "reads": [], "writes": [], "role": "collects"}]
    trace = Trace([Span(agent, 1, 0, 1, agent, 0, 1, {"requests": requests})])
    trace.meta["job"] = {"pipeline": {"stages": declared}}
    for i, how in enumerate(hows):
        facts: dict[str, Any] = {"step": 1, "group": i, "tries": 2, **({"how": how} if how else {})}
        seconds = 0.0 if how in ("ledger", "shared") else 99.0 if how in ("failed", "cancelled") else 2.0
        trace.add(Mark("reward", agent, 1, 1 + seconds, facts))
    return trace


@given(st.lists(st.sampled_from(HOWS)), st.integers(0, 5))
def test_each_request_ends_in_exactly_one_way(hows: list[str], left: int) -> None:
    counts = reward_counts([asked(len(hows) + left, *hows)], {})
    if not hows and not left:
        assert counts == {}
        return
    assert counts["requested"] == len(hows) + left
    assert counts["requested"] == counts["scored"] + counts["failed"] + counts["cancelled"]
    how = Counter(hows)
    assert (counts["failed"], counts["cached"], counts["shared"]) == (how["failed"], how["ledger"], how["shared"])
    assert counts["cancelled"] == how["cancelled"] + left
    assert counts["latency_s"]["p95"] == (2.0 if how[""] or how["hedged"] else None), "of calls alone"
    assert counts["retried"] == len(hows)


def test_several_agents_have_a_sum() -> None:
    logged = {("", "tokens"): 10, ("style", "tokens"): 5}
    found = reward_counts([asked(2, "", ""), asked(3, "", "failed", agent="style")], logged)
    assert (found["requested"], found["scored"], found["failed"], found["tokens"]) == (5, 3, 1, 15)
    assert {agent: of["tokens"] for agent, of in found["agents"].items()} == {"reward": 10, "style": 5}
