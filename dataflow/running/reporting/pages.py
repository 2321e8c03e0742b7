"""Draws a finished run into its directory: picture and page of its timeline, and the page of its samples."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from dataflow.samples.page import run_page
from dataflow.system.extras import not_installed
from dataflow.timeline import files, perfetto
from dataflow.timeline.causes import linked
from dataflow.timeline.compare import facts_of


def draw_run(directory: Path) -> None:
    """Draws ``samples.html``, if the run kept samples, and ``timeline.png`` and ``timeline.html``, which link to it.

    The picture needs matplotlib, which the base install does without.

    Raises:
        OSError: a file cannot be written.
    """
    trace = perfetto.load(str(directory))
    name = str(trace.meta.get("policy", "run"))
    run_page(directory, linked(trace))
    if not trace.spans:  # it was lost, and no step ran since
        logger.warning(f"{directory}: no timeline is drawn, as the run's trace has no task")
        return
    pictures = ("timeline.png",) if not_installed("matplotlib") is None else ()
    for out in (*pictures, "timeline.html"):
        files.draw({name: trace}, directory / out, directory.name, {name: facts_of(str(directory), directory / out)})
