"""The calls that froze earlier processes of an agent; the agent must not make them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import RewardFailed
from dataflow.usercode.sentinel.sentinel import Kind, Step

FILE = "frozen.jsonl"
"""Name of the record, beside the ledger of a run: one line for each call that froze an agent."""


class FrozenCall(RewardFailed):
    """A call froze the agent's process, which was ended; the call is not repeated."""

    retry = False


class FrozenCalls:
    """The calls that froze the agent's earlier processes.

    Args:
        path: of the record; if None or missing, there are none. Unreadable lines, such as one truncated by a full
            disk, are ignored with a warning.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._samples: dict[tuple[Step, int, int], str] = {}
        self._keys: dict[str, str] = {}
        self._groups: dict[tuple[Step, int], str] = {}
        self.log = ""
        """How the user's ``log`` froze the agent; "" if it did not."""
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
                f"reward agent: unreadable lines in {path}, damaged or edited: {unreadable}; their calls may freeze "
                "the agent again. Check that the disk is in order and has space."
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
        """Returns how scoring a sample, or another with the same text, froze the agent; "" if it did not."""
        if not self._keys and not self._samples:
            return ""
        known = "" if key is None else self._keys.get(key[:8].rstrip(b"\0").hex(), "")
        return known or self._samples.get((step, group, sample), "")

    def group(self, step: Step, group: int) -> str:
        """Returns how post-processing a group froze the agent; "" if it did not."""
        return self._groups.get((step, group), "")
