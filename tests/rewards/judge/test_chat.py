"""The transports against a server that misbehaves on command: each fault ends in the right error."""

from __future__ import annotations

import asyncio
import pickle
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from dataflow.rewards.judge import errors
from dataflow.rewards.judge.errors import JudgeError, JudgeTimeout
from dataflow.rewards.judge.judge import Judge
from dataflow.system import http
from tests.faults.rig.server import FaultServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

RIGHT = "It is 3 + 4 = 7.\n#### 7"


@pytest.fixture(scope="module")
def running() -> Iterator[FaultServer]:
    with FaultServer() as server:
        yield server


@pytest.fixture
def server(running: FaultServer) -> Iterator[FaultServer]:
    yield running
    running.behave("ok")


def ask(server: FaultServer, calls: int = 1, **options: Any) -> list[Any]:
    """Returns the scores, and the errors where there is none."""

    async def body() -> list[Any]:
        judge = Judge(server.url, **options)
        try:
            async with asyncio.timeout(30):
                asked = (judge.compute_score("d", f"{i} {RIGHT}", "7") for i in range(calls))
                results = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await judge.close()
        return [one["score"] if isinstance(one, dict) else one for one in results]

    return asyncio.run(body())


def fault(server: FaultServer, mode: str, **options: Any) -> JudgeError:
    server.behave(mode)
    (error,) = ask(server, **options)
    assert isinstance(error, JudgeError), error
    assert not error.fatal
    return error


def test_it_is_answered(server: FaultServer) -> None:
    assert ask(server, 20) == [1] * 20


@pytest.mark.parametrize(
    ("mode", "message", "again"),
    [
        ("none", "has 0 lines 'Score: <number>', not one: ''", False),
        ("nan", "has 0 lines", False),
        ("prose", "not one: 'I like this response a lot.'", False),
        ("half_json", "sent broken JSON, JSONDecodeError: ", True),
        ("reset", "/v1/chat/completions: ClientPayloadError: ", True),
    ],
)
def test_answers_without_a_score(server: FaultServer, mode: str, message: str, again: bool) -> None:
    error = fault(server, mode)
    assert message in str(error)
    assert (error.retry, error.status, error.retry_after) == (again, None, None)
    assert error.fix


@pytest.mark.parametrize(
    ("status", "retry", "fix"),
    [
        (400, False, "judge.model"),
        (401, False, "judge.api_key_env"),
        (402, False, "what the server says"),
        (403, False, "judge.api_key_env"),
        (404, False, "judge.url or judge.model"),
        (408, True, "log of the server"),
        (422, False, "judge.options"),
        (425, True, "log of the server"),
        (429, True, "lower reward.rpm or reward.concurrency"),
        (500, True, "log of the server"),
        (503, True, "log of the server"),
    ],
)
def test_statuses(server: FaultServer, status: int, retry: bool, fix: str) -> None:
    error = fault(server, f"status:{status}:3")
    assert str(error) == f"{server.url}/v1/chat/completions answered {status}: misbehaves on command"
    assert (error.status, error.retry, error.retry_after) == (status, retry, 3)
    assert fix in error.fix


def test_it_does_not_try_again_by_itself(server: FaultServer) -> None:
    server.behave("status:503", count=1)
    results = [ask(server), ask(server)]
    assert isinstance(results[0][0], JudgeError)
    assert results[1] == [1]


def test_retry_after_as_a_date(server: FaultServer) -> None:
    error = fault(server, f"status:503:{formatdate(time.time() + 3600, usegmt=True)}")
    assert error.retry_after is not None
    assert 3000 < error.retry_after <= 3600
    assert fault(server, "status:503:Mon, 01 Jan 2001 00:00:00 GMT").retry_after is None
    assert fault(server, "status:503:soon").retry_after is None


def test_a_redirect_is_no_answer(server: FaultServer) -> None:
    error = fault(server, "status:307")
    assert (error.status, error.retry) == (307, False)
    assert "set judge.url to the address that it redirects to" in error.fix


@pytest.mark.parametrize("mode", ["huge", "huge:sized"])
def test_a_huge_body_is_not_read(server: FaultServer, mode: str) -> None:
    ask(server)  # what is imported with the first call is not to be measured
    tracemalloc.start()
    try:
        error = fault(server, mode)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "over 4,194,304 bytes" in str(error)
    assert not error.retry
    assert "judge.max_reply_bytes" in error.fix
    assert peak < 16 << 20


def test_a_reply_may_be_as_long_as_is_allowed(server: FaultServer) -> None:
    assert "over 100 bytes" in str(fault(server, "ok", max_reply_bytes=100))
    assert ask(server, max_reply_bytes=1000) == [1]


def test_no_answer_in_time(server: FaultServer) -> None:
    error = fault(server, "hang", timeout=0.2)
    assert isinstance(error, JudgeTimeout)
    assert isinstance(error, TimeoutError)
    assert str(error) == f"{server.url}/v1/chat/completions did not answer within 0.2 s (judge.timeout)"
    assert error.retry
    assert "judge.timeout" in error.fix
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.retry, copy.fix) == (str(error), True, error.fix)


def test_without_a_time_out_it_waits(server: FaultServer) -> None:
    server.behave("late:0.3")
    assert ask(server, timeout=None) == [1]


def test_who_gives_up_hangs_up(server: FaultServer) -> None:
    async def body() -> None:
        judge = Judge(server.url, timeout=None)
        before = server.seen()
        waiting = asyncio.create_task(judge.compute_score("d", RIGHT, "7"))
        async with asyncio.timeout(30):
            assert (await asyncio.to_thread(server.seen, before["requests"] + 1))["in_flight"] == 1
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            server.behave("ok")
            await judge.compute_score("d", RIGHT, "7")
        await judge.close()
        assert server.seen()["in_flight"] == 0

    server.behave("hang")
    asyncio.run(body())


def test_a_server_that_is_not_there() -> None:
    async def body() -> None:
        judge = Judge("http://127.0.0.1:9")
        with pytest.raises(JudgeError, match=r"ClientConnectorError: Cannot connect to host 127\.0\.0\.1:9") as error:
            await judge.compute_score("d", RIGHT, "7")
        assert error.value.retry
        assert "judge.url" in error.value.fix
        await judge.close()

    asyncio.run(body())


@pytest.mark.heavy
def test_a_server_that_is_killed_and_comes_back() -> None:
    async def body(server: FaultServer) -> None:
        judge = Judge(server.url)
        calls = [asyncio.create_task(judge.compute_score("d", RIGHT, "7")) for _ in range(8)]
        async with asyncio.timeout(60):
            await asyncio.to_thread(server.seen, 8)
            await asyncio.to_thread(server.kill)
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, JudgeError)
                assert error.retry
                assert not isinstance(error, JudgeTimeout)
            await asyncio.to_thread(server.restart)
            assert (await judge.compute_score("d", RIGHT, "7"))["score"] == 1
        await judge.close()

    with FaultServer() as server:
        server.behave("hang")
        asyncio.run(body(server))


def test_many_at_once(server: FaultServer) -> None:
    server.behave("late:0.5")
    assert ask(server, 64) == [1] * 64
    assert server.seen()["peak"] == 64


def test_an_endless_error_is_cut() -> None:
    async def body() -> None:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1000

        text = await http.beginning_of_error(pieces(), {})
        assert len(text) == http.ERROR_BYTES
        assert len(str(errors.refused("http://h", 500, {}, text))) < 300

    asyncio.run(body())
