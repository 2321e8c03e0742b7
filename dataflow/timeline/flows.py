"""Which samples went where: from the rollout of a step to each part of its rewards to each update on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import PipelineError
from dataflow.graph import Pipeline
from dataflow.timeline.spans import Span, Trace, emissions

CHAIN = ("rollout", "reward_collect", "actor_update")
"""The stages that sample, collect rewards and train, of a trace that does not say what its pipeline was."""


def flows(trace: Trace) -> Iterator[tuple[Span, float, Span, Span]]:
    """Yields (rollout, when its samples left it, part of the rewards, update on that part), for each update.

    Of a rollout that streams, samples leave with what it hands on: the last set that the part had to wait for.
    """
    stages = chain(trace)
    if stages is None:
        return
    source, collect, update = stages
    parts: dict[tuple[str, int], dict[int, Span]] = {}
    for span in trace.spans:
        if span.stage in stages:
            parts.setdefault((span.stage, span.step), {})[span.part] = span
    for (stage, step), updates in parts.items():
        if stage != update:
            continue
        for trained in updates.values():
            for scored in parts.get((collect, step), {}).values():
                for rollout in parts.get((source, step), {}).values():
                    if _overlap(rollout, scored) and _overlap(scored, trained):
                        yield rollout, _left(rollout, scored), scored, trained


def chain(trace: Trace) -> tuple[str, str, str] | None:
    """Returns the stages that sample, collect rewards and train; None if the pipeline has no such."""
    try:
        pipeline = Pipeline.from_facts(trace.meta["job"]["pipeline"])
    except (KeyError, TypeError, AttributeError, ValueError, PipelineError):
        return CHAIN
    update = next((s for s in pipeline.stages if s.grain == "mini-batch"), None)
    if pipeline.former is None or update is None:
        return None
    source = pipeline.former
    while before := [pipeline.writer[r.field] for r in source.reads if r.lag == "none" and r.field in pipeline.writer]:
        source = before[0]
    return source.name, pipeline.former.name, update.name


def _overlap(one: Span, other: Span) -> bool:
    """Whether two parts of a step overlap, both as shares of it."""
    return (
        one.part * other.parts < (other.part + 1) * one.parts and other.part * one.parts < (one.part + 1) * other.parts
    )


def _left(rollout: Span, scored: Span) -> float:
    """Returns when the last samples left a rollout whose rewards are in a part."""
    sets = emissions(rollout)
    return max((one.end for one in sets if _overlap(one, scored)), default=rollout.end)
