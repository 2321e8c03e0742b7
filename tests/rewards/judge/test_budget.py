"""A judge's budget: what is counted, and what happens when it is spent."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.judge.budget import Budget, BudgetSpent, estimate
from dataflow.rewards.judge.chat import Chat
from dataflow.rewards.judge.errors import JudgeError
from dataflow.rewards.judge.judge import Judge

pytestmark = pytest.mark.timeout(30)


class Canned(Chat):
    """A chat that gives the same reply to all, once a given number of calls are waiting."""

    def __init__(self, content: str, usage: Any, together: int = 1) -> None:
        super().__init__(None, None, 1 << 20)
        self.raw = json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()
        self.gate = asyncio.Barrier(together)
        self.asked = 0

    async def send(self, url: str, body: bytes) -> bytes:
        self.asked += 1
        await self.gate.wait()
        return self.raw


async def call(judge: Judge, times: int) -> list[Any]:
    return [await asyncio.gather(judge.compute_score("d", "r", "7"), return_exceptions=True) for _ in range(times)]


def test_a_spent_budget_ends_the_calls() -> None:
    async def body() -> None:
        chat = Canned("Score: 1", {"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000})
        judge = Judge("http://h", max_tokens=2500, price_per_million=(1.0, 10.0))
        judge.chat = chat
        results = [one for (one,) in await call(judge, 5)]
        assert [result["tokens"] for result in results[:3]] == [1000] * 3
        for error in results[3:]:
            assert isinstance(error, BudgetSpent)
            assert isinstance(error, JudgeError)
            assert (error.fatal, error.retry) == (True, False)
            assert str(error) == "the judge's budget is spent: 3,000 of 2,500 tokens after 3 calls"
            assert "judge.max_tokens" in error.fix
        assert chat.asked == 3
        assert judge.usage() == {
            "tokens": 3000,
            "prompt_tokens": 2700,
            "completion_tokens": 300,
            "tokens_estimated": 0,
            "cost": pytest.approx(0.0057),
            "calls": 3,
        }

    asyncio.run(body())


def test_a_spent_cost_ends_the_calls() -> None:
    budget = Budget(None, 0.5, [1, 100])
    budget.check()
    budget.count({"prompt_tokens": 400_000, "completion_tokens": 1000}, 0, 0)
    with pytest.raises(BudgetSpent, match=r"spent: 0\.5 of a cost of 0\.5 after 1 call") as spent:
        budget.check()
    assert "judge.max_cost" in spent.value.fix


def test_requests_in_flight_when_the_budget_ends_are_answered() -> None:
    async def body() -> None:
        chat = Canned("Score: 1", {"prompt_tokens": 90, "completion_tokens": 10}, together=6)
        judge = Judge("http://h", max_tokens=100)
        judge.chat = chat
        results = await asyncio.gather(*(judge.compute_score("d", "r", "7") for _ in range(6)))
        assert [result["score"] for result in results] == [1] * 6
        with pytest.raises(BudgetSpent, match="600 of 100 tokens"):
            await judge.compute_score("d", "r", "7")

    asyncio.run(body())


def test_replies_without_a_score_are_paid_for_too() -> None:
    async def body() -> None:
        chat = Canned("What?", {"prompt_tokens": 90, "completion_tokens": 10})
        judge = Judge("http://h", max_tokens=100)
        judge.chat = chat
        assert [type(error) for (error,) in await call(judge, 2)] == [JudgeError, BudgetSpent]

    asyncio.run(body())


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        3,
        {"prompt_tokens": 0, "completion_tokens": 0},
        {"prompt_tokens": None},
        {"prompt_tokens": "9"},
        {"prompt_tokens": True, "completion_tokens": 10**400},
    ],
)
def test_what_no_server_counts_is_estimated(usage: Any) -> None:
    budget = Budget(100, None, None)
    assert budget.count(usage, 399, 5) is None
    assert budget.usage() == {
        "tokens": 102,
        "prompt_tokens": 100,
        "completion_tokens": 2,
        "tokens_estimated": 102,
        "cost": 0,
        "calls": 1,
    }
    with pytest.raises(BudgetSpent, match=r"102 of 100 tokens \(102 tokens estimated\) after 1 call"):
        budget.check()


def test_thoughts_that_are_only_in_the_total_count_as_reply() -> None:
    budget = Budget(None, None, None)
    assert budget.count({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 115}, 0, 0) == 115
    assert (budget.prompt_tokens, budget.completion_tokens) == (10, 105)


def test_the_thinking_of_a_server_that_states_no_tokens_is_counted() -> None:
    chat = Canned("Score: 1", None)
    chat.raw = chat.raw.replace(b'"content"', b'"reasoning": "%s", "content"' % (b"a" * 400))
    judge = Judge("http://h")
    judge.chat = chat
    asyncio.run(call(judge, 1))
    assert judge.usage()["completion_tokens"] == 102


def test_a_reply_is_taken_to_be_as_long_as_those_before() -> None:
    budget = Budget(None, None, None)
    assert budget.reply_tokens() > 0
    for reply in (10, 21):
        budget.count({"prompt_tokens": 10, "completion_tokens": reply}, 0, 0)
    assert budget.reply_tokens() == 16
    assert [estimate(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_the_error_survives_the_way_out_of_an_actor() -> None:
    budget = Budget(1, None, None)
    budget.count(None, 40, 0)
    with pytest.raises(BudgetSpent) as spent:
        budget.check()
    copy = pickle.loads(pickle.dumps(spent.value))
    assert (str(copy), copy.fix, copy.fatal, copy.retry) == (str(spent.value), spent.value.fix, True, False)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, None, None), "judge.max_tokens=0"),
        ((None, -1, (1, 1)), "judge.max_cost=-1"),
        ((None, 1, None), "judge.max_cost=1 needs prices; give judge.price_per_million"),
        ((None, 1, (0, 0)), "needs prices"),
        ((None, 1, (1,)), "judge.price_per_million=(1,)"),
        ((None, None, (1, -1)), "judge.price_per_million=(1, -1)"),
        ((None, None, (1, float("nan"))), "judge.price_per_million="),
    ],
)
def test_budgets_that_cannot_be(limits: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Budget(*limits)
    assert message in str(error.value)


def test_what_an_earlier_process_spent_counts_against_the_limits_alone() -> None:
    budget = Budget(100, None, None)
    budget.count_before(3, 90, 40)
    budget.check()
    assert budget.usage()["tokens"] == 0
    budget.count({"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}, 0, 0)
    with pytest.raises(BudgetSpent, match=r"100 of 100 tokens after 4 calls"):
        budget.check()


def test_its_cost_takes_the_replies_from_their_length() -> None:
    budget = Budget(None, 1.0, [1.0, 10_000.0])
    budget.count_before(2, 200, 396)  # 99 tokens of replies
    budget.check()
    budget.count_before(1, 1, 4)
    with pytest.raises(BudgetSpent, match=r"judge's budget is spent: 1\.\d+ of a cost of 1"):
        budget.check()
