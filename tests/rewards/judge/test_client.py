"""The POST to a judge, each fault of which ends in an error with status, wait and fix; the check before a start."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from aiohttp import web

from dataflow.errors import ConfigError
from dataflow.rewards.judge.client import JudgeError, JudgeUnreachable, address_of, models_of
from dataflow.rewards.judge.judge import Judge
from tests.faults.rig.server import FaultServer
from tests.rewards.judge.serving import RIGHT, Reply, answering, serving

pytestmark = pytest.mark.timeout(60)


def refusing(status: int, body: Any = None, **headers: str) -> Reply:
    async def reply(_request: web.Request) -> web.Response:
        error = {"error": {"message": "no such luck"}} if body is None else body
        return web.json_response(error, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return reply


@pytest.mark.parametrize(("status", "retry", "fix"), [(401, False, "the key"), (429, True, "lower reward.concurrency")])
def test_statuses(status: int, retry: bool, fix: str) -> None:
    error = answering(refusing(status, Retry_After="3"))
    assert str(error).endswith(f"/v1/chat/completions answered {status}: no such luck")
    assert (error.status, error.retry, error.retry_after, error.fatal) == (status, retry, 3, False)
    assert fix in error.fix
    copy = pickle.loads(pickle.dumps(error))  # as on the way out of an actor
    assert (str(copy), copy.retry, copy.fix) == (str(error), retry, error.fix)


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
    assert "as the OpenAI API does" in answering(refusing(200, {})).fix


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
        judge = Judge(server.url)
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


def listed(reply: Reply, key: str | None = None, patience_s: float = 5.0) -> list[str]:
    async def body() -> list[str]:
        async with serving(reply) as url:
            return await models_of(f"{url}/v1", "judge.url", patience_s, key)

    return asyncio.run(body())


def test_a_server_that_answers_needs_to_have_no_list_of_models(logins: list[str | None]) -> None:
    assert listed(echoing(logins, 200), key="TEST_JUDGE_KEY") == []
    assert listed(echoing(logins, 404)) == []
    assert logins == ["Bearer sk-sesame-123456", None]


def test_a_server_that_starts_is_waited_for(warned: list[str]) -> None:
    replies = [web.Response(status=503), web.json_response({"object": "list", "data": [{"id": "big"}]})]

    async def reply(_request: web.Request) -> web.Response:
        return replies.pop(0)

    assert listed(reply) == ["big"]
    assert any("does not answer (it answers 503); waiting for it" in line for line in warned)


def test_a_server_that_refuses_or_is_not_there(logins: list[str | None]) -> None:
    for status, words in ((401, r"refuses GET /v1/models \(401\)"), (503, r"within 0.1 s \(it answers 503\)")):
        with pytest.raises(ConfigError, match=words):
            listed(echoing(logins, status), patience_s=0.1)
    words = r"^judge.url=http://127.0.0.1:9: the server does not answer .* \(Connection refused\); start it"
    with pytest.raises(ConfigError, match=words) as error:
        asyncio.run(models_of("http://me:hush@127.0.0.1:9", "judge.url", 0.1))
    assert "hush" not in str(error.value)
