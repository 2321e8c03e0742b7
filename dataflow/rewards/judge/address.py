"""The addresses of servers: from what the user gives to that of a request."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from dataflow.errors import ConfigError
from dataflow.rewards.judge.chat import COMPLETIONS
from dataflow.system.address import is_address
from dataflow.system.secrets import redact


def root_of(url: str) -> str:
    """Returns the address of a server without the path of its API.

    >>> root_of("http://v1.rewards:8000/"), root_of("http://h/proxy/v1"), root_of("https://h/classify")
    ('http://v1.rewards:8000', 'http://h/proxy', 'https://h')
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    for end in (COMPLETIONS, "/classify", "/pooling", "/v1"):
        path = path.removesuffix(end)
    return parts._replace(path=path, query="", fragment="").geturl()


def addresses(urls: Sequence[str], path: str = f"/v1{COMPLETIONS}") -> list[str]:
    """Returns the full addresses of servers.

    Args:
        urls: ``http://host:port``, with or without ``/v1`` or all of the path.
        path: of the requests.

    Raises:
        ConfigError: there is no url, one is not an address, or one is given twice.
    """
    if not urls:
        raise ConfigError("judge.url=[] names no server; give http://host:port.")
    full = []
    for url in urls:
        if not is_address(url):
            raise ConfigError(f"judge.url={redact(str(url))} is not an address; give http://host:port.")
        parts = urlsplit(url)
        if parts.query or parts.fragment:
            address = parts._replace(query="", fragment="").geturl()
            fix = "remove what follows the path; put a key into the variable that judge.api_key_env names"
            raise ConfigError(f"judge.url={address}?...: an address with a query is not supported; {fix}.")
        base = url.rstrip("/")
        full.append(base if base.endswith(path.removeprefix("/v1")) else f"{base.removesuffix('/v1')}{path}")
    if len(set(full)) != len(full):
        raise ConfigError(f"judge.url={urls} names a server twice; give each once.")
    return full
