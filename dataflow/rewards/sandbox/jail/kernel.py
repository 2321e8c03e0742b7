"""Calls of the system that Python has no function for."""

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    """Raises the system's error if a call failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
