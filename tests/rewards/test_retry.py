"""Which errors are retried, and how long to wait: with the exceptions that clients really raise."""

from __future__ import annotations

import email.message
import email.utils
import http.client
import math
import socket
import time
import urllib.error
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import urllib3
from aiohttp.client_reqrep import ConnectionKey
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from dataflow.errors import ConfigError
from dataflow.rewards.retry import (
    Retry,
    is_overload,
    is_throttle,
    is_timeout,
    is_transient,
    read_retry_after,
    retry_after_s,
    status_of,
)
from dataflow.usercode.calls import NoThread
from dataflow.usercode.failures import TimedOut

try:
    import openai
except ImportError:  # an extra
    openai = None  # type: ignore[assignment]
try:
    import httpx2 as below_openai
except ImportError:  # older ones are built on httpx
    below_openai = httpx  # type: ignore[misc]

URL_ = "http://judge.example.com/v1"


def of_aiohttp(status: int, **headers: str) -> BaseException:
    head = CIMultiDictProxy(CIMultiDict(headers))
    info = aiohttp.RequestInfo(URL(URL_), "POST", CIMultiDictProxy(CIMultiDict()), URL(URL_))
    return aiohttp.ClientResponseError(info, (), status=status, message="no", headers=head)


def of_httpx(status: int, **headers: str) -> BaseException:
    request = httpx.Request("POST", URL_)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        httpx.Response(status, headers=headers, request=request).raise_for_status()
    return caught.value


def of_openai(status: int, **headers: str) -> BaseException:
    response = below_openai.Response(status, headers=headers, request=below_openai.Request("POST", URL_))
    kind = {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        404: openai.NotFoundError,
        409: openai.ConflictError,
        422: openai.UnprocessableEntityError,
        429: openai.RateLimitError,
    }.get(status, openai.InternalServerError if status >= 500 else openai.APIStatusError)
    return kind("no", response=response, body=None)


def of_requests(status: int, **headers: str) -> BaseException:
    response = requests.Response()
    response.status_code, response.url = status, URL_
    response.headers.update(headers)
    with pytest.raises(requests.HTTPError) as caught:
        response.raise_for_status()
    return caught.value


def of_urllib(status: int, **headers: str) -> BaseException:
    head = email.message.Message()
    for name, value in headers.items():
        head[name] = value
    return urllib.error.HTTPError(URL_, status, "no", head, None)


class GoogleError(Exception):
    """As google.genai and google.api_core have it: the number is ``code``, and ``status`` a word."""

    def __init__(self, code: int) -> None:
        super().__init__("no")
        self.code, self.status = code, "RESOURCE_EXHAUSTED"


def of_google(status: int, **headers: str) -> BaseException:
    error = GoogleError(status)
    error.headers = headers  # type: ignore[attr-defined]
    return error


needs_openai = pytest.mark.skipif(openai is None, reason="openai is an extra")
CLIENTS = [of_aiohttp, of_httpx, pytest.param(of_openai, marks=needs_openai), of_requests, of_urllib, of_google]
clients = pytest.mark.parametrize("client", CLIENTS)


@clients
@pytest.mark.parametrize(
    ("status", "again"),
    [
        *((status, False) for status in (400, 401, 403, 404, 413, 422)),
        *((status, True) for status in (408, 409, 425, 429, 500, 502, 503, 504, 529)),
    ],
)
def test_a_status_decides(client: Callable[..., BaseException], status: int, again: bool) -> None:
    error = client(status)
    assert status_of(error) == status
    assert is_transient(error) is again
    assert is_throttle(error) is (status in (429, 503, 529))
    assert not is_timeout(error)


@clients
def test_retry_after_is_read_from_the_headers(client: Callable[..., BaseException]) -> None:
    assert retry_after_s(client(429, **{"retry-after": "7"})) == 7
    assert retry_after_s(client(503, **{"Retry-After": "2.5"})) == 2.5
    assert retry_after_s(client(429)) == 0


def refused() -> OSError:
    return ConnectionRefusedError(111, "Connection refused")


def key() -> ConnectionKey:
    return ConnectionKey("judge.example.com", 80, False, True, None, None, None)


