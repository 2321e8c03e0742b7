"""Chat: the transport to an OpenAI-style chat server: the bytes of a request out, the bytes of its reply back.

An exchange that fails ends in a :class:`JudgeError` that says whether another try may succeed; the tries themselves
are the agent's. Of a reply no more than ``max_bytes`` is ever held, whatever the server sends, and no secret that a
server sends back leaves this file in an error: messages are redacted, and the HTTP clients' own errors, which hold
headers, are not chained to them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import ssl
import sys
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.retry import may_pass, read_retry_after
from dataflow.system.redaction import redact

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS = "/chat/completions"
CLIENTS = ("aiohttp", "openai")
CONNECT_S = 30.0
"""Seconds a connection may take to be made where no other time-out is set."""

ERROR_BYTES = 64 * 1024
"""Bytes of an error's text that are read: enough for any message, little enough to hold for each request."""
ERROR_S = 0.3
"""Seconds that an error's text may take: its status says enough, and must not be lost to the call's time-out."""

_QUOTED = 1000  # characters of a server's text in which secrets are looked for before it is shortened
_LET_THROUGH = ("", "identity")
_PACKED = ("gzip", "x-gzip", "deflate")
_PLAIN_TO_TLS = ("plain HTTP request was sent to HTTPS port", "HTTP request to an HTTPS server")
_UP = "see that the judge at judge.url is up and can be reached from this machine"
_TLS = "give judge.url https:// in place of http://: the server speaks TLS at this port"
_NO_TLS = "give judge.url http:// in place of https://, or the port of https: the server speaks no TLS at this port"
_UNKNOWN_AUTHORITY = (
    "write the certificate of the authority that signed it (of a self-signed one, itself) into a PEM file and start "
    "the run with the environment variable SSL_CERT_FILE naming that file"
)
_CERTIFICATES = {
    9: "correct the clock of this machine or of the server: the certificate is not valid yet",
    10: "renew the certificate on the server, or correct the clock of this machine: the certificate has expired",
    23: "renew the certificate on the server: it has been revoked",
    62: "give judge.url the host name that its certificate is for",
    64: "give judge.url the host name that its certificate is for, or one of its addresses",
} | dict.fromkeys((2, 18, 19, 20, 21), _UNKNOWN_AUTHORITY)
"""What to do, by OpenSSL's verify codes."""
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "UNKNOWN_PROTOCOL",
)

_FIXES = {
    400: "correct what the server objects to: judge.model, judge.options, or a prompt that is too long for the model",
    401: "see that the environment variable that judge.api_key_env names holds a key which this server takes",
    404: "correct judge.url or judge.model: the server has no such address or no such model",
    429: "lower reward.rpm or reward.concurrency",
}
_FIXES |= {422: _FIXES[400], 403: _FIXES[401]}


class JudgeError(Exception):
    """The judge did not answer, or not with a score.

    Attributes:
        status: HTTP status of the answer, if there was one that says what went wrong.
        retry: whether another try may succeed.
        retry_after: seconds to wait before it, if the server says so.
        fatal: whether no failure rule may handle it.
        fix: what the user can do.
    """

    fatal = False
    fix = "see that the judge at judge.url is up and replies with one line 'Score: <0..1>'"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry: bool = True,
        retry_after: float | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(redact(message))
        self.status = status
        self.retry = retry
        self.retry_after = retry_after
        if fix:
            self.fix = redact(fix)


class JudgeTimeout(JudgeError, TimeoutError):
    """The judge did not answer in time."""

    fix = "raise judge.timeout, or lower reward.concurrency if the judge is asked more than it can answer"


class Chat(Protocol):
    """What sends a request."""

    async def ask(self, url: str, body: bytes) -> bytes:
        """Returns the reply to a JSON body, itself JSON if the server is in order.

        Args:
            url: full address, ending in ``/chat/completions``.
            body: JSON with ``model`` and ``messages``.

        Raises:
            JudgeError: an HTTP error, no answer, a broken or an overlong one.
        """
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


