"""Completes commands, options and files of a command line in bash, zsh and fish, by argcomplete."""

from __future__ import annotations

import argparse
import os
import sys
from shlex import quote

SHELLS = ("bash", "zsh", "fish")


def complete(parser: argparse.ArgumentParser) -> None:
    """If a shell asks this process for words, gives it those that may stand at the cursor, and ends the process."""
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete

        autocomplete(parser, always_complete_options=False)  # options are offered behind a dash


def script(shell: str) -> str:
    """Returns the code that a shell evaluates so that it completes the words of `dataflow`."""
    from argcomplete.shell_integration import shellcode

    # bash and zsh run the program that was typed; fish would look for its name, which may not be on the path.
    program = f"{quote(sys.executable)} -P -m dataflow" if shell == "fish" else None
    code: str = shellcode(["dataflow"], shell=shell, argcomplete_script=program)
    return code.strip()
