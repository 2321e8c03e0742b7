"""How Python processes are started: none of them imports from the working directory.

A process that is started with ``-m`` or ``-c``, as all of multiprocessing's are, looks for modules in the working
directory first: a ``json.py`` that lies there would be executed. ``-P`` keeps that directory out.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "PYTHONSAFEPATH"
_OURS = "dataflow"  # any text means yes to Python; this one can be told from a user's setting
_lock = threading.Lock()
_open = 0


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module of ours in a process of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Starts a block in which libraries start Python processes; what these start themselves is covered too.

    The processes inherit a variable of the environment, which :func:`restore_path` removes there. May be nested, and
    used by several threads at a time.
    """
    global _open
    with _lock:
        _open += 1
        os.environ.setdefault(_NAME, _OURS)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                _remove()


def restore_path() -> None:
    """Call it in a process started under :func:`safe_path`, before code of the user's runs there.

    This process stays as it was started, and so do those that its multiprocessing starts. A program that the user's
    code starts finds the modules beside it again.
    """
    with _lock:
        if not _open:
            _remove()


def _remove() -> None:
    if os.environ.get(_NAME) == _OURS:
        del os.environ[_NAME]


def working_directory_imported() -> bool:
    """Whether this process imports from the working directory, as one started with ``python -m`` does."""
    here = os.getcwd()
    return any(os.path.abspath(path) == here for path in sys.path)
