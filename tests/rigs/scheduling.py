"""Random pipelines, and runs of task graphs on the virtual clock that record which task reads which."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dataflow.executors.base import Chunk, Done, StageCall
from dataflow.executors.virtual import Costs, VirtualExecutor
from dataflow.graph import Lag, Piece, Pipeline, Read, Stage, Task, TaskGraph, TaskId
from dataflow.policy import SchedulingPolicy, divisors, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace


def random_pipeline(dice: random.Random) -> Pipeline:
    """Returns a valid pipeline of 2 to 7 stages with random edges, pieces and resources.

    It may have optional fields, several collectors, and stages with epochs and their own number of mini-batches.

    Args:
        dice: ``random.Random(seed)``, or a value of hypothesis' ``randoms()``, which it can shrink.
    """
    resources: dict[str, int | None] = {
        "gpu": dice.choice([1, 1, 2]),
        "reward": None,
        "io": dice.choice([1, 2, 3]),
    }
    count = dice.randint(2, 7)
    collector = dice.choice([None, *range(1, count)])
    needs_all: set[int] = set()  # stages downstream of one that needs all parts
    split: set[int] = set()
    stages: list[Stage] = []
    for n in range(count):
        every = dice.choice([None, None, None, 2, 3]) if n and n != collector else None
        known = [m for m in range(n) if stages[m].every in (None, every)]
        sources = [m for m in known if dice.random() < 0.5]
        rarely = [m for m in range(n) if stages[m].every not in (None, every) and dice.random() < 0.2]
        gathers = any(m in needs_all for m in (*sources, *rarely))
        per: Piece = "step"
        if n == collector:
            per = "part"
            sources = [m for m in sources if m not in needs_all]
            rarely = [m for m in rarely if m not in needs_all]
        elif collector is not None and n > collector and not gathers:
            per = dice.choice(["step", "part", "mini-batch"])
        if per != "step":
            split.add(n)
        elif gathers or any(m in split for m in (*sources, *rarely)):
            needs_all.add(n)
        reads = [Read("prompts")] if dice.random() < 0.5 else []
        reads += [Read("absent", "none", True)] if dice.random() < 0.2 else []
        reads += [Read(f"f{m}", "none", True) for m in rarely]
        collects = n == collector or (per == "part" and every is None and dice.random() < 0.3)
        trains = per == "mini-batch"
        stages.append(
            Stage(
                name=f"s{n}",
                fn=lambda: None,
                reads=(*reads, *(Read(f"f{m}") for m in sources)),
                writes=(f"f{n}",),
                on=dice.choice(list(resources)),
                per=per,
                role="collects" if collects else "trains" if trains else None,
                mini_batches=dice.choice([None, 2, 6]) if trains else None,
                epochs=dice.choice([1, 1, 2, 3]) if trains else 1,
                epochs_over=dice.choice(["mini-batch", "step"]),
                after=tuple(f"s{m}" for m in known[:1] if not split and dice.random() < 0.3),
                every=every,
            )
        )
    _stream(stages, dice, collector or count, needs_all)
    for _ in range(dice.randint(0, 3)):
        # States: any stage may read them from an earlier step, their writer included.
        writer = dice.choice([m for m in range(count) if stages[m].every is None and not stages[m].streams] or [-1])
        if writer < 0:
            break
        reader = dice.randrange(count)
        lag: Lag = dice.choice(["latest", "carried"])
        if all(read.field != f"f{writer}" for read in stages[reader].reads):
            stages[reader] = replace(stages[reader], reads=(*stages[reader].reads, Read(f"f{writer}", lag)))
    return Pipeline(stages, inputs=["prompts"], resources=resources)


def _stream(stages: list[Stage], dice: random.Random, before: int, needs_all: set[int]) -> None:
    """Lets the first stage stream at random, and some of its readers run once per chunk."""
    if stages[0].per != "step" or dice.random() < 0.5:
        return
    stages[0] = replace(stages[0], streams=True)
    whole = {s.writes[0] for s in stages if s.per == "step" and s.every is None} | {"prompts"}
    for m, s in enumerate(stages[:before]):
        fields = {r.field for r in s.reads}
        if s.writes[0] in whole and m not in needs_all and "f0" in fields <= whole and dice.random() < 0.7:
            stages[m] = replace(s, per="chunk")
            whole.discard(s.writes[0])


def random_graph(dice: random.Random) -> TaskGraph:
    """Returns a random pipeline under a random policy, unrolled over 1 to 8 steps.

    Raises:
        PipelineError: the pipeline happens to need two versions of one state at the same time.
    """
    pipeline = random_pipeline(dice)
    mini_batches = dice.choice([1, 2, 3, 4, 6])
    numbers = [mini_batches, *(s.mini_batches for s in pipeline.stages if s.mini_batches is not None)]
    splits = pipeline.collector and not any(s.epochs > 1 and s.epochs_over == "step" for s in pipeline.stages)
    split = dice.choice(divisors(math.gcd(*numbers))) if splits else 1
    streams = dice.random() < 0.5
    policy = SchedulingPolicy(split, dice.randint(0, 4), dice.choice(["arrival", "index"]), streams)
    groups = math.lcm(*numbers) * dice.randint(1, 3)
    return expand(pipeline, policy, dice.randint(1, 8), mini_batches, groups=groups)


@dataclass
class Seen:
    """The inputs of a task.

    Attributes:
        fields: for each field the tasks that wrote its values; empty for an initial state.
        groups: ids that it works on; None for all.
    """

    fields: dict[str, tuple[TaskId | None, ...]] = field(default_factory=dict)
    groups: tuple[int, ...] | None = None


class RecordingExecutor(VirtualExecutor):
    """A virtual executor whose values are the ids of the tasks that wrote them, to show which task reads which.

    Attributes:
        seen: inputs of the tasks that were started.
    """

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.seen: dict[TaskId, Seen] = {}

    def start(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        """Records the inputs of the task, then starts it."""
        if task.id in self.seen:
            raise AssertionError(f"{task} was started twice")
        left = iter(values)
        fields = {name: tuple(next(left) for _ in range(count)) for name, count, _state in call.layout}
        self.seen[task.id] = Seen(fields, call.groups)
        super().start(task, call, values)

    async def events(self) -> AsyncIterator[Done | Chunk]:
        """Yields the events, each with its own id as each of its values."""
        async for done in super().events():
            yield replace(done, values=(done.id,) * len(done.values))


def simulate(graph: TaskGraph, costs: Costs) -> tuple[Trace, dict[TaskId, Seen]]:
    """Runs a task graph on the virtual clock, and checks the scheduler's invariants after every task.

    Args:
        graph: the task graph.
        costs: durations of its tasks.

    Returns:
        The trace and the inputs of every task.

    Raises:
        DataflowError: ``costs`` knows no duration for a stage of the graph.
    """
    executor = RecordingExecutor(costs)
    trace = Trace(meta={"resources": dict(graph.pipeline.resources), "steps": graph.steps})
    inputs = dict.fromkeys(graph.pipeline.inputs, lambda step: None)
    runner = Runner(graph, executor, inputs=inputs, trace=trace)
    trace.sink = lambda *_items: runner.scheduler.check()
    asyncio.run(runner.run())
    return trace, executor.seen


def sequence(trace: Trace, resource: str) -> list[str]:
    """Returns the names of the tasks on a resource (``rollout[1]``), in order of begin."""
    return [span.task for span in trace.on(resource)]
