"""`policy=auto` in a run: when to plan, the process that plans, and what is written about each change of policy.

The schedule of policies is in the run's ``policy.json``, so that a run that resumes goes on with the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.config.base import PolicyConfig
from dataflow.drawing.duration import figure
from dataflow.errors import DataflowError, RunError
from dataflow.files import replaced, written
from dataflow.graph import TaskGraph
from dataflow.planning.auto.controller import LEAST_LEFT, Controller, Switch
from dataflow.planning.auto.forecast import Forecast, candidates
from dataflow.planning.auto.window import latency_changed, window
from dataflow.policy import PolicySchedule, SchedulingPolicy
from dataflow.runner import Runner
from dataflow.running.record import Record
from dataflow.running.reporting.tracking import METRICS, read_metrics
from dataflow.system.children import command
from dataflow.timeline.agents import MAIN
from dataflow.timeline.spans import Level, Span, Trace

FILE = "policy.json"
RECENT = 2000
"""Last reward requests, which name the endpoints in use."""
LIMIT_S = 600.0
"""Seconds after which a plan is given up."""


def words(policy: SchedulingPolicy) -> str:
    """Returns a policy in words."""
    streams = " stream_rollout=true" if policy.stream_rollout else ""
    return f"split={policy.split} max_staleness={policy.max_staleness}{streams}"


def load_schedule(directory: Path, mini_batches: int = 0) -> PolicySchedule | None:
    """Returns the policies that a run has had, from its directory; None if it has not changed any.

    Args:
        directory: of the run.
        mini_batches: optimizer steps of a step, whose number each split divides; 0 if that is not to be checked.

    Raises:
        RunError: its file cannot be read, or is not of this run.
    """
    try:
        found = json.loads((directory / FILE).read_text(encoding="utf-8"))
        changes = tuple((int(each.pop("step")), SchedulingPolicy(**each)) for each in found["policies"])
        for change in found.get("switches", ()):
            Switch.of(change)
        if not changes:
            raise ValueError("it has no policy")
        if wrong := [policy.split for _step, policy in changes if mini_batches % policy.split]:
            raise ValueError(f"it has a split of {wrong[0]}, and a step {mini_batches} mini-batches")
        return PolicySchedule(changes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, DataflowError) as error:
        raise RunError(
            f"{directory / FILE} cannot be read ({type(error).__name__}: {error}); delete it, and the run goes on with "
            "the baseline."
        ) from error


def _switches(directory: Path) -> list[dict[str, Any]]:
    """Returns the changes of policy that a run has had; :func:`load_schedule` has checked their file."""
    try:
        return list(json.loads((directory / FILE).read_text(encoding="utf-8")).get("switches", ()))
    except FileNotFoundError:
        return []


def within(schedule: PolicySchedule, options: PolicyConfig, first: int) -> PolicySchedule:
    """Returns a schedule that keeps the user's limits from a step on, which may have changed with a resume."""

    def allowed(policy: SchedulingPolicy) -> SchedulingPolicy:
        streams = policy.stream_rollout if options.stream_rollout is None else options.stream_rollout
        return replace(policy, max_staleness=min(policy.max_staleness, options.limit), stream_rollout=streams)

    later = {step: allowed(policy) for step, policy in schedule.changes if step > first}
    if schedule.at(first) == allowed(schedule.at(first)) and all(schedule.at(step) == at for step, at in later.items()):
        return schedule
    found = schedule.switched(first, allowed(schedule.at(first)))
    for step, policy in later.items():
        found = found.switched(step, policy)
    return found


def listed(schedule: PolicySchedule) -> list[dict[str, Any]]:
    """Returns a schedule as JSON can hold it."""
    return [{"step": step, **dataclasses.asdict(policy)} for step, policy in schedule.changes]


