"""Health check: whether a server of a pool answers at all."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp


class HealthCheck:
    """Asks servers whether they are well.

    Args:
        limit_s: seconds that an answer may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._session: aiohttp.ClientSession | None = None

    async def failure(self, address: str) -> str:
        """Returns why the health check at an address failed; "" if it was answered."""
        import aiohttp

        if self._session is None:
            # A new connection for each probe: an old one may be open to a process that hangs or is gone.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        limit = aiohttp.ClientTimeout(total=self._limit_s)
        try:
            async with self._session.get(address, timeout=limit, allow_redirects=False) as reply:
                # A server elsewhere may have no such page, or want a key for it; but it answers.
                return f"GET {address} answered {reply.status}" if reply.status >= 500 else ""
        except TimeoutError:
            return f"GET {address} was not answered within {self._limit_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"GET {address}: {brief(error)}"

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()


def health_of(url: str) -> str:
    """Returns the address of the health check of a server, which is at its root."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/health"


def brief(error: BaseException) -> str:
    """Returns an error as one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}".rstrip(": ")
