"""The HTTP client of one inference server: JSON there and back, and every failure as one kind of error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dataflow.system.address import without_login
from dataflow.system.http import (
    THROTTLED,
    beginning_of_error,
    error_within,
    may_pass,
    message_in,
    reason,
    short,
    wait_asked,
)

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 10.0
"""Seconds for connecting."""
_LONG_BYTES = 1 << 20
"""Length from which a reply is decoded in a thread."""
PAGE_BYTES = 4 << 20
"""Longest reply with what a server says about itself, or about a request that is not for a sample."""


class ServerError(Exception):
    """A request to an inference server was not answered as it should.

    Attributes:
        status: HTTP status of the reply, if that is the error.
        wait_s: seconds to wait before the next request, as the server asks.
    """

    def __init__(self, message: str, *, status: int | None = None, wait_s: float = 0.0) -> None:
        super().__init__(short(message).rstrip(": "))
        self.status = status
        self.wait_s = wait_s

    @property
    def throttled(self) -> bool:
        """Whether the server takes no more load for now."""
        return self.status in THROTTLED

    @property
    def refused(self) -> bool:
        """Whether the server refuses this request, and would refuse it again."""
        return self.status is not None and not may_pass(self.status)


class Client:
    """Sends requests to one server. It connects with the first one, on the event loop that sends it.

    Args:
        url: ``http://host:port``, with or without ``/v1``; a user name and a password in it are sent as a header.
        key: the API key, if the server requires one.
        timeout_s: of a request, unless it has a limit of its own.

    Attributes:
        url: of the server, without user name and password.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float) -> None:
        self.url = base_of(url)
        _url, login = without_login(url)
        # Decompressing a reply would block the event loop, and a few bytes of it may stand for gigabytes.
        self._headers = {"Accept-Encoding": "identity"}
        if header := f"Bearer {key}" if key else login:
            self._headers["Authorization"] = header
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, limit_s: float | None = None) -> Any:
        """Returns the JSON of a page. Raises :class:`ServerError`."""
        return await self._send("GET", path, None, limit_s, PAGE_BYTES)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        limit_s: float | None = None,
        most_bytes: int = PAGE_BYTES,
    ) -> Any:
        """Sends JSON, and returns that of the reply; None if it is empty.

        Args:
            path: of the page.
            body: of the request.
            limit_s: seconds for the exchange, if it has a limit of its own.
            most_bytes: of the reply.

        Raises:
            ServerError: there is no reply in time, or one that is broken, too long, compressed or an error.
        """
        return await self._send("POST", path, body, limit_s, most_bytes)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float | None, most_bytes: int
    ) -> Any:
        import aiohttp

        limit = limit_s or self._timeout_s
        what = f"{method} {path.partition('?')[0]}"
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=min(CONNECT_S, limit))
        failure = ServerError(f"{what} was not answered within {limit:g} s")
        try:
            async with self._opened().request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as reply:
                if reply.status != 200:
                    text = await beginning_of_error(reply.content.iter_any(), limit)
                    wait_s = wait_asked(reply.headers.get("Retry-After", ""), reply.headers.get("Date", ""))
                    message = short(message_in(text)) or reply.reason or "no message"
                    raise ServerError(f"{what} answered {reply.status}: {message}", status=reply.status, wait_s=wait_s)
                raw = await _whole(what, reply, most_bytes)
                # Of a long reply the decoding would block the event loop.
                got = _decoded(what, raw) if len(raw) < _LONG_BYTES else await asyncio.to_thread(_decoded, what, raw)
                if (error := error_within(got, reply.headers)) is not None:
                    message = f"{what} answered {error.status or 'an error'} in a reply of status 200: {error.message}"
                    raise ServerError(message, status=error.status, wait_s=error.wait_s)
                return got
        except aiohttp.ConnectionTimeoutError:
            failure = ServerError(f"{what}: no connection within {min(CONNECT_S, limit):g} s")
        except TimeoutError:
            pass
        except aiohttp.ClientPayloadError:
            failure = ServerError(f"{what}: the connection broke in the middle of the reply")
        except (aiohttp.ClientError, OSError) as error:
            failure = ServerError(f"{what}: {reason(error)}")
        except ServerError:
            raise
        except Exception as error:  # a reply that the library cannot read, either
            failure = ServerError(f"{what}: {type(error).__name__}: {reason(error)}")
        # Not from the client's own error, which holds the headers.
        raise failure

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            # The pool limits the requests. Servers close idle connections after 5 s: close them earlier.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, cookie_jar=jar, auto_decompress=False
            )
        return self._session

    async def close(self) -> None:
        """Closes the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def base_of(url: str) -> str:
    """Returns the address of a server without user name, password and the path of OpenAI's API.

    >>> base_of("http://me:secret@h:8000/v1/")
    'http://h:8000'
    """
    return without_login(url)[0].rstrip("/").removesuffix("/v1").rstrip("/")


def same_server(url: str) -> tuple[str, str, int, str]:
    """Returns what two spellings of a server's address have in common.

    >>> same_server("http://H.:80/v1") == same_server("HTTP://h")
    True
    """
    parts = urlsplit(base_of(url))
    host = (parts.hostname or "").rstrip(".")
    with suppress(ValueError):  # a name
        host = str(ip_address(host))
    return parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80), parts.path


async def _whole(what: str, reply: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    if (encoding := reply.headers.get("Content-Encoding", "identity").lower()) != "identity":
        raise ServerError(
            f"{what} sent its reply in the encoding '{encoding}', which was not requested; configure the server, or "
            "the proxy before it, to send replies without encoding"
        )
    if (reply.content_length or 0) > most_bytes:
        raise _overlong(what, most_bytes)
    got = bytearray()
    async for piece in reply.content.iter_any():
        got += piece
        if len(got) > most_bytes:
            raise _overlong(what, most_bytes)
    return bytes(got)


def _overlong(what: str, most_bytes: int) -> ServerError:
    return ServerError(f"{what} sent a reply of over {most_bytes:,} bytes, more than the request can need")


def _decoded(what: str, raw: bytes) -> Any:
    if not raw:
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        text = raw[:200].decode(errors="replace")
    raise ServerError(f"{what} sent broken JSON: {text}")
