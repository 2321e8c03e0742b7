"""The limits of a service: calls in flight, requests and tokens a minute, by endpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataflow.errors import ConfigError, nearest


@dataclass(frozen=True)
class Limits:
    """Limits of a service.

    Attributes:
        concurrency: calls in flight; the ceiling of an adaptive limit.
        rpm: requests that may begin in any 60 seconds; None for no limit.
        tpm: tokens that may be used in any 60 seconds; needs a reward object with ``tokens``, or replies with a column
            ``tokens``. None for no limit.
        adaptive: lowers the limit on 429 and time-outs, and raises it by one for each round without them.
        floor: smallest value of an adaptive limit.
        endpoints: limits of single endpoints of a reward object with ``endpoint``, within the limits of all calls.
        pool: endpoints of equal servers, one of which takes a call when it starts; each has limits in ``endpoints``.

    Raises:
        ConfigError: a number out of range.
    """

    concurrency: int = 64
    rpm: float | None = None
    tpm: float | None = None
    adaptive: bool = False
    floor: int = 1
    endpoints: Mapping[str, Limits] = field(default_factory=dict)
    pool: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"reward.concurrency={self.concurrency}; give 1 or more.")
        for name in ("rpm", "tpm"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"reward.{name}={rate}; give a number above 0, or null.")
        if not 1 <= self.floor <= self.concurrency:
            raise ConfigError(f"reward.floor={self.floor}; give 1 to reward.concurrency={self.concurrency}.")

    @property
    def rated(self) -> bool:
        """Whether requests or tokens a minute are limited."""
        return self.rpm is not None or self.tpm is not None


def check_endpoints(reward: Any, limits: Limits) -> None:
    """Checks that limits of endpoints name endpoints of the reward object; others would limit nothing.

    Args:
        reward: its method ``endpoint`` returns where a request is sent; ``endpoints`` may list all names, and must if
            the server is chosen when a call starts.
        limits: limits of all calls and of single endpoints.

    Raises:
        ConfigError: it has no method ``endpoint``, or no endpoint of that name.
    """
    known = getattr(reward, "endpoints", None)
    if limits.endpoints and known is None and not callable(getattr(reward, "endpoint", None)):
        first = next(iter(limits.endpoints))
        fix = "give it a method endpoint(**arguments), or limit all calls (reward.concurrency, reward.rpm, reward.tpm)"
        raise ConfigError(f"reward.endpoints={{{first}: ...}}: the reward does not say which endpoint it calls; {fix}.")
    if not isinstance(known, list | tuple):
        return
    for name in limits.endpoints:
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(map(str, known))}."
            raise ConfigError(f"reward.endpoints={{{name}: ...}}: the reward calls no such endpoint{hint}")
