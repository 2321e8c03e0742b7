"""Replies of chat servers as they are: with thinking, in parts, cut off, refused, or errors in a body of status 200."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from dataflow.rewards.judge.chat import Chat
from dataflow.rewards.judge.errors import JudgeError
from dataflow.rewards.judge.judge import SCORE_LINE, Judge
from dataflow.rewards.judge.reply import behind_thinking, whole
from tests.rewards.judge.test_judge import answering

pytestmark = pytest.mark.timeout(60)


class Canned(Chat):
    """A chat that gives the same body to all."""

    def __init__(self, body: Any) -> None:
        super().__init__(None, None, 1 << 20)
        self.raw = json.dumps(body).encode()

    async def send(self, url: str, body: bytes) -> bytes:
        async def pieces() -> AsyncIterator[bytes]:
            yield self.raw

        return await whole(url, pieces(), 1 << 20)


def result(body: Any, **options: Any) -> Any:
    """Returns the columns, or the error if there is none."""
    judge = Judge("http://h", **options)
    judge.chat = Canned(body)
    try:
        return asyncio.run(judge.compute_score("d", "r", "7"))
    except JudgeError as error:
        return error


def said(message: Any, finish: str | None = "stop") -> dict[str, Any]:
    message = message if isinstance(message, dict) else {"content": message}
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


def text(words: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": words}


THOUGHTS = [{"type": "thinking", "thinking": [text("Score: 0")]}, text("Score: 0", "reasoning")]


@pytest.mark.parametrize(
    "message",
    [
        "<think>... Score: 0 ...</think>\nScore: 1",
        "<think>\nScore: 0\n</think>\n\nScore: 1",
        "Is it?\nScore: 0\nNo.\n</think>\n\nScore: 1",  # the template has written the tag
        "<think>Score: 0</think>So:\n<think>\nScore: 0\n</think>Score: 1",
        "<think>a <think> b</think>\nScore: 0\n</think>Score: 1",
        "<THINKING>\nScore: 0\n</THINKING>Score: 1",
        "<seed:think>\nScore: 0\n</seed:think>Score: 1",
        "[THINK]\nScore: 0\n[/THINK]Score: 1",
        "\u25c1think\u25b7\nScore: 0\n\u25c1/think\u25b7Score: 1",
        "<|channel|>analysis<|message|>\nScore: 0\n<|end|><|start|>assistant<|channel|>final<|message|>Score: 1",
        "The response ends its <think> block.\nScore: 1",
        "Score: 0?\nNo, reasoning</think>\nScore: 1",
        "Is it?\nScore: 0\nNo.</think>Score: 1",
        "Is it?\nScore: 0\nreasoning </think> score: 1",
        "Is it?\nScore: 0\nreasoning\r\n</think> Score: 1\r\n",
        "Is it?\nScore: 0\nreasoning </think> so it is right.\nScore: 1",
        "Score: 1\nIt closes its </think> tag.",
        "Score: 1\nIt closes its [/THINK] tag.",
        "Score: 1\rIt closes its </reasoning> tag.",
        "Score: 1\n- It ends with `</think>`",
        "Score: 1\n`</think>` is there.",
        "Score: 1\n</think> is missing.",
        "Score: 1\nIt ends with </think>.",
        "Score: 1\nIt writes <|channel|>final<|message|> twice, </think> and </think> too.",
        "Its <think> block is fine.\nScore: 1\nIt closes its </think> tag.",
        "<think>\nScore: 0\n</think>\nScore: 1\nIt closes its </think> tag.",
        "Its </think> tag is there.\nScore: 1\nIt uses </think> once.",
        {"content": "Score: 1", "reasoning_content": "Score: 0"},
        {"content": "Score: 1", "reasoning": "Score: 0", "refusal": None, "tool_calls": []},
        {"content": [text("Score: 1")]},
        {"content": [text("It is right."), text("Score: 1", "output_text")]},
        {"content": [*THOUGHTS, text("Score: 1")]},
        {"content": text("Score: 1")},
    ],
)
def test_the_verdict_is_behind_the_thinking(message: Any) -> None:
    found = result(said(message))
    assert found["score"] == 1
    assert "Score: 0" not in found["explanation"]


@pytest.mark.parametrize(
    ("message", "finish", "words"),
    [
        ("<think>\nScore: 0\n", "stop", "has no answer, only thinking that does not end"),
        ("<think>\nScore: 0\n", "length", "only thinking that does not end, and ended by 'length'"),
        ("<think>\nScore: 0\n</think>", "stop", "has 0 lines 'Score: <number>', not one: ''"),
        ("Score: 0\nhm\n</think>", "stop", "has 0 lines 'Score: <number>', not one: ''"),
        ("Score: 0\nhm</think>I cannot.", "stop", "has 0 lines 'Score: <number>', not one: 'I cannot.'"),
        ("Score: 0\nhm. </think> I cannot.", "stop", "has 0 lines 'Score: <number>', not one: 'I cannot.'"),
        ("Score: 0\n</think>**I cannot.**", "stop", "has 0 lines 'Score: <number>', not one: '**I cannot.**'"),
        ("<think>\nScore: 0\nIt closes its </think> tag.", "stop", "has 0 lines 'Score: <number>', not one: 'tag.'"),
        ({"content": None, "reasoning_content": "Score: 1"}, "stop", "no answer, only reasoning_content: 'Score: 1'"),
        ({"content": "", "reasoning": "Score: 1"}, "length", "only reasoning: 'Score: 1', and ended by 'length'"),
        ({"reasoning": "hm", "tool_calls": [{"id": "1"}]}, "tool_calls", "only reasoning and tool_calls: 'hm'"),
        ({"content": None, "refusal": "I cannot."}, "stop", "no answer, only refusal: 'I cannot.'"),
        ({"content": THOUGHTS}, "stop", 'only content: \'[{"type": "thinking"'),
        ({"content": None}, "content_filter", "the judge's reply has no answer, and ended by 'content_filter'"),
        ("", "content_filter", "has 0 lines"),
        ("First,", "length", "has 0 lines"),
        ("Let me see.\nScore: 0\nBut", "length", "ended by 'length' before its score was sure"),
        ("Score: 1", "length", "ended by 'length' before its score was sure"),  # or 10
        ("Score: 0.", "max_tokens", "ended by 'max_tokens' before its score was sure"),  # or 0.5
    ],
)
def test_what_came_in_place_of_a_verdict_is_named_and_not_asked_for_again(
    message: Any, finish: str, words: str
) -> None:
    error = result(said(message, finish))
    assert words in str(error)
    assert not error.retry
    assert result(said(message, finish), temperature=0.5).retry
    if finish in ("length", "max_tokens"):
        assert error.fix.startswith("raise judge.max_tokens_reply")


def test_a_score_that_stands_first_counts_although_its_explanation_is_cut() -> None:
    for reply in ("Score: 1\nBecause", "**Score: 1**"):
        assert result(said(reply, "length"))["score"] == 1


@pytest.mark.parametrize("choices", [[], None])
def test_no_choices(choices: Any) -> None:
    error = result({"choices": choices})
    assert "has no answer, only 'choices': " in str(error)
    assert not error.retry


def test_a_reply_that_the_server_broke_off_is_asked_for_again() -> None:
    assert result(said("Score: 1", "error")).retry


LATER = {"code": 429, "message": "later"}


@pytest.mark.parametrize(
    ("body", "status", "again"),
    [
        ({"error": LATER}, 429, True),
        ({"error": {**LATER, "code": "429"}}, 429, True),
        ({"error": {**LATER, "code": "rate_limit_exceeded"}}, 429, True),
        ({"error": {**LATER, "code": None, "type": "rate_limit_error"}}, 429, True),
        ({"error": {**LATER, "code": 1302, "message": "Rate limit reached: later"}}, 429, True),
        ([{"error": {**LATER, "code": 8, "status": "RESOURCE_EXHAUSTED"}}], 429, True),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "later"}}, 503, True),
        ({"error": "too many requests, come later"}, 429, True),
        ({"object": "error", **LATER, "type": "BadRequestError", "code": 400}, 400, False),
        ({"error": {**LATER, "code": "invalid_api_key"}}, 401, False),
        ({"error": {**LATER, "code": "context_length_exceeded"}}, 400, False),
        ({"error": {**LATER, "code": "model_not_found"}}, 404, False),
        ({"error": {**LATER, "code": 500}, **said("Score: 1")}, 500, True),
        ({"choices": [{"error": {**LATER, "code": 502}, "message": {"content": "Score: 1"}}]}, 502, True),
        ({"error": "later"}, None, True),
    ],
)
def test_an_error_in_a_body_of_status_200_is_that_error(body: Any, status: int | None, again: bool) -> None:
    async def reply(_request: web.Request) -> web.Response:
        return web.json_response(body, headers={"Retry-After": "7"})

    for error, wait_s in ((result(body), None), (answering(reply)[0], 7.0)):
        assert isinstance(error, JudgeError)
        assert (error.status, error.retry) == (status, again)
        assert f"answered {status or 'an error'} in a reply of status 200: " in str(error)
        assert "later" in str(error)
        assert error.retry_after == wait_s


@pytest.mark.parametrize("where", ["metadata", "error"])
def test_the_wait_that_an_error_itself_asks_for(where: str) -> None:
    more = {"retry_after_seconds": 17}
    assert result({"error": {**LATER, **({"metadata": more} if where == "metadata" else more)}}).retry_after == 17


@pytest.mark.parametrize("nothing", [None, {}, "", False, {"code": 0, "message": ""}])
def test_an_empty_error_is_none(nothing: Any) -> None:
    assert result({"error": nothing, **said("Score: 1")})["score"] == 1


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<think></think>", "<", "\n<think>", "a", " </think> a", " <think> a </think> a"]
)
def test_thinking_is_left_out_in_linear_time(piece: str) -> None:
    score = re.compile(SCORE_LINE, re.IGNORECASE | re.MULTILINE)
    behind_thinking(piece * (400_000 // len(piece)), score)
