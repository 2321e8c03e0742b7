"""What froze an agent's process before: the agent that takes its place must not call that again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import RewardFailed
from dataflow.rewards.requests import Step
from dataflow.rewards.sentinel.sentinel import Kind

FILE = "frozen.jsonl"
"""Beside the ledger of a run: a line for each call that froze an agent."""


class FrozenCall(RewardFailed):
    """A call froze the agent's process, which was ended for it; it is not made again."""

    retry = False


class Frozen:
    """The calls that froze the agents before this one.

    Args:
        path: of the record; None, or no such file, knows none. A line that cannot be read, such as one that a full
            disk cut off, is left out with a warning.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._samples: dict[tuple[Step, int, int], str] = {}
        self._keys: dict[str, str] = {}
        self._groups: dict[tuple[Step, int], str] = {}
        self.log = ""
        """What is to be said of the user's ``log``, if that did it."""
        if path is None or not path.is_file():
            return
        unreadable = 0
        for line in filter(bytes.strip, path.read_bytes().split(b"\n")):
            try:
                self._add(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                unreadable += 1
        if unreadable:
            logger.warning(
                f"reward agent: lines of {path} that cannot be read, damaged or edited: {unreadable}; a call that they "
                "named may freeze the agent once more. See that the disk is in order and has space."
            )

    def _add(self, facts: dict[str, Any]) -> None:
        story, at = facts["story"], (facts["step"], facts["group"])
        if facts["kind"] == Kind.LOG:
            self.log = story
        elif facts["kind"] == Kind.POST_PROCESS:
            self._groups[at] = story
        elif facts["key"]:
            self._keys[facts["key"]] = story  # the same text freezes the agent again, in any sample
        else:
            self._samples[*at, facts["sample"]] = story

    def sample(self, step: Step, group: int, sample: int, key: bytes | None) -> str:
        """Returns what happened when a sample, or another with the same text, was scored; nothing if it was not."""
        if not self._keys and not self._samples:
            return ""
        known = "" if key is None else self._keys.get(key[:8].rstrip(b"\0").hex(), "")
        return known or self._samples.get((step, group, sample), "")

    def group(self, step: Step, group: int) -> str:
        """Returns what happened when a group was post-processed."""
        return self._groups.get((step, group), "")
