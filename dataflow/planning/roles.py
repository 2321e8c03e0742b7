"""Which stages of a pipeline use the reward service, by their roles. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataflow.graph import Pipeline, Stage


@dataclass(frozen=True)
class Roles:
    """The stages that send reward requests, collect them and score a validation; None if there is none.

    Attributes:
        request, collect: of the agent whose groups form the parts.
        score: the validation's, scored by that agent.
        beside: of the other agents, the stage that sends requests by the stage that collects them.
    """

    request: str | None
    collect: str | None
    score: str | None
    beside: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, pipeline: Pipeline) -> Roles:
        """Returns the roles of a pipeline's stages; a validation is scored on the resource that collects rewards.

        A collecting stage to which nothing sends requests is no agent: it takes its measured time.
        """
        collector = pipeline.collector
        # Requests to a reward model on the GPUs of the engine end in the time of the stage that sends them.
        pools = {s.on for s in pipeline.with_role("samples")}
        asking = [s for s in pipeline.with_role("requests") if s.on not in pools]
        if collector is None or not asking:
            return cls(asking[0].name if asking else None, None, None)
        if any(_feeds(r, collector) for r in pipeline.with_role("requests") if r not in asking):
            return cls(None, None, None)
        of = {s.name: next((r.name for r in asking if _feeds(r, s)), None) for s in pipeline.collectors}
        scoring = [s.name for s in pipeline.with_role("validates") if s.on == collector.on]
        return cls(
            of[collector.name] or (asking[0].name if asking else None),
            collector.name,
            scoring[0] if scoring else None,
            {name: request for name, request in of.items() if request is not None and name != collector.name},
        )


def _feeds(request: Stage, collector: Stage) -> bool:
    return not {read.field for read in collector.reads}.isdisjoint(request.writes)
