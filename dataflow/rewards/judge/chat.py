"""Chat: the transport to an OpenAI-style chat server. It sends the bytes of a request and returns those of the reply.

A failed exchange raises a :class:`JudgeError` that states whether another try may succeed; the agent retries. At most
``max_bytes`` of a reply are held. Messages of errors are redacted, and aiohttp's own errors, which hold headers, are
not chained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dataflow.rewards.judge.errors import CONNECT_S, broken, overlong, refused
from dataflow.rewards.judge.reply import whole
from dataflow.system.http import beginning_of_error

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS = "/chat/completions"


class Chat:
    """Sends requests to servers over one aiohttp session, which the first request opens.

    Args:
        key: the API key, if the server requires one.
        timeout: seconds for a whole exchange; None sets no limit but :data:`CONNECT_S` for connecting.
        max_bytes: of a reply.
        logins: values of the header ``Authorization``, by address, which replace that of the key.
    """

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
        """Sends one request; returns the body of the reply, unparsed.

        Raises:
            JudgeError: the server returns an error, no reply, or one that is broken or too long.
        """
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
        """Closes the connections."""
        if self.session is not None:
            await self.session.close()
