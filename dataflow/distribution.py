"""Distributions of durations: how long a reward call or a stage takes, in seconds.

Written as ``2.5``, ``uniform:1:40``, ``lognormal:8:0.6`` or ``empirical:FILE``, a file with a number on each line.
Pure: the caller passes the random generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dataflow.errors import ConfigError, nearest
from dataflow.files import decoded

if TYPE_CHECKING:
    from random import Random

_MOST_SIGMA = 20.0  # beyond it, durations are no numbers
_FORMS = {"uniform": "uniform:LOW:HIGH", "lognormal": "lognormal:MEDIAN:SIGMA", "empirical": "empirical:FILE"}


@dataclass(frozen=True)
class Distribution:
    """A distribution of durations, in seconds.

    Attributes:
        a: the constant, the low end or the median.
        b: the high end, or the standard deviation of the duration's logarithm.
        values: measured durations, all equally likely.
        factor: multiplies every draw.
    """

    kind: Literal["constant", "uniform", "lognormal", "empirical"]
    a: float = 0.0
    b: float = 0.0
    values: tuple[float, ...] = ()
    factor: float = 1.0

    def draw(self, rng: Random) -> float:
        """Returns one duration, in seconds."""
        return self.draws(rng, 1)[0]

    def draws(self, rng: Random, count: int) -> list[float]:
        """Returns ``count`` durations, in seconds."""
        if self.kind == "constant":
            return [self.a * self.factor] * count
        if self.kind == "empirical":
            values = rng.choices(self.values, k=count)
            return values if self.factor == 1.0 else [v * self.factor for v in values]
        if self.kind == "uniform":
            low, wide = self.a * self.factor, (self.b - self.a) * self.factor
            uniform = rng.random
            return [low + wide * uniform() for _ in range(count)]
        mu = math.log(self.a * self.factor)
        return [rng.lognormvariate(mu, self.b) for _ in range(count)]

    @property
    def mean(self) -> float:
        """The expected duration, in seconds."""
        if self.kind == "uniform":
            return self.factor * (self.a + self.b) / 2
        if self.kind == "lognormal":
            return self.factor * self.a * math.exp(self.b**2 / 2)
        if self.kind == "empirical":
            return self.factor * math.fsum(self.values) / len(self.values)
        return self.factor * self.a

    def scaled(self, factor: float) -> Distribution:
        """Returns the distribution of durations ``factor`` times as long."""
        return replace(self, factor=self.factor * factor)

    def __str__(self) -> str:
        times = "" if self.factor == 1.0 else f" x {self.factor:.3f}"
        if self.kind == "constant":
            return f"{self.a:g} s{times}"
        if self.kind == "empirical":
            return f"{len(self.values)} measured values (mean {self.mean:.3g} s)"
        return f"{self.kind}:{self.a:g}:{self.b:g}{times}"


def parse_distribution(text: str | float, what: str = "latency", folder: Path | None = None) -> Distribution:
    """Parses a number of seconds, or a distribution such as ``uniform:1:40``.

    ``what`` is the configuration key or quantity, for messages. The file of ``empirical:FILE`` is looked up in
    ``folder``, by default the current directory.

    >>> parse_distribution("uniform:1:40").mean
    20.5
    >>> parse_distribution("2.5").mean
    2.5
    """
    where = f"{what} '{text}'"
    word, _, rest = str(text).strip().partition(":")
    if word == "empirical":
        return Distribution("empirical", values=_measured(where, (folder or Path()) / rest))
    try:
        a, b = map(float, rest.split(":")) if word in _FORMS else (float(str(text)), 0.0)
    except ValueError as error:
        *forms, last = _FORMS.values()
        hint = nearest(word, _FORMS) or f"; give a number of seconds, {', '.join(forms)} or {last}."
        if word in _FORMS:
            raise ConfigError(f"{where} is not of the form {_FORMS[word]} (numbers).") from error
        raise ConfigError(f"{where}: no distribution is named '{word}'{hint}") from error
    if word == "uniform":
        if not 0 <= a <= b < math.inf:
            raise ConfigError(f"{where}: give 0 <= LOW <= HIGH.")
        return Distribution("uniform", a, b)
    if word == "lognormal":
        if not 0 < a < math.inf or not 0 <= b <= _MOST_SIGMA:
            raise ConfigError(f"{where}: give MEDIAN > 0 and SIGMA from 0 to {_MOST_SIGMA:.0f}.")
        return Distribution("lognormal", a, b)
    if not 0 <= a < math.inf:
        raise ConfigError(f"{where}: give seconds of 0 or more.")
    return Distribution("constant", a)


def _measured(where: str, path: Path) -> tuple[float, ...]:
    try:
        values = tuple(map(float, decoded(path.read_bytes()).split()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: cannot read {path}: {error}; give a file with a number a line.") from error
    if not values or not all(0 <= value < math.inf for value in values):
        raise ConfigError(f"{where}: {path} holds no durations; give seconds of 0 or more, one a line.")
    return values
