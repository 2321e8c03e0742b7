"""The scheduler as a pure state machine: its instructions, its invariants after every event, its memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dataflow.errors import DataflowError, PipelineError
from dataflow.graph import Pipeline, Task, TaskGraph, TaskId, stage
from dataflow.policy import PRESETS, SchedulingPolicy, expand, preset
from dataflow.scheduler import (
    Cancel,
    ChunkEmitted,
    Release,
    RunDone,
    Scheduler,
    Start,
    StepDone,
    TaskFailed,
    TaskFinished,
)
from dataflow.testing import grpo_pipeline
from tests.rigs.memory import size_of
from tests.rigs.scheduling import random_graph

DICE = st.randoms(use_true_random=False)


def some_graph(dice: random.Random) -> TaskGraph:
    try:
        return random_graph(dice)
    except PipelineError:
        reject()


def chosen(task: Task, groups: int, order: list[int]) -> tuple[int, ...] | None:
    if not task.stage.collects:
        return None
    each = task.take or groups
    return tuple(order[task.id.part * each : (task.id.part + 1) * each])


def drive(scheduler: Scheduler, groups: int, dice: random.Random, check: bool = True):
    """Ends running tasks in a random order, after what they emit; yields what ended (at first None) and the rest."""
    running: list[Task] = []
    emitted: dict[TaskId, int] = {}
    orders: dict[int, list[int]] = {}
    instructions = scheduler.start()
    ended: TaskId | None = None
    while True:
        if check:
            scheduler.check()
        yield ended, instructions
        running += [i.task for i in instructions if isinstance(i, Start)]
        if any(isinstance(i, RunDone) for i in instructions):
            assert not running
            return
        assert running, "it stands still"
        task = running.pop(dice.randrange(len(running)))
        if task.id.step not in orders:
            orders[task.id.step] = dice.sample(range(groups), groups)
        part = emitted.get(task.id, 0)
        if part < task.emits > 1:
            running.append(task)
            emitted[task.id] = part + 1
            ended = task.id._replace(part=part, parts=task.emits)
            each = groups // task.emits
            instructions = scheduler.handle(ChunkEmitted(ended, tuple(range(part * each, (part + 1) * each))))
            continue
        event = TaskFinished(task.id, float(dice.randrange(5)), chosen(task, groups, orders[task.id.step]))
        ended, instructions = task.id, scheduler.handle(event)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(DICE)
def test_every_task_starts_once_after_what_it_depends_on(dice):
    graph = some_graph(dice)
    done: set[TaskId | None] = set()
    started: list[TaskId] = []
    finished: list[int] = []
    released: list[int] = []
    for ended, instructions in drive(Scheduler(graph), graph.groups, dice):
        done.add(ended)
        for instruction in instructions:
            match instruction:
                case Start(task=task):
                    assert done.issuperset(task.deps), f"{task} started too early"
                    started.append(task.id)
                case StepDone(step=step):
                    finished.append(step)
                case Release(step=step):
                    released.append(step)
    everything = [t.id for step in range(1, graph.steps + 1) for t in graph.unroll(step)]
    assert sorted(started) == sorted(everything)
    assert sorted(finished) == sorted(released) == list(range(1, graph.steps + 1))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(DICE, st.integers(0, 99))
def test_the_same_events_give_the_same_instructions(dice, seed):
    graph = some_graph(dice)
    first, second = (list(drive(Scheduler(graph), graph.groups, random.Random(seed))) for _ in range(2))
    assert first == second


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(DICE)
def test_each_group_is_in_one_part_and_one_mini_batch_of_each_epoch_of_a_step(dice):
    graph = some_graph(dice)
    seen: dict[tuple[int, str, int], list[int]] = {}
    for _ended, instructions in drive(Scheduler(graph), graph.groups, dice):
        for start in instructions:
            if isinstance(start, Start) and start.task.chosen_by:
                key = start.task.id.step, start.task.stage.name, start.task.epoch
                seen.setdefault(key, []).extend(start.groups)
    for key, groups in seen.items():
        assert sorted(groups) == list(range(graph.groups)), key


def known(scheduler: Scheduler, tasks: Iterable[TaskId]) -> list[TaskId]:
    """Returns those of the tasks that the scheduler has not forgotten."""
    return [task for task in tasks if scheduler.story(task) != "unknown"]


@pytest.mark.slow
def test_memory_follows_the_window_not_the_run():
    steps = 500  # 4,000 entries and more, were none removed
    graph = expand(grpo_pipeline(val_every=7), SchedulingPolicy(2, 4), steps, 4, groups=4)
    scheduler, most, sizes = Scheduler(graph), 0, []
    ids = [[task.id for task in graph.unroll(step)] for step in range(1, steps + 1)]
    for i, _instructions in drive(scheduler, 4, random.Random(0), check=False):
        if i is not None and i.stage == "actor_update" and i.part + 1 == i.parts:  # once in each step
            around = ids[max(0, i.step - 20) : i.step + 20]
            most = max(most, len(known(scheduler, itertools.chain(*around))))
            if i.step % 50 == 0:
                sizes.append(size_of([scheduler], [graph]))
    assert most <= (graph.ahead + 3) * len(ids[6])
    assert not known(scheduler, itertools.chain(*ids))
    assert max(sizes) < 2 * sizes[0], "of any kind"
    assert size_of([scheduler], [graph]) < min(sizes) / 2


def test_a_slow_validation_keeps_only_its_own_step():
    graph = expand(grpo_pipeline(val_every=5), preset("baseline", 1), 104, 1, groups=1)
    scheduler = Scheduler(graph)
    running: list[TaskId] = [i.task.id for i in scheduler.start() if isinstance(i, Start)]
    released = []
    while len(released) < 100:
        i = next(i for i in running if i != TaskId(5, "val_score"))
        running.remove(i)
        instructions = scheduler.handle(TaskFinished(i, 1.0, (0,)))
        released += [r.step for r in instructions if isinstance(r, Release)]
        running += [s.task.id for s in instructions if isinstance(s, Start)]
        scheduler.check()
    assert 5 not in released
    assert len(known(scheduler, (task.id for step in range(1, 105) for task in graph.unroll(step)))) <= 5 * 12


@stage(writes="a", on="gpu")
def one(prompts): ...


@stage(writes="b", on="gpu")
def two(a): ...


@stage(writes="c", on="io")
def three(a): ...


def small(steps: int = 1) -> Scheduler:
    return Scheduler(expand(Pipeline([one, two, three], inputs=["prompts"]), SchedulingPolicy(), steps))


def told(instructions) -> list[str]:
    return [f"start {i.task}" if isinstance(i, Start) else str(i) for i in instructions]


def test_instructions_of_a_small_run():
    s = small()
    assert told(s.start()) == ["start one[1]"]
    assert told(s.handle(TaskFinished(TaskId(1, "one")))) == ["start two[1]", "start three[1]"]
    assert told(s.handle(TaskFinished(TaskId(1, "three")))) == []
    assert s.handle(TaskFinished(TaskId(1, "two"))) == [StepDone(1), Release(1), RunDone()]


def test_a_failure_cancels_what_runs_and_tells_its_story():
    s = small()
    s.start()
    s.handle(TaskFinished(TaskId(1, "one")))
    assert s.handle(TaskFailed(TaskId(1, "two"))) == [
        Cancel(TaskId(1, "three")),
        RunDone(TaskId(1, "two")),
    ]
    assert s.story(TaskId(1, "two")) == "waiting -> ready (one[1] done) -> running -> failed"
    assert s.story(TaskId(9, "two")) == "unknown"


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(DICE, st.sampled_from(PRESETS), st.integers(1, 80))
def test_a_failure_that_drains_lets_the_step_in_training_end_unless_that_needs_the_task(dice, name, after):
    graph = expand(grpo_pipeline(), preset(name, 4), 5, 4, groups=8)
    scheduler, running, done, failed = Scheduler(graph), [], set(), None
    instructions = scheduler.start()
    while not any(isinstance(each, RunDone) for each in instructions):
        running += [each.task for each in instructions if isinstance(each, Start)]
        task = running.pop(dice.randrange(len(running)))
        if failed is None and len(done) >= after and task.stage.name == "reward_collect":
            failed = task.id
            instructions = scheduler.handle(TaskFailed(task.id, drains=True))
        else:
            done.add((task.stage.name, task.id.step, task.id.part))
            instructions = scheduler.handle(TaskFinished(task.id, 1.0, chosen(task, 8, list(range(8)))))
        scheduler.check()
    step, _none = scheduler.end_early()
    trained = {part for stage, at, part in done if (stage, at) == ("actor_update", step)}
    if failed is not None and failed.step > step:
        assert trained == (set(range(4)) if step else set()), "whole"
        assert not step or ("sync_weights", step, 0) in done
    assert failed is None or not any(
        at > max(step, failed.step) for stage, at, _part in done if stage == "actor_update"
    )


def test_an_event_out_of_place_is_an_error():
    s = small()
    s.start()
    with pytest.raises(DataflowError, match=r"TaskFinished for two\[1\], which is waiting, not running"):
        s.handle(TaskFinished(TaskId(1, "two")))
    s.handle(TaskFinished(TaskId(1, "one")))
    with pytest.raises(DataflowError, match=r"one\[1\], which is done, not running"):
        s.handle(TaskFinished(TaskId(1, "one")))
    with pytest.raises(DataflowError, match="unknown or forgotten"):
        s.handle(TaskFinished(TaskId(7, "one")))


def test_what_a_rollout_hands_on_starts_its_rewards_while_it_runs():
    scheduler = Scheduler(expand(grpo_pipeline(), preset("baseline+stream", 1), 1, 1, groups=2))
    scheduler.start()
    first = scheduler.handle(ChunkEmitted(TaskId(1, "rollout", 1, 2), (0,)))
    assert [(str(i.task), i.groups) for i in first] == [("reward_request[1.2]", (0,))]
    assert str(first[0].waited_for) == "rollout[1]"
    assert scheduler.story(TaskId(1, "rollout")) == "waiting -> ready -> running -> emitted 2 of 2"
