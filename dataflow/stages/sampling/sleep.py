"""Waking and sleeping of reward models that share their GPUs with trainer and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from dataflow.errors import PipelineError
from dataflow.graph import Role, Stage, TaskInfo, stage


class Sleeper(Protocol):
    """The servers of one reward model (:class:`~dataflow.rewards.models.sleeping.Sleeper`)."""

    @property
    def urls(self) -> Sequence[str]: ...

    async def wake(self) -> None: ...

    async def sleep(self) -> None: ...


VALIDATION = "val_"
"""Begins the names of the two stages that wake and sleep for a validation."""


@stage(on="gpu")
async def wake_rewards(*, sleepers: Sequence[Sleeper], task: TaskInfo) -> None:
    """Loads the reward models onto the GPUs; these stay taken until :func:`sleep_rewards` has ended."""
    for sleeper in sleepers:
        await sleeper.wake()
    task.note(servers=sum(len(sleeper.urls) for sleeper in sleepers))


@stage(on="gpu")
async def sleep_rewards(*, sleepers: Sequence[Sleeper]) -> None:
    """Frees the GPUs' memory that the reward models take."""
    for sleeper in sleepers:
        await sleeper.sleep()


def with_sleep(stages: Sequence[Stage], on: str, sleepers: Sequence[Sleeper]) -> list[Stage]:
    """Returns the stages with reward models that are awake only from the rollout to the last rewards of a step.

    Between, no other task runs on the models' GPUs: all policies keep to that, so that the next rollout, the log-probs
    and the updates come before the models wake or after they sleep.

    Args:
        stages: of a pipeline. Those that request rewards wait until the models are awake, and the models sleep when
            those that collect have ended; a validation wakes them for its own.
        on: resource of the GPUs.
        sleepers: wake the models and let them sleep.

    Raises:
        PipelineError: a stage asks for rewards in another way.
    """
    found = list(stages)
    agents = {s.host.name for s in stages if s.role in ("requests", "collects") and s.host is not None}
    asked = [s for s in stages if s.host is not None and s.host.name in agents]
    if others := [s for s in asked if s.role not in ("requests", "collects", "validates")]:
        raise PipelineError(
            f"stage '{others[0].name}' asks for rewards while reward models with placement=colocated may sleep; give "
            "them placement=own."
        )
    awake_between(found, _with_role(asked, "requests"), _with_role(asked, "collects"), on, sleepers)
    validating = _with_role(asked, "validates")
    if validating:
        awake_between(found, validating, validating, on, sleepers, VALIDATION)
    return found


def _with_role(stages: Sequence[Stage], role: Role) -> list[Stage]:
    return [s for s in stages if s.role == role]


def awake_between(
    found: list[Stage],
    asking: Sequence[Stage],
    ending: Sequence[Stage],
    on: str,
    sleepers: Sequence[Sleeper] = (),
    prefix: str = "",
) -> None:
    """Adds a pair of stages around those that ask for rewards and those with which the last ones come.

    Args:
        found: the stages of a pipeline, which are changed.
        asking: wait until the models are awake.
        ending: when these have ended, the models sleep.
        on: resource of the GPUs.
        sleepers: wake the models and let them sleep.
        prefix: of the names of the two stages.
    """
    writer = {field: s.name for s in found for field in s.writes}
    needed = dict.fromkeys(writer[r.field] for s in asking for r in s.reads if r.lag == "none" and r.field in writer)
    wake, sleep = f"{prefix}{wake_rewards.name}", f"{prefix}{sleep_rewards.name}"
    role, on_steps = asking[0].role if prefix else None, asking[0].every
    names = {s.name for s in asking}
    found[:] = [replace(s, after=(*s.after, wake)) if s.name in names else s for s in found]
    waking = wake_rewards.bind(
        name=wake, on=on, every=on_steps, after=list(needed), until=sleep, sleepers=tuple(sleepers)
    )
    asleep = sleep_rewards.bind(
        name=sleep, on=on, every=on_steps, after=[s.name for s in ending], sleepers=tuple(sleepers)
    )
    found += [replace(each, role=role) for each in (waking, asleep)]
