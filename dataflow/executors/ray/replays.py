"""Records which finished tasks have to run again when a service is rebuilt, because its memory held their results.

Pure bookkeeping. For a stage that leaves a state in its service (a weight sync), the record keeps the newest task. For
a stage that submits groups (a reward request), it keeps each step's submissions, and which of their groups later stages
of the service, the takers, have returned. A step's submissions are dropped when all tasks of its takers have ended,
so the record holds the steps in flight only.
"""

from __future__ import annotations

from collections import Counter
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

    def without(self, groups: Container[int]) -> Submission:
        """Returns the same submission without these groups."""
        rest = tuple(g for g in self.groups if g not in groups)
        return replace(self, call=_narrowed(self.call, self.groups, rest), groups=rest)


@dataclass
class _Kept:
    """One step's submissions of one stage.

    Attributes:
        takers: stages with tasks of the step that have not ended.
        tasks: the submissions.
        returned: ids of the groups that the takers have returned.
        ended: number of ended tasks of each taker.
    """

    takers: set[str]
    tasks: dict[TaskId, Submission] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)


class Replays:
    """The submissions that one service still holds.

    Args:
        host: name of the service.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._takers: dict[str, set[str]] = {}
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._states: set[str] = set()
        self._newest: dict[str, Submission] = {}

    def __len__(self) -> int:
        """Returns the number of finished tasks that are kept."""
        return len(self._newest) + sum(len(kept.tasks) for kept in self._kept.values())

    def learn(self, pipeline: Pipeline) -> None:
        """Finds the stages of the service that replay, and the stages that return what those submit."""
        for s in pipeline.stages:
            if not s.replays or _host_of(s) != self._host:
                continue
            if pipeline.states.intersection(s.writes):
                self._states.add(s.name)
            else:
                self._takers.setdefault(s.name, set()).update(_takers(pipeline, s))

    def ended(self, submission: Submission | None, task: Task, groups: tuple[int, ...] | None) -> None:
        """Records the end of a task of the service.

        Args:
            submission: the task's submission, if its stage replays.
            task: that finished without an error.
            groups: ids that it returned, if its stage collects.

        Raises:
            DataflowError: the stage replays, but left neither groups nor a state.
        """
        i = task.id
        if submission is not None and i.stage in self._states:
            self._newest[i.stage] = submission
        if submission is not None and self._takers.get(i.stage):
            if not submission.groups and submission.call.groups != ():  # all returned before its answer was lost
                raise DataflowError(
                    f"stage '{i.stage}' replays, so it must read a Batch of the groups that it submits, or "
                    "write a state."
                )
            kept = self._kept.setdefault((i.step, i.stage), _Kept(set(self._takers[i.stage])))
            kept.tasks[i] = submission
        for stage, takers in self._takers.items():
            if i.stage in takers and (i.step, stage) in self._kept:
                self._take((i.step, stage), i, groups or ())

    def _take(self, key: tuple[int, str], taker: TaskId, groups: Sequence[int]) -> None:
        kept = self._kept[key]
        kept.returned.update(groups)
        kept.ended[taker.stage] += 1
        if kept.ended[taker.stage] == taker.parts:
            kept.takers.discard(taker.stage)
        if not kept.takers:
            del self._kept[key]

    def left(self) -> list[Submission]:
        """Returns the submissions to run again: states first, then by step, each for its groups not returned yet."""
        found = list(self._newest.values())
        for key in sorted(self._kept):
            kept = self._kept[key]
            found += [rest for was in kept.tasks.values() if (rest := was.without(kept.returned)).groups]
        return found

    def narrowed(self, task: Task, call: StageCall) -> StageCall:
        """Returns the call of an unfinished task for those of its groups that were not returned yet.

        Some may be: the service accepted the submission and died before its answer arrived.
        """
        kept = self._kept.get((task.id.step, task.id.stage))
        if kept is None or call.groups is None:
            return call
        return _narrowed(call, call.groups, tuple(g for g in call.groups if g not in kept.returned))


def _narrowed(call: StageCall, of: tuple[int, ...], groups: tuple[int, ...]) -> StageCall:
    if len(groups) == len(of):
        return call
    return replace(call, groups=groups, info=replace(call.info, groups=groups))


def _host_of(s: Stage) -> str | None:
    return s.host.name if s.host else None


def _takers(pipeline: Pipeline, submits: Stage) -> set[str]:
    """Returns the stages downstream in the step that use the same service and run on the same steps."""
    reached = {submits.name}
    for s in pipeline.order:
        if any(t is s and source.name in reached and lag == "none" for source, t, _field, lag in pipeline.edges):
            reached.add(s.name)
    beside = [pipeline.by_name[name] for name in reached - {submits.name}]
    return {s.name for s in beside if _host_of(s) == _host_of(submits) and s.every == submits.every}
