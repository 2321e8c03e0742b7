"""A duration in words, in the unit that people use for it. Pure."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Returns a duration as text: ``0.25 s``, ``12.3 s``, ``3 min 20 s``, ``17 h 53 min``.

    >>> seconds(0.254), seconds(200), seconds(64380)
    ('0.25 s', '3 min 20 s', '17 h 53 min')
    """
    if value >= 3600:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if value >= 120:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{value:.1f} s" if value >= 9.995 else f"{value:.2f} s"