def make_chat(
    client: str, key: str | None, timeout: float | None, max_bytes: int, logins: Mapping[str, str] | None = None
) -> Chat:
    """Returns the transport of that name; it connects with its first request.

    Args:
        client: ``aiohttp``, or ``openai`` for that package's own client.
        key: the API key, if the server wants one.
        timeout: seconds for a whole exchange; None leaves them to who asks, but for :data:`CONNECT_S`.
        max_bytes: of a reply.
        logins: the header ``Authorization`` of each address that has one of its own.

    Raises:
        ConfigError: an unknown client, or its package is not installed.
    """
    if client not in CLIENTS:
        hint = nearest(client, CLIENTS) or f"; give {' or '.join(CLIENTS)}."
        raise ConfigError(f"judge.client={client} is unknown{hint}")
    if client == "aiohttp":
        return AiohttpChat(key, timeout, max_bytes, logins)
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("judge.client=openai: the package is missing; run pip install 'dataflow-rl[openai]'.")
    return OpenAIChat(key, timeout, max_bytes, logins)


class AiohttpChat:
    """All its requests share one session of aiohttp."""

    def __init__(
        self, key: str | None, timeout: float | None, max_bytes: int, logins: Mapping[str, str] | None = None
    ) -> None:
        # A reply is a few hundred bytes: to compress it would cost both sides more than it saves.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._logins = {url: {"Authorization": login} for url, login in (logins or {}).items()}
        self._timeout = timeout
        self._max_bytes = max_bytes
        self.session: aiohttp.ClientSession | None = None

    async def ask(self, url: str, body: bytes) -> bytes:
        """See :class:`Chat`."""
        import aiohttp

        session = self._opened()
        try:
            async with session.post(url, data=body, headers=self._logins.get(url), allow_redirects=False) as reply:
                if reply.status != 200:
                    text = await beginning_of_error(reply.content.iter_any(), self._timeout)
                    raise refused(url, reply.status, reply.headers, text)
                length = reply.content_length
                if length is None or "Content-Encoding" in reply.headers:
                    return await whole(url, reply.content.iter_any(), self._max_bytes, reply.headers)
                if length > self._max_bytes:
                    raise overlong(url, self._max_bytes)
                return await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = broken(url, error, self._timeout)
        raise failure

    def _opened(self) -> aiohttp.ClientSession:
        """Returns the session; made here because it belongs to the running loop."""
        import aiohttp

        if self.session is None or self.session.closed:
            self.session = aiohttp.ClientSession(
                # The agent bounds the calls. Idle connections go early: many servers drop theirs after 5 s,
                # and a request sent into a connection that is being dropped would be lost.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(
                    total=self._timeout, sock_connect=CONNECT_S if self._timeout is None else None
                ),
                headers=self._headers,
                auto_decompress=False,  # it would hold all that a piece unpacks to, however much
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self.session

    async def close(self) -> None:
        """See :class:`Chat`."""
        if self.session is not None:
            await self.session.close()


