"""A duration in words, in the unit that people use for it, and as a bare number of seconds. Pure."""

from __future__ import annotations

from decimal import Decimal


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


def figure(value: float, digits: int = 4) -> str:
    """Returns a number of seconds for text that names the unit: rounded, and without an exponent.

    >>> figure(2.34567), figure(1940.3, digits=3), figure(123456.7), figure(0.0000123)
    ('2.346', '1940', '123457', '0.0000123')
    """
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else f"{Decimal(text):f}"
