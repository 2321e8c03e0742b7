"""Checkpoint stages: copy the state after a step's sync, and write it while training continues.

    sync_weights[v] ─▶ stage_checkpoint[v] ─▶ write_checkpoint[v]      (gpu: a copy to CPU memory; io: the files)
                                                    ▲
    rollout[v+1 .. v+max_staleness] ─▶ keep_samples   ┘               (io; drawn before the sync of step v)

``stage_checkpoint`` reads every state of the graph, so the next step overwrites none before it is copied
(``Unroller._overwrites``). There is one copy at a time: until its files are written, which may wait for a slot of
``io``, the next checkpoint is left out, and training continues. Only the checkpoint at the end of the run waits.

A service is saved if a stage with the role ``trains`` calls it. With several, such as an actor and a critic, each is
copied and written by stages of its own; that of the first makes the whole a checkpoint when all others are written:

    stage_checkpoint[v] ─▶ stage_critic_checkpoint[v] ─▶ write_critic_checkpoint[v] ─▶ write_checkpoint[v]
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.engines.base import Trained
from dataflow.errors import PipelineError
from dataflow.graph import Read, Stage, TaskInfo
from dataflow.system import clock

FAILED = "checkpoint/failed"
"""Metric of a step: 1 if its checkpoint could not be written, 0 if it was."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint whose services are copied, with the value of each state of the graph.

    The directory is made by the first rank, where all ranks of all services write; None if it cannot be made.
    """

    directory: Path | None
    states: Mapping[str, Any]
    seconds: float = 0.0


async def _copy_first(
    *values: Any, service: Trained, store: Any, fields: Sequence[str], steps: int, task: TaskInfo
) -> Snapshot | None:
    """Copies the first service (the actor), and the graph's states; None if the last copy is still being written."""
    begin = clock.now()
    if not await service.snapshot(wait=task.step == steps):
        task.note(left_out=True)
        if service.rank == 0:
            logger.warning(
                f"checkpoint of step {task.step}: left out, since the previous one is still being written; a faster "
                "disk or a larger checkpoint.every avoids that."
            )
        return None
    if service.rank != 0:
        return None
    try:
        directory = store.begin(task.step)
    except OSError as error:
        _failed(task, error)
        return Snapshot(None, {})
    return Snapshot(directory, dict(zip(fields, values, strict=True)), clock.now() - begin)


async def _copy_further(snapshot: Snapshot | None, *_states: Any, service: Trained) -> Snapshot | None:
    """Copies another service's state, unless the checkpoint is left out; returns the snapshot with both."""
    if snapshot is None or snapshot.directory is None:
        return snapshot
    begin = clock.now()
    await service.snapshot(wait=True)  # it is free: the first service is written last
    return replace(snapshot, seconds=snapshot.seconds + clock.now() - begin)


def _keep_samples(*values: Any, store: Any, fields: Sequence[str], task: TaskInfo) -> None:
    """Keeps the fields of a step that are made before a checkpoint, and trained on after it."""
    try:
        store.keep(task.step, dict(zip(fields, values, strict=True)))
    except OSError as error:
        logger.warning(f"samples of step {task.step} are not kept for the next checkpoint: {_why(error)}")


async def _write_further(snapshot: Snapshot | None, *, service: Trained, folder: str, task: TaskInfo) -> float | None:
    """Writes one of the other services; returns the seconds that it took, None if it is not written."""
    if snapshot is None or snapshot.directory is None:
        return None
    begin = clock.now()
    try:
        await service.write(str(snapshot.directory / folder))
    except OSError as error:
        if service.rank == 0:
            _failed(task, error)
        return None
    return clock.now() - begin


