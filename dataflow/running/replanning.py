"""`policy=auto` in a run: the process that plans, and what is written about each change of policy.

The schedule of policies is in the run's ``policy.json``, so that a run that resumes goes on with the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.config.base import PolicyConfig
from dataflow.drawing.duration import figure
from dataflow.errors import PolicyError, RunError
from dataflow.files import replaced, written
from dataflow.graph import Pipeline, TaskGraph
from dataflow.planning.auto import LEAST_LEFT, PolicyChooser, candidates, window
from dataflow.policy import PolicySchedule, SchedulingPolicy
from dataflow.runner import Runner
from dataflow.running.record import Record
from dataflow.system.children import command
from dataflow.timeline.agents import MAIN
from dataflow.timeline.spans import Level, Trace

FILE = "policy.json"
LIMIT_S = 600.0
"""Seconds after which a plan is given up."""


def load_schedule(directory: Path) -> PolicySchedule | None:
    """Returns the policies that a run has had, from its directory; None if it has not begun."""
    try:
        found = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return PolicySchedule(tuple((int(each.pop("step")), SchedulingPolicy(**each)) for each in found["policies"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, PolicyError) as error:
        raise RunError(
            f"{directory / FILE} cannot be read ({type(error).__name__}: {error}); delete it, and the run chooses its "
            "policies anew."
        ) from error


def policies_of(
    pipeline: Pipeline, options: PolicyConfig, mini_batches: int, groups: int | None
) -> list[SchedulingPolicy]:
    """Returns the policies that a run may take, the one that overlaps most last; arguments as of ``expand``."""
    return candidates(
        pipeline, mini_batches, groups, limit=options.limit, order=options.order, streams=options.stream_rollout
    )


def within(schedule: PolicySchedule, options: PolicyConfig, first: int) -> PolicySchedule:
    """Returns a schedule that keeps the user's limits from a step on, which may have changed with a resume."""
    found = schedule
    for step in [first, *(since for since, _policy in schedule.changes if since > first)]:
        policy = schedule.at(step)
        streams = policy.stream_rollout if options.stream_rollout is None else options.stream_rollout
        policy = replace(policy, max_staleness=min(policy.max_staleness, options.limit), stream_rollout=streams)
        if policy != found.at(step):
            found = found.switched(step, policy)
    return found


def facts_of(schedule: PolicySchedule) -> dict[str, Any]:
    """Returns what a trace's meta says of the policies of a run."""
    _step, last = schedule.changes[-1]
    numbers = {"split": last.split, "max_staleness": schedule.most, "stream_rollout": last.stream_rollout}
    return {**numbers, "policies": [{"step": step, **dataclasses.asdict(policy)} for step, policy in schedule.changes]}


class AutoPolicy:
    """Changes the policy of one attempt.

    Args:
        options: section ``policy``.
        graph: the tasks of the attempt.
        schedule: the policies so far.
        mini_batches: optimizer steps of a step.
        record: of the run.
    """

    def __init__(
        self, options: PolicyConfig, graph: TaskGraph, schedule: PolicySchedule, mini_batches: int, record: Record
    ) -> None:
        policies = policies_of(graph.pipeline, options, mini_batches, graph.groups)
        self._graph, self._record, self._schedule = graph, record, schedule
        # Of a run that resumes, the policy that was decided last may hold from a later step on.
        step, current = schedule.changes[-1]
        shows = max(step, graph.first) + current.max_staleness + 1
        self._chooser = PolicyChooser(policies, current, since=graph.first + 1, shows=shows)
        self._runner: Runner | None = None
        self._plan: asyncio.Task[None] | None = None
        self._said = ""
        """Why the run could not be planned the last time."""

    def begin(self, runner: Runner) -> None:
        """Takes what runs the steps."""
        self._runner = runner
        self._write()

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the policy of a step."""
        policy = self._schedule.at(step)
        numbers = {
            "split": policy.split,
            "max_staleness": policy.max_staleness,
            "stream_rollout": policy.stream_rollout,
        }
        return {f"policy/{name}": float(number) for name, number in numbers.items()}

    def ended(self, step: int) -> None:
        """Takes the end of a step; begins a plan if one is due and none is under way.

        Raises:
            RunError: a change of policy could not be recorded.
        """
        assert self._runner is not None
        due = self._chooser.ended(step, self._runner.executor.now(), self._record.trace)
        if self._plan is not None:
            if not self._plan.done():
                return
            self._plan.result()
        if due and step <= self._graph.steps - LEAST_LEFT:
            self._chooser.planned(step)
            self._plan = asyncio.create_task(self._replan(step))

    async def close(self) -> None:
        """Ends the plan under way."""
        if self._plan is not None:
            self._plan.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._plan

    async def _replan(self, step: int) -> None:
        assert self._runner is not None
        policies, trace = self._chooser.policies, self._record.trace
        found = window(trace, self._chooser.since, step)
        if found is None:
            return
        try:
            seconds = await forecast((found, policies, limit_in_force(trace)))
        except (RunError, OSError, TimeoutError) as error:
            if str(error) != self._said:
                logger.warning(f"policy: the run cannot be planned after step {step}, its policy stays: {error}")
            self._said = str(error)
            return
        predicted = {policy: s for policy, s in zip(policies, seconds, strict=True) if s is not None}
        before, policy = self._chooser.current, self._chooser.decide(predicted)
        if policy is None or (first := self._runner.switch(policy)) is None:
            return
        self._chooser.switched(first, policy)
        self._schedule = self._schedule.switched(first, policy)
        logger.info(
            f"policy: {_words(policy)} from step {first} on; predicted {figure(predicted[policy])} s a step, "
            f"{figure(predicted[before])} s with {_words(before)}"
        )
        self._write()

    def _write(self) -> None:
        """Records the policies, and in the trace the one that was decided last."""
        assert self._runner is not None
        facts, path = facts_of(self._schedule), self._record.directory / FILE
        with written("policies of the run", path), replaced(path) as temporary:
            temporary.write_text(json.dumps({"policies": facts["policies"]}, indent=1), encoding="utf-8")
        self._record.describe(**facts)
        policy, now = self._chooser.current, self._runner.trace_now()
        self._record.trace.add(
            Level("policy split", now, policy.split),
            Level("policy max_staleness", now, policy.max_staleness),
            Level("policy stream_rollout", now, policy.stream_rollout),
        )


def _words(policy: SchedulingPolicy) -> str:
    streams = " stream_rollout=true" if policy.stream_rollout else ""
    return f"split={policy.split} max_staleness={policy.max_staleness}{streams}"


def limit_in_force(trace: Trace) -> float | None:
    """Returns the requests in flight at most at present, if the agent has adapted that number."""
    return next((level.value for level in reversed(trace.levels) if level.name == f"{MAIN} limit"), None)


async def forecast(question: tuple[Any, ...]) -> list[float | None]:
    """Asks a process of its own for the seconds a step under each policy, so that training waits for nothing.

    ``question`` has the arguments of :func:`dataflow.planning.auto.forecast`. A TimeoutError says that it takes too
    long.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command("dataflow.planning.auto"), stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(pickle.dumps(question)), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RunError(f"the planning process ended with code {process.returncode} ({last or 'no reason'})")
    found: list[float | None] = json.loads(out)
    return found
