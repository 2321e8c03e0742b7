"""The failure rule: what happens to a sample that cannot be scored. The user declares it; none is implied.

A kind of rule is named here and applied in :meth:`Steps.failed <dataflow.rewards.steps.Steps.failed>`; one that needs
the scores of the whole group, in ``Steps._finish``, before post-processing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

from dataflow.errors import ConfigError, nearest
from dataflow.usercode.numeric import LARGEST_SCORE

_LATEST = 100  # smallest number of requests that a share is computed from

Kind = Literal["fail", "score", "drop_sample", "drop_group", "replace_group"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class FailureRule:
    """A parsed rule.

    Attributes:
        kind: ``fail`` ends the run with the request's message; ``score`` gives the sample a fixed score;
            ``drop_sample`` excludes it from the loss and from its group's baseline; ``drop_group`` excludes its whole
            group; ``replace_group`` replaces its group by another finished one.
        score: of kind ``score``.
    """

    kind: Kind = "fail"
    score: float = math.nan

    def __str__(self) -> str:
        return f"score:{self.score:g}" if self.kind == "score" else self.kind

    @property
    def drops(self) -> bool:
        """Whether collected rewards may contain samples that no loss may use."""
        return self.kind in ("drop_sample", "drop_group")

    def for_validation(self) -> FailureRule:
        """Returns the rule of a validation, which drops groups instead of replacing them: it has no extra ones."""
        return FailureRule("drop_group") if self.kind == "replace_group" else self


def parse_rule(text: str) -> FailureRule:
    """Reads a rule as the user writes it.

    >>> parse_rule("score:-1")
    FailureRule(kind='score', score=-1.0)
    >>> parse_rule("drop_sampel")
    Traceback (most recent call last):
    dataflow.errors.ConfigError: reward.on_failure=drop_sampel is unknown; did you mean 'drop_sample'?
    """
    kind, colon, number = text.partition(":")
    if kind not in KINDS or (colon and kind != "score"):
        hint = nearest(kind, KINDS) or f"; give {', '.join(k if k != 'score' else 'score:X' for k in KINDS)}."
        raise ConfigError(f"reward.on_failure={text} is unknown{hint}")
    if kind != "score":
        return FailureRule(kind)
    try:
        score = float(number)
    except ValueError:
        score = math.nan
    if not abs(score) <= LARGEST_SCORE:
        raise ConfigError(
            f"reward.on_failure={text}: give a finite number of at most {LARGEST_SCORE:g}, as in score:0."
        )
    return FailureRule("score", score)


class FailedShare:
    """Detects that more than the share ``most`` of requests has failed: too many for faults of single samples.

    The share is of the latest ended requests: as many as the largest step has, and at least 100, so that a dead service
    is detected as early after a thousand good steps as after one. While fewer were submitted, the share is of those.
    """

    def __init__(self, most: float) -> None:
        if not 0 <= most <= 1:
            raise ConfigError(f"reward.max_failed_share={most}; give a number from 0 to 1.")
        self._most = most
        self._submitted, self._latest = 0, _LATEST
        self._ends: deque[bool] = deque()  # whether each of the latest failed
        self._failed, self._message = 0, ""

    def submitted(self, rows: int, of_step: int) -> None:
        """Counts ``rows`` submitted requests, whose step has ``of_step`` requests now."""
        self._submitted += rows
        self._latest = max(self._latest, of_step)

    def ended(self, failure: str = "") -> None:
        """Counts an ended request; ``failure`` is its message if it failed."""
        self._message = failure or self._message
        self._ends.append(bool(failure))
        self._failed += bool(failure)
        if len(self._ends) > self._latest:
            self._failed -= self._ends.popleft()

    def passed(self, more: bool = False) -> str:
        """Returns an error message if too many requests have failed, else nothing.

        With ``more``, further chunks of the step may follow: the share of a few first ones would be misleading.
        """
        known = min(self._submitted, self._latest)
        if self._failed <= self._most * (max(known, _LATEST) if more else known):
            return ""
        of = f"the last {known}" if self._submitted > known else f"{known}"
        most = f"more than reward.max_failed_share={self._most:g} allows"
        return f"{self._failed} of {of} reward requests have failed, {most}; the last one: {self._message}"
