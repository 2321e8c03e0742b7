"""Checks a run without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataflow.api.arguments import arguments_of
from dataflow.api.notebook import outside_a_loop
from dataflow.running.preparing.check import Finding

__all__ = ["Finding", "check"]


def check(pipeline: str | Path, *overrides: str, **keys: Any) -> list[Finding]:
    """Makes all checks of a run, as ``dataflow run ... dry=true`` does; starts nothing and leaves nothing behind.

    Args:
        pipeline: its file, a recipe, or the ``config.yaml`` of a run.
        *overrides: ``key=value`` arguments, as of the command line.
        **keys: configuration by name, as of :func:`~dataflow.api.run.run`.

    Returns:
        What each check found; ``state`` is ``ok``, ``warning``, ``problem`` or ``not checked``.
    """
    from functools import partial

    from dataflow.config.loading.saved import load
    from dataflow.running.dry import dry_run

    return outside_a_loop(lambda: dry_run(partial(load, pipeline), arguments_of(overrides, keys)))
