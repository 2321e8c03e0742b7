"""The command lines of our own processes."""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs one of our modules; it imports nothing from the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]
