"""A task that runs in the processes of a service, or is sent again to new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.cluster.answer import died
from dataflow.executors.base import Done, StageCall
from dataflow.graph import Task


@dataclass(eq=False)
class Running:
    """A task that was started and has not ended.

    Attributes:
        begin: when it was started, in seconds of :func:`dataflow.system.clock.now`.
        attempt: its latest call; None if it was not sent yet because the service was down.
        refs: of that call, a list per rank: the pickled answer, then a handle per field.
        emitted: handles of the chunks that a streaming task has emitted, one per field, by chunk number.
        generation: of the service that was called; each restart starts a new one.
        lost: number of its calls that died with the service.
    """

    task: Task
    call: StageCall
    values: Sequence[Any]
    begin: float
    attempt: asyncio.Task[Done] | None = None
    refs: list[list[Any]] = field(default_factory=list)
    emitted: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    generation: int = 0
    lost: int = 0

    @property
    def to_send(self) -> bool:
        """Whether it has to be sent: it was not yet, or its call died with the service."""
        if self.attempt is None:
            return True
        ended = self.attempt.done() and not self.attempt.cancelled()
        return ended and died(self.attempt.exception())
