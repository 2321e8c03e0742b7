"""What is said of a run that ended early, and the summary of one that could not write it itself."""

from __future__ import annotations

from pathlib import Path

from dataflow.errors import DataflowError, counted
from dataflow.running.saving.checkpoints import CheckpointStore
from dataflow.running.summary import read_summary


def finish_killed(directory: Path, status: str, steps: int | None) -> str:
    """Writes the summary of a run whose process was killed, from its files, unless it has one.

    Args:
        directory: of the run.
        status: "failed" or "interrupted".
        steps: the planned number of steps.

    Returns:
        The number of steps made and what can be done, as a phrase that follows "it" or "interrupted: ".
    """
    summary = read_summary(directory)
    if not summary:
        from dataflow.running.record import Record

        record = Record(directory)
        try:
            record.load()
            record.end(status, 0.0)
        except (OSError, DataflowError) as error:
            return f"stopped, and its summary cannot be written ({getattr(error, 'strerror', None) or error})"
        summary = record.summary
    done = int(summary.get("steps", 0))
    if summary.get("status") == "finished" and (steps is None or done >= steps):  # else it was resumed, to more steps
        return f"finished before that, and its files in {directory} are complete"
    return stopped(directory, done, steps)


def stopped(directory: Path, done: int, steps: int | None) -> str:
    """Returns the number of steps made, how to go on, and how to draw the timeline, in words."""
    after = counted(done, "step") if steps is None else f"{done} of {counted(steps, 'step')}"
    draw = f"'dataflow timeline {directory} -o {directory}.html' draws what it did"
    if saved := CheckpointStore(directory / "checkpoints").whole():
        resume = f"'dataflow resume {directory}' resumes from step {saved[-1]}"
    else:
        resume = f"'dataflow run' with name={directory.name} and resume=auto begins it again"
    return f"stopped after {after}; {resume}" + (f", {draw}" if done else f"; its files are in {directory}")