class OpenAIChat:
    """All its requests share one HTTP client under openai's own clients, one for each server."""

    def __init__(
        self, key: str | None, timeout: float | None, max_bytes: int, logins: Mapping[str, str] | None = None
    ) -> None:
        self._key = key
        self._logins = {url: {"Authorization": login} for url, login in (logins or {}).items()}
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._http: Any = None
        self._clients: dict[str, Any] = {}

    async def ask(self, url: str, body: bytes) -> bytes:
        """See :class:`Chat`."""
        import aiohttp
        import openai

        more = json.loads(body)
        wanted = {"model": more.pop("model"), "messages": more.pop("messages"), "extra_body": more}
        create = self._client(url).chat.completions.with_streaming_response.create
        # Which of the two openai is built on depends on its version; it does not catch what breaks while it reads.
        under = [sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules]
        try:
            async with asyncio.timeout(self._timeout), create(**wanted) as reply:
                raw = reply.http_response
                return await whole(url, raw.aiter_raw(), self._max_bytes, raw.headers)
        except (openai.OpenAIError, *under, aiohttp.ClientError, TimeoutError, OSError) as error:
            failure = broken(url, error, self._timeout)
        raise failure

    def _client(self, url: str) -> Any:
        import openai

        if self._http is None or self._http.is_closed:
            self._http, self._clients = _http_client(self._timeout), {}
        if url not in self._clients:
            self._clients[url] = openai.AsyncOpenAI(
                base_url=url.removesuffix(COMPLETIONS),
                # Without one the package would take OPENAI_API_KEY and show it to whatever server this is.
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
    """Returns the HTTP client for openai: over aiohttp where it can be, which takes two thirds of the CPU time."""
    import openai

    async def check(response: Any) -> None:
        # Before openai reads it: it would read all of an error, however long.
        if response.status_code != 200:
            text = await beginning_of_error(response.aiter_raw(), timeout)
            raise refused(str(response.url), response.status_code, response.headers, text)

    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=1 << 16, keepalive_expiry=3.0)
    options: Any = {"limits": limits, "event_hooks": {"response": [check]}, "follow_redirects": False}
    try:
        return openai.DefaultAioHttpClient(**options)
    except (AttributeError, RuntimeError):  # an older version, or one without its part for aiohttp
        return openai.DefaultAsyncHttpxClient(**options)


async def whole(
    url: str, pieces: AsyncIterator[bytes], max_bytes: int, headers: Mapping[str, Any] | None = None
) -> bytes:
    """Returns a reply that comes in pieces, unpacked.

    Raises:
        JudgeError: it is longer than it may be, or in an encoding that cannot be unpacked.
    """
    got = bytearray()
    async for piece in pieces:
        got += piece
        if len(got) > max_bytes:
            raise overlong(url, max_bytes)
    encoding = _encoding(headers)
    if encoding not in (*_LET_THROUGH, *_PACKED):
        fix = "have the server, or the proxy before it, send replies as they are, as they are asked for"
        sent = short(str((headers or {}).get("Content-Encoding", "")))  # not in lower case, which hides a secret in it
        raise JudgeError(f"{url} sent its reply in the encoding '{sent}', which was not asked for", fix=fix)
    text = _unpacked(bytes(got), encoding, max_bytes + 1)
    if len(text) > max_bytes:
        raise overlong(url, max_bytes)
    return text


def _encoding(headers: Mapping[str, Any] | None) -> str:
    return str((headers or {}).get("Content-Encoding", "")).strip().lower()


def _unpacked(raw: bytes, encoding: str, most: int) -> bytes:
    """Returns the first bytes of what was packed, or the bytes as they are if they were not packed in truth."""
    if encoding not in _PACKED:
        return raw
    for window in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):  # with a header of either kind, or without
        with suppress(zlib.error):
            return zlib.decompressobj(window).decompress(raw, most)
    return raw


async def beginning_of_error(pieces: AsyncIterator[bytes], timeout: float | None = None) -> bytes:
    """Returns what can be had at once of the text of an error, whose status alone says enough.

    Args:
        pieces: of the text, which may come slowly, without an end, or break off.
        timeout: seconds of the whole exchange.
    """
    got = bytearray()
    with suppress(Exception):  # whatever goes wrong with the text, the status and what has come of the text count
        async with asyncio.timeout(min(ERROR_S, (timeout or ERROR_S) / 2)):
            async for piece in pieces:
                got += piece
                if len(got) >= ERROR_BYTES:
                    break
    return bytes(got[:ERROR_BYTES])


