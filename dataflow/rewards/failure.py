"""What becomes of a sample that cannot be scored: a rule that the user declares, never one that is implied."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.user.results import MOST

_LATEST = 100  # requests of which a share says something

Kind = Literal["fail", "score", "drop_sample", "drop_group", "replace_group"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class FailureRule:
    """A parsed rule.

    Attributes:
        kind: ``fail`` ends the run with the story of the request; ``score`` gives the sample a fixed score;
            ``drop_sample`` leaves it out of the loss and of its group's baseline; ``drop_group`` leaves its whole
            group out; ``replace_group`` lets another finished group take its group's place.
        score: of kind ``score``.
    """

    kind: Kind = "fail"
    score: float = math.nan

    def __str__(self) -> str:
        return f"score:{self.score:g}" if self.kind == "score" else self.kind

    @property
    def drops(self) -> bool:
        """Whether what is collected may hold samples that no loss may use."""
        return self.kind in ("drop_sample", "drop_group")

    def for_validation(self) -> FailureRule:
        """Returns the rule of a validation stream: it has no spare groups, so it leaves out what it would replace."""
        return FailureRule("drop_group") if self.kind == "replace_group" else self


def parse_rule(text: str) -> FailureRule:
    """Reads a rule as the user writes it.

    Raises:
        ConfigError: no rule of that name, or ``score`` without a finite number.

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
    if not abs(score) <= MOST:
        raise ConfigError(f"reward.on_failure={text}: give a finite number, as in score:0.")
    return FailureRule("score", score)


class FailedShare:
    """Whether so many of an agent's requests have failed that the fault is the service's and not a sample's.

    The share is of the latest requests that ended, as many as the largest step has, and at least 100: a service that
    dies is found out as soon after a thousand good steps as after one. While fewer were submitted it is of those.

    Args:
        most: share that may fail, 0 to 1.

    Raises:
        ConfigError: it is none.
    """

    def __init__(self, most: float) -> None:
        if not 0 <= most <= 1:
            raise ConfigError(f"reward.max_failed_share={most}; give a number from 0 to 1.")
        self.most = most
        self._submitted = 0
        self._latest = _LATEST
        self._ends: deque[bool] = deque()
        self._failed = 0
        self._story = ""

    def submitted(self, rows: int, of_step: int) -> None:
        """Takes note of requests, and of how many their step has by now."""
        self._submitted += rows
        self._latest = max(self._latest, of_step)

    def ended(self, failure: str = "") -> None:
        """A request has ended: well, or so."""
        failed = bool(failure)
        self._story = failure or self._story
        self._ends.append(failed)
        self._failed += failed
        if len(self._ends) > self._latest:
            self._failed -= self._ends.popleft()

    def passed(self, more: bool = False) -> str:
        """Returns what to say if too many have failed, else nothing.

        Args:
            more: whether further requests of the step may come: of a few that came first the share says nothing.
        """
        known = min(self._submitted, self._latest)
        if self._failed <= self.most * (max(known, _LATEST) if more else known):
            return ""
        of = f"the last {known}" if self._submitted > known else f"{known}"
        most = f"more than reward.max_failed_share={self.most:g} allows"
        return f"{self._failed} of {of} reward requests have failed, {most}; the last one: {self._story}"
