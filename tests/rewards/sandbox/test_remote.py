"""Programs at a service: its errors are errors, never outcomes of a program."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.payload import Payload

from dataflow.errors import ConfigError
from dataflow.rewards.retry import Retry
from dataflow.rewards.sandbox.outcome import Outcome, SandboxError
from dataflow.rewards.sandbox.remote import RemoteSandbox, outcome_of
from tests.rewards.sandbox.service import serving

pytestmark = pytest.mark.timeout(60)

FINE = {"status": "Finished", "return_code": 0, "stdout": "a\n", "stderr": "e"}
RETRY = Retry(tries=3, timeout_s=None, backoff_s=0)


def run(url: str, timeout: float = 5, retry: Retry = RETRY) -> tuple[Outcome | SandboxError, int]:
    async def body() -> tuple[Outcome | SandboxError, int]:
        box = RemoteSandbox(url, timeout, 256, "python", retry)
        try:
            async with asyncio.timeout(30):
                return await box.run("print(1)", "in"), box.retried
        except SandboxError as error:
            return error, box.retried
        finally:
            await box.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("compiled", "ran", "whole", "expected"),
    [
        (None, FINE, "Success", Outcome("finished", "a\n", "e")),
        (None, {**FINE, "return_code": 1}, "Failed", Outcome("runtime_error", "a\n", "e")),
        (None, {**FINE, "status": "TimeLimitExceeded"}, "Failed", Outcome("timeout", "a\n", "e")),
        ({**FINE, "return_code": 1}, None, "Failed", Outcome("compile_error", "", "runtime_error: e")),
        ({"status": "TimeLimitExceeded"}, None, "Failed", Outcome("compile_error", "", "timeout: ")),
        (FINE, FINE, "Success", Outcome("finished", "a\n", "e")),
        (None, {**FINE, "return_code": -9, "stdout": None}, "Failed", Outcome("runtime_error", "", "e")),
        # What follows holds no outcome of a program: verl scores most of it.
        (None, {**FINE, "stdout": None}, "Success", None),
        (None, {**FINE, "return_code": 1}, "Success", None),
        (None, {**FINE, "return_code": None}, "Failed", None),
        (None, {**FINE, "status": "Error"}, "Failed", None),
        ({"status": "Error"}, None, "Failed", None),
        ({**FINE, "status": "Error"}, FINE, "Success", None),
        ("text", ["list"], "Failed", None),
        (None, FINE, "Failed", None),
        (None, {**FINE, "status": "Error"}, "Success", None),
        (None, None, "Failed", None),
        (None, None, "SandboxError", None),
        (None, FINE, "Else", None),
    ],
)
def test_a_reply_is_an_outcome_of_the_program_or_an_error(
    compiled: Any, ran: Any, whole: str, expected: Outcome | None
) -> None:
    reply = {"status": whole, "message": "because", "compile_result": compiled, "run_result": ran}
    if expected is not None:
        assert outcome_of(reply, "u") == expected
    else:
        with pytest.raises(SandboxError, match=f"status '{whole}': because"):
            outcome_of(reply, "u")


def test_the_request_is_verls() -> None:
    async def answer(_body: dict[str, Any]) -> Any:
        return {"status": "Success", "run_result": FINE}

    with serving(answer) as (url, bodies):
        assert run(url) == (Outcome("finished", "a\n", "e"), 0)
        assert run(f"{url}/run_code")[1] == 0
    assert bodies == [
        {
            "compile_timeout": 5,
            "run_timeout": 5,
            "code": "print(1)",
            "stdin": "in",
            "memory_limit_MB": 256,
            "language": "python",
            "files": {},
            "fetch_files": [],
        }
    ] * 2  # fmt: skip


@pytest.mark.parametrize(
    ("replies", "tries", "retry"),
    [
        ([504, 429], 3, None),
        ([503, 503, 503], 3, True),
        ([400], 1, False),
        (["SandboxError", "SandboxError", "SandboxError"], 3, True),
        (["SandboxError"], 2, None),
        (["no json"], 2, None),
        ([[]], 2, None),
    ],
)
def test_errors_of_the_service_are_retried_and_raised(replies: list[Any], tries: int, retry: bool | None) -> None:
    left = list(replies)

    async def answer(_body: dict[str, Any]) -> Any:
        reply = left.pop(0) if left else "Success"
        if isinstance(reply, int):
            return web.Response(status=reply, text="busy")
        if reply == "no json":
            return web.Response(text="<html>")
        return {"status": reply, "run_result": FINE} if isinstance(reply, str) else reply

    with serving(answer) as (url, bodies):
        found, retried = run(url)
    assert (len(bodies), retried) == (tries, tries - 1)
    if retry is None:
        assert isinstance(found, Outcome)
    else:
        assert isinstance(found, SandboxError)
        assert found.retry is retry
        assert url in str(found)


@pytest.mark.parametrize(("key", "expected"), [("run_result", Outcome("output_limit")), ("else", None)])
def test_of_a_long_reply_only_the_beginning_is_read(key: str, expected: Outcome | None) -> None:
    sent = 0

    class Endless(Payload):
        async def write(self, writer: Any) -> None:
            nonlocal sent
            await writer.write(f'{{"status": "Success", "{key}": "'.encode())
            while True:
                await writer.write(b"a" * (1 << 20))
                sent += 1

        def decode(self, *_words: str) -> str:
            return ""

    async def answer(_body: dict[str, Any]) -> Any:
        return web.Response(body=Endless(None))

    with serving(answer) as (url, _):
        found, _ = run(url, retry=Retry(tries=1))
    assert 16 <= sent < 64
    if expected is None:
        assert "answered with more than 16 MiB" in str(found)
    else:
        assert found == expected


def test_a_service_that_is_not_there_or_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, retried = run("http://127.0.0.1:1")
    assert isinstance(found, SandboxError)
    assert (found.retry, retried) == (True, 2)

    async def answer(_body: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("dataflow.rewards.sandbox.remote._EXTRA_S", 0.1)
    with serving(answer) as (url, _):
        found, _ = run(url, timeout=0.1, retry=Retry(tries=1))
    assert "no answer in time" in str(found)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a/b", "", "http://"])
def test_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        RemoteSandbox(url, 1, 1, "python", RETRY)