def overlong(url: str, max_bytes: int) -> JudgeError:
    """Returns the error for a reply that is too long, not to be asked for again: it would cost as much."""
    fix = "see what answers there, and set judge.max_tokens_reply; judge.max_reply_bytes allows longer replies"
    return JudgeError(f"{url} sent a reply of over {max_bytes:,} bytes, which was not read", retry=False, fix=fix)


def refused(url: str, status: int, headers: Mapping[str, Any], raw: bytes) -> JudgeError:
    """Returns the error for an answer that is not 200."""
    again = may_pass(status)
    text = _text(_unpacked(raw, _encoding(headers), ERROR_BYTES), headers)
    fix = _FIXES.get(status, "see the log of the server at judge.url" if again else "see what the server says")
    if 300 <= status < 400:
        fix = f"give judge.url the address it sends to: {short(str(headers.get('Location', 'it names none')))}"
    elif any(words in text for words in _PLAIN_TO_TLS):
        fix = _TLS
    wait_s = read_retry_after(headers) or None
    message = f"{url} answered {status}: {short(_said(text)) or 'without a word'}"
    return JudgeError(message, status=status, retry=again, retry_after=wait_s, fix=fix)


def _text(raw: bytes, headers: Mapping[str, Any]) -> str:
    """Returns a text in the character set that its header names, else in UTF-8."""
    _, _, charset = str(headers.get("Content-Type", "")).lower().partition("charset=")
    with suppress(LookupError):
        return raw.decode(charset.partition(";")[0].strip(" \"'") or "utf-8", errors="replace")
    return raw.decode(errors="replace")


def _said(text: str) -> str:
    """Returns the message in the JSON of an error, or the text if it is none."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return text


def broken(url: str, error: BaseException, timeout: float | None) -> JudgeError:
    """Returns the error for an exchange that did not come to its end.

    Args:
        url: of the request.
        error: what was raised.
        timeout: seconds that the exchange had; None for :data:`CONNECT_S` to connect.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if any(isinstance(one, TimeoutError) for one in chain):
        if timeout is None:
            return JudgeTimeout(f"{url} could not be reached within {CONNECT_S:g} s")
        return JudgeTimeout(f"{url} did not answer within {timeout:g} s (judge.timeout)")
    if any(type(one).__name__ in ("ClientPayloadError", "IncompleteReadError") for one in chain):
        return JudgeError(f"{url}: the connection broke in the middle of the reply", fix=_UP)
    # The first cause tells most: openai wraps it in 'Connection error.', or even in a time-out.
    root = chain[-1]
    message = f"{url}: {type(root).__name__}: {short(str(root))}".rstrip(": ")
    fix, again = _fix_of(url, root)
    return JudgeError(message, retry=again, fix=fix)


def _fix_of(url: str, error: BaseException) -> tuple[str, bool]:
    """Returns what to do about a connection that failed, and whether another try may succeed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _CERTIFICATES.get(
            getattr(error, "verify_code", 0), "see that the certificate of the server is in order"
        ), False
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        reason = str(error.reason)
        if reason in _NOT_TLS:
            return _NO_TLS, False
        if "CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason:
            return (
                "see what the server asks of its clients: it may want a certificate, which a judge cannot send",
                False,
            )
        return f"{_UP}, and which versions of TLS it speaks", True
    if url.startswith("http://"):
        # An alert of TLS, in place of a line of HTTP.
        if "\x15\x03" in str(error) or "\\x15\\x03" in str(error):
            return _TLS, False
        if type(error).__name__ in ("ServerDisconnectedError", "RemoteProtocolError"):
            return f"{_UP}; if it speaks TLS, give judge.url https:// in place of http://", True
    elif isinstance(error, ConnectionResetError):
        return f"{_UP}; if it is, see what its TLS asks of clients: a version, or a certificate", True
    return _UP, True


def short(text: str) -> str:
    """Returns a text on one line, of 200 characters at most, without secrets and with nothing invisible."""
    line = redact(" ".join(text.split())[:_QUOTED])
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
    return line if len(line) <= 200 else line[:197] + "..."
