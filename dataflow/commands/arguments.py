"""Arguments of the command line: errors in one line, and the version."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dataflow.commands.ending import one_line


def as_key(unknown: Sequence[str], arguments: Sequence[str]) -> str:
    """Returns a hint that writes an unknown option as a key."""
    option = next((text for text in unknown if text.startswith("--")), None)
    if option is None:
        return ""
    name, _, value = option.removeprefix("--").partition("=")
    if not value:
        following = arguments[arguments.index(option) + 1 :]
        value = following[0] if following and not following[0].startswith("-") else "VALUE"
    return f"; keys are written without dashes, {name.replace('-', '_')}={value}"


class Parser(argparse.ArgumentParser):
    """Prints errors in one line, without the usage, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{one_line(message)}; see '{self.prog} -h'.\n")


class Version(argparse.Action):
    """Prints the installed version; looks it up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from dataflow import __version__

        print(f"dataflow {__version__}")
        parser.exit()
