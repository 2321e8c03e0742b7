"""The configuration of checkpoints."""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from dataflow.config.section import Section


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    every: NonNegativeInt = 10
    """Steps from one checkpoint to the next, the last step has one, too; 0 saves none."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """Checkpoints to keep whose step has the best validation."""
    keep_every: NonNegativeInt = 0
    """Also keep the checkpoints of steps that are multiples of this; 0 for none."""
    on_interrupt: bool = True
    """Save before Ctrl-C or SIGTERM ends the run."""
    grace_s: NonNegativeFloat = 30.0
    """Seconds that this may take."""
    max_failed: PositiveInt = 3
    """Checkpoints that may fail one after another before the run does."""
    export: bool = True
    """Write the trained model to runs/NAME/model at the end."""
