"""The reward files of examples/rewards work as described, with the agent of a run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.reward import RewardConfig
from dataflow.errors import RewardFailed
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.managers import build_manager
from dataflow.running.services.agent import build_agent
from tests.rigs.reward_servers import reward_server

pytestmark = pytest.mark.timeout(60)

EXAMPLES = Path(__file__).parents[2] / "examples" / "rewards"


def run(body: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await body()

    return asyncio.run(limited())


def batch(texts: list[list[str]], truth: str = "7") -> Batch:
    """One group for each list."""
    rows = [(group, text) for group, some in enumerate(texts) for text in some]
    columns: dict[str, Any] = {"response_text": [text for _, text in rows], "data_source": ["d"] * len(rows)}
    chat = [{"role": "user", "content": "3 + 4?"}]
    columns |= {"ground_truth": [truth] * len(rows), "raw_prompt": [chat] * len(rows)}
    return Batch([group for group, _ in rows], columns)


async def rewards(agent: RewardAgent, samples: Batch) -> Batch:
    """Returns what the agent makes of one step."""
    try:
        agent.submit(1, samples)
        return await agent.collect(1)
    finally:
        await agent.close()


def agent_of(file: str, options: RewardConfig | None = None, **custom: Any) -> RewardAgent:
    """Returns the agent that a run with this reward file would have."""
    return build_agent({"path": str(EXAMPLES / file), **custom}, {}, options or RewardConfig(backoff=0.01))


@asynccontextmanager
async def serving(path: str, reply: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[str]:
    """Answers POST on loopback; gives the address."""
    from aiohttp import web

    app = web.Application()
    app.router.add_post(path, reply)
    async with listening(app) as address:
        yield address


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Runs an application on loopback; gives the address."""
    from aiohttp import web

    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_final_number() -> None:
    agent = agent_of("final_number.py", reward_kwargs={"wrong": 0.1})
    found = run(lambda: rewards(agent, batch([["so 7", "1,000"], ["none", "6 or 7.0"]])))
    assert found["score"].tolist() == pytest.approx([1, 0.1, 0, 1])
    assert found["answer"].tolist() == ["7", "1000", None, "7.0"]


def test_the_best_of_a_group_wins_its_comparisons() -> None:
    def longer_first(body: dict[str, Any]) -> float:
        first, second = re.findall(r"<(?:first|second)>\n(.*?)\n</", body["messages"][-1]["content"], re.DOTALL)
        return 0.5 if len(first) == len(second) else float(len(first) > len(second))

    async def body() -> None:
        async with reward_server(score=longer_first) as server:
            options = RewardConfig(backoff=0.01, router_address=server.url.removeprefix("http://"))
            agent = agent_of("best_of.py", options, name="BestOf", reward_kwargs={"model": "rm"})
            got = await rewards(agent, batch([["a", "bbb", "cc", "dd"], ["x"]]))
            assert got["score"].tolist() == pytest.approx([0, 1, 0.5, 0.5, 0.5])
            bodies = [body for _path, body in server.bodies]
            assert len(bodies) == 4 * 3
            assert all("3 + 4?" in body["messages"][-1]["content"] for body in bodies)

    run(body)


def test_service_is_asked_until_it_answers() -> None:
    from aiohttp import web

    moods = ["429", "503", "{}"]
    came: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.Response:
        came.append(await request.json())
        mood = moods.pop() if moods else ""
        if mood == "{}":
            return web.json_response({})
        if mood:
            return web.Response(status=int(mood), headers={"Retry-After": "0.01"})
        return web.json_response({"score": len(came[-1]["response"]), "why": "its length", "tokens": 5})

    async def body() -> tuple[Batch, dict[str, Any]]:
        async with serving("/score", reply) as url:
            kwargs = {"url": url, "scale": 0.5}
            agent = agent_of("service.py", name="Service", reward_kwargs=kwargs)
            return await rewards(agent, batch([["a", "bb"], ["ccc", "ccc"]])), agent.stats()

    found, stats = run(body)
    assert found["score"].tolist() == pytest.approx([0.5, 1.1, 1.6, 1.6]), "the best of a group has its bonus"
    assert set(found["explanation"]) == {"its length"}
    assert (stats["retried"], stats["throttled"], stats["scored"]) == (3, 2, 4)
    assert stats["tokens"] == 5 * stats["scored"] - 5 * stats["shared"]
    assert came[0]["prompt"] == [{"role": "user", "content": "3 + 4?"}]


