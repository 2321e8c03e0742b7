"""The way of the samples: from a step's rollout to the parts of its rewards, and to the updates on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.timeline.spans import Span, Trace, chunk_spans


def flows(trace: Trace) -> Iterator[tuple[Span, float, Span, Span]]:
    """Yields (rollout, when the samples left it, part of the rewards, update on that part), for each update.

    Samples leave a streaming rollout with its chunks: the time is that of the last chunk that the part waited for.
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
    """Returns the stages that sample, collect rewards and train; None if the pipeline lacks one."""
    role_of = trace.roles
    first = {role: name for name, role in reversed(role_of.items())}
    chosen = [first.get(role) for role in ("samples", "collects", "trains")]
    sampling, collecting, training = chosen
    return (sampling, collecting, training) if sampling and collecting and training else None


def _overlap(one: Span, other: Span) -> bool:
    """Whether two parts of a step, each taken as a share of the step, overlap."""
    return (
        one.part * other.parts < (other.part + 1) * one.parts and other.part * one.parts < (one.part + 1) * other.parts
    )


def _left(rollout: Span, scored: Span) -> float:
    """Returns when the last samples of a part left the rollout."""
    sets = chunk_spans(rollout)
    return max((one.end for one in sets if _overlap(one, scored)), default=rollout.end)
