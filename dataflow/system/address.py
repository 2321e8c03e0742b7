"""Addresses of HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(url: object) -> bool:
    """Whether requests can be sent to an address of HTTP.

    >>> is_address("http://h:80/a"), is_address("http://h:99999"), is_address("http://h/a b"), is_address(5)
    (True, False, False, False)
    """
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # raises for parts that are empty or too long
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