REQUEST = below_openai.Request("POST", URL_)
TRANSPORT = [
    ConnectionResetError(),
    refused(),
    BrokenPipeError(),
    aiohttp.ClientConnectorError(key(), refused()),
    aiohttp.ClientOSError(104, "reset"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError("Response payload is not completed"),
    aiohttp.ClientConnectorDNSError(key(), socket.gaierror(-3, "Temporary failure in name resolution")),
    httpx.ConnectError("refused"),
    httpx.ReadError("reset"),
    below_openai.ConnectError("refused"),
    httpx.RemoteProtocolError("peer closed connection without sending complete message body"),
    requests.ConnectionError("refused"),
    requests.exceptions.ChunkedEncodingError("broken"),
    requests.exceptions.SSLError("eof"),
    urllib3.exceptions.ProtocolError("Connection broken"),
    urllib3.exceptions.MaxRetryError(urllib3.HTTPConnectionPool("x"), "/", None),
    urllib.error.URLError(refused()),
    http.client.IncompleteRead(b"half", 100),
    http.client.RemoteDisconnected("Remote end closed connection without response"),
    http.client.BadStatusLine("garbage"),
    NoThread("can't start new thread"),
]
TIME_OUTS = [
    TimeoutError(),
    TimedOut("no answer within 3 s"),
    aiohttp.ServerTimeoutError(),
    aiohttp.SocketTimeoutError(),
    aiohttp.ConnectionTimeoutError(),
    httpx.ReadTimeout("late"),
    httpx.ConnectTimeout("late"),
    httpx.PoolTimeout("late"),
    below_openai.ReadTimeout("late"),
    requests.ReadTimeout("late"),
    requests.ConnectTimeout("late"),
    urllib3.exceptions.ReadTimeoutError(urllib3.HTTPConnectionPool("x"), "/", "late"),
]
FINAL = [
    ValueError(),
    KeyError("score"),
    SystemExit(429),
    SystemExit(500),
    OSError(28, "No space left on device"),
    FileNotFoundError(),
    aiohttp.InvalidURL("x"),
    aiohttp.ContentTypeError(aiohttp.RequestInfo(URL(URL_), "POST", CIMultiDictProxy(CIMultiDict())), (), status=200),
    httpx.InvalidURL("x"),
    requests.exceptions.MissingSchema("x"),
    requests.exceptions.JSONDecodeError("x", "", 0),
    http.client.InvalidURL("x"),
]
if openai is not None:
    TRANSPORT.append(openai.APIConnectionError(request=REQUEST))
    TIME_OUTS.append(openai.APITimeoutError(request=REQUEST))
    FINAL.append(openai.OpenAIError("no key"))


def named(error: BaseException) -> str:
    return f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"


@pytest.mark.parametrize("error", TRANSPORT, ids=named)
def test_a_broken_connection_may_be_whole_at_the_next_try(error: BaseException) -> None:
    assert is_transient(error)
    assert not is_overload(error)
    assert status_of(error) is None


@pytest.mark.parametrize("error", TIME_OUTS, ids=named)
def test_a_time_out_is_worth_another_try_and_a_sign_of_too_much(error: BaseException) -> None:
    assert is_transient(error)
    assert is_timeout(error)
    assert is_overload(error)


@pytest.mark.parametrize("error", FINAL, ids=named)
def test_what_will_not_change_is_not_tried_again(error: BaseException) -> None:
    assert not is_transient(error)
    assert not is_overload(error)


def test_subclasses_of_a_users_own_count_like_their_base() -> None:
    class Mine(httpx.ReadTimeout):
        pass

    assert is_transient(Mine("late"))
    assert is_timeout(Mine("late"))

    class ConnectionError_(Exception):
        """Of some other package: a name alone proves nothing."""

    ConnectionError_.__name__ = "ConnectionError"
    assert not is_transient(ConnectionError_())


@pytest.mark.parametrize("code", [True, 99, 200, 399, 600, 1006, -1, "429", 429.0, None, lambda: 429])
def test_a_code_that_is_no_http_error_is_ignored(code: Any) -> None:
    error = ValueError()
    error.code = code  # type: ignore[attr-defined]
    assert status_of(error) is None


@pytest.mark.parametrize("own", [True, False])
def test_an_error_may_say_so_itself(own: bool) -> None:
    error = of_aiohttp(429 if not own else 404)
    error.retry = own  # type: ignore[attr-defined]
    assert is_transient(error) is own


def test_only_a_bool_is_a_word_of_its_own() -> None:
    error = of_aiohttp(404)
    error.retry = 3  # type: ignore[attr-defined]
    assert not is_transient(error)


# --- Retry-After ---------------------------------------------------------------------------------------------


def in_seconds(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("3", 3),
        (" 1.5 ", 1.5),
        ("-5", 0),
        ("", 0),
        ("soon", 0),
        ("nan", 0),
        ("inf", 0),
        ("-inf", 0),
        ("1e999", 0),
        ("1e12", 0),
        ("86400", 86400),
        ("3 seconds", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 0),
        ("Mon, 01 Jan 0001 00:00:00 +2359", 0),
        ("Wed, 99 Foo 2020 99:99:99 GMT", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
    ],
)
def test_retry_after_as_servers_write_it(text: str, seconds: float) -> None:
    assert read_retry_after({"Retry-After": text}) == seconds
    assert read_retry_after({"retry-after": text}) == seconds


def test_retry_after_as_a_date() -> None:
    assert 58 <= read_retry_after({"Retry-After": in_seconds(60)}) <= 60
    assert read_retry_after({"Retry-After": in_seconds(-60)}) == 0


def test_no_retry_after() -> None:
    assert read_retry_after({}) == 0
    assert read_retry_after({"Retry-After": None}) == 0


@given(st.text())
def test_whatever_stands_there_is_a_time_that_can_be_waited(text: str) -> None:
    assert 0 <= read_retry_after({"Retry-After": text}) < 1e9


@given(st.datetimes(), st.integers(-2400, 2400))
def test_every_date_is_a_time_that_can_be_waited(moment: Any, zone: int) -> None:
    text = f"{moment:%a, %d %b} {moment.year:04d} {moment:%H:%M:%S} {zone:+05d}"
    assert 0 <= read_retry_after({"Retry-After": text}) < 1e9


@pytest.mark.parametrize("own", [4, 4.0])
def test_an_errors_own_wait_comes_before_the_headers(own: float) -> None:
    error = of_aiohttp(429, **{"Retry-After": "9"})
    error.retry_after = own  # type: ignore[attr-defined]
    assert retry_after_s(error) == 4


@pytest.mark.parametrize(("own", "wait_s"), [(-1, 0), (math.nan, 0), (math.inf, 0), (10**400, 0), (None, 0), ("3", 0)])
def test_an_errors_own_wait_that_is_none(own: Any, wait_s: float) -> None:
    error = ValueError()
    error.retry_after = own  # type: ignore[attr-defined]
    assert retry_after_s(error) == wait_s


def test_headers_without_it_do_not_hide_those_of_the_response() -> None:
    error = of_requests(429, **{"Retry-After": "5"})
    error.headers = {"X-Request-Id": "1"}  # type: ignore[attr-defined]
    assert retry_after_s(error) == 5


# --- waits and options ---------------------------------------------------------------------------------------


def test_waits_double_are_random_and_bounded() -> None:
    retry = Retry(backoff_s=0.5, max_backoff_s=5.0)
    for tried, most in [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0), (50, 5.0), (5000, 5.0)]:
        waits = [retry.wait_s(tried, ValueError()) for _ in range(300)]
        assert 0 <= min(waits) < most * 0.2
        assert most * 0.8 < max(waits) <= most
        assert len(set(waits)) > 250, "all that fail together must not come back together"


