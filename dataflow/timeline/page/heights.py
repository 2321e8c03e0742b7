"""How high the parts of the chart are, for one run and for several below each other. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heights:
    """Heights in pixels.

    Attributes:
        head: a run's name.
        strip: the numbers of its steps.
        gap: between two rows.
        pool: the row of a GPU pool.
        lane: one lane of another row.
        band: the reward requests in flight.
        most: all lanes of one row together.
        stripe: a GPU pool in the overview.
    """

    head: float
    strip: float
    gap: float
    pool: float
    lane: float
    band: float
    most: float
    stripe: float


ALONE = Heights(head=22, strip=15, gap=7, pool=42, lane=15, band=84, most=120, stripe=16)
BESIDE = Heights(head=17, strip=13, gap=3, pool=27, lane=7, band=34, most=40, stripe=9)
"""Of runs below each other: four of them fit on a screen."""