def facts_of(schedule: PolicySchedule) -> dict[str, Any]:
    """Returns what a trace's meta says of the policies of a run."""
    _step, last = schedule.changes[-1]
    most = max(policy.max_staleness for policy in schedule.policies)
    numbers = {"split": last.split, "max_staleness": most, "stream_rollout": last.stream_rollout}
    return {**numbers, "policies": listed(schedule)}


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
        limit = options.limit
        policies = candidates(
            graph.pipeline, mini_batches, graph.groups, limit=limit, order=options.order, streams=options.stream_rollout
        )
        self._graph, self._record, self._schedule = graph, record, schedule
        # Of a run that resumes the policy that was decided last is in force, perhaps from a later step on.
        current = schedule.changes[-1][1]
        self._controller = Controller(policies, current, options.replan, options.gain, since=graph.first)
        self._runner: Runner | None = None
        self._plan: asyncio.Task[None] | None = None
        self._new: dict[str, float] = {}
        self._before = _switches(record.directory)
        """The changes of earlier attempts, as JSON, but for one of which it is not known yet what came of it."""
        if self._before and self._before[-1]["measured_s"] is None:
            last = Switch.of(self._before[-1])
            if last.after == current:
                del self._before[-1]
                self._controller.switches.append(last)
        self._suggested: int | None = None
        self._failed: RunError | None = None
        """A record that could not be written after a plan; raised with the next step that ends."""
        self._reason = ""
        """Why the run could not be planned the last time, which is said once."""
        self._last = 0
        """The last step that ended."""
        self._waiting: dict[int, set[str]] = {}
        """Of each step whose rewards come in, the stages that still wait for some."""

    def begin(self, runner: Runner) -> None:
        """Takes what runs the steps."""
        self._runner = runner
        if (switches := self._listed()) or len(self._schedule.changes) > 1:
            self._record.describe(switches=switches)
            self._write()  # a resume may have changed the limits
        if switches and switches[-1]["step"] > self._shown():
            self._show(Switch.of(switches[-1]))

    def _shown(self) -> int:
        """Returns the last change that metrics.jsonl has; that of a change after the checkpoint was cut off."""
        rows = read_metrics(self._record.directory / METRICS)
        return max((int(row.get("policy/switch_step") or 0) for row in rows), default=0)

    def _show(self, change: Switch) -> None:
        """Records a change in the trace, and in the metrics of the next step that ends."""
        assert self._runner is not None
        now = self._runner.trace_now()
        self._record.trace.add(
            Level("policy split", now, change.after.split),
            Level("policy max_staleness", now, change.after.max_staleness),
            Level("policy stream_rollout", now, change.after.stream_rollout),
        )
        self._new |= {"policy/switch_step": float(change.step), "policy/predicted_s": change.after_s}
        self._new["policy/predicted_before_s"] = change.before_s

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a step: its policy, and what has become known of changes since the last step."""
        policy = self._schedule.at(step)
        found = {"policy/split": float(policy.split), "policy/max_staleness": float(policy.max_staleness)}
        found["policy/stream_rollout"] = float(policy.stream_rollout)
        found |= self._new
        self._new = {}
        return found

    def ended(self, step: int) -> None:
        """Takes the end of a step; begins a plan if one is due.

        Raises:
            RunError: a change of policy could not be recorded.
        """
        assert self._runner is not None
        if self._failed is not None:
            raise self._failed
        due = self._controller.ended(step, self._runner.executor.now())
        if (last := self._controller.outcome(step)) is not None:
            self._report(last)
        self._last = step
        if due:
            self._begin_plan(None)

    def on_span(self, span: Span) -> None:
        """Takes the end of a task; begins a plan if rewards of a step are there that took much longer or shorter."""
        collectors = {s.name for s in self._graph.pipeline.collectors if s.every is None}
        if span.stage not in collectors:
            return
        left = self._waiting.setdefault(span.step, collectors)
        if span.part == span.parts - 1:
            left.discard(span.stage)
            if not left:
                del self._waiting[span.step]
        if self._controller.begun and latency_changed(self._record.trace, span.step, self._last, whole=not left):
            self._begin_plan(span.step)

    def _begin_plan(self, rewards_of: int | None) -> None:
        busy = self._plan is not None and not self._plan.done()
        if not busy and self._last <= self._graph.steps - LEAST_LEFT:
            self._plan = asyncio.create_task(self._replan(self._last, rewards_of))

    async def close(self) -> None:
        """Ends the plan under way; reports what came of the last change, as far as it is known."""
        if self._plan is not None:
            self._plan.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._plan
        if (last := self._controller.outcome(self._last, least=1)) is not None:
            self._report(last)

    async def _replan(self, step: int, rewards_of: int | None) -> None:
        try:
            found = window(self._record.trace, step, rewards_of)
            policies = self._controller.policies
            if found is None:
                return
            answer = await forecast((found, policies, self._controller.current, limit_in_force(self._record.trace)))
        except (DataflowError, OSError, ValueError, TimeoutError) as error:
            logger.warning(f"policy: the run cannot be planned after step {step}, its policy stays: {error}")
            return
        # Steps with other latencies than the prediction's do not say how right it is.
        since = step + 1 - (0 if rewards_of else found.meta["steps"])
        try:
            self._take(answer, step, since)
        except RunError as error:
            self._failed = error
        except (DataflowError, ValueError) as error:
            logger.warning(f"policy: the run cannot change its policy after step {step}: {error}")

    def _take(self, answer: Forecast, step: int, since: int) -> None:
        """Changes the policy if a plan says so.

        Args:
            answer: the plan.
            step: the last one that had ended when it was asked for.
            since: the first step that it is made from.
        """
        if answer.reason and answer.reason != self._reason:
            logger.warning(f"policy: the run is not planned, its policy stays: {answer.reason}")
        self._reason = answer.reason
        policies = self._controller.policies
        predicted = {policy: s for policy, s in zip(policies, answer.seconds, strict=True) if s is not None}
        confirmed = self._controller.confirms(step, predicted, since)
        policy = self._controller.decide(step, predicted, since)
        if policy is not None:
            self._switch(policy, self._controller.known)
        if answer.in_flight is not None and confirmed:
            self._suggest(*answer.in_flight, min(predicted.values()))

    def _switch(self, policy: SchedulingPolicy, predicted: Mapping[SchedulingPolicy, float]) -> None:
        assert self._runner is not None
        first = self._runner.switch(policy)
        if first is None:
            return
        change = self._controller.switched(first, policy, predicted)
        self._schedule = self._schedule.switched(first, policy)
        logger.info(
            f"policy: {words(policy)} from step {first} on; predicted {figure(change.after_s)} s a step, "
            f"{figure(change.before_s)} s with {words(change.before)}"
        )
        self._write()
        self._record.describe(**facts_of(self._schedule), switches=self._listed())
        self._show(change)

    def _suggest(self, number: int, seconds: float, present: float) -> None:
        """Says once that more requests in flight would make the steps shorter."""
        if number == self._suggested:
            return
        self._suggested = number
        self._new |= {"policy/suggested_concurrency": float(number), "policy/suggested_s": seconds}
        logger.info(
            f"policy: with reward.concurrency={number} a step would take {figure(seconds)} s in place of "
            f"{figure(present)} s, if the service answers as fast as now; give it to the next run, or to a resume of "
            "this one"
        )

    def _report(self, change: Switch) -> None:
        self._record.describe(switches=self._listed())
        self._write()
        assert change.measured_s is not None
        self._new["policy/measured_s"] = change.measured_s
        logger.info(
            f"policy: {figure(change.measured_s)} s a step since step {change.step}, predicted "
            f"{figure(change.after_s)} s, {figure(change.before_s)} s with {words(change.before)}"
        )

    def _listed(self) -> list[dict[str, Any]]:
        return [*self._before, *(dataclasses.asdict(change) for change in self._controller.switches)]

    def _write(self) -> None:
        path = self._record.directory / FILE
        content = {"policies": listed(self._schedule), "switches": self._listed()}
        with written("policies of the run", path), replaced(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")


def limit_in_force(trace: Trace) -> float | None:
    """Returns the requests in flight at most at present, if the agent has adapted that number for each endpoint."""
    now = {level.name: level.value for level in trace.levels if level.name.startswith(f"{MAIN} limit")}
    asked = {mark.args.get("endpoint") for mark in trace.marks[-RECENT:] if mark.resource == MAIN}
    return sum(now.values()) if len(now) >= max(1, len(asked)) else None


async def forecast(question: tuple[Any, ...]) -> Forecast:
    """Asks a process of its own for a plan.

    Raises:
        RunError: it failed.
        TimeoutError: it takes too long.
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
        lines = errors.decode(errors="replace").strip().splitlines()
        raise RunError(
            f"the planning process ended with code {process.returncode} ({lines[-1] if lines else 'no reason'})"
        )
    return Forecast(**json.loads(out))
