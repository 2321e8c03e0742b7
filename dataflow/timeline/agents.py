"""Who answered a run's reward requests: its agents, each with a resource of its own name. Pure."""

from __future__ import annotations

from typing import Any

from dataflow.timeline.spans import Trace

MAIN = "reward"
"""The resource of the one agent that most runs have."""


def stages_of(trace: Trace) -> dict[str, str]:
    """Returns stage -> agent, for the stages that request, collect or evaluate rewards; in the pipeline's order.

    A stage that requests belongs to the agent whose collecting stage reads what it writes. Where a trace does not say
    that, it belongs to the first agent.
    """
    placed, roles = trace.placed, trace.roles
    found = {stage: placed.get(stage, MAIN) for stage, role in roles.items() if role == "collects"}
    agents = dict.fromkeys(found.values()) or {MAIN: None}
    read = {field: found[s["name"]] for s in trace.declared if s["name"] in found for field, *_ in s["reads"]}
    asking = {s["name"]: [read[field] for field in s["writes"] if field in read] for s in trace.declared}
    for stage, role in roles.items():
        if role == "requests":
            found[stage] = next(iter(asking.get(stage, ())), next(iter(agents)))
    return {**{stage: on for stage, on in placed.items() if on in agents}, **found}


def agents_of(trace: Trace) -> list[str]:
    """Returns the agents, in the order of the pipeline: those that collect, and those whose requests are marked."""
    collects = trace.with_role("collects")
    named = [agent for stage, agent in stages_of(trace).items() if stage in collects]
    return list(dict.fromkeys([*named, *(mark.resource for mark in trace.marks)]))


def part_of(trace: Trace, agent: str) -> Trace:
    """Returns the tasks and requests of one agent."""
    stages = stages_of(trace)
    spans = [s for s in trace.spans if stages.get(s.stage, s.resource) == agent]
    alone = all(m.resource == agent for m in trace.marks)
    return Trace(spans, trace.marks if alone else [m for m in trace.marks if m.resource == agent], meta=trace.meta)


def cause_of(agent: str) -> str:
    """Returns the name of the waits for an agent: ``rewards`` for the one named reward, else its own name."""
    return "rewards" if agent == MAIN else agent


def reward_causes_of(trace: Trace) -> dict[str, str]:
    """Returns {cause: agent} of the waits for rewards that a run may have."""
    return {cause_of(agent): agent for agent in (MAIN, *agents_of(trace))}


def concurrency_of(trace: Trace, agent: str) -> int | None:
    """Returns the agent's requests in flight at most, as the run's configuration has them; None if it does not."""
    job = trace.meta.get("job") or {}
    found = _limits_of(trace, agent).get("concurrency") or job.get("concurrency")
    return int(found) if found else None


def rpm_of(trace: Trace, agent: str) -> float | None:
    """Returns the agent's requests a minute at most, by the run's configuration; None for no limit."""
    found = _limits_of(trace, agent).get("rpm")
    return float(found) if found else None


def _limits_of(trace: Trace, agent: str) -> dict[str, Any]:
    job = trace.meta.get("job") or {}
    agents = job.get("agents") or {}
    return dict(agents.get(agent, job))
