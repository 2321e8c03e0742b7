"""Latency laws: how long a reward call takes, written as ``2.5``, ``uniform:1:40`` or ``lognormal:8:0.6``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

from dataflow.errors import ConfigError, nearest

_FORMS = {"uniform": "uniform:LOW:HIGH", "lognormal": "lognormal:MEDIAN:SIGMA"}


@dataclass(frozen=True)
class Law:
    """A distribution of delays, in seconds.

    Attributes:
        kind: its name.
        a: the constant, the low end or the median.
        b: the high end, or the standard deviation of the delay's logarithm.
    """

    kind: Literal["constant", "uniform", "lognormal"]
    a: float
    b: float = 0.0

    def draw(self, rng: Random) -> float:
        """Returns one delay, in seconds."""
        if self.kind == "uniform":
            return rng.uniform(self.a, self.b)
        if self.kind == "lognormal":
            return rng.lognormvariate(math.log(self.a), self.b)
        return self.a

    @property
    def mean(self) -> float:
        """The expected delay, in seconds."""
        if self.kind == "uniform":
            return (self.a + self.b) / 2
        if self.kind == "lognormal":
            return self.a * math.exp(self.b**2 / 2)
        return self.a


def parse_latency(text: str | float) -> Law:
    """Returns the law that a text names.

    Raises:
        ConfigError: an unknown law, a number that is none, or one out of range.

    >>> parse_latency("uniform:1:40").mean
    20.5
    >>> parse_latency("2.5")
    Law(kind='constant', a=2.5, b=0.0)
    """
    word, *rest = str(text).strip().split(":")
    if not rest and (value := _number(word)) is not None:
        if value < 0:
            raise ConfigError(f"latency '{text}' is negative; give seconds of 0 or more.")
        return Law("constant", value)
    if word not in _FORMS:
        hint = nearest(word, _FORMS) or f"; give a number of seconds, {' or '.join(_FORMS.values())}."
        raise ConfigError(f"latency '{text}': no latency law is named '{word}'{hint}")
    numbers = [_number(part) for part in rest]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise ConfigError(f"latency '{text}' is not of the form {_FORMS[word]} (finite numbers).")
    a, b = numbers[0], numbers[1]
    if word == "uniform":
        if not 0 <= a <= b:
            raise ConfigError(f"latency '{text}': give 0 <= LOW <= HIGH.")
        return Law("uniform", a, b)
    if a <= 0 or b < 0:
        raise ConfigError(f"latency '{text}': give MEDIAN > 0 and SIGMA >= 0.")
    return Law("lognormal", a, b)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
