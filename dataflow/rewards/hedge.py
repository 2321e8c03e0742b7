"""Hedge: when a second call is sent for a slow request."""

from __future__ import annotations

from collections import deque

import numpy as np

from dataflow.errors import ConfigError

_WINDOW, _EVERY, _ENOUGH = 1000, 25, 20
"""Latencies that the percentile is computed from, how often it is updated, and how many it needs."""


class Hedge:
    """The time after which a second call is sent.

    Args:
        after: see :func:`parse_hedge`.
    """

    def __init__(self, after: str | float | None) -> None:
        self._kind, self._number = parse_hedge(after)
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0
        self.after_s = self._number if self._kind == "s" else None
        """Seconds; None while no call is hedged."""

    def answered(self, seconds: float) -> None:
        """Adds the latency of a successful call, in seconds."""
        if self._kind != "p":
            return
        self._recent.append(seconds)
        self._seen += 1
        if self._seen >= _ENOUGH and (self.after_s is None or self._seen % _EVERY == 0):
            self.after_s = float(np.percentile(self._recent, self._number))


def parse_hedge(text: str | float | None) -> tuple[str, float]:
    """Parses ``hedge_after``: seconds, or a percentile of the latencies so far.

    Returns:
        ``("s", seconds)``, ``("p", percentile)`` or ``("", 0)`` for never.

    Raises:
        ConfigError: it is neither.

    >>> parse_hedge("p95"), parse_hedge(2), parse_hedge(None)
    (('p', 95.0), ('s', 2.0), ('', 0.0))
    """
    if text is None:
        return "", 0.0
    percentile = isinstance(text, str) and text.startswith("p")
    try:
        number = float(str(text)[1:] if percentile else text)
    except ValueError:
        number = -1.0
    if not (0 < number < 100 if percentile else 0 < number < float("inf")):
        raise ConfigError(f"reward.hedge_after={text}; give a percentile such as p95, or seconds above 0.")
    return ("p" if percentile else "s"), number
