"""Which errors are retried, how long to wait, and hedges: with the exceptions that clients really raise."""

from __future__ import annotations

import email.message
import email.utils
import http.client
import math
import random
import urllib.error
from collections.abc import Callable
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import requests
import urllib3
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from dataflow.errors import ConfigError
from dataflow.rewards.retry import (
    Hedge,
    Retry,
    is_overload,
    is_throttle,
    is_timeout,
    is_transient,
    parse_hedge,
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
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, headers=headers))


def of_openai(status: int, **headers: str) -> BaseException:
    response = below_openai.Response(status, headers=headers, request=below_openai.Request("POST", URL_))
    return openai.APIStatusError("no", response=response, body=None)


def of_requests(status: int, **headers: str) -> BaseException:
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers)
    return requests.HTTPError(response=response)


def of_urllib(status: int, **headers: str) -> BaseException:
    head = email.message.Message()
    for name, value in headers.items():
        head[name] = value
    return urllib.error.HTTPError(URL_, status, "no", head, None)


class GoogleError(Exception):
    """As google.genai and google.api_core have it: the number is ``code``, and ``status`` a word."""

    def __init__(self, code: int, headers: dict[str, str]) -> None:
        super().__init__("no")
        self.code, self.status, self.headers = code, "RESOURCE_EXHAUSTED", headers


def of_google(status: int, **headers: str) -> BaseException:
    return GoogleError(status, headers)


needs_openai = pytest.mark.skipif(openai is None, reason="openai is an extra")
CLIENTS = [of_aiohttp, of_httpx, pytest.param(of_openai, marks=needs_openai), of_requests, of_urllib, of_google]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_status_and_its_retry_after_are_read_from_the_errors_of_each_client(
    client: Callable[..., BaseException],
) -> None:
    for status in (400, 401, 404, 422, 408, 409, 429, 500, 503, 529):
        error = client(status)
        assert status_of(error) == status
        assert is_transient(error) is (status >= 408 and status != 422)
        assert is_throttle(error) is (status in (429, 503, 529))
        assert not is_timeout(error)
    assert retry_after_s(client(429, **{"retry-after": "7"})) == 7
    assert retry_after_s(client(429)) == 0


REQUEST = below_openai.Request("POST", URL_)
TRANSPORT = [
    ConnectionResetError(),
    aiohttp.ClientOSError(104, "reset"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.ClientPayloadError("Response payload is not completed"),
    httpx.ConnectError("refused"),
    httpx.RemoteProtocolError("peer closed connection without sending complete message body"),
    below_openai.ConnectError("refused"),
    requests.ConnectionError("refused"),
    requests.exceptions.ChunkedEncodingError("broken"),
    urllib3.exceptions.ProtocolError("Connection broken"),
    urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")),
    http.client.IncompleteRead(b"half", 100),
    NoThread("can't start new thread"),
]
TIME_OUTS = [
    TimeoutError(),
    TimedOut("no answer within 3 s"),
    aiohttp.ServerTimeoutError(),
    httpx.ReadTimeout("late"),
    below_openai.ReadTimeout("late"),
    requests.ReadTimeout("late"),
    urllib3.exceptions.ReadTimeoutError(urllib3.HTTPConnectionPool("x"), "/", "late"),
]
FINAL = [
    ValueError(),
    SystemExit(429),
    OSError(28, "No space left on device"),
    aiohttp.InvalidURL("x"),
    httpx.InvalidURL("x"),
    requests.exceptions.MissingSchema("x"),
    requests.exceptions.JSONDecodeError("x", "", 0),
]
if openai is not None:
    TRANSPORT.append(openai.APIConnectionError(request=REQUEST))
    TIME_OUTS.append(openai.APITimeoutError(request=REQUEST))
    FINAL.append(openai.OpenAIError("no key"))


def named(error: BaseException) -> str:
    return f"{type(error).__module__.partition('.')[0]}.{type(error).__name__}"


@pytest.mark.parametrize("error", [*TRANSPORT, *TIME_OUTS, *FINAL], ids=named)
def test_broken_connections_and_time_outs_are_tried_again_and_no_other_error(error: BaseException) -> None:
    assert is_transient(error) is (error not in FINAL)
    assert is_timeout(error) is is_overload(error) is (error in TIME_OUTS)
    assert status_of(error) is None


@pytest.mark.parametrize("own", [True, False])
def test_an_error_may_say_so_itself(own: bool) -> None:
    error = of_aiohttp(404 if own else 429)
    error.retry = own  # type: ignore[attr-defined]
    assert is_transient(error) is own


# --- waits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3), (" 1.5 ", 1.5), ("-5", 0), ("", 0), ("soon", 0), ("nan", 0), ("1e999", 0),
     ("Fri, 31 Dec 9999 23:59:59 GMT", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)  # fmt: skip
def test_retry_after_as_servers_write_it(text: str, seconds: float) -> None:
    assert retry_after_s(of_aiohttp(429, **{"Retry-After": text})) == seconds


def test_an_errors_own_wait_comes_before_the_headers() -> None:
    error = of_aiohttp(429, **{"Retry-After": "9"})
    error.retry_after = 4  # type: ignore[attr-defined]
    assert retry_after_s(error) == 4


def test_waits_double_are_random_and_bounded_and_come_after_retry_after() -> None:
    retry = Retry(backoff_s=0.5, max_backoff_s=5.0)
    for tried, most in [(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0), (5000, 5.0)]:
        waits = [retry.wait_s(tried, ValueError()) for _ in range(300)]
        assert 0 <= min(waits) < most * 0.2
        assert most * 0.8 < max(waits) <= most
        assert len(set(waits)) > 250, "all that fail together must not come back together"
    waits = [retry.wait_s(1, of_httpx(429, **{"Retry-After": "20"})) for _ in range(100)]
    assert 20 <= min(waits) < max(waits) <= 20.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tries": 0}, "reward.tries=0; give 1 or more."),
        ({"timeout_s": 0.0}, "reward.timeout=0.0; give seconds above 0, or null."),
        ({"deadline_s": -1.0}, "reward.deadline=-1.0; give seconds above 0, or null."),
        ({"backoff_s": 5.0, "max_backoff_s": 1.0}, "reward.backoff=5 and reward.max_backoff=1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Retry(**options)


# --- hedges --------------------------------------------------------------------------------------------------


def test_a_hedge_comes_after_a_percentile_or_seconds() -> None:
    read = {None: (None, None), "p95": (95.0, None), "p99.9": (99.9, None), "8": (None, 8.0), 0.25: (None, 0.25)}
    assert {text: parse_hedge(text) for text in read} == read
    for text in ("", "p", "p0", "p100", "95p", "0", "-3", "3s", math.nan):
        with pytest.raises(ConfigError, match="give a percentile such as p95, or seconds above 0"):
            parse_hedge(text)


def test_a_percentile_follows_the_last_thousand_answers_from_the_twentieth_on() -> None:
    hedge, rng = Hedge("p90"), random.Random(0)
    for most in (20, 2):
        answers = [rng.uniform(most / 2, most) for _ in range(1000)]
        for number, seconds in enumerate(answers):
            hedge.answered(seconds)
            assert most == 2 or (hedge.after_s is None) == (number < 19)
        assert hedge.after_s == pytest.approx(np.percentile(answers, 90)), "nothing is left of what was before"
    assert Hedge(None).after_s is None
    assert Hedge(3).after_s == 3.0
