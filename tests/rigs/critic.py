"""The stages of PPO with a critic, without engines: those of GRPO, with values and their update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataflow.graph import Hosted, Latest, Pipeline, Stage, stage
from dataflow.testing import grpo_pipeline


@stage(writes="values", on="gpu")
def values(responses: Any, critic: Latest) -> Any:
    """Returns the version of the critic."""
    return critic


@stage(writes="critic", on="gpu", role="trains", per_mini_batch=True)
def critic_update(responses: Any, values: Any, advantages: Any, critic: Latest) -> Any:
    """Returns the next version of the critic."""
    return (critic or 0) + 1


def hosted(stages: tuple[Stage, ...]) -> list[Stage]:
    """Returns the stages with a service for each that trains: ``trainer`` for the actor, ``critic`` for the critic."""
    names = {"actor": "trainer", "critic": "critic"}
    return [
        replace(s, services={"trainer": Hosted(names[s.writes[0]], dict, concurrent=True)}) if s.role == "trains" else s
        for s in stages
    ]


def ppo_pipeline(val_every: int | None = None) -> Pipeline:
    """Returns a pipeline of the stages of a PPO step, to schedule and to draw."""
    plain = grpo_pipeline(val_every)
    stages = [s.also_reads("values") if s.name == "advantage" else s for s in plain.stages]
    return Pipeline([*stages, values, critic_update], plain.inputs, plain.resources)
