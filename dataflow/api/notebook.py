"""Calls that run an event loop of their own, from where one runs already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def outside_a_loop(work: Callable[[], Result]) -> Result:
    """Calls a function; where this thread has an event loop already (a notebook), in a thread of its own.

    Raises:
        BaseException: what the function raises.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    found: list[Result] = []
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, name="dataflow run")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
