"""Costs of tasks for simulations: steady ones, and random durations and orders of arrival."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from dataflow.errors import DataflowError, nearest
from dataflow.executors.virtual import Costs, End, chunks_of, groups_by_index
from dataflow.graph import Task, TaskId

SECONDS = {
    "rollout": 3.0,
    "reward_request": 0.01,
    "old_log_prob": 2.0,
    "advantage": 0.01,
    "actor_update": 1.5,
    "gather_weights": 0.1,
    "sync_weights": 0.2,
    "val_rollout": 1.0,
    "val_score": 5.0,
}


class SteadyCosts(Costs):
    """The same seconds for every task of a stage; a step's rewards arrive evenly spread over ``latency``.

    Stages are known by their roles: a stage that ``collects`` waits for what the stage that ``requests`` has requested
    when it ended.

    Args:
        latency: seconds from the end of the request to the last reward; of several collectors for each by its name.
        groups: prompt groups in a step.
        seconds: per stage; :data:`SECONDS` for the others. Every stage of the graph needs a value, except collectors.
    """

    def __init__(
        self,
        latency: float | Mapping[str, float] = 8.0,
        groups: int = 16,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.latency = latency
        self.groups = groups
        self.seconds = {**SECONDS, **(seconds or {})}
        self._sent: dict[tuple[int, str], float] = {}

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End:
        """Returns the end of the task; rewards arrive in order of the groups' ids.

        Raises:
            DataflowError: no seconds are known for the stage, or nothing requests what it collects.
        """
        i = task.id
        if task.stage.collects:
            if groups is None:
                groups = groups_by_index(task, self.groups)
            last = (max(groups) + 1) / self.groups
            return End(max(now, self._requested(task) + self._latency(task) * last), groups=groups)
        if i.stage not in self.seconds:
            raise DataflowError(
                f"SteadyCosts has no seconds for stage '{i.stage}'{nearest(i.stage, self.seconds)}; give "
                f"SteadyCosts(seconds={{'{i.stage}': 1.0}}), or the stage the role 'collects' if it collects rewards."
            )
        end = now + self.seconds[i.stage]
        if task.stage.role == "requests":
            for field in task.stage.writes:
                self._sent.setdefault((i.step, field), end)
        return End(end, chunks=chunks_of(task, self.groups, now, end))

    def _requested(self, task: Task) -> float:
        """Returns when the requests were sent whose rewards the task collects."""
        sent = [self._sent.get((task.id.step, read.field)) for read in task.stage.reads]
        known = [at for at in sent if at is not None]
        if not known:
            raise DataflowError(
                f"SteadyCosts: '{task.stage.name}' collects rewards, but reads nothing from a stage with the role "
                "'requests'; give the stage that requests them this role."
            )
        return max(known)

    def _latency(self, task: Task) -> float:
        if not isinstance(self.latency, Mapping):
            return self.latency
        name = task.stage.name
        if name not in self.latency:
            raise DataflowError(
                f"SteadyCosts has no latency for stage '{name}'{nearest(name, self.latency)}; give "
                f"SteadyCosts(latency={{'{name}': 8.0}})."
            )
        return self.latency[name]


class RandomCosts(Costs):
    """Random durations and orders of arrival by seed and task; of a rollout that streams, of what it emitted so far.

    Args:
        seed: of all durations and orders.
        groups: prompt groups in a step.
        order: in which groups are collected: ``arrival`` (shuffled for each step) or ``index``.
        grain: seconds of which durations are multiples, 0 included, so that ties are common; 0 for any duration.
    """

    def __init__(self, seed: int, groups: int = 16, order: str = "arrival", grain: float = 0.5) -> None:
        self.seed, self.groups, self.order, self.grain = seed, groups, order, grain
        self._emitted: dict[int, dict[int, float]] = {}  # when a rollout that streams emits each group of a step
        self._parts: dict[int, dict[int, tuple[int, ...]]] = {}  # the groups collected of a step
        self._begun: dict[int, set[TaskId]] = {}  # the tasks of a step

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End:
        """Returns the end of the task, with the groups it collected if its stage collects."""
        i = task.id
        dice = random.Random(f"{self.seed}/{i}")
        seconds = dice.randrange(6) * self.grain if self.grain else dice.expovariate(1.0)
        if i in self._begun.setdefault(i.step, {i}):  # the first task of the step, or that of another run
            self._emitted[i.step], self._parts[i.step], self._begun[i.step] = {}, {}, set()
        self._begun[i.step].add(i)
        if not task.stage.collects:
            chunks = chunks_of(task, self.groups, now, now + seconds)
            self._emitted[i.step].update({group: time for time, of in chunks for group in of or ()})
            return End(now + seconds, chunks=chunks)
        ids = list(range(self.groups))
        if self.order == "arrival":
            random.Random(f"{self.seed}/{i.step}").shuffle(ids)
        each = task.take or self.groups
        found = tuple(ids[i.part * each : (i.part + 1) * each])
        if self.order == "arrival" and self._emitted[i.step]:
            found = self._arrived(i, ids, now)[:each]
        self._parts[i.step][i.part] = groups or found
        return End(now + seconds, groups=groups or found)

    def _arrived(self, i: TaskId, ids: Sequence[int], now: float) -> tuple[int, ...]:
        """Returns the groups that no other part has: those emitted before now, shuffled, then the others by index."""
        taken = {g for part, of in self._parts[i.step].items() if part != i.part for g in of}
        there = {g for g, time in self._emitted[i.step].items() if time < now}
        return tuple(g for g in (*filter(there.__contains__, ids), *sorted({*ids} - there)) if g not in taken)
