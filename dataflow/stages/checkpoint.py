"""Checkpoint stages: copy the state after a step's sync, and write it while training goes on.

    sync_weights[v] ─▶ stage_checkpoint[v] ─▶ write_checkpoint[v]      (gpu: a copy to CPU memory; io: the files)
                                                    ▲
    rollout[v+1 .. v+max_staleness] ─▶ keep_samples   ┘               (io; drawn before the sync of step v)

``stage_checkpoint`` reads every state of the graph, so the graph's own rules keep the next step from overwriting one
before it is copied. There is one copy at a time: until its turn on ``io`` has come and its files are written, the next
checkpoint is left out, and training goes on. Only the checkpoint at the end of the run waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from loguru import logger

from dataflow.engines.base import Trainer
from dataflow.graph import Read, Stage, TaskInfo, stage
from dataflow.system import clock

FAILED = "checkpoint/failed"
"""Metric of a step: 1 if its checkpoint could not be written, 0 if it was."""


class Store(Protocol):
    """The directory of a run's checkpoints; see :class:`dataflow.running.saving.checkpoints.CheckpointStore`."""

    def begin(self, step: int) -> Path: ...

    def commit(self, step: int, facts: Mapping[str, Any]) -> int: ...

    def discard(self, step: int) -> None: ...

    def keep(self, step: int, value: Any) -> None: ...

    def link(self, step: int, directory: Path) -> None: ...

    def save_states(self, directory: Path, states: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """What ``stage_checkpoint`` copied.

    Attributes:
        directory: that the first rank began for it, where the other ranks write their shares, too; None if it cannot
            be made.
        states: value of each state of the graph.
    """

    directory: Path | None
    states: Mapping[str, Any]


async def _stage_checkpoint(
    *values: Any, trainer: Trainer, store: Store, fields: Sequence[str], steps: int, task: TaskInfo
) -> Snapshot | None:
    """Copies the trainer's state to CPU memory; returns None if the previous checkpoint is still being written.

    Args:
        values: the graph's states.
        trainer: to copy.
        store: of the run's checkpoints.
        fields: names of the states.
        steps: of the run; the checkpoint of the last one waits for the previous one instead.
        task: takes the metric ``checkpoint/staged_s``.
    """
    begin = clock.now()
    if not await trainer.snapshot(wait=task.step == steps):
        task.note(left_out=True)
        if trainer.rank == 0:
            logger.warning(
                f"checkpoint of step {task.step}: left out, since the previous one is still being written; a faster "
                "disk or a larger checkpoint.every avoids that."
            )
        return None
    task.log({"checkpoint/staged_s": clock.now() - begin})
    if trainer.rank != 0:
        return None
    try:
        return Snapshot(store.begin(task.step), dict(zip(fields, values, strict=True)))
    except OSError as error:
        _failed(task, error)
        return Snapshot(None, {})


def _keep_samples(*values: Any, store: Store, fields: Sequence[str], task: TaskInfo) -> None:
    """Keeps the fields of a step that are made before a checkpoint, and trained on after it."""
    try:
        store.keep(task.step, dict(zip(fields, values, strict=True)))
    except OSError as error:
        logger.warning(f"samples of step {task.step} are not kept for the next checkpoint: {_why(error)}")


@stage(on="io", role="saves")
async def write_checkpoint(
    snapshot: Snapshot | None, *, trainer: Trainer, store: Store, steps: int, task: TaskInfo
) -> None:
    """Writes the snapshot, with the responses of the steps already sampled, and makes it a checkpoint.

    A disk that fails costs this checkpoint alone: it is logged as ``checkpoint/failed``, and training goes on.

    Args:
        snapshot: what to write; None if there is none.
        trainer: writes its own part, all ranks together.
        store: of the run's checkpoints.
        steps: of the run.
        task: takes the metrics ``checkpoint/write_s``, ``checkpoint/bytes`` and ``checkpoint/failed``.
    """
    if snapshot is None:
        return
    if snapshot.directory is None:
        await trainer.settle()  # or no later one would be copied
        return
    begin = clock.now()
    try:
        await trainer.write(str(snapshot.directory / "trainer"))
        if trainer.rank != 0:
            return
        later = range(task.step + 1, min(task.step + task.max_staleness, steps) + 1)
        # In a thread: hashing and syncing files takes seconds, in which the trainer goes on.
        size = await asyncio.to_thread(_commit, snapshot.directory, snapshot.states, store, task, later)
    except OSError as error:
        if trainer.rank == 0:
            _failed(task, error)
            await asyncio.to_thread(store.discard, task.step)
        return
    task.log({"checkpoint/write_s": clock.now() - begin, "checkpoint/bytes": float(size), FAILED: 0.0})


def _commit(directory: Path, states: Mapping[str, Any], store: Store, task: TaskInfo, later: range) -> int:
    for step in later:
        store.link(step, directory)
    store.save_states(directory, states)
    return store.commit(task.step, {"max_staleness": task.max_staleness, "states": sorted(states)})


def _failed(task: TaskInfo, error: OSError) -> None:
    task.log({FAILED: 1.0})
    logger.warning(f"checkpoint of step {task.step} failed, training goes on: {_why(error)}")


def _why(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; make room there, or let runs= name another place."


def checkpoint_stages(
    stages: Sequence[Stage], *, every: int, trainer: Any, store: Store, steps: int, on: str = "gpu"
) -> list[Stage]:
    """Returns the stages that save checkpoints of a pipeline.

    Args:
        stages: of the pipeline.
        every: steps from one checkpoint to the next; the last step has one, too.
        trainer: the hosted trainer; calls of it must run concurrently (``Hosted(concurrent=True)``).
        store: of the run's checkpoints.
        steps: of the run.
        on: resource of the trainer.
    """
    states = tuple(sorted({read.field for s in stages for read in s.reads if read.lag != "none"}))
    early = tuple(name for s in stages if any(r.lag == "carried" for r in s.reads) for name in s.writes)
    copies = {"trainer": trainer, "store": store, "fields": states, "steps": steps}
    staging = Stage(
        name="stage_checkpoint",
        fn=_stage_checkpoint,
        reads=tuple(Read(name) for name in states),
        writes=("snapshot",),
        on=on,
        role="saves",
        every=every,
        services=copies,
        accepts=tuple(copies),
    )
    keeping = Stage(
        name="keep_samples",
        fn=_keep_samples,
        reads=tuple(Read(name) for name in early),
        writes=(),
        on="io",
        role="saves",
        every=every,
        ahead_of="write_checkpoint",
        services={"store": store, "fields": early},
        accepts=("store", "fields"),
    )
    return [staging, keeping, write_checkpoint.bind(every=every, trainer=trainer, store=store, steps=steps)]
