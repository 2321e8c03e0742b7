"""The errors of a judge: what went wrong, what to do about it, and whether another try may succeed.

Messages are redacted, and aiohttp's own errors, which hold headers, are not chained.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from dataflow.rewards.retry import read_retry_after
from dataflow.system.http import error_within, may_pass, message_in, short
from dataflow.system.secrets import redact

CONNECT_S = 30.0
"""Seconds for connecting if no other time-out is set."""

_UP = "see that the judge at judge.url is up and can be reached from this machine"
_TLS = (
    "see that judge.url is right, https:// or http:// and the port, and that this machine trusts the server's "
    "certificate: the environment variable SSL_CERT_FILE may name a PEM file with one more"
)

_FIXES = {
    400: "correct what the server objects to: judge.model, judge.options, or a prompt that is too long for the model",
    401: "see that the environment variable that judge.api_key_env names holds a key that this server accepts",
    404: "correct judge.url or judge.model: the server has no such address or no such model",
    429: "lower reward.rpm or reward.concurrency",
}
_FIXES |= {422: _FIXES[400], 403: _FIXES[401]}


class JudgeError(Exception):
    """The judge did not return a score.

    Attributes:
        status: HTTP status of the reply, if that is the error.
        retry: whether another try may succeed.
        retry_after: seconds to wait before it, if the server states them.
        fatal: whether the error ends the run, whatever the failure rule.
        lost: whether the server did not answer as it should; None leaves that to ``status``.
        of_server: whether it is about what a server did, so that another one may do better.
        fix: what the user can do.
    """

    fatal = False
    lost: bool | None = None
    of_server = True
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
    """The judge did not reply in time."""

    fix = "raise judge.timeout, or lower reward.concurrency if the judge is overloaded"


def overlong(url: str, max_bytes: int) -> JudgeError:
    """Returns the error for a reply that is too long; it is not retried, as the next would cost as much."""
    fix = (
        "check which server answers there, and set judge.max_tokens_reply; judge.max_reply_bytes allows longer replies"
    )
    return JudgeError(f"{url} sent a reply of over {max_bytes:,} bytes, which was not read", retry=False, fix=fix)


def refused(url: str, status: int | None, headers: Mapping[str, Any], text: str, within: str = "") -> JudgeError:
    """Returns the error for a status other than 200, given the text of the reply and where the status stood."""
    again = status is None or may_pass(status)
    fix = _FIXES.get(status or 0, "see the log of the server at judge.url" if again else "see what the server says")
    if 300 <= (status or 0) < 400:
        fix = (
            f"set judge.url to the address that it redirects to: {short(str(headers.get('Location', 'it names none')))}"
        )
    wait_s = read_retry_after(headers) or None
    message = f"{url} answered {status or 'an error'}{within}: {short(message_in(text)) or 'without a message'}"
    return JudgeError(message, status=status, retry=again, retry_after=wait_s, fix=fix)


def refused_within(url: str, answer: Any, headers: Mapping[str, Any]) -> JudgeError | None:
    """Returns the error that a reply of status 200 holds, as if its status were that of the reply."""
    found = error_within(answer, headers)
    if found is None:
        return None
    asked = {"Retry-After": str(found.wait_s)}
    return refused(url, found.status, asked, found.message, " in a reply of status 200")


def broken(url: str, error: BaseException, timeout: float | None) -> JudgeError:
    """Returns the error for an exchange that failed before its reply was complete.

    Args:
        url: of the request.
        error: what aiohttp raised.
        timeout: of the exchange, in seconds; None if only connecting was limited, to :data:`CONNECT_S`.
    """
    import aiohttp

    if isinstance(error, TimeoutError):
        if timeout is None:
            return JudgeTimeout(f"{url} could not be reached within {CONNECT_S:g} s")
        return JudgeTimeout(f"{url} did not answer within {timeout:g} s (judge.timeout)")
    # Of TLS only a connection that broke may be another at the next try.
    tls = isinstance(error, aiohttp.ClientSSLError) and not isinstance(error.__cause__, ssl.SSLEOFError)
    message = f"{url}: {type(error).__name__}: {short(str(error))}".rstrip(": ")
    failure = JudgeError(message, retry=not tls, fix=_TLS if tls else _UP)
    failure.lost = not tls
    return failure
