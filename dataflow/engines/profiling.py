"""Profiles of single tasks by torch.profiler: the operators that an update or a rollout spends its time in."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.stage import TaskInfo

SHOWN = 5
"""Operators that a task's span names."""
_FREE = threading.Lock()
"""Held while a task is profiled: torch has one profiler in a process."""


@dataclass(frozen=True)
class TaskProfiler:
    """Profiles the calls of stage functions in chosen steps; entered around each call (``Hosted.around``).

    Each profile is a file, ``STAGE-STEP.json.gz`` with the part and the rank if there are several. The task's span gets
    two facts: ``profile``, the file's name, and ``operators``, those with the most time of their own and their shares.
    A task that begins while another one of its process is profiled is not.

    Attributes:
        steps: to profile.
        directory: of the files.
    """

    steps: frozenset[int]
    directory: str

    @contextlib.contextmanager
    def __call__(self, task: TaskInfo) -> Iterator[None]:
        """Profiles what the process does meanwhile, in all its threads, if the task is of one of the steps."""
        if task.step not in self.steps or not _FREE.acquire(blocking=False):
            yield
            return
        try:
            profiler = _profiler()
            profiler.start()
            try:
                yield
            finally:
                profiler.stop()
            self._keep(profiler, task)
        finally:
            _FREE.release()

    def _keep(self, profiler: Any, task: TaskInfo) -> None:
        path = Path(self.directory, f"{name_of(task)}.json.gz")
        aside = path.with_name(f".{path.name}")  # with its ending, by which torch compresses it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(aside))
            aside.replace(path)
        except (OSError, RuntimeError) as error:
            logger.warning(f"the profile {path} is not written: {error}")
            return
        task.note(profile=path.name, operators=_operators(profiler))


def name_of(task: TaskInfo) -> str:
    """Returns the name of a task's profile.

    >>> name_of(TaskInfo(3, "actor_update", part=1, parts=4)), name_of(TaskInfo(3, "rollout"))
    ('actor_update-3.2', 'rollout-3')
    """
    part = f".{task.part + 1}" if task.parts > 1 else ""
    rank = f"-rank{os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    return f"{task.stage}-{task.step}{part}{rank}"


def _profiler() -> Any:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its library reports every start and stop on stderr
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # The transformers engine generates in a thread of its own.
    return profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))


def _operators(profiler: Any) -> str:
    """Returns the operators with the most time of their own: of the GPU if there is one, else of the CPU."""
    found = list(profiler.key_averages())
    times = {each.key: float(each.self_device_time_total) for each in found}
    if not any(times.values()):
        times = {each.key: float(each.self_cpu_time_total) for each in found}
    whole = sum(times.values()) or 1.0
    most = sorted(times.items(), key=lambda each: (-each[1], each[0]))[:SHOWN]
    return ", ".join(f"{name} {time / whole:.0%}" for name, time in most)