def test_verl_router(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    class Tokenizer:
        def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
            return f"<user>{chat[0]['content']}"

    async def reply(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        assert prompt.startswith("<user>")
        said = {"7": " Yes\n", "8": "no"}.get(prompt.removeprefix("<user>")[0], "maybe")
        return web.json_response({"choices": [{"text": said}]})

    async def body() -> Batch:
        async with serving("/v1/completions", reply) as url:
            monkeypatch.setattr("dataflow.running.services.agent.load_tokenizer", lambda path, where: Tokenizer())
            address = url.removeprefix("http://")
            options = RewardConfig(router_address=address, model_tokenizer="reward-model", on_failure="drop_sample")
            options.max_failed_share = 1
            return await rewards(agent_of("verl_router.py", options), batch([["7", "six"], ["7.0", "8"]]))

    found = run(body)
    assert found["kept"].tolist() == [True, False, True, True]
    assert found["acc"].tolist() == [1.0, None, 1.0, 0.0]


def _chat(content: str, asked: list[str]) -> Callable[[Any], Awaitable[Any]]:
    from aiohttp import web

    async def reply(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"][-1]["content"])
        return web.json_response({"choices": [{"message": {"content": content}}]})

    return reply


def test_cheap_first_asks_only_where_the_rule_cannot_tell() -> None:
    asked: list[str] = []

    async def body() -> Batch:
        async with serving("/v1/chat/completions", _chat("Score: 0.5", asked)) as url:
            agent = agent_of("cheap_first.py", name="CheapFirst", reward_kwargs={"url": url, "longest": 20})
            return await rewards(agent, batch([["#### 7", "it is 7"], ["w" * 30, "7\n#### 7 "]]))

    found = run(body)
    assert found["score"].tolist() == [1, 0.5, 0, 1]
    assert found["by"].tolist() == ["rule", "judge", "length", "rule"]
    assert len(asked) == 1


def test_rating_is_a_template_for_the_judge() -> None:
    asked: list[str] = []

    async def body() -> Batch:
        async with serving("/v1/chat/completions", _chat("The sum is right.\nRating: 7", asked)) as url:
            template = str(EXAMPLES / "rating.txt")
            judge = Judge(url, template=template, score_pattern=r"^Rating: *([0-9]+)$", score_range=(1, 10))
            return await rewards(RewardAgent(judge), batch([["it is {reference}"]]))

    assert run(body)["score"].tolist() == pytest.approx([6 / 9])
    assert "Problem: 3 + 4?\nReference answer: 7\nResponse: it is {reference}" in asked[0]


def test_clipped() -> None:
    async def number(solution_str: str, **_: Any) -> float:
        return float(solution_str)

    manager = build_manager("Clipped", number, str(EXAMPLES / "clipped.py"), low=0)
    found = run(lambda: rewards(RewardAgent(manager), batch([["-2", "0.5"], ["3", "1"]])))
    assert (found["score"].tolist(), found["raw"].tolist()) == ([0, 0.5, 1, 1], [-2, 0.5, 3, 1])

    async def nothing(**_: Any) -> None:
        return None

    with pytest.raises(RewardFailed, match="'nothing' returned None; return a finite number"):
        run(
            lambda: rewards(
                RewardAgent(build_manager("Clipped", nothing, str(EXAMPLES / "clipped.py"))), batch([["1"]])
            )
        )
