"""Predicts every policy, from a run, a log of verl or costs written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.api.arguments import arguments_of
from dataflow.api.notebook import outside_a_loop

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan


def plan(source: str | Path, *overrides: str, **keys: Any) -> Plan:
    """Returns the predicted time of every policy, with advice.

    Args:
        source: a run's directory or trace, a verl log, or a ``costs.yaml``.
        *overrides: ``key=value`` arguments, as of ``dataflow plan``.
        **keys: the same by name: ``plan(run, reward={"concurrency": 128})``.

    Raises:
        UserError: the source or a key is wrong, in one sentence.
    """
    from dataflow.planning.plan import make_plan

    arguments = arguments_of(overrides, keys)
    return outside_a_loop(lambda: make_plan(str(source), arguments))
