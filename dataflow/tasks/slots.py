"""The slots of the resources, and the tasks that are ready for one. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TypeAlias

from dataflow.graph import TaskId

Key: TypeAlias = tuple[float, float, int, int, int, TaskId]
"""By which ready tasks are ordered; the smallest is first. The task is last."""


class Slots:
    """Which task gets a free slot of a resource next.

    Args:
        resources: number of slots by resource; None for no limit.

    Attributes:
        taken: slots that are taken, by resource.
    """

    def __init__(self, resources: Mapping[str, int | None]) -> None:
        self._resources = resources
        self.taken = dict.fromkeys(resources, 0)
        self._ready: dict[str, list[Key]] = {resource: [] for resource in resources}

    def add(self, resource: str, key: Key) -> None:
        """Adds a ready task."""
        heapq.heappush(self._ready[resource], key)

    def clear(self) -> None:
        """Forgets all ready tasks."""
        for ready in self._ready.values():
            ready.clear()

    def sort(self, key: Callable[[TaskId], Key]) -> None:
        """Takes new keys for all ready tasks."""
        for resource, ready in self._ready.items():
            self._ready[resource] = [key(item[-1]) for item in ready]
            heapq.heapify(self._ready[resource])

    def take(self, wanted: Container[TaskId] | None) -> Iterator[TaskId]:
        """Yields the ready tasks that can start; the slot of each is taken from then on.

        Args:
            wanted: the tasks that may start; the others are forgotten. None for all.
        """
        for resource, slots in self._resources.items():
            if wanted is not None:
                self._ready[resource] = [item for item in self._ready[resource] if item[-1] in wanted]
                heapq.heapify(self._ready[resource])
            ready = self._ready[resource]
            while ready and (slots is None or self.taken[resource] < slots):
                self.taken[resource] += 1
                yield heapq.heappop(ready)[-1]
