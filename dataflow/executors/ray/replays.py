"""Records which finished tasks have to run again when a service is rebuilt, because its memory held their results.

Pure bookkeeping. Of a stage that leaves a state in its service (a weight sync) the newest task counts. Of one that
submits groups (a reward request) the submissions of a step count until the tasks of its takers, the later stages of the
service that return these groups, have all ended; those groups that they have returned are left out.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dataflow.errors import DataflowError
from dataflow.executors.base import StageCall
from dataflow.graph import Pipeline, Stage, Task, TaskId


@dataclass(frozen=True)
class Submission:
    """A finished task that left groups or a state in the memory of its service, and the handles of its inputs."""

    task: Task
    call: StageCall
    values: Sequence[Any]
    groups: tuple[int, ...]


@dataclass
class _Step:
    """What a step has submitted, what its takers have returned, and how many tasks each of them has left."""

    submissions: dict[TaskId, Submission] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)


class Replays:
    """The submissions that the service of this name still holds."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._takers: dict[str, set[str]] = {}  # by the stage that submits
        self._states: set[str] = set()
        self._newest: dict[str, Submission] = {}
        self._steps: dict[tuple[int, str], _Step] = {}

    def __len__(self) -> int:
        """Returns the number of finished tasks that are kept."""
        return len(self._newest) + sum(len(step.submissions) for step in self._steps.values())

    def learn(self, pipeline: Pipeline) -> None:
        """Finds the stages of the service that replay, and the stages that return what those submit."""
        for stage in pipeline.stages:
            if not stage.replays or _host_of(stage) != self._host:
                continue
            if pipeline.states.intersection(stage.writes):
                self._states.add(stage.name)
            elif takers := _takers(pipeline, stage):
                self._takers.setdefault(stage.name, set()).update(takers)

    def ended(self, submission: Submission | None, task: Task, groups: Sequence[int] | None) -> None:
        """Records the end of a task: its submission, if its stage replays, and the groups that it collected."""
        step, stage = task.id.step, task.id.stage
        if submission is not None and stage in self._states:
            self._newest[stage] = submission
        elif submission is not None and stage in self._takers:
            if not submission.groups and submission.call.groups != ():  # all returned before its answer was lost
                raise DataflowError(
                    f"stage '{stage}' replays, so it must read a Batch of the groups that it submits, or write a state."
                )
            self._steps.setdefault((step, stage), _Step()).submissions[task.id] = submission
        for submits, takers in self._takers.items():
            if stage in takers and (kept := self._steps.get((step, submits))) is not None:
                kept.returned.update(groups or ())
                kept.left[stage] = kept.left.get(stage, task.id.parts) - 1
                if all(kept.left.get(taker) == 0 for taker in takers):
                    del self._steps[step, submits]

    def left(self) -> list[Submission]:
        """Returns the submissions to run again: states first, then by step, each for its groups not returned yet."""
        found = list(self._newest.values())
        for key in sorted(self._steps):
            step = self._steps[key]
            rests = [(was, _without(was.groups, step.returned)) for was in step.submissions.values()]
            found += [
                replace(was, call=_narrowed(was.call, was.groups, rest), groups=rest) for was, rest in rests if rest
            ]
        return found

    def narrowed(self, task: Task, call: StageCall) -> StageCall:
        """Returns the call of an unfinished task for those of its groups that were not returned yet.

        Some may be: the service accepted the submission and died before its answer arrived.
        """
        kept = self._steps.get((task.id.step, task.id.stage))
        if kept is None or call.groups is None:
            return call
        return _narrowed(call, call.groups, _without(call.groups, kept.returned))


def _without(groups: Sequence[int], returned: Container[int]) -> tuple[int, ...]:
    return tuple(group for group in groups if group not in returned)


def _narrowed(call: StageCall, of: Sequence[int], groups: tuple[int, ...]) -> StageCall:
    if len(groups) == len(of):
        return call
    return replace(call, groups=groups, info=replace(call.info, groups=groups))


def _host_of(stage: Stage) -> str | None:
    return stage.host.name if stage.host else None


def _takers(pipeline: Pipeline, submits: Stage) -> set[str]:
    """Returns the stages downstream in the step that use the same service and run on the same steps."""
    reached = {submits.name}
    for stage in pipeline.order:
        if any(to is stage and source.name in reached and lag == "none" for source, to, _field, lag in pipeline.edges):
            reached.add(stage.name)
    beside = [pipeline.by_name[name] for name in reached - {submits.name}]
    return {s.name for s in beside if _host_of(s) == _host_of(submits) and s.every == submits.every}
