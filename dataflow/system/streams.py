"""The standard streams of a command: open, and able to take any character."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """Opens the null device for each standard stream that is closed (``>&-``).

    Otherwise the next file or pipe would get its number, and the output.
    """
    names = ("stdin", "stdout", "stderr")
    for number, name in enumerate(names):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def take_any_character() -> None:
    """Has stdout replace the characters that its encoding lacks by "?"; Python raises an error by default."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
