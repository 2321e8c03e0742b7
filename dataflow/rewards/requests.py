"""The requests of a step: what stands between submit and collect, without any event loop's doing."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dataflow.batch import Batch

Step = int | str
Order = Literal["arrival", "index"]


@dataclass(frozen=True)
class Ticket:
    """What submit returns: the step, its group ids and how many requests it has."""

    step: Step
    groups: tuple[int, ...]
    requests: int


@dataclass(eq=False)
class Request:
    """One sample to score; ``begin`` and ``end`` are seconds of ``time.time()``."""

    step: StepRequests
    group: int
    sample: int
    arguments: dict[str, Any]
    score: float = math.nan
    extras: dict[str, Any] = field(default_factory=dict)
    begin: float = 0.0
    end: float = 0.0
    thread: Future[Any] | None = None

    def __str__(self) -> str:
        return f"sample {self.sample} of group {self.group} of step {self.step.key}"


@dataclass(eq=False)
class Waiter:
    take: int
    order: Order
    future: asyncio.Future[list[int]]


@dataclass(eq=False)
class StepRequests:
    """A submitted step. Its groups go from unfinished to arrived to collected."""

    key: Step
    groups: dict[int, list[Request]] = field(default_factory=dict)
    unfinished: dict[int, int] = field(default_factory=dict)
    """How many samples of a group are still to come."""
    arrived: list[int] = field(default_factory=list)
    waiters: deque[Waiter] = field(default_factory=deque)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    queued: int = 0
    open: int = 0
    """Requests that have not ended."""
    latency_s: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Groups that nobody has collected or is waiting for."""
        return len(self.unfinished) + len(self.arrived) - sum(waiter.take for waiter in self.waiters)

    def pick(self, take: int, order: Order) -> list[int] | None:
        """Takes the next groups out, in order of their ids; None while they are not all there."""
        if order == "index":
            chosen = sorted([*self.unfinished, *self.arrived])[:take]
            if not self.unfinished.keys().isdisjoint(chosen):
                return None
        elif len(self.arrived) < take:
            return None
        else:
            chosen = sorted(self.arrived[:take])
        self.arrived = [group for group in self.arrived if group not in chosen]
        return chosen


def latency_summary(latency_s: Sequence[float] | array[float]) -> dict[str, float]:
    """Returns p50, p95, p99, max and mean of durations, in seconds; nothing if there are none."""
    if not len(latency_s):
        return {}
    values = np.asarray(latency_s, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": float(values.max()), "mean": float(values.mean())}


def arguments_of(samples: Batch) -> list[dict[str, Any]]:
    """Returns the keywords of each row's call, verl's names.

    Raises:
        DataflowError: a column is missing.
    """
    needed = [samples[name] for name in ("data_source", "response_text", "ground_truth")]
    empty = [None] * len(samples)
    columns = samples.columns
    extras, prompts = columns.get("extra_info", empty), columns.get("raw_prompt", empty)
    return [
        {
            "data_source": source,
            "solution_str": text,
            "ground_truth": truth,
            "extra_info": {**(extra or {}), **({} if prompt is None else {"raw_prompt": prompt})},
        }
        for source, text, truth, extra, prompt in zip(*needed, extras, prompts, strict=True)
    ]


def rewards_of(state: StepRequests, chosen: Sequence[int]) -> Batch:
    """Returns the rewards of finished groups and forgets them."""
    import torch

    requests = [request for group in chosen for request in state.groups.pop(group)]
    names = dict.fromkeys(name for request in requests for name in request.extras)
    latency_s = [request.end - request.begin for request in requests]
    state.latency_s += latency_s
    return Batch(
        [request.group for request in requests],
        {name: [request.extras.get(name) for request in requests] for name in names}
        | {"score": torch.tensor([request.score for request in requests], dtype=torch.float32)},
        {
            "latency_s": latency_s,
            "step_latency_s": list(state.latency_s),
            "records": [{"group": r.group, "sample": r.sample, "begin": r.begin, "end": r.end} for r in requests],
        },
    )
