"""Arguments of the command line: errors in one line, and the version."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from dataflow.commands.ending import one_line
from dataflow.errors import ConfigError


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


def is_dry(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Returns whether ``dry=true`` is the last such key among ``key=value`` arguments, and the others.

    Raises:
        ConfigError: it has another value than true or false.
    """
    given = [text for text in arguments if text.partition("=")[0].strip() == "dry"]
    if not given:
        return False, list(arguments)
    value = given[-1].partition("=")[2].strip().lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{given[-1]}: give true, to check everything, or false.")
    return value == "true", [text for text in arguments if text not in given]


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
