"""Reads the source of a plan: a dataflow run, a verl log, or costs written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import DataError
from dataflow.files import nearest_path
from dataflow.planning.config import PlanConfig
from dataflow.planning.sources import handmade, logs, trace, verl
from dataflow.planning.workload import Workload

KINDS = "a run's directory, a verl log (console, jsonl, CSV or TensorBoard) or a costs.yaml"


def read_workload(source: str, overrides: Sequence[str] = ()) -> tuple[Workload, PlanConfig]:
    """Reads a workload and the plan's configuration.

    Args:
        source: a run's directory or trace.json, a verl log or a .yaml file, see :data:`KINDS`.
        overrides: ``key=value``, see :class:`~dataflow.planning.config.PlanConfig`.

    Raises:
        DataError: there is no such source, or it lacks what a plan needs.
        ConfigError: a key or a value is wrong, or missing.
    """
    path = Path(source)
    if not (path.is_file() or path.is_dir()):  # opening a FIFO would block until something writes to it
        near = "" if path.exists() else nearest_path(path, path.parent)
        raise DataError(f"nothing to plan from at '{source}'{near or f'; give {KINDS}.'}")
    costs = path.suffix in (".yaml", ".yml")
    config = parse_overrides(PlanConfig, overrides, base=handmade.values(path) if costs else None)
    if costs:
        workload = handmade.workload(path, config)
    elif path.suffix == ".json" or (path / "trace.json").is_file():
        workload = trace.workload(path, config)
    elif logs.reader_of(path) is not None:
        workload = verl.workload(path, config)
    else:
        raise DataError(f"'{source}' cannot be planned from; give {KINDS}.")
    return (workload if config.placement is None else workload.placed(config.placement)), config
