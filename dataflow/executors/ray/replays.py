"""What must run again when a tool is built anew: finished tasks whose groups its memory still held.

Pure bookkeeping. Of a stage that leaves a state in its tool (a weight sync) the newest task counts. Of one that
leaves groups: of each step it keeps what was submitted (tasks of stages that replay) and which of those groups were
handed out since (reports of the tasks that form parts, downstream in the same tool). A step's submissions are
forgotten with the last task that could hand them out: the takers, every task of them, have ended. As a step always
runs to its last task, or the run ends, no more is kept than the steps in flight, however long the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dataflow.errors import DataflowError
from dataflow.executors.base import Call
from dataflow.graph import Pipeline, Stage, Task, TaskId


@dataclass(frozen=True)
class Submission:
    """A finished task whose groups, or whose state, live in its tool's memory, and the handles of what it read."""

    task: Task
    call: Call
    values: Sequence[Any]
    groups: tuple[int, ...]

    def without(self, groups: Container[int]) -> Submission:
        """Returns the same task for the other groups alone."""
        rest = tuple(g for g in self.groups if g not in groups)
        return replace(self, call=_narrowed(self.call, self.groups, rest), groups=rest)


@dataclass
class _Kept:
    """One step's submissions of one stage."""

    takers: set[str]
    """Stages that have tasks of the step left to end."""
    tasks: dict[TaskId, Submission] = field(default_factory=dict)
    handed: set[int] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)


class Replays:
    """The submissions to one tool that it has not handed out yet.

    Args:
        host: name of the tool.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._takers: dict[str, set[str]] = {}
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._states: set[str] = set()
        self._newest: dict[str, Submission] = {}

    def __len__(self) -> int:
        """How many finished tasks are kept."""
        return len(self._newest) + sum(len(kept.tasks) for kept in self._kept.values())

    def learn(self, pipeline: Pipeline) -> None:
        """Finds the tool's stages that replay, and which stages of it hand out what those submitted."""
        for s in pipeline.stages:
            if not s.replays or _host_of(s) != self._host:
                continue
            if pipeline.states.intersection(s.writes):
                self._states.add(s.name)
            else:
                self._takers.setdefault(s.name, set()).update(_takers(pipeline, s))

    def ended(self, submission: Submission | None, task: Task, groups: tuple[int, ...] | None) -> None:
        """Books the end of a task of the tool.

        Args:
            submission: what it left in the tool, if its stage replays.
            task: that ended well.
            groups: that it handed out, if it forms parts.
        """
        i = task.id
        if submission is not None and i.stage in self._states:
            self._newest[i.stage] = submission
        if submission is not None and self._takers.get(i.stage):
            if not submission.groups:
                raise DataflowError(
                    f"stage '{i.stage}' replays, so what it leaves in its tool must be groups, or a state that it "
                    "writes; let it read a Batch."
                )
            kept = self._kept.setdefault((i.step, i.stage), _Kept(set(self._takers[i.stage])))
            kept.tasks[i] = submission
        for stage, takers in self._takers.items():
            if i.stage in takers and (i.step, stage) in self._kept:
                self._take((i.step, stage), i, groups or ())

    def _take(self, key: tuple[int, str], taker: TaskId, groups: Sequence[int]) -> None:
        kept = self._kept[key]
        kept.handed.update(groups)
        kept.ended[taker.stage] += 1
        if kept.ended[taker.stage] == taker.parts:
            kept.takers.discard(taker.stage)
        if not kept.takers:
            del self._kept[key]

    def left(self) -> list[Submission]:
        """Returns what to submit again: states, then oldest step first each task for its groups not handed out."""
        found = list(self._newest.values())
        for key in sorted(self._kept):
            kept = self._kept[key]
            found += [rest for was in kept.tasks.values() if (rest := was.without(kept.handed)).groups]
        return found

    def narrowed(self, task: Task, call: Call) -> Call:
        """Returns the call of a task that has not ended, for those of its groups that were not handed out yet.

        So it may be for one of several submissions of a step: the tool took it, its answer was lost.
        """
        kept = self._kept.get((task.id.step, task.id.stage))
        if kept is None or call.groups is None:
            return call
        return _narrowed(call, call.groups, tuple(g for g in call.groups if g not in kept.handed))


def _narrowed(call: Call, of: tuple[int, ...], groups: tuple[int, ...]) -> Call:
    if len(groups) == len(of):
        return call
    return replace(call, groups=groups, info=replace(call.info, groups=groups))


def _host_of(s: Stage) -> str | None:
    return s.host.name if s.host else None


def _takers(pipeline: Pipeline, submits: Stage) -> set[str]:
    """Returns the stages of the same tool, as often run, that lie downstream within the step."""
    reached = {submits.name}
    for s in pipeline.order:
        if any(t is s and source.name in reached and lag == "none" for source, t, _field, lag in pipeline.edges):
            reached.add(s.name)
    beside = [pipeline.by_name[name] for name in reached - {submits.name}]
    return {s.name for s in beside if _host_of(s) == _host_of(submits) and s.every == submits.every}
