"""What becomes of a sample that cannot be scored: a rule that the user declares, never one that is implied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dataflow.errors import ConfigError, nearest

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
    if not math.isfinite(score):
        raise ConfigError(f"reward.on_failure={text}: give a finite number, as in score:0.")
    return FailureRule("score", score)
