"""The actor's side of a remote agent, without Ray: the commands it gets, and the reports it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import cloudpickle
import pytest

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.graph import Hosted
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.failure import FailureRule
from dataflow.rewards.limits.server import LimitServer
from dataflow.rewards.remote.host import Arrival, Facts, Failure, RewardHost

pytestmark = pytest.mark.timeout(60)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


def samples(groups: int, n: int = 2, first: int = 0, **columns: Any) -> Batch:
    ids = range(first, first + groups)
    texts = [f"{g}.{i}" for g in ids for i in range(n)]
    given = {"response_text": texts, "data_source": ["d"] * len(texts), "ground_truth": texts}
    return Batch([g for g in ids for _ in range(n)], given | columns)


def agent(**options: Any) -> RewardAgent:
    async def compute_score(ground_truth: str, **_others: Any) -> dict[str, Any]:
        if ground_truth == "bad":
            raise ValueError("no answer")
        if ground_truth == "never":
            await asyncio.Event().wait()
        return {"score": float(ground_truth), "text": ground_truth}

    return RewardAgent(compute_score, retry=Retry(tries=1), **options)


async def host(shared: Any = None, **options: Any) -> tuple[RewardHost, Facts]:
    made = RewardHost()
    blob = cloudpickle.dumps((Hosted("reward", agent, options), {}))
    return made, await made.build(blob, "here", shared)


async def told(actor: RewardHost, groups: int) -> list[Arrival]:
    """Returns the groups that arrive, up to a number."""
    got: list[Arrival] = []
    while len({(arrival.step, record["group"]) for arrival in got for record in arrival.records}) < groups:
        got += (await actor.news())[0]  # type: ignore[arg-type]
    return got


def test_groups_come_back_as_columns_many_at_a_time() -> None:
    async def body() -> None:
        actor, facts = await host(limits=Limits(7), on_failure="drop_sample", max_failed_share=0.5)
        assert facts == Facts(Limits(7), FailureRule("drop_sample"), max_failed_share=0.5, ledger=False, ids=False)
        await actor.submit(3, samples(100, n=3, ground_truth=["bad", *map(str, range(1, 300))]))
        got = await told(actor, 100)
        assert len(got) < 20
        rows = [row for arrival in got for row in zip(arrival.records, arrival.scores, arrival.kept, strict=True)]
        assert len(rows) == 300
        for record, score, kept in rows:
            number = 3 * record["group"] + record["sample"]
            assert kept == (number > 0)
            assert score == number if kept else score != score
        assert [text for arrival in got for text in arrival.extras["text"] if text is not None][-1] == "299"
        assert {arrival.step for arrival in got} == {3}
        assert "no answer" in got[0].last_failure
        assert [arrival.stats is not None for arrival in got] == [False] * (len(got) - 1) + [True]
        assert got[-1].stats is not None
        assert got[-1].stats["scored"] == 299
        await actor.close()

    run(body)


def test_groups_of_a_step_are_scored_while_others_go_on() -> None:
    async def body() -> None:
        actor, _facts = await host()
        truths = ["never" if g == 1 else "1" for g in range(4) for _ in range(2)]
        await actor.submit(1, samples(4, ground_truth=truths))
        await actor.submit(2, samples(4), [0, 3])
        got = await told(actor, 5)
        assert sorted({(a.step, record["group"]) for a in got for record in a.records}) == [
            *((1, g) for g in (0, 2, 3)),
            *((2, g) for g in (0, 3)),
        ]
        assert (await actor.stats())["running"] == 2
        await actor.cancel(1)
        while (stats := await actor.stats())["running"]:
            await asyncio.sleep(0.001)
        assert stats["steps"] == 0
        await actor.close()

    run(body)


def test_a_step_in_sets_is_served_until_it_is_cancelled() -> None:
    async def body() -> None:
        actor, _facts = await host()
        await actor.submit(1, samples(2), [1], more=True)
        await actor.submit(1, samples(2, first=2), more=True)
        got = await told(actor, 3)
        assert got[-1].stats is not None, "nothing is left of what it was given"
        assert (await actor.stats())["steps"] == 1
        await actor.submit(1, samples(2, first=4, ground_truth=["1", "1", "1", "never"]), more=True)
        (arrival,) = await told(actor, 1)
        assert ({record["group"] for record in arrival.records}, arrival.stats) == ({4}, None)
        await actor.cancel(1)
        await actor.submit(2, samples(1))
        assert [news.step for news in (await actor.news())[0]] == [2], "who cancels need not be told"
        assert (await actor.stats())["steps"] == 0
        with pytest.raises(RewardFailed, match="step 1: its reward requests were cancelled"):
            await actor.submit(1, samples(1, first=6), more=True)
        await actor.close()

    run(body)


def test_a_set_that_fails_is_told_once() -> None:
    async def body() -> None:
        actor, _facts = await host()
        await actor.submit(1, samples(1), more=True)
        await told(actor, 1)
        await actor.submit(1, samples(1, first=1, ground_truth=["1", "bad"]), more=True)
        ((failure,), _lines) = await actor.news()
        assert isinstance(failure, Failure)
        assert failure.message.startswith("sample 1 of group 1 of step 1: 'compute_score' raised ValueError")
        with pytest.raises(RewardFailed, match="sample 1 of group 1"):
            await actor.submit(1, samples(1, first=2), more=True)
        await actor.close()

    run(body)


def test_a_step_that_fails_is_told_with_its_story() -> None:
    async def body() -> None:
        actor, _facts = await host()
        await actor.submit("val:1", samples(2, ground_truth=["1", "1", "1", "bad"]))
        news, _lines = await actor.news()
        while not isinstance(news[-1], Failure):
            news += (await actor.news())[0]
        assert news[-1].step == "val:1"
        assert news[-1].message.startswith("sample 1 of group 1 of step val:1: 'compute_score' raised ValueError")
        with pytest.raises(DataflowError, match="submitted before"):
            await actor.submit("val:1", samples(1))
        await actor.close()

    run(body)


def test_groups_that_would_be_replaced_are_told_as_dropped() -> None:
    async def body() -> None:
        actor, facts = await host(on_failure="replace_group", max_failed_share=1.0)
        assert facts.rule == FailureRule("replace_group")
        await actor.submit(1, samples(3, ground_truth=["1", "bad", "1", "1", "1", "bad"]))
        kept = {
            record["group"]: keep
            for arrival in await told(actor, 3)
            for record, keep in zip(arrival.records, arrival.kept or [], strict=True)
        }
        assert kept == {0: False, 1: True, 2: False}
        await actor.close()

    run(body)


def test_limits_are_shared_from_the_first_request_on() -> None:
    async def body() -> None:
        server = LimitServer(Limits(2))
        address = await server.open()
        actor, _facts = await host(address, limits=Limits(2))
        await actor.submit(1, samples(2, ground_truth=["never"] * 4))
        while server.stats()["holders"] != {"here": 2}:
            await asyncio.sleep(0.001)
        await actor.close()
        await server.close()

    run(body)


def test_what_cannot_be_built_is_an_error() -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match="drop_sampel"):
            await host(on_failure="drop_sampel")

    run(body)
