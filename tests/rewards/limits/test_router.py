"""The router over HTTP on loopback: the choice of a server, ejection, and calls that go to another server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.client import JudgeError
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.judge.rubric import question_of
from dataflow.rewards.limits.queues import EndpointQueue
from dataflow.rewards.limits.router import BAD, FAILURES, Probing, Router, ServerGivenUp
from dataflow.rewards.retry import is_lost
from dataflow.system import clock
from tests.rigs.reward_servers import FakeServer, servers

pytestmark = pytest.mark.timeout(60)

FAST = Probing(first_s=0.02, most_s=0.1, limit_s=0.2, patience_s=30.0)
AT_ONCE = Retry(tries=2, timeout_s=20.0, deadline_s=30.0, backoff_s=0.01, max_backoff_s=0.01)


def samples(count: int, size: int = 1) -> Batch:
    return Batch(
        [row // size for row in range(count)],
        {
            "response_text": [f"response {row}" for row in range(count)],
            "data_source": ["d"] * count,
            "ground_truth": ["1"] * count,
            "extra_info": [{"question": f"question {row // size}"} for row in range(count)],
        },
    )


class OpenRouter(Router):
    """A router whose queues a test may look at."""

    queues: Mapping[str, EndpointQueue]

    def open(self, queues: Mapping[str, EndpointQueue], patience_s: float | None = None) -> None:
        self.queues = queues
        super().open(queues, patience_s)

    def takes(self, name: str) -> bool:
        """Whether a server gets calls."""
        return not self.queues[name].paused


def prompt_of(arguments: Mapping[str, Any]) -> str:
    return question_of(arguments["extra_info"])


def judge_of(
    found: list[FakeServer], slots: int = 4, timeout: float = 20.0, probing: Probing = FAST, **how: Any
) -> Judge:
    judge = Judge([server.url for server in found], timeout=timeout, slots=slots, **how)
    judge.router = OpenRouter(judge.endpoints, slots, how.get("routing", "least"), prompt_of, probing=probing)
    return judge


def agent_of(judge: Judge, concurrency: int = 64, retry: Retry = AT_ONCE, **how: Any) -> RewardAgent:
    return RewardAgent(judge, limits=Limits(concurrency), retry=retry, **how)


async def opened(found: list[FakeServer]) -> tuple[RewardAgent, OpenRouter]:
    """Returns an agent that has scored a step, and its router."""
    judge = judge_of(found)
    agent = agent_of(judge)
    agent.submit(1, samples(1))
    await agent.collect(1)
    assert isinstance(judge.router, OpenRouter)
    return agent, judge.router


def run(body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(50):
            return await body

    return asyncio.run(limited())


def places(rewards: Batch) -> Counter[str]:
    return Counter(record["endpoint"] for record in rewards.meta["records"])


def one(_body: dict[str, Any]) -> float:
    return 1.0


def test_a_call_takes_the_emptiest_server_and_its_record_names_it() -> None:
    async def body() -> None:
        async with servers(3, score=one) as found:
            for server in found:
                server.hang()
            agent = agent_of(judge_of(found, slots=2))
            agent.submit(1, samples(8))
            for server in found:
                await server.until(2)
            assert [server.running for server in found] == [2, 2, 2]
            found[1].answering.set()  # the others are full: it gets all that wait
            await found[1].until(4)
            for server in found:
                server.answering.set()
            rewards = await agent.collect(1)
            assert places(rewards) == {found[0].url: 2, found[1].url: 4, found[2].url: 2}
            assert [server.most for server in found] == [2, 2, 2]
            assert agent.stats()["limit"] == {"": 64, **{server.url: 2 for server in found}}
            await agent.close()

    run(body())


def test_with_prefix_routing_a_prompt_goes_to_one_server_while_that_is_not_full() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            agent = agent_of(judge_of(found, slots=128, routing="prefix"), concurrency=256)
            agent.submit(1, samples(40, size=5))
            rewards = await agent.collect(1)
            by_group: dict[int, set[str]] = {}
            for record in rewards.meta["records"]:
                by_group.setdefault(record["group"], set()).add(record["endpoint"])
            assert all(len(at) == 1 for at in by_group.values())
            assert len(places(rewards)) == 2
            for server in found:
                server.hang()
            agent.submit(2, samples(60, size=60))  # one prompt: the other server helps
            await asyncio.gather(*(server.until(len(server.bodies) + 1) for server in found))
            for server in found:
                server.answering.set()
            assert min(places(await agent.collect(2)).values()) >= 8
            await agent.close()

    run(body())


def test_the_calls_of_a_server_that_dies_go_to_another_at_once_and_cost_no_try() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            for server in found:
                server.hang()
            agent = agent_of(judge_of(found), retry=Retry(tries=1, timeout_s=20.0))
            agent.submit(1, samples(8))
            for server in found:
                await server.until(4)
            await found[0].stop()
            found[1].answering.set()
            rewards = await agent.collect(1)
            assert rewards["score"].tolist() == [1.0] * 8
            assert places(rewards) == {found[1].url: 8}
            assert sorted(record.get("resent", 0) for record in rewards.meta["records"]) == [0] * 4 + [1] * 4
            stats = agent.stats()
            assert (stats["resent"], stats["ejections"], stats["failed"]) == (4, 1, 0)
            changes = [(endpoint, limit) for _at, endpoint, limit in rewards.meta["limits"]]
            assert changes == [(found[0].url, 0)]
            await found[0].start()  # at the same port, as after a restart
            rewards = await agent_until(agent, found[0])
            assert (found[0].url, 4) in [(endpoint, limit) for _at, endpoint, limit in rewards.meta["limits"]]
            await agent.close()

    run(body())


async def agent_until(agent: RewardAgent, server: FakeServer) -> Batch:
    """Submits steps until a server has answered one of their calls; returns the rewards of the last."""
    step, bodies = 1, len(server.bodies)
    changes: list[Any] = []
    while len(server.bodies) == bodies:
        step += 1
        agent.submit(step, samples(8))
        rewards = await agent.collect(step)
        changes += rewards.meta["limits"]
    rewards.meta["limits"] = changes
    return rewards


def test_a_server_that_hangs_is_ejected_at_the_first_time_out_with_all_its_calls() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            found[0].hang()
            agent = agent_of(judge_of(found, timeout=0.5), retry=Retry(tries=1, timeout_s=20.0))
            agent.submit(1, samples(40))
            begin = asyncio.get_running_loop().time()
            rewards = await agent.collect(1)
            assert rewards["score"].tolist() == [1.0] * 40
            assert places(rewards) == {found[1].url: 40}
            assert asyncio.get_running_loop().time() - begin < 10
            assert (len(found[0].bodies), agent.stats()["resent"]) == (4, 4)
            found[0].answering.set()
            await agent_until(agent, found[0])
            await agent.close()

    run(body())


def test_a_slow_server_that_answers_its_health_check_keeps_its_other_calls() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            agent, router = await opened(found)
            name = found[0].url
            assert router.failed(name, TimeoutError())
            assert not router.takes(name)
            while not router.takes(name):
                await asyncio.sleep(0)
            assert (found[0].probes, agent.stats()["ejections"]) == (1, 0)
            agent.submit(2, samples(2))
            assert len(places(await agent.collect(2))) == 2
            await agent.close()

    run(body())


def test_a_server_that_only_fails_is_ejected_although_it_is_healthy() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            found[0].status = 500
            agent = agent_of(judge_of(found, slots=1), retry=Retry(tries=1, timeout_s=20.0))
            for step in range(1, 30):
                agent.submit(step, samples(2))
                rewards = await agent.collect(step)
                assert places(rewards) == {found[1].url: 2}
                if agent.stats()["ejections"]:
                    break
            assert len(found[0].bodies) == FAILURES
            await agent.close()

    run(body())


@pytest.mark.parametrize(("status", "text"), [(429, ""), (404, ""), (200, "<html>")])
def test_a_server_that_answers_badly_while_others_answer_well_is_ejected(
    status: int, text: str, logged: list[str]
) -> None:
    async def body() -> None:
        async with servers(3, score=one, status=status, text=text) as found:
            bad, *good = found
            for server in good:
                server.status, server.text = 200, ""
                server.hang()
            judge = judge_of(found)
            agent = agent_of(judge)
            agent.submit(1, samples(40))
            await bad.until(BAD)  # the others are full: it is the emptiest
            assert isinstance(judge.router, OpenRouter)
            while judge.router.takes(bad.url):
                await asyncio.sleep(0)
            assert len(bad.bodies) < BAD + 4  # those of its slots
            for server in good:
                server.answering.set()
            rewards = await agent.collect(1)
            assert rewards["score"].tolist() == [1.0] * 40
            assert bad.url not in places(rewards)
            assert agent.stats()["ejections"] >= 1
            assert "calls in a row failed here and not elsewhere" in "".join(logged)
            asked = Counter(str(sent) for _path, sent in bad.bodies)
            assert max(asked.values()) == 1  # no request comes back to it
            bad.status, bad.text = 200, ""
            await agent_until(agent, bad)
            await agent.close()
        assert sum("takes no calls" in line and "WARNING" in line for line in logged) == 1
        assert any("answers again, after" in line for line in logged)

    run(body())


def test_bad_requests_eject_no_server() -> None:
    async def body() -> None:
        async with servers(2, score=one, status=404) as found:
            agent = agent_of(judge_of(found), on_failure="score:0", max_failed_share=1.0)
            agent.submit(1, samples(8 * BAD))
            rewards = await agent.collect(1)
            assert rewards["score"].tolist() == [0.0] * 8 * BAD
            assert agent.stats()["ejections"] == 0
            assert sum(len(server.bodies) for server in found) <= 16 * BAD
            await agent.close()

    run(body())


def test_one_bad_answer_costs_no_reward_even_without_a_second_try() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            found[0].status = 404
            agent = agent_of(judge_of(found, slots=1), retry=Retry(tries=1, timeout_s=20.0))
            agent.submit(1, samples(4))
            rewards = await agent.collect(1)
            assert places(rewards) == {found[1].url: 4}
            assert agent.stats()["resent"] == len(found[0].bodies)
            await agent.close()

    run(body())


def test_a_server_whose_calls_all_lose_against_hedges_is_ejected() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            found[0].hang()
            agent = agent_of(judge_of(found), hedge_after=0.05)
            step = 0
            while not agent.stats()["ejections"]:
                step += 1
                agent.submit(step, samples(8))
                assert places(await agent.collect(step)) == {found[1].url: 8}
            assert max(Counter(str(sent) for _path, sent in found[0].bodies).values()) <= step
            await agent.close()

    run(body())


def test_a_call_that_lost_against_a_hedge_says_nothing_of_a_server_that_has_answered_since() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            agent, router = await opened(found)
            begin = clock.now()
            slow, fast = router.names
            router.answered(slow)
            router.answered(fast, {slow: begin})
            assert router.takes(slow)
            router.answered(fast, {slow: clock.now() + 1.0})
            assert not router.takes(slow)
            await agent.close()

    run(body())


def test_a_status_4xx_of_all_servers_is_not_retried_and_ejects_none() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            for server in found:
                server.status = 400
            agent = agent_of(judge_of(found))
            agent.submit(1, samples(1))
            with pytest.raises(RewardFailed, match=r"answered 400: out of order"):
                await agent.collect(1)
            assert [len(server.bodies) for server in found] == [1, 1]  # another one might have done better
            assert sum(server.probes for server in found) == 0
            await agent.close()

    run(body())


def test_requests_wait_while_no_server_answers_and_go_on_when_one_is_back() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            for server in found:
                server.hang()
            agent = agent_of(judge_of(found))
            agent.submit(1, samples(20))
            for server in found:
                await server.until(4)
            for server in found:
                await server.stop()
            waiting = asyncio.ensure_future(agent.collect(1))
            while agent.stats()["ejections"] < 2:
                await asyncio.sleep(0.01)
            await found[1].start()
            rewards = await waiting
            assert rewards["score"].tolist() == [1.0] * 20
            assert places(rewards) == {found[1].url: 20}
            await agent.close()

    run(body())


def test_with_no_server_for_long_requests_fail_with_a_sentence(logged: list[str]) -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            pass  # they are gone
        retry = Retry(tries=2, timeout_s=1.0, deadline_s=1.0, backoff_s=0.01, max_backoff_s=0.01)
        agent = agent_of(judge_of(found), 2, retry, on_failure="drop_sample", max_failed_share=0.9)
        agent.submit(1, samples(30))
        with pytest.raises(RewardFailed, match=r"see that the judge at judge\.url is up"):
            await agent.collect(1)
        assert any("no server has answered for 1 s" in line for line in logged)
        await agent.close()

    run(body())


def test_a_hedge_goes_to_another_server() -> None:
    async def body() -> None:
        async with servers(2, score=one) as found:
            found[0].hang()
            agent = agent_of(judge_of(found), hedge_after=0.05)
            agent.submit(1, samples(1))
            rewards = await agent.collect(1)
            (record,) = rewards.meta["records"]  # with its wait in the queue, if the machine is busy
            assert (record["how"], record["endpoint"]) == ("hedged", found[1].url)
            assert "resent" not in record
            await agent.close()

    run(body())


def test_which_errors_are_of_a_lost_server() -> None:
    lost = [TimeoutError(), ConnectionResetError(), ServerGivenUp("x"), JudgeError("x", status=500)]
    assert all(map(is_lost, lost))
    busy = [JudgeError("x", status=status) for status in (400, 429, 503)]
    assert not any(map(is_lost, [ValueError(), JudgeError("no score"), *busy]))
