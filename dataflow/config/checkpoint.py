"""The configuration of checkpoints, and of a run that resumes from one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from dataflow.config.section import Section, Text

Keys = Annotated[list[Text], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    every: NonNegativeInt = 10
    """Steps from one checkpoint to the next; the last step has one, too. 0 saves none."""
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
    """Checkpoints that may fail one after another before the run fails."""
    export: bool = True
    """Write the trained model to runs/NAME/model at the end."""


class ResumeConfig(Section):
    """Resumes from the last checkpoint of the run of the same name."""

    shorthand = "mode"

    mode: Literal["never", "auto"] = "never"
    """auto resumes runs/NAME if it exists, from its last whole checkpoint, or without one from the beginning with its
    ledger; never refuses to."""
    allow: Keys = Field(default=[])
    """Keys that may differ from those of the run although they change what it trains on, such as policy; data for other
    rows in the same files, or another tokenizer in the same directory."""
