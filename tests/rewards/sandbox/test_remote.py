"""Programs at a service: its errors are errors, never outcomes of a program."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from dataflow.rewards.retry import is_transient, retry_after_s
from dataflow.rewards.sandbox.cases import Outcome, SandboxError
from dataflow.rewards.sandbox.remote import RemoteSandbox, outcome_of
from tests.rewards.sandbox.service import serving

pytestmark = pytest.mark.timeout(60)

FINE = {"status": "Finished", "return_code": 0, "stdout": "a\n", "stderr": "e"}


def run(url: str, timeout: float = 5) -> Outcome | SandboxError:
    async def body() -> Outcome | SandboxError:
        box = RemoteSandbox(url, timeout, 256, "python")
        try:
            async with asyncio.timeout(30):
                return await box.run("print(1)", "in")
        except SandboxError as error:
            return error
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
        (None, {**FINE, "return_code": -9, "stdout": None}, "Failed", Outcome("runtime_error", "", "e")),
        # What follows holds no outcome of a program: verl scores most of it.
        (None, {**FINE, "stdout": None}, "Success", None),
        (None, {**FINE, "return_code": 1}, "Success", None),
        (None, {**FINE, "return_code": None}, "Failed", None),
        (None, {**FINE, "status": "Error"}, "Failed", None),
        (None, None, "SandboxError", None),
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
        assert run(url) == run(f"{url}/run_code") == Outcome("finished", "a\n", "e")
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
    ("reply", "retry", "wait_s"),
    [
        (web.Response(status=504, text="late"), True, 0),
        (web.Response(status=429, headers={"Retry-After": "2"}), True, 2),
        (web.Response(status=400, text="no code"), False, 0),
        ({"status": "SandboxError", "run_result": FINE}, True, 0),
    ],
)
def test_errors_of_the_service_are_raised_and_say_whether_another_try_helps(
    reply: Any, retry: bool, wait_s: float
) -> None:
    async def answer(_body: dict[str, Any]) -> Any:
        return reply

    with serving(answer) as (url, bodies):
        found = run(url)
    assert len(bodies) == 1
    assert isinstance(found, SandboxError)
    assert (is_transient(found), retry_after_s(found)) == (retry, wait_s)
    assert url in str(found)


def test_a_service_that_is_not_there_or_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("http://127.0.0.1:1")
    assert isinstance(found, SandboxError)
    assert is_transient(found)

    async def answer(_body: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr("dataflow.rewards.sandbox.remote._EXTRA_S", 0.1)
    with serving(answer) as (url, _):
        found = run(url, timeout=0.1)
    assert isinstance(found, SandboxError)
    assert is_transient(found)
    assert "no answer within 0.3 s" in str(found)
