"""Starts Python processes that do not import from the working directory.

A process started with ``-m`` or ``-c``, as those of multiprocessing are, looks for modules in the working directory
first: a ``json.py`` there would be executed. ``-P`` excludes that directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "PYTHONSAFEPATH"
_OURS = "dataflow"  # any text enables it; this one differs from a user's setting


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs one of our modules as a process."""
    return [sys.executable, "-P", "-m", module, *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Excludes the working directory from the imports of Python processes that libraries start within the block.

    These processes, and those that they start, inherit an environment variable; :func:`restore_path` removes it there.
    """
    os.environ.setdefault(_NAME, _OURS)
    try:
        yield
    finally:
        restore_path()


def restore_path() -> None:
    """Removes the variable of :func:`safe_path`; called in a process started under it, before user code runs.

    This process and those that its multiprocessing starts are not affected. Programs that user code starts can import
    the modules beside them again.
    """
    if os.environ.get(_NAME) == _OURS:
        del os.environ[_NAME]


def working_directory_imported() -> bool:
    """Whether this process imports from the working directory, as with ``python -m``."""
    here = os.getcwd()
    return any(os.path.abspath(path) == here for path in sys.path)
