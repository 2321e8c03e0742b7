"""The judge as a reward: what it sends, what it counts, and when its budget ends it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from dataflow.batch import Batch
from dataflow.errors import ConfigError, RewardFailed
from dataflow.rewards.judge.client import JudgeError
from dataflow.rewards.judge.judge import BudgetSpent, Judge
from dataflow.rewards.judge.rubric import messages
from dataflow.rewards.judge.server import start_judge
from dataflow.system.serving import Child
from tests.rewards.judge.serving import RIGHT, WRONG, answering, said

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def server() -> Iterator[Child]:
    with start_judge("uniform:1:40", time_scale=0.001, seed=0) as running:
        yield running


def ask(judge: Judge, *responses: str, reference: str = "7", extra: Any = None) -> list[Any]:
    """Returns the scores, and the errors where there is none."""

    async def body() -> list[Any]:
        try:
            calls = (judge.compute_score("openai/gsm8k", text, reference, extra) for text in responses)
            return list(await asyncio.gather(*calls, return_exceptions=True))
        finally:
            await judge.close()

    return [result["score"] if isinstance(result, dict) else result for result in asyncio.run(body())]


def test_it_grades(server: Child) -> None:
    loose = "The sum is 7 apples"
    assert ask(Judge(server.url), RIGHT, WRONG, "", loose) == [1, 0, 0, 0]
    assert ask(Judge(server.url + "/v1/"), RIGHT, loose, WRONG) == [1, 0, 0]
    turns = [{"role": "assistant", "content": "3 + 4 ="}, {"role": "assistant", "content": "#### 7"}]
    assert ask(Judge(server.url), "nothing", extra={"conversation": turns}) == [1]


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    async def reply(request: web.Request) -> web.StreamResponse:
        seen.clear()
        seen.update(await request.json())
        return await said("Good.\nScore: 0.5")(request)

    result = answering(reply, model="m")
    assert result == {"score": 0.5, "explanation": "Good.\nScore: 0.5"}
    assert seen == {"model": "m", "temperature": 0, "messages": messages("3 + 4?", "7", RIGHT)}
    options = {"top_p": 0.5, "temperature": 1, "stop": ["\n\n"]}
    answering(reply, temperature=0.25, max_tokens_reply=99, options=options, template="{response}")
    chat = [{"role": "user", "content": RIGHT}]
    assert seen == {"model": "judge", "max_tokens": 99, "messages": chat, **options}
    answering(reply, temperature=None)
    assert "temperature" not in seen


# --- tokens and budget -----------------------------------------------------------------------------------------


def test_the_tokens_of_a_request_are_estimated_before_it() -> None:
    extra = {"question": "q" * 400}
    asked = -(-sum(len(turn["content"]) for turn in messages(extra["question"], "7", RIGHT)) // 4)
    asks = {"data_source": "d", "solution_str": RIGHT, "ground_truth": "7", "extra_info": extra}
    assert Judge("http://h:1", max_tokens_reply=50).tokens(**asks) == 50 + asked
    assert Judge("http://h:1", options={"max_completion_tokens": 70}).tokens(**asks) == 70 + asked
    assert Judge("http://h:1").tokens(**asks) > asked


class Spending(Judge):
    """A judge whose server says the same to all."""

    def __init__(self, usage: Any, text: str = "Score: 1", **options: Any) -> None:
        super().__init__("http://h", **options)
        self.said = {"choices": [{"message": {"content": text, "reasoning": "a" * 400}}], "usage": usage}
        self.client.post = self._post  # type: ignore[method-assign]

    async def _post(self, url: str, body: Any) -> Any:
        return self.said

    def ask(self, times: int) -> list[Any]:
        async def body() -> list[Any]:
            return await asyncio.gather(
                *(self.compute_score("d", "r", "7") for _ in range(times)), return_exceptions=True
            )

        return asyncio.run(body())


def test_a_spent_budget_ends_the_calls() -> None:
    usage = {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000}
    judge = Spending(usage, max_tokens=2500, price_per_million=(1.0, 10.0))
    results = judge.ask(4)
    assert [result["tokens"] for result in results[:3]] == [1000] * 3
    error = pickle.loads(pickle.dumps(results[3]))  # as on the way out of an actor
    assert isinstance(error, BudgetSpent)
    assert isinstance(error, JudgeError)
    assert (error.fatal, error.retry) == (True, False)
    assert str(error) == "the judge's budget is spent: 3,000 of judge.max_tokens=2500 after 3 calls"
    assert error.fix.startswith("raise judge.max_tokens; ")
    assert judge.usage() == {
        "tokens": 3000, "prompt_tokens": 2700, "completion_tokens": 300,
        "tokens_estimated": 0, "cost": pytest.approx(0.0057), "calls": 3,
    }  # fmt: skip


def test_a_spent_cost_ends_the_calls() -> None:
    judge = Spending({"prompt_tokens": 400_000, "completion_tokens": 1000}, max_cost=0.5, price_per_million=[1, 100])
    assert str(judge.ask(2)[1]) == "the judge's budget is spent: 0.5 of judge.max_cost=0.5 after 1 call"


def test_replies_without_a_score_are_paid_for_too() -> None:
    judge = Spending({"prompt_tokens": 90, "completion_tokens": 10}, text="What?", max_tokens=100)
    assert [type(error) for error in judge.ask(2)] == [JudgeError, BudgetSpent]


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 0, "completion_tokens": 0}])
def test_what_no_server_counts_is_estimated_thinking_included(usage: Any) -> None:
    judge = Spending(usage, template="{response}" + "x" * 398)
    (result,) = judge.ask(1)
    assert "tokens" not in result
    counts = judge.usage()
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["tokens_estimated"]) == (100, 102, 202)


def test_what_an_earlier_process_spent_counts_against_the_limits_alone() -> None:
    judge = Spending({"prompt_tokens": 8, "completion_tokens": 2}, max_tokens=100)
    judge.count_before(3, 90, 40)
    assert judge.usage()["tokens"] == 0
    assert str(judge.ask(2)[1]).endswith("100 of judge.max_tokens=100 after 4 calls")


@pytest.mark.slow
def test_through_the_agent(server: Child) -> None:
    from dataflow.running.services.agent import build_agent

    async def body() -> None:
        columns = {
            "response_text": [RIGHT, WRONG, RIGHT, f"So it is 7.\n{RIGHT}"],
            "ground_truth": ["7", "7", "8", "7"],
            "data_source": ["openai/gsm8k"] * 4,
        }
        target = "dataflow.rewards.judge.judge:Judge"
        agent = build_agent(None, {"target": target, "kwargs": {"url": server.url, "max_tokens": 1}})
        agent.submit(1, Batch([0, 0, 1, 1], columns))
        rewards = await agent.collect(1)
        assert rewards["score"].tolist() == [1, 0, 0, 1]
        assert list(rewards["explanation"]) == ["Score: 1", "Score: 0", "Score: 0", "Score: 1"]
        assert min(rewards.meta["latency_s"]) >= 0.001
        agent.submit(2, Batch([0, 0, 1, 1], columns))
        with pytest.raises(RewardFailed, match=r"the judge's budget is spent: .* raise judge.max_tokens"):
            await agent.collect(2)
        await agent.close()

    asyncio.run(body())


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:80"}, "judge.url=localhost:80 is not an address"),
        ({"url": "https://h/v1?key=abc"}, "judge.url=https://h/v1 is not an address; give http://host:port, without a"),
        ({"api_key_env": "NO_SUCH_VARIABLE_1"}, "the environment variable NO_SUCH_VARIABLE_1"),
        ({"api_key_env": "sk-abc-123"}, "judge.api_key_env takes the name of an environment variable"),
        ({"url": "https://me:pass@h", "api_key_env": "PATH"}, "judge.url also holds a password; give one of the two"),
        ({"template": "Grade {question}."}, "judge.template has no {response}"),
        ({"template": "{respones}"}, "unknown placeholder {respones}; did you mean 'response'; known are {question}, "),
        ({"score_pattern": "a"}, "has 0 groups; give one"),
        ({"score_range": (1, 1)}, "judge.score_range=(1, 1)"),
        ({"max_cost": 1}, "judge.max_cost=1 needs prices; give judge.price_per_million"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Judge(**{"url": "http://h", **options})
    assert message in str(error.value)
    assert not any(secret in str(error.value) for secret in ("sk-abc-123", "key=abc", "me:pass"))
