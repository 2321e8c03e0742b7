"""Which tasks are queued in their process: those that are certain to be next there, so that no order changes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dataflow.errors import PipelineError
from dataflow.executors.base import Chunk, Done
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Hosted, Latest, Pipeline, Stage, TaskGraph, TaskId, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.runner import Runner
from dataflow.scheduler import Scheduler
from dataflow.tasks.events import Start, TaskFailed, TaskFinished
from dataflow.testing import grpo_pipeline
from dataflow.timeline.spans import Trace
from tests.rigs.costs import RandomCosts, SteadyCosts
from tests.rigs.scheduling import RecordingExecutor, random_graph

TRAINER, ENGINE = Hosted("trainer", object), Hosted("engine", object)
SLOTS = {"gpu": 1, "controller": None, "reward": None}


def grpo(policy: SchedulingPolicy, steps: int = 8, engine: Hosted = ENGINE) -> TaskGraph:
    """Returns the graph of a GRPO pipeline with an engine and a trainer in one GPU slot."""
    hosts = {"rollout": engine, "sync_weights": engine}
    stages = [
        replace(s, services={"service": hosts.get(s.name, TRAINER)}) if s.on == "gpu" else s
        for s in grpo_pipeline().stages
    ]
    return expand(Pipeline(stages, inputs=["prompts"], resources=SLOTS), policy, steps, 4, groups=8)


def spans(graph: TaskGraph, executor: VirtualExecutor) -> list[tuple[str, float, float]]:
    trace = Trace()
    inputs = dict.fromkeys(graph.pipeline.inputs, lambda step: None)
    asyncio.run(Runner(graph, executor, inputs=inputs, trace=trace).run())
    return [(span.task, span.begin, span.end) for span in trace.spans]


# --- whole runs -------------------------------------------------------------------------------------------


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=50)
@given(
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2),
    st.sampled_from(["arrival", "index"]),
    st.booleans(),
    st.integers(0, 999),
)
def test_no_task_of_a_step_changes_its_place(split, staleness, order, streams, seed):
    graph = grpo(SchedulingPolicy(split, staleness, order, streams))
    queueing = RecordingExecutor(RandomCosts(seed, graph.groups, order))
    plain = VirtualExecutor(RandomCosts(seed, graph.groups, order))
    assert spans(graph, queueing) == spans(graph, plain)
    assert queueing.begun_queued


def test_random_runs_queue_tasks_too():
    """The tests of random pipelines check each queued task; here, that there are such tasks."""
    begun = 0
    for seed in range(150):
        with contextlib.suppress(PipelineError):
            graph = random_graph(random.Random(seed))
            executor = RecordingExecutor(RandomCosts(seed, graph.groups, graph.order))
            spans(graph, executor)
            begun += len(executor.begun_queued)
    assert begun > 20


@pytest.mark.parametrize("policy", ["baseline", "mini-batch", "off-policy", "both"])
def test_each_update_but_the_first_is_queued_where_its_rewards_are_there(policy):
    graph = grpo(preset(policy, 4))
    executor = RecordingExecutor(SteadyCosts(latency=0.0, groups=graph.groups))
    spans(graph, executor)
    begun = [str(i) for i in executor.begun_queued if i.step == 5]
    assert [name for name in begun if name != "actor_update[5.1]"] == [
        "actor_update[5.2]",
        "actor_update[5.3]",
        "actor_update[5.4]",
        "gather_weights[5]",
    ]


# --- event by event ---------------------------------------------------------------------------------------


@stage(writes="a", on="gpu", role="trains")
def first(prompts: Any, *, service: Any) -> None: ...


@stage(writes="b", on="gpu", role="trains")
def second(a: Any, *, service: Any) -> None: ...


@stage(writes="c", on="gpu")
def third(b: Any, *, service: Any) -> None: ...


@stage(writes="e", on="io")
def elsewhere(prompts: Any) -> None: ...


@stage(writes="d", on="gpu")
def beside(e: Any, *, service: Any) -> None: ...


@stage(writes="f", on="gpu")
def after_it(e: Any, *, service: Any) -> None: ...


@stage(writes="b", on="gpu")
async def waits(a: Any, *, service: Any) -> None: ...


def reads(a: Any, prompts: Any, *, service: Any) -> None: ...


def scheduler(*stages: Stage, steps: int = 1, seconds: dict[str, float] | None = None, **resources: Any) -> Scheduler:
    known = {"gpu": 1, "io": None, **resources}
    graph = expand(Pipeline(stages, inputs=["prompts"], resources=known), SchedulingPolicy(), steps)
    return Scheduler(graph, {s.name: 1.0 for s in stages} | (seconds or {}))


def queued(s: Scheduler) -> list[str]:
    found = s.queue()
    assert s.queue() == []  # each is sent once
    return [f"{item.task} after {item.after}" for item in found]


def end(s: Scheduler, name: str, step: int = 1) -> list[str]:
    instructions = s.handle(TaskFinished(TaskId(step, name), 1.0))
    s.check()
    return [i.task.id.stage for i in instructions if isinstance(i, Start)]


def bound(*stages: Stage, host: Hosted = TRAINER) -> list[Stage]:
    return [s.bind(service=host) for s in stages]


def test_a_task_that_waits_for_the_running_one_alone_is_queued_and_then_started():
    s = scheduler(*bound(first, second, third))
    s.start()
    assert queued(s) == ["second[1] after first[1]"]
    assert end(s, "first") == ["second"]
    assert queued(s) == ["third[1] after second[1]"]


def test_a_task_that_is_ready_follows_the_running_one():
    s = scheduler(*bound(first), elsewhere, *bound(beside))
    s.start()
    end(s, "elsewhere")
    assert queued(s) == ["beside[1] after first[1]"]
    assert end(s, "first") == ["beside"]


@pytest.mark.parametrize("seconds", [0.1, 9.0])
def test_a_task_that_may_come_first_keeps_the_others_from_being_queued(seconds):
    """``after_it`` is ready as soon as ``elsewhere`` ends; the longer it takes, the earlier it goes."""
    s = scheduler(*bound(first, second), elsewhere, *bound(after_it), seconds={"after_it": seconds}, io=4)
    s.start()
    assert s.running() == [TaskId(1, "elsewhere"), TaskId(1, "first")]
    assert queued(s) == (["second[1] after first[1]"] if seconds < 1 else [])


def test_a_queued_task_keeps_its_place_whatever_becomes_ready():
    s = scheduler(*bound(first, second), elsewhere, *bound(after_it), seconds={"after_it": 0.1}, io=4)
    s.start()
    assert queued(s) == ["second[1] after first[1]"]
    assert end(s, "elsewhere") == []
    assert end(s, "first") == ["second"]
    assert queued(s) == ["after_it[1] after second[1]"]


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([first.bind(service=TRAINER), second.bind(service=ENGINE)], id="another process"),
        pytest.param(bound(first, second, host=replace(TRAINER, ranks=2)), id="two processes"),
        pytest.param(bound(first, second, host=replace(TRAINER, restarts=1)), id="may be rebuilt"),
        pytest.param([first.bind(service=1), second.bind(service=1)], id="no service"),
        pytest.param([*bound(first), second.bind(service=TRAINER, every=1)], id="on some steps"),
        pytest.param([*bound(first), second.bind(service=TRAINER, on="io")], id="another resource"),
        pytest.param([*bound(first), stage(writes="b", on="gpu")(reads).bind(service=TRAINER)], id="an input"),
    ],
)
def test_what_is_not_queued(stages):
    s = scheduler(*stages)
    s.start()
    assert queued(s) == []


def test_nothing_is_queued_behind_a_function_that_waits():
    s = scheduler(*bound(first, waits, third))
    s.start()
    assert queued(s) == ["waits[1] after first[1]"]
    end(s, "first")
    assert queued(s) == []


def test_nothing_is_queued_where_two_tasks_run():
    s = scheduler(*bound(first, second), gpu=2)
    s.start()
    assert queued(s) == []


def test_after_a_failure_nothing_is_queued():
    s = scheduler(*bound(first, second))
    s.start()
    s.handle(TaskFailed(TaskId(1, "first"), "broken"))
    assert queued(s) == []


# --- an end, and another policy ---------------------------------------------------------------------------


@stage(writes="actor", on="gpu", role="trains")
def train(d: Any, actor: Latest, *, service: Any) -> None: ...


def until(s: Scheduler, name: str) -> str:
    """Ends tasks, first those elsewhere, until one of this name is queued; returns the name of the task before it."""
    s.start()
    while running := s.running():
        for item in s.queue():
            if str(item.task) == name:
                return str(item.after)
        s.handle(TaskFinished(max(running, key=lambda i: i.stage == "elsewhere"), 1.0))
    raise AssertionError(f"{name} is never queued")


def test_an_early_end_waits_for_a_training_task_that_is_queued():
    s = scheduler(elsewhere, *bound(beside, train), steps=3)
    assert until(s, "train[2]") == "train[1]"
    assert s.end_early() == (2, [])
    assert end(s, "train", 1) == ["train"]


def test_no_task_of_a_later_step_is_queued_unless_it_trains():
    """An early end would not need it, but its process would run it before the save."""
    s = scheduler(elsewhere, *bound(beside, train), steps=3)
    with pytest.raises(AssertionError, match=r"beside\[3\] is never queued"):
        until(s, "beside[3]")


class OverError(Exception):
    """An early end found nothing left to do; a session cancels its run then."""


class Ended(RecordingExecutor):
    """Ends its run early after some events."""

    def __init__(self, costs: RandomCosts, events: int) -> None:
        super().__init__(costs)
        self.left, self.runner = events, None

    async def events(self) -> AsyncIterator[Done | Chunk]:
        async for event in super().events():
            yield event
            self.left -= 1
            if self.left == 0:
                self.runner.end_early()
                if self.runner.over:
                    raise OverError


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
@given(st.randoms(use_true_random=False), st.integers(0, 999), st.integers(1, 60))
def test_whenever_a_run_ends_early_each_queued_task_was_started(dice, seed, events):
    try:
        graph = dice.choice([grpo(SchedulingPolicy(2, 1)), random_graph(dice)])
    except PipelineError:
        reject()
    executor = Ended(RandomCosts(seed, graph.groups, graph.order), events)
    inputs = dict.fromkeys(graph.pipeline.inputs, lambda step: None)
    executor.runner = Runner(graph, executor, inputs=inputs, trace=Trace())
    with contextlib.suppress(OverError):
        asyncio.run(executor.runner.run())
    assert not executor.queued
