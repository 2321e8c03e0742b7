"""The simulations of a plan: each is run once, several in parallel where that is faster."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Condition
from types import TracebackType

from dataflow.planning.rewards import Rewards
from dataflow.planning.simulation.simulate import simulate
from dataflow.planning.simulation.workers import Worker
from dataflow.planning.workload import Workload
from dataflow.policy import SchedulingPolicy

WORTH = 4_000_000
"""Requests to simulate from which on a further process pays, which takes as long to start as a fifth of them."""
PER_STEP = 3_000
"""Requests that take as long to simulate as the tasks of a step."""


@dataclass(frozen=True)
class Outcome:
    """The times of a simulated run, in seconds; see :class:`~dataflow.planning.simulation.account.Account`.

    Attributes:
        begin, end: the counted interval.
        busy_s: in which the GPU pool works.
        waits_s: in which it waits, by cause.
        work_s: of GPU work that training depends on, by pool.
        load_s: that each agent's service needs at least.
    """

    begin: float
    end: float
    busy_s: float
    waits_s: Mapping[str, float]
    work_s: Mapping[str, float]
    load_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """The counted seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class Job:
    """One simulation: its result depends on nothing else."""

    workload: Workload
    policy: SchedulingPolicy
    unlimited: bool = False

    @classmethod
    def of(cls, workload: Workload, policy: SchedulingPolicy, unlimited: bool = False) -> Job:
        """Returns the job of a workload; jobs with the same result compare equal."""
        load = replace(workload, source="", assumptions=(), logged=None, loop=None, caution="")
        if unlimited:
            beside = {name: _without_limits(rewards) for name, rewards in load.beside.items()}
            load = replace(load, rewards=_without_limits(load.rewards), beside=beside)
        return cls(load, policy, unlimited)

    @property
    def size(self) -> int:
        """Its estimated cost, in requests."""
        load = self.workload
        return load.steps * (load.prompts * load.responses * len(load.agents) + PER_STEP)

    def run(self) -> Outcome:
        """Simulates it.

        Raises:
            PolicyError, PipelineError: the policy does not fit the workload.
        """
        account, costs = simulate(self.workload, self.policy, unlimited=self.unlimited)
        return Outcome(account.begin, account.end, account.busy_s, account.waits_s, account.work_s, costs.load_s)


def _without_limits(rewards: Rewards) -> Rewards:
    return replace(rewards, concurrency=1, rpm=None, agent="continuous")


def processes() -> int:
    """Returns how many processes a plan may use: one for each core that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Outcomes:
    """The outcomes of simulations, each of which is run once.

    Use it as a context manager: on leaving it ends the processes that it started.

    Args:
        processes: to simulate in, this one included.
    """

    def __init__(self, processes: int = 1) -> None:
        self._most = processes - 1  # other processes
        self._known: list[tuple[Job, Outcome]] = []
        self._pending: deque[Job] = deque()
        self._running: list[Job] = []  # in other processes
        self._workers: list[Worker[Job, Outcome]] = []
        self._changed = Condition()
        self._open = True

    def __enter__(self) -> Outcomes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._changed:
            self._open = False
            self._pending.clear()
            self._changed.notify_all()
        for worker in self._workers:
            worker.end()

    def begin(self, jobs: Iterable[Job]) -> None:
        """Starts simulations in other processes, if there are any and that is faster."""
        with self._changed:
            known = [*(job for job, _outcome in self._known), *self._pending, *self._running]
            for job in jobs:
                if job not in known:
                    known.append(job)
                    self._pending.append(job)
            self._changed.notify_all()
            wanted = min(self._most, sum(job.size for job in self._pending) // WORTH)
        while len(self._workers) < wanted:
            self._workers.append(Worker(self._next, self._done))

    def of(self, workload: Workload, policy: SchedulingPolicy, unlimited: bool = False) -> Outcome:
        """Returns the outcome of a simulation; runs others here while another process runs this one.

        Raises:
            PolicyError, PipelineError: the policy does not fit the workload.
        """
        wanted = Job.of(workload, policy, unlimited)
        while True:
            with self._changed:
                if (found := next((outcome for job, outcome in self._known if job == wanted), None)) is not None:
                    return found
                if wanted in self._running:
                    if not self._pending:
                        self._changed.wait()
                        continue
                    job = self._pending.pop()
                else:
                    job = wanted
                    if job in self._pending:
                        self._pending.remove(job)
            outcome = job.run()
            with self._changed:
                self._known.append((job, outcome))

    def _next(self) -> Job | None:
        """Waits for a simulation that another process can run; returns None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or not self._open)
            if not self._open:
                return None
            self._running.append(self._pending.popleft())
            return self._running[-1]

    def _done(self, job: Job, outcome: Outcome | None) -> None:
        """Takes an outcome from another process; None if that failed, so that this process runs the job."""
        with self._changed:
            self._running.remove(job)
            if outcome is not None:
                self._known.append((job, outcome))
            self._changed.notify_all()
