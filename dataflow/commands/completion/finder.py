"""argcomplete's search for the argument at the cursor, for a command whose options may stand between its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from argcomplete.finders import CompletionFinder


class Finder(CompletionFinder):
    """Leaves out the options before the cursor: behind one, argparse takes no further argument of a list."""

    def _get_completions(self, comp_words: list[str], *rest: object) -> list[str]:
        parser = self._parser
        assert parser is not None
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        command = next((commands.choices[word] for word in comp_words[1:] if word in commands.choices), None)
        if command is not None:
            comp_words = _without_options(comp_words, command)
        found: list[str] = super()._get_completions(comp_words, *rest)  # type: ignore[no-untyped-call]
        return found


def _without_options(words: Sequence[str], command: argparse.ArgumentParser) -> list[str]:
    """Returns the words without options and their values; an option that lacks its value yet stays."""
    kept: list[str] = []
    at = 0
    while at < len(words):
        action = command._option_string_actions.get(words[at])
        takes = 0 if action is None or action.nargs == 0 else 1
        if action is None or at + takes >= len(words) or action.nargs == "+":
            kept.append(words[at])
            at += 1
        else:
            at += 1 + takes
    return kept
