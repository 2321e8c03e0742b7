"""Addresses of HTTP, and of a host with a port."""

from __future__ import annotations

import base64
import socket
from urllib.parse import unquote, urlsplit

from dataflow.system.secrets import keep_secret


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


def host_port(host: str, port: int) -> str:
    """Returns a host and a port as one text, which may follow ``http://``.

    >>> host_port("10.0.0.1", 80), host_port("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Returns the kind of a socket for an address: that of IPv6 if it has a colon."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def without_login(url: str) -> tuple[str, str]:
    """Returns an address without user name and password, and the header that replaces them, or ""."""
    try:
        parts = urlsplit(url)
        user, password = parts.username, parts.password
    except (ValueError, AttributeError):  # not an address, which addresses() reports
        return url, ""
    if user is None and password is None:
        return url, ""
    login = f"{unquote(user or '')}:{unquote(password or '')}"
    encoded = base64.b64encode(login.encode()).decode()
    # Some servers take a key as the user name.
    for secret in (password or user, unquote(password or user or ""), encoded):
        keep_secret(secret)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), f"Basic {encoded}"