def test_retry_after_is_waited_before_the_jitter() -> None:
    retry = Retry(backoff_s=0.5, max_backoff_s=5.0)
    waits = [retry.wait_s(1, of_httpx(429, **{"Retry-After": "20"})) for _ in range(100)]
    assert 20 <= min(waits) < max(waits) <= 20.5


def test_no_backoff_means_none() -> None:
    retry = Retry(backoff_s=0.0, max_backoff_s=0.0)
    assert retry.wait_s(3, ValueError()) == 0
    assert retry.wait_s(3, of_httpx(429, **{"Retry-After": "2"})) == 2


def test_the_predicate_has_the_last_word() -> None:
    asked: list[BaseException] = []

    def predicate(error: BaseException) -> bool:
        asked.append(error)
        return isinstance(error, ValueError)

    retry, right = Retry(predicate=predicate), of_aiohttp(429)
    right.retry = True  # type: ignore[attr-defined]
    assert not retry.again(right)
    assert retry.again(ValueError())
    assert len(asked) == 2
    assert Retry().again(right)
    assert not Retry().again(ValueError())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tries": 0}, "reward.tries=0; give 1 or more."),
        ({"timeout_s": 0.0}, "reward.timeout=0.0; give seconds above 0, or null."),
        ({"timeout_s": math.nan}, "reward.timeout=nan"),
        ({"deadline_s": -1.0}, "reward.deadline=-1.0; give seconds above 0, or null."),
        ({"backoff_s": -0.1}, "reward.backoff=-0.1 and reward.max_backoff=30"),
        ({"backoff_s": 5.0, "max_backoff_s": 1.0}, "reward.backoff=5 and reward.max_backoff=1"),
        ({"backoff_s": math.nan}, "reward.backoff=nan"),
        ({"max_backoff_s": math.inf}, "reward.max_backoff=inf"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Retry(**options)


def test_options_at_their_bounds() -> None:
    retry = Retry(tries=1, timeout_s=None, deadline_s=None, backoff_s=2.0, max_backoff_s=2.0)
    assert 0 <= retry.wait_s(9, ValueError()) <= 2.0