async def write_checkpoint(
    snapshot: Snapshot | None,
    *others: float | None,
    service: Trained,
    folder: str,
    store: Any,
    steps: int,
    task: TaskInfo,
) -> None:
    """Writes the first service, with the responses of the steps already sampled, and makes all of it a checkpoint.

    If the disk fails, only this checkpoint is lost: ``checkpoint/failed`` is logged, and training continues.

    Args:
        snapshot: what to write; None if there is none.
        others: seconds in which each other service was written; None for one that is not, without which there is no
            checkpoint.
        service: writes its own part, all ranks together.
        folder: of the checkpoint, that it writes to.
        store: the run's :class:`~dataflow.running.saving.checkpoints.CheckpointStore`.
        steps: of the run.
        task: takes the metrics ``checkpoint/staged_s``, ``checkpoint/write_s``, ``checkpoint/bytes`` and
            ``checkpoint/failed``.
    """
    if snapshot is None:
        return
    begin = clock.now()
    took = [seconds for seconds in others if seconds is not None]
    if snapshot.directory is None or len(took) < len(others):
        await service.settle()  # otherwise no later one would be copied
        if snapshot.directory is not None and service.rank == 0:
            await asyncio.to_thread(store.discard, task.step)
        return
    try:
        await service.write(str(snapshot.directory / folder))
        if service.rank != 0:
            return
        later = range(task.step + 1, min(task.step + task.sampled_ahead, steps) + 1)
        # In a thread: hashing and syncing files takes seconds, in which the service can serve others.
        size = await asyncio.to_thread(_commit, snapshot.directory, snapshot.states, store, task, later)
    except OSError as error:
        if service.rank == 0:
            _failed(task, error)
            await asyncio.to_thread(store.discard, task.step)
        return
    task.log({"checkpoint/staged_s": snapshot.seconds, "checkpoint/write_s": sum(took) + clock.now() - begin})
    task.log({"checkpoint/bytes": float(size), FAILED: 0.0})


def _commit(directory: Path, states: Mapping[str, Any], store: Any, task: TaskInfo, later: range) -> int:
    for step in later:
        store.link(step, directory)
    store.save_states(directory, states)
    return int(store.commit(task.step))


def _failed(task: TaskInfo, error: OSError) -> None:
    task.log({FAILED: 1.0})
    logger.warning(f"checkpoint of step {task.step} failed: {_why(error)}")


def _why(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}; make room there, or let runs= name another place."


def checkpoint_stages(stages: Sequence[Stage], *, every: int, store: Any, steps: int) -> list[Stage]:
    """Returns the stages that save checkpoints of a pipeline: of each service that a stage trains, and its states.

    Args:
        stages: of the pipeline. Calls of the services that they train must run concurrently
            (``Hosted(concurrent=True)``).
        every: steps from one checkpoint to the next; the last step has one, too.
        store: the run's :class:`~dataflow.running.saving.checkpoints.CheckpointStore`.
        steps: of the run.

    Raises:
        PipelineError: no stage trains a hosted service.
    """
    states = tuple(sorted({read.field for s in stages for read in s.reads if read.lag != "none"}))
    early = tuple(name for s in stages if any(r.lag == "carried" for r in s.reads) for name in s.writes)
    trained = {s.host.name: (s.host, s.on) for s in reversed(stages) if s.role == "trains" and s.host is not None}
    if not trained:
        raise PipelineError(
            "checkpoint_stages: no stage trains a hosted service, whose state a checkpoint would hold; bind one to a "
            "stage with role='trains': bind(trainer=Hosted(...))."
        )
    (first, on), *others = reversed(trained.values())

    def saves(name: str, fn: Any, reads: Sequence[str], writes: Sequence[str], on: str, **services: Any) -> Stage:
        return Stage(
            name=name,
            fn=fn,
            reads=tuple(map(Read, reads)),
            writes=tuple(writes),
            on=on,
            role="saves",
            every=every,
            services=services,
            accepts=tuple(services),
        )

    shared = {"store": store, "steps": steps}
    made = [saves("stage_checkpoint", _copy_first, states, ["snapshot"], on, service=first, fields=states, **shared)]
    last, written = "snapshot", []
    for service, its in others:
        name = service.name
        copied, done = f"{name}_snapshot", f"{name}_written"
        made += [
            saves(f"stage_{name}_checkpoint", _copy_further, (last, *states), [copied], its, service=service),
            saves(f"write_{name}_checkpoint", _write_further, [copied], [done], "io", service=service, folder=name),
        ]
        last = copied
        written.append(done)
    keeping = saves("keep_samples", _keep_samples, early, (), "io", store=store, fields=early)
    reads, folder = (last, *written), first.name
    writing = saves("write_checkpoint", write_checkpoint, reads, (), "io", service=first, folder=folder, **shared)
    return [*made, replace(keeping, ahead_of="write_checkpoint"), writing]
