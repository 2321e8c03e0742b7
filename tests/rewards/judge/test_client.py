"""The POST to a judge, each fault of which ends in an error with status, wait and fix; the check before a start."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from aiohttp import web

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import JudgeError, JudgeTimeout, JudgeUnreachable, address_of, check_judge
from dataflow.rewards.judge.judge import Judge
from tests.faults.rig.server import FaultServer
from tests.rewards.judge.serving import RIGHT, Reply, answering, serving

pytestmark = pytest.mark.timeout(60)


def refusing(status: int, body: Any = None, **headers: str) -> Reply:
    async def reply(_request: web.Request) -> web.Response:
        error = {"error": {"message": "no such luck"}} if body is None else body
        return web.json_response(error, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return reply


@pytest.mark.parametrize(
    ("status", "retry", "fix"),
    [
        (401, False, "judge.api_key_env"),
        (404, False, "judge.url or judge.model"),
        (429, True, "lower reward.rpm or reward.concurrency"),
        (503, True, "log of the server"),
    ],
)
def test_statuses(status: int, retry: bool, fix: str) -> None:
    error = answering(refusing(status, Retry_After="3"))
    assert str(error).endswith(f"/v1/chat/completions answered {status}: no such luck")
    assert (error.status, error.retry, error.retry_after, error.fatal) == (status, retry, 3, False)
    assert fix in error.fix


@pytest.mark.parametrize(
    ("body", "status", "again"),
    [
        ({"error": {"code": 429, "message": "later"}}, 429, True),
        ({"error": {"code": 400, "message": "later"}}, 400, False),
    ],
)
def test_an_error_in_a_body_of_status_200_is_that_error(body: Any, status: int | None, again: bool) -> None:
    error = answering(refusing(200, body, Retry_After="7"))
    assert (error.status, error.retry, error.retry_after) == (status, again, 7)
    assert f"answered {status or 'an error'}: later" in str(error)


def test_no_json() -> None:
    async def reply(_request: web.Request) -> web.Response:
        return web.Response(text='{"choices": [')

    error = answering(reply)
    assert "sent broken JSON, Expecting value" in str(error)
    assert error.retry
    assert "OpenAI-style" in answering(refusing(200, {})).fix


def test_no_answer_in_time() -> None:
    async def reply(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError

    error = answering(reply, timeout=0.2)
    assert isinstance(error, JudgeTimeout)
    assert str(error).endswith("/v1/chat/completions did not answer in time (judge.timeout=0.2)")
    assert error.retry
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.retry, copy.fix) == (str(error), True, error.fix)


def test_a_connection_that_breaks_or_is_not_there() -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        half = web.StreamResponse(headers={"Content-Length": "100"})
        await half.prepare(request)
        await half.write(b'{"choices"')
        assert request.transport is not None
        request.transport.close()
        return half

    async def nobody() -> Any:
        judge = Judge("http://127.0.0.1:9")
        try:
            return await judge.compute_score("d", RIGHT, "7")
        except JudgeError as error:
            return error
        finally:
            await judge.close()

    for error, what in ((answering(reply), "ClientPayloadError"), (asyncio.run(nobody()), "ClientConnectorError")):
        assert isinstance(error, JudgeUnreachable)
        assert isinstance(error, ConnectionError)
        assert f"/v1/chat/completions: {what}: " in str(error)
        assert error.retry
        assert "can be reached" in error.fix
        assert error.__cause__ is None


@pytest.mark.heavy
def test_who_gives_up_hangs_up() -> None:
    async def body(server: FaultServer) -> None:
        judge = Judge(server.url, timeout=None)
        waiting = asyncio.create_task(judge.compute_score("d", RIGHT, "7"))
        async with asyncio.timeout(30):
            assert (await asyncio.to_thread(server.seen, 1))["in_flight"] == 1
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            server.behave("ok")
            await judge.compute_score("d", RIGHT, "7")
        await judge.close()
        assert server.seen()["in_flight"] == 0

    with FaultServer() as server:
        server.behave("hang")
        asyncio.run(body(server))


@pytest.fixture
def logins(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The header Authorization of each request to :func:`echoing`."""
    monkeypatch.setenv("TEST_JUDGE_KEY", "sk-sesame-123456\n")
    return []


def echoing(logins: list[str | None], status: int = 401) -> Reply:
    async def reply(request: web.Request) -> web.Response:
        logins.append(request.headers.get("Authorization"))
        return web.Response(status=status, text=f"not {logins[-1]}")

    return reply


def test_a_key_is_sent_and_never_shown(logins: list[str | None]) -> None:
    error = answering(echoing(logins), api_key_env="TEST_JUDGE_KEY")
    assert logins == ["Bearer sk-sesame-123456"]
    assert str(error).endswith("answered 401: not Bearer ***")


def test_the_full_address() -> None:
    for url, full in (
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("https://h/v1/", "https://h/v1/chat/completions"),
        ("https://h/v1beta/openai/chat/completions", "https://h/v1beta/openai/chat/completions"),
    ):
        assert address_of(url) == full


# --- before a start --------------------------------------------------------------------------------------------


def checked(reply: Reply, key: str | None = None, login: str = "") -> str:
    async def body() -> str:
        async with serving(reply) as url:
            said = await asyncio.to_thread(check_judge, f"{url}/v1".replace("//", f"//{login}"), key, "big", 5.0)
            assert said.startswith(f"{url}/v1 answers")
            return said.removeprefix(f"{url}/v1 answers")

    return asyncio.run(body())


def test_a_server_that_answers_needs_to_have_no_list_of_models(logins: list[str | None]) -> None:
    assert checked(echoing(logins, 200), key="TEST_JUDGE_KEY") == ""
    checked(echoing(logins, 404))
    checked(echoing(logins, 429), login="user:sesame@")
    assert logins == ["Bearer sk-sesame-123456", None, "Basic dXNlcjpzZXNhbWU="]


@pytest.mark.parametrize(
    ("model", "words"), [("big", ""), ("bigg", ", but lists no model 'big' (judge.model): it has bigg")]
)
def test_a_model_that_the_server_does_not_list_is_named(model: str, words: str) -> None:
    async def lists(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": model}]})

    assert checked(lists) == words


def test_a_server_that_refuses_or_is_not_there(logins: list[str | None]) -> None:
    for status, words in (
        (401, r"refuses GET /v1/models \(401\); see that .*api_key_env"),
        (503, "answers 503 to GET"),
    ):
        with pytest.raises(ConfigError, match=words):
            checked(echoing(logins, status))
    with pytest.raises(
        ConfigError, match=r"judge.url=http://127.0.0.1:9: the server does not answer \(Connect.*refused"
    ):
        check_judge("http://127.0.0.1:9", None, "judge", 5.0)
