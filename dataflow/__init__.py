"""dataflow: a declarative dataflow scheduler for RL post-training of LLMs.

Declare a training step as stages, pick a scheduling policy by one word, and slow rewards hide behind GPU work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dataflow.errors import DataflowError
from dataflow.graph import Carried, Hosted, Latest, Pipeline, Stage, TaskInfo, stage
from dataflow.policy import SchedulingPolicy, expand, preset

if TYPE_CHECKING:
    from dataflow.api import Finding, Run, Trace, check, plan, resume, run, simulate
    from dataflow.batch import Batch
    from dataflow.metrics import Mean, Sum
    from dataflow.reward_agent import RewardAgent

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Carried",
    "DataflowError",
    "Finding",
    "Hosted",
    "Latest",
    "Mean",
    "Pipeline",
    "RewardAgent",
    "Run",
    "SchedulingPolicy",
    "Stage",
    "Sum",
    "TaskInfo",
    "Trace",
    "check",
    "expand",
    "plan",
    "preset",
    "resume",
    "run",
    "simulate",
    "stage",
]

_LAZY = {
    "Batch": "dataflow.batch",
    "RewardAgent": "dataflow.reward_agent",
    **dict.fromkeys(("Mean", "Sum"), "dataflow.metrics"),
    **dict.fromkeys(("Finding", "Run", "Trace", "check", "plan", "resume", "run", "simulate"), "dataflow.api"),
}
"""Names that are imported when they are used, so that ``import dataflow`` takes no time."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dataflow' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
