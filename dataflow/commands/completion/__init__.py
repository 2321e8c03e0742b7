"""Completes the words of a command line in bash, zsh and fish: `dataflow completion SHELL` sets it up.

argcomplete asks this program for the words at each TAB, and gives them to the shell. So what runs then must be quick:
nothing here imports an engine, and the keys of a pipeline come from the cache.
"""

from __future__ import annotations

import argparse
import os
import sys
from shlex import quote

SHELLS = ("bash", "zsh", "fish")


def asked() -> bool:
    """Whether a shell asks this process for words."""
    return "_ARGCOMPLETE" in os.environ


def answer(parser: argparse.ArgumentParser) -> None:
    """Gives the shell the words that may stand at the cursor, and ends the process."""
    from dataflow.commands.completion.finder import Finder
    from dataflow.commands.completion.words import attach

    attach(parser)
    # Options are offered behind a dash alone: among a pipeline's keys nobody looks for them.
    Finder()(parser, always_complete_options=False)


def script(shell: str) -> str:
    """Returns the code that a shell evaluates so that it completes the words of `dataflow`."""
    from argcomplete.shell_integration import shellcode

    # bash and zsh run the program that was typed; fish would look for its name, which may not be on the path.
    program = f"{quote(sys.executable)} -P -m dataflow" if shell == "fish" else None
    code: str = shellcode(["dataflow"], shell=shell, argcomplete_script=program)
    return code.strip()
