"""What every form of a log has in common: the scalars that are required, and the advice where they are missing."""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.errors import DataError, nearest

SECONDS = "timing_s/"
GIVE = "give verl's console log, its jsonl file or tensorboard directory, or a CSV of its scalars"

EACH_STEP = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic")
"""What verl times in each step, if at all."""
NOW_AND_THEN = ("testing", "save_checkpoint")
"""What it times in some steps."""
WHOLE = "step"
_LISTED = 12
"""Timings that a message lists."""

Columns = dict[str, dict[int, float]]
"""Name of a scalar -> {step: value}."""


def require(timings: Sequence[str], names: Sequence[str], trouble: str) -> None:
    """Rejects a log without some scalars.

    Args:
        timings: names of the scalars.
        names: those that the log has.
        trouble: beginning of the message.

    Raises:
        DataError: one is missing.
    """
    missing = [name for name in timings if name not in names]
    if missing:
        # Without their prefix, which would make all timings look similar.
        word = missing[0].rpartition("/")[2]
        alike = [name for name in names if nearest(word, [name.rpartition("/")[2]])]
        hint = nearest(missing[0], alike) or nearest(word, alike) or f"; {GIVE}."
        timed = [name for name in names if name.startswith(SECONDS)]
        listed = ", ".join(timed[:_LISTED]) + ", ..." * (len(timed) > _LISTED)
        there = f" (it has {listed})" if timed else ""
        raise DataError(f"{trouble} {', '.join(missing)}{there}{hint}")


def number(cell: str, where: str, give: str) -> float:
    """Returns the number of a cell.

    Raises:
        DataError: it is none; the message begins with ``where`` and says what to ``give``.
    """
    try:
        return float(cell)
    except ValueError as error:
        raise DataError(f"{where}: '{cell[:40]}' is not a number; give {give}.") from error
