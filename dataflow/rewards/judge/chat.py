"""Chat: the transport to an OpenAI-style chat server. It sends the bytes of a request and returns those of the reply.

A failed exchange raises a :class:`JudgeError` that states whether another try may succeed; the agent retries. At most
``max_bytes`` of a reply are held. Messages of errors are redacted, and the HTTP clients' own errors, which hold
headers, are not chained.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.judge.errors import CONNECT_S, broken, overlong, refused
from dataflow.rewards.judge.reply import whole
from dataflow.system.extras import not_installed
from dataflow.system.http import beginning_of_error

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS = "/chat/completions"
CLIENTS = ("aiohttp", "openai")


class Chat(Protocol):
    """Sends requests to chat servers."""

    async def send(self, url: str, body: bytes) -> bytes:
        """Sends one request.

        Args:
            url: full address, ending in ``/chat/completions``.
            body: JSON with ``model`` and ``messages``.

        Returns:
            The body of the reply, unparsed.

        Raises:
            JudgeError: the server returns an error, no reply, or one that is broken or too long.
        """
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


def make_chat(
    client: str, key: str | None, timeout: float | None, max_bytes: int, logins: Mapping[str, str] | None = None
) -> Chat:
    """Returns a transport, which connects with its first request.

    Args:
        client: ``aiohttp``, or ``openai`` for the client of that package.
        key: the API key, if the server requires one.
        timeout: seconds for a whole exchange; None sets no limit but :data:`CONNECT_S` for connecting.
        max_bytes: of a reply.
        logins: values of the header ``Authorization``, by address, which replace that of the key.

    Raises:
        ConfigError: the client is unknown, or its package is not installed.
    """
    if client not in CLIENTS:
        hint = nearest(client, CLIENTS) or f"; give {' or '.join(CLIENTS)}."
        raise ConfigError(f"judge.client={client} is unknown{hint}")
    if client == "aiohttp":
        return AiohttpChat(key, timeout, max_bytes, logins)
    if (why := not_installed(client)) is not None:
        raise ConfigError(f"judge.client={client}: {why}")
    return OpenAIChat(key, timeout, max_bytes, logins)


class AiohttpChat:
    """A :class:`Chat` over one aiohttp session."""

    def __init__(
        self, key: str | None, timeout: float | None, max_bytes: int, logins: Mapping[str, str] | None = None
    ) -> None:
        # A reply has a few hundred bytes: compressing it costs both sides more than it saves.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._logins = {url: {"Authorization": login} for url, login in (logins or {}).items()}
        self._timeout = timeout
        self._max_bytes = max_bytes
        self.session: aiohttp.ClientSession | None = None

    async def send(self, url: str, body: bytes) -> bytes:
        """See :class:`Chat`."""
        import aiohttp

        session = self._opened()
        try:
            async with session.post(url, data=body, headers=self._logins.get(url), allow_redirects=False) as reply:
                if reply.status != 200:
                    text = await beginning_of_error(reply.content.iter_any(), reply.headers, self._timeout)
                    raise refused(url, reply.status, reply.headers, text)
                if (reply.content_length or 0) > self._max_bytes:
                    raise overlong(url, self._max_bytes)
                return await whole(url, reply.content.iter_any(), self._max_bytes, reply.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = broken(url, error, self._timeout)
        raise failure

    def _opened(self) -> aiohttp.ClientSession:
        """Returns the session, which is created here as it belongs to the running event loop."""
        import aiohttp

        if self.session is None or self.session.closed:
            self.session = aiohttp.ClientSession(
                # The agent limits the calls. Many servers close idle connections after 5 s, and a request sent
                # meanwhile would be lost: close them earlier.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(
                    total=self._timeout, sock_connect=CONNECT_S if self._timeout is None else None
                ),
                headers=self._headers,
                auto_decompress=False,  # it would hold a decompressed chunk of any size
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self.session

    async def close(self) -> None:
        """See :class:`Chat`."""
        if self.session is not None:
            await self.session.close()


class OpenAIChat:
    """A :class:`Chat` over openai's clients, one per server, which share one HTTP client."""

    def __init__(
        self, key: str | None, timeout: float | None, max_bytes: int, logins: Mapping[str, str] | None = None
    ) -> None:
        self._key = key
        self._logins = {url: {"Authorization": login} for url, login in (logins or {}).items()}
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._http: Any = None
        self._clients: dict[str, Any] = {}

    async def send(self, url: str, body: bytes) -> bytes:
        """See :class:`Chat`."""
        import aiohttp
        import openai

        extra = json.loads(body)
        request = {"model": extra.pop("model"), "messages": extra.pop("messages"), "extra_body": extra}
        create = self._client(url).chat.completions.with_streaming_response.create
        # Depending on its version openai uses either; errors while a reply is read are not converted to its own.
        http_errors = [sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules]
        try:
            async with asyncio.timeout(self._timeout), create(**request) as reply:
                raw = reply.http_response
                return await whole(url, raw.aiter_raw(), self._max_bytes, raw.headers)
        except (openai.OpenAIError, *http_errors, aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = broken(url, error, self._timeout)
        raise failure

    def _client(self, url: str) -> Any:
        import openai

        if self._http is None or self._http.is_closed:
            self._http, self._clients = _http_client(self._timeout), {}
        if url not in self._clients:
            self._clients[url] = openai.AsyncOpenAI(
                base_url=url.removesuffix(COMPLETIONS),
                # Without a key the package would send OPENAI_API_KEY to this server.
                api_key=self._key or "none",
                default_headers={"Accept-Encoding": "identity", **self._logins.get(url, {})},
                max_retries=0,
                timeout=openai.Timeout(self._timeout, connect=self._timeout or CONNECT_S),
                http_client=self._http,
            )
        return self._clients[url]

    async def close(self) -> None:
        """See :class:`Chat`."""
        if self._http is not None:
            await self._http.aclose()


def _http_client(timeout: float | None) -> Any:
    """Returns the HTTP client for openai: over aiohttp if possible, which takes two thirds of the CPU time."""
    import openai

    async def check(response: Any) -> None:
        # This hook runs before openai reads an error, which may be of any length, as a whole.
        if response.status_code != 200:
            text = await beginning_of_error(response.aiter_raw(), response.headers, timeout)
            raise refused(str(response.url), response.status_code, response.headers, text)

    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=1 << 16, keepalive_expiry=3.0)
    options: Any = {"limits": limits, "event_hooks": {"response": [check]}, "follow_redirects": False}
    try:
        return openai.DefaultAioHttpClient(**options)
    except (AttributeError, RuntimeError):  # an older version, or one without aiohttp support
        return openai.DefaultAsyncHttpxClient(**options)
