"""dataflow: a declarative dataflow scheduler for RL post-training of LLMs.

Declare a training step as stages, pick a scheduling policy by one word, and slow rewards hide behind GPU work.
"""

from dataflow.errors import DataflowError
from dataflow.graph import Carried, Hosted, Latest, Pipeline, Stage, TaskInfo, stage
from dataflow.policy import SchedulingPolicy, expand, preset

__version__ = "0.1.0"

__all__ = [
    "Carried",
    "DataflowError",
    "Hosted",
    "Latest",
    "Pipeline",
    "SchedulingPolicy",
    "Stage",
    "TaskInfo",
    "expand",
    "preset",
    "stage",
]
