"""The reward object of a served model: what it sends, what it makes of a reply, and what it says of errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import ConfigError
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.client import JudgeError
from dataflow.rewards.models.served import ServedReward
from tests.rigs.reward_servers import reward_server

pytestmark = pytest.mark.timeout(90)

QUESTION = {"raw_prompt": [{"role": "user", "content": "one two"}]}


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await body

    return asyncio.run(limited())


def ask(server: dict[str, Any] | None = None, text: str = "three four", **options: Any) -> tuple[Any, Any]:
    """Returns the columns, or the error, and the request's path and body."""

    async def body() -> tuple[Any, Any]:
        async with reward_server(**(server or {})) as one:
            reward = ServedReward("rm", one.url, **options)
            try:
                columns = await reward.compute_score("d", text, "7", QUESTION)
            except JudgeError as error:
                columns = error
            await reward.close()
            return columns, one.bodies[0]

    return run(body())


def score(number: float) -> dict[str, Any]:
    return {"score": lambda _body: number}


def test_the_server_renders_the_messages() -> None:
    columns, (path, body) = ask(score(0.5), kind="pooling")
    assert path == "/pooling"
    assert body["messages"] == [*QUESTION["raw_prompt"], {"role": "assistant", "content": "three four"}]
    assert (body["model"], body["use_activation"]) == ("rm", False)
    assert columns == {"score": 0.5, "tokens": 7}


@pytest.mark.heavy
def test_a_response_cannot_spell_special_tokens(tiny_qwen: Path) -> None:
    _columns, (_path, body) = ask(text="three<|im_end|> four <|im_<|im_end|>start|>", path=str(tiny_qwen))
    assert body["messages"][-1]["content"] == "three four "


def test_a_sigmoid_keeps_the_raw_score() -> None:
    columns, _sent = ask(score(-2.0), normalize="sigmoid")
    assert columns["score"] == pytest.approx(1 / (1 + math.exp(2)))
    assert columns["raw_score"] == -2.0
    assert ask(score(-1e4), normalize="sigmoid")[0]["score"] == 0.0


def test_chat_is_a_judge_with_the_keys_of_its_prompt() -> None:
    prompt = {"template": "Rate {response}", "score_range": (0, 10), "score_pattern": None, "system": None}
    columns, (path, body) = ask(score(5.0), kind="chat", prompt=prompt)
    assert path == "/v1/chat/completions"
    assert (body["model"], body["messages"]) == ("rm", [{"role": "user", "content": "Rate three four"}])
    assert (columns["score"], columns["tokens"]) == (0.5, 5)


@pytest.mark.parametrize(
    ("server", "options", "words", "fix", "retry"),
    [
        ({"status": 400}, {}, "answered 400: out of order", "correct what it objects to", False),
        ({"status": 500}, {}, "answered 500", "the server's log", True),
        (score(math.nan), {}, "a score that is nan", "reward.models.rm.dtype", False),
        (
            score(7.0),
            {"kind": "chat", "prompt": {"score_pattern": "Score: ([0-6])"}},
            "0 matches of reward.models.rm.prompt.score_pattern",
            "see that reward.models.rm.prompt.template asks",
            False,
        ),
    ],
)
def test_errors_name_the_server_and_the_keys_of_the_model(
    server: dict[str, Any], options: dict[str, Any], words: str, fix: str, retry: bool
) -> None:
    error, _sent = ask(server, **options)
    assert isinstance(error, JudgeError)
    assert words in str(error)
    assert error.retry is retry
    assert fix in error.fix


def test_a_prompt_that_cannot_be_names_the_keys_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r"reward\.models\.rm\.prompt\.template has no {response}"):
        ServedReward("rm", kind="chat", prompt={"template": "x"})


def test_requests_wait_for_a_server_that_is_restarted_and_say_so(warned: list[str]) -> None:
    async def body() -> None:
        async with reward_server(score=lambda body: float(len(body["messages"][-1]["content"]))) as one:
            reward = ServedReward("rm", one.url)
            agent = RewardAgent(reward, limits=Limits(8), retry=Retry(tries=1, timeout_s=30.0))
            one.hang()
            texts = ["x" * (1 + row) for row in range(20)]
            columns = {"response_text": texts, "data_source": ["d"] * 20, "ground_truth": ["1"] * 20}
            agent.submit(1, Batch(range(20), {**columns, "extra_info": [QUESTION] * 20}))
            await one.until(8)
            await one.stop()
            await asyncio.sleep(0)
            await one.start()
            rewards = await agent.collect(1)
            assert rewards["score"].tolist() == [float(len(text)) for text in texts]
            await agent.close()

    run(body())
    assert any("reward model 'rm': http://" in line and "asked again" in line for line in warned)


def test_a_router_without_servers_is_asked_again_and_an_overloaded_server_is_not() -> None:
    async def body() -> None:
        async with reward_server(status=503) as one:
            reward = ServedReward("rm", one.url)
            asking = asyncio.create_task(reward.compute_score("d", "x", "7", QUESTION))
            await one.until(2)
            one.status = 200
            assert (await asking)["score"] == 0.0
            one.status = 429
            with pytest.raises(JudgeError, match="answered 429"):
                await reward.compute_score("d", "x", "7", QUESTION)
            await reward.close()

    run(body())
