"""The agent in Ray actors: the same groups and scores as locally, one job's limits, and nothing lost with an actor."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.cluster.pickling import pickled
from dataflow.config.reward import RewardConfig
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.executors.inline import InlineExecutor
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Hosted
from dataflow.policy import SchedulingPolicy
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.ledger.ledger import Ledger
from dataflow.rewards.limits.shared import start_limits
from dataflow.rewards.remote import agent as remote_agent
from dataflow.rewards.remote.agent import RemoteAgent
from dataflow.rewards.remote.host import RewardHost, needed
from dataflow.running.services.agent import host_agent
from tests.executors import test_streaming as streaming
from tests.rigs.fake_engine import FakeRollout

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]


def run(test: Callable[[], Coroutine[Any, Any, None]], deadline_s: float = 60.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(deadline_s):
            await test()

    asyncio.run(limited())


def samples(groups: int, n: int = 2, first: int = 0, step: int = 0) -> Batch:
    rows = [(g, i) for g in range(first, first + groups) for i in range(n)]
    columns = {
        "response_text": [f"{step}/{g}.{i}" for g, i in rows],
        "data_source": ["d"] * len(rows),
        "ground_truth": [str(1000 * step + g + i / 10) for g, i in rows],
        "extra_info": [{"group": g} for g, _ in rows],
        "not_sent": [object] * len(rows),
    }
    return Batch([g for g, _ in rows], columns)


class Judge:
    """Lives in the test: knows what was asked and how many at once, and answers when it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun: list[float] = []
        self.now = self.most = 0
        self.held: set[str] = set()
        self.delay_s = 0.0
        self.changed = asyncio.Condition()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text, truth = (await reader.readline()).decode().split()
        self.asked.append(text)
        self.begun.append(time.time())
        self.now += 1
        self.most = max(self.most, self.now)
        await self._tell()
        gone = asyncio.ensure_future(reader.read())
        held = asyncio.ensure_future(self._until(lambda: not any(text.startswith(name) for name in self.held)))
        await asyncio.wait([gone, held], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        for task in (gone, held):
            task.cancel()
        writer.write(truth.encode())
        writer.close()
        await self._tell()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _until(self, true: Callable[[], Any]) -> None:
        async with self.changed:
            await self.changed.wait_for(true)

    async def until(self, true: Callable[[], Any]) -> None:
        await self._until(true)

    async def let(self) -> None:
        self.held = set()
        await self._tell()


@asynccontextmanager
async def judging() -> AsyncIterator[tuple[Judge, int]]:
    judge = Judge()
    server = await asyncio.start_server(judge.answer, "127.0.0.1", 0)
    async with server:
        yield judge, server.sockets[0].getsockname()[1]


def asking(port: int, ledger: str | None = None, **options: Any) -> RewardAgent:
    """An agent that asks the judge."""

    async def compute_score(solution_str: str, ground_truth: str, **_others: Any) -> dict[str, Any]:
        if ground_truth == "bad":
            raise ValueError("no answer")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{solution_str} {ground_truth}\n".encode())
            return {"score": float(await reader.read()), "query": solution_str}
        finally:
            writer.close()

    book = Ledger(ledger, "run") if ledger else None
    return RewardAgent(compute_score, ledger=book, retry=Retry(tries=1), **options)


def scoring(**options: Any) -> RewardAgent:
    """An agent without outside services; some samples have a further column, and some fail."""

    async def compute_score(ground_truth: str, extra_info: Any, **_others: Any) -> Any:
        score = float(ground_truth)
        if extra_info["group"] in FAILING and score % 1 == 0:
            raise ValueError("no answer")
        return {"score": score, "odd": True} if extra_info["group"] % 2 else score

    return RewardAgent(compute_score, retry=Retry(tries=1), **options)


FAILING = (13, 15)


class Handles:
    """The actors of agents, in the order in which they were started."""

    def __init__(self) -> None:
        self.rewards: list[Any] = []
        self.limits: list[Any] = []

    def __enter__(self) -> Handles:
        self._patches = pytest.MonkeyPatch()
        start, start_limits = remote_agent.start, remote_agent.start_limits

        def kept(options: Mapping[str, Any]) -> Any:
            self.rewards.append(start(options))
            return self.rewards[-1]

        def limits_kept(limits: Limits) -> tuple[Any, Any]:
            actor, address = start_limits(limits)
            self.limits.append(actor)
            return actor, address

        self._patches.setattr(remote_agent, "start", kept)
        self._patches.setattr(remote_agent, "start_limits", limits_kept)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()


@pytest.fixture
def handles() -> Iterator[Handles]:
    with Handles() as found:
        yield found


@asynccontextmanager
async def remote(factory: Callable[..., RewardAgent], **options: Any) -> AsyncIterator[RemoteAgent]:
    agent = RemoteAgent(factory, **options)
    try:
        yield agent
    finally:
        await agent.close()


@pytest.fixture(scope="module")
def running(local_ray: None) -> Iterator[tuple[asyncio.Runner, Judge, RemoteAgent, Handles]]:
    """An agent of two actors for the tests that kill none, its judge, and the event loop of both."""
    with asyncio.Runner() as runner:

        async def start() -> tuple[Judge, asyncio.Server, RemoteAgent]:
            judge = Judge()
            server = await asyncio.start_server(judge.answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            return judge, server, RemoteAgent(partial(asking, port, limits=Limits(6)), actors=2)

        with Handles() as handles:
            judge, server, agent = runner.run(start())
        yield runner, judge, agent, handles
        runner.run(agent.close())
        server.close()


@pytest.fixture
def actors(running: tuple[asyncio.Runner, Judge, RemoteAgent, Handles]) -> Handles:
    """The actors of that agent."""
    return running[-1]


@pytest.fixture
def here(running: tuple[asyncio.Runner, Judge, RemoteAgent, Handles]) -> Callable[..., None]:
    """Runs a test of that agent."""
    runner, judge, agent, _handles = running
    judge.asked, judge.held, judge.delay_s, judge.most = [], set(), 0.0, 0

    async def limited(test: Callable[[Judge, RemoteAgent], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.timeout(60):
            await test(judge, agent)

    return lambda test: runner.run(limited(test))


def scores(rewards: Batch) -> dict[tuple[int, int], float]:
    where = [(record["group"], record["sample"]) for record in rewards.meta["records"]]
    assert [group for group, _sample in where] == rewards.groups.tolist()
    return dict(zip(where, rewards["score"].tolist(), strict=True))


def expected(groups: Any, n: int = 2, step: int = 0) -> Any:
    return pytest.approx({(g, i): 1000 * step + g + i / 10 for g in groups for i in range(n)})


# --- the same as here -----------------------------------------------------------------------------------------------


def test_groups_scores_and_columns_are_those_of_a_local_agent() -> None:
    async def collected(agent: RewardAgent) -> list[Batch]:
        agent.submit(1, samples(11, 3, first=10))
        parts = [await agent.collect(1, 4, "index"), await agent.collect(1, 6, "index"), await agent.collect(1)]
        agent.submit("val:1", samples(3))
        return [*parts, await agent.collect("val:1")]

    async def body() -> None:
        factory = partial(scoring, on_failure="drop_group", max_failed_share=1.0)
        alone = factory()
        wanted = await collected(alone)
        async with remote(factory, actors=2) as agent:
            got = await collected(agent)
            stats = agent.stats()
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.groups.tolist() == theirs.groups.tolist()
            assert sorted(mine.names) == sorted(theirs.names)
            for name in theirs.names:
                assert str(list(mine[name])) == str(list(theirs[name]))
        for mine, theirs in ((got[2], wanted[2]), (got[3], wanted[3])):
            assert {k: v for k, v in mine.meta["step"].items() if "latency" not in k} == {
                k: v for k, v in theirs.meta["step"].items() if "latency" not in k
            }
        told = alone.stats()
        same = ("requested", "scored", "failed", "cancelled", "cached", "shared", "steps", "limit")
        assert {name: stats[name] for name in same} == {name: told[name] for name in same}
        assert stats["latency_s"].keys() == told["latency_s"].keys()
        await alone.close()

    run(body)


def test_the_first_groups_to_finish_come_first_whichever_actor_has_them(here: Callable[..., None]) -> None:
    async def body(judge: Judge, agent: RemoteAgent) -> None:
        judge.held = {"10/0.", "10/1.", "10/2.", "10/5."}
        agent.submit(10, samples(8, n=1, step=10))
        first = await agent.collect(10, 4)
        assert scores(first) == expected((3, 4, 6, 7), n=1, step=10)
        rest = asyncio.ensure_future(agent.collect(10))
        await judge.let()
        assert scores(await rest) == expected((0, 1, 2, 5), n=1, step=10)
        assert first["query"].tolist() == [f"10/{g}.0" for g in (3, 4, 6, 7)]

    here(body)


def test_steps_are_never_mixed_and_no_more_is_in_flight_than_the_job_may(
    here: Callable[..., None], actors: Handles
) -> None:
    async def body(judge: Judge, agent: RemoteAgent) -> None:
        judge.delay_s = 0.005
        for step in (1, 2, 3):
            agent.submit(step, samples(10, step=step))
        agent.submit("val", samples(4, step=9))
        parts = {step: [agent.collect(step, 2) for _ in range(5)] for step in (3, 1, 2)}
        for step, part in parts.items():
            got: dict[tuple[int, int], float] = {}
            for rewards in await asyncio.gather(*part):
                assert not got.keys() & scores(rewards).keys()
                got |= scores(rewards)
            assert got == expected(range(10), step=step)
        assert scores(await agent.collect("val")) == expected(range(4), step=9)
        assert Counter(judge.asked).most_common(1)[0][1] == 1
        assert judge.most == 6
        assert (await actors.limits[0].stats.remote())["peak"] == 6

    here(body)


def test_fewer_groups_than_actors(here: Callable[..., None]) -> None:
    async def body(_judge: Judge, agent: RemoteAgent) -> None:
        agent.submit(20, samples(1, step=20))
        rewards = await agent.collect(20)
        assert scores(rewards) == expected([0], step=20)
        assert rewards.meta["step"]["scored"] == 2

    here(body)


def test_samples_that_an_agent_refuses_are_refused_here(here: Callable[..., None]) -> None:
    async def body(_judge: Judge, agent: RemoteAgent) -> None:
        with pytest.raises(DataflowError, match="no column 'ground_truth'"):
            agent.submit(30, Batch([0], {"response_text": ["x"], "data_source": ["d"]}))
        agent.submit(31, samples(1, step=31))
        with pytest.raises(DataflowError, match="was submitted before"):
            agent.submit(31, samples(1))
        await agent.collect(31)
        agent.submit(32, Batch([0], {"responses": ["x"], "data_source": ["d"], "ground_truth": ["0"]}))
        with pytest.raises(RewardFailed, match="no column 'response_text'"):
            await agent.collect(32)

    here(body)


def test_a_step_that_fails_in_one_actor_has_failed_in_all_and_others_go_on(here: Callable[..., None]) -> None:
    async def body(judge: Judge, agent: RemoteAgent) -> None:
        judge.held = {"40/"}
        bad = samples(2, step=40)
        truths = [*bad["ground_truth"][:-1], "bad"]
        agent.submit(40, bad.merge(bad.like(ground_truth=truths)))
        agent.submit(41, samples(8, step=41))
        with pytest.raises(RewardFailed, match=r"sample 1 of group 1 of step 40: 'compute_score' raised .*no answer"):
            await agent.collect(40)
        assert scores(await agent.collect(41)) == expected(range(8), step=41)
        await judge.until(lambda: judge.now == 0)  # those of the other actor have been cancelled
        with pytest.raises(RewardFailed, match=r"of step 40: .*no answer"):
            await agent.collect(40)

    here(body)


def test_a_cancelled_step_is_cancelled_in_the_actors(here: Callable[..., None]) -> None:
    async def body(judge: Judge, agent: RemoteAgent) -> None:
        judge.held = {"50/"}
        before = agent.stats()["cancelled"]
        agent.submit(50, samples(8, step=50))
        agent.submit(51, samples(4, step=51))
        await judge.until(lambda: judge.now == 6)
        assert agent.cancel(50) == 16
        with pytest.raises(RewardFailed, match="cancelled"):
            await agent.collect(50)
        assert scores(await agent.collect(51)) == expected(range(4), step=51)
        await judge.until(lambda: judge.now == 0)
        assert sum(text.startswith("50/") for text in judge.asked) < 16
        stats = await agent.refresh()
        assert (stats["cancelled"] - before, stats["running"], stats["steps"]) == (16, 0, 0)

    here(body)


def test_failed_groups_are_replaced_by_any_actors() -> None:
    async def body() -> None:
        factory = partial(scoring, on_failure="replace_group", max_failed_share=1.0)
        async with remote(factory, actors=2) as agent:
            # 13 and 15 are in the same actor; the spare groups are the step's, wherever they are.
            agent.submit(1, samples(8, first=10), extra_groups=2)
            rewards = await agent.collect(1)
            assert scores(rewards) == expected((10, 11, 12, 14, 16, 17))
            assert "kept" not in rewards
            with pytest.raises(DataflowError, match="collected in full"):
                await agent.collect(1)
            agent.submit(2, samples(8, first=10), extra_groups=1)
            with pytest.raises(RewardFailed, match=r"step 2: 2 groups failed, one more than .* of step 2: .*no answer"):
                await agent.collect(2)

    run(body)


# --- sets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "order"), [(60, "arrival"), (61, "index")])
def test_sets_come_while_others_are_collected(
    here: Callable[..., None], step: int, order: Any, actors: Handles
) -> None:
    async def body(judge: Judge, agent: RemoteAgent) -> None:
        judge.held = {f"{step}/1.", f"{step}/6."}
        submit = partial(samples, n=1, step=step)
        agent.submit(step, submit(3), more=True)
        parts = [asyncio.ensure_future(agent.collect(step, k, order, last=k == 4)) for k in (2, 3, 4)]
        if order == "arrival":
            assert scores(await parts[0]) == expected((0, 2), n=1, step=step)
        agent.submit(step, submit(1, first=3), more=True)
        agent.submit(step, submit(2, first=4), more=True)
        if order == "arrival":
            assert scores(await parts[1]) == expected((3, 4, 5), n=1, step=step)
        agent.submit(step, submit(3, first=6), more=True)
        await judge.until(lambda: len(judge.asked) == 9)
        await judge.let()
        got = [await part for part in parts]
        ids = [(0, 2), (3, 4, 5), (1, 6, 7, 8)] if order == "arrival" else [(0, 1), (2, 3, 4), (5, 6, 7, 8)]
        assert [scores(part) for part in got] == [expected(groups, n=1, step=step) for groups in ids]
        assert ["step" in part.meta for part in got] == [False, False, True]
        assert Counter(judge.asked).most_common(1)[0][1] == 1
        await over(actors)

    here(body)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_cancel_ends_all_sets_of_a_step(here: Callable[..., None], at_once: bool, actors: Handles) -> None:
    async def body(judge: Judge, agent: RemoteAgent) -> None:
        step = 70 + at_once
        judge.held = {f"{step}/"}
        agent.submit(step, samples(1, step=step), more=True)
        agent.submit(step, samples(2, first=1, step=step), more=True)
        waiting = asyncio.ensure_future(agent.collect(step, 1))
        if not at_once:
            await judge.until(lambda: judge.now == 6)
        await asyncio.sleep(0)
        assert agent.cancel(step) == 6
        with pytest.raises(RewardFailed, match="cancelled"):
            await waiting
        with pytest.raises(RewardFailed, match="cancelled"):
            agent.submit(step, samples(1, first=3, step=step), more=True)
        await over(actors)
        await judge.until(lambda: judge.now == 0)

    here(body)


async def over(actors: Handles) -> None:
    """Waits until no actor has a step."""
    while sum([(await actor.stats.remote())["steps"] for actor in actors.rewards]):
        await asyncio.sleep(0.01)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_an_agent_that_is_killed_frees_its_permits_and_the_other_goes_on() -> None:
    async def body() -> None:
        import ray

        async with judging() as (judge, port):
            limits = Limits(3)
            server, address = start_limits(limits)
            blob = pickled(Hosted("a", asking, {"port": port, "limits": limits}), {})
            a, b = (ray.remote(num_cpus=0)(RewardHost).remote() for _ in range(2))
            for name, actor in {"a": a, "b": b}.items():
                await actor.build.remote(blob, name, address)
            judge.held = {"0/"}
            await a.submit.remote(1, samples(4))
            await judge.until(lambda: judge.now == 3)
            await b.submit.remote(2, samples(2, first=100, step=1))
            assert (await server.stats.remote())["holders"].get("a") == 3
            ray.kill(a)
            got: set[int] = set()
            while len(got) < 2:
                got |= {record["group"] for arrival in (await b.news.remote())[0] for record in arrival.records}
            assert got == {100, 101}
            assert (await server.stats.remote())["holders"] == {"b": 0}

    run(body)


def test_all_actors_have_one_rate_and_the_death_of_the_limits_is_told(handles: Handles) -> None:
    async def body() -> None:
        import ray

        limits = Limits(64, rpm=1200)
        async with judging() as (judge, port), remote(partial(asking, port, limits=limits), actors=2) as agent:
            submitted = time.time()
            agent.submit(1, samples(20))
            await agent.collect(1)
            # 20 a second, as many at once. The first may begin late, but none before it is submitted.
            assert max(judge.begun) - submitted >= 0.9
            assert (await agent.refresh())["rate_limit_wait_s"] > 0.5
            judge.held = {"2/"}
            agent.submit(2, samples(2, step=2))
            waiting = asyncio.ensure_future(agent.collect(2))
            await judge.until(lambda: judge.now >= 2)
            ray.kill(handles.limits[0])
            with pytest.raises(RewardFailed, match=r"shared (reward )?limits"):
                await waiting
            with pytest.raises(RewardFailed, match=r"shared (reward )?limits"):
                agent.submit(3, samples(1))

    run(body)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_an_actor_that_dies_is_replaced_and_nothing_is_lost_or_paid_for_twice(tmp_path: Path, handles: Handles) -> None:
    async def body() -> None:
        import ray

        async with judging() as (judge, port):
            factory = partial(asking, port, str(tmp_path / "ledger.sqlite"), limits=Limits(64))
            async with remote(factory, actors=2, restarts=1) as agent:
                judge.held = {"1/3.", "1/6.1", "2/"}
                agent.submit(1, samples(8, step=1))
                agent.submit(2, samples(4, step=2))
                first = await agent.collect(1, 3)
                await judge.until(lambda: len(judge.asked) == 24 and judge.now == 11)
                book = Ledger(tmp_path / "ledger.sqlite", "run")
                while book.totals()["answered"] < 13:
                    await asyncio.sleep(0.01)
                ray.kill(handles.rewards[0])
                await judge.until(lambda: judge.now <= 6)
                rest = asyncio.ensure_future(agent.collect(1))
                await judge.let()
                got = scores(first) | scores(await rest)
                assert got == expected(range(8), step=1)
                assert scores(await agent.collect(2)) == expected(range(4), step=2)
                twice = {text for text, count in Counter(judge.asked).items() if count > 1}
                # Those of actor 0 (every second group) that the judge had not answered.
                assert twice == {"1/6.1", "2/0.0", "2/0.1", "2/2.0", "2/2.1"}
                stats = await agent.refresh()
                assert (stats["actors_died"], stats["scored"]) == (1, 24)
                agent.submit(3, samples(4, step=3))
                assert scores(await agent.collect(3)) == expected(range(4), step=3)
                judge.held = {"4/"}  # ray.kill returns before its victim has died, which may answer once more
                ray.kill(handles.rewards[1])
                with pytest.raises(RewardFailed, match="after 1 that were replaced"):
                    await agent.collect(agent.submit(4, samples(2, step=4)).step)

    run(body)


async def lasting(actor: Any) -> None:
    while True:  # ray.kill returns before its victim has died, which may answer some more
        await actor.stats.remote()


def test_close_ends_the_actors_and_all_who_wait(handles: Handles) -> None:
    async def body() -> None:
        from ray.exceptions import RayActorError

        async with judging() as (judge, port):
            agent = RemoteAgent(partial(asking, port), actors=2)
            judge.held = {"0/"}
            agent.submit(0, samples(4))
            waiting = asyncio.ensure_future(agent.collect(0))
            await judge.until(lambda: judge.now == 8)
            await agent.close()
            await agent.close()
            with pytest.raises(RewardFailed, match="closed"):
                await waiting
            for actor in [*handles.limits, *handles.rewards]:
                with pytest.raises(RayActorError):
                    await lasting(actor)
            await judge.until(lambda: judge.now == 0)

    run(body)


def test_an_agent_that_cannot_be_built_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match=r"reward\.on_failure=drop_sampel is unknown"):
        RemoteAgent(partial(scoring, on_failure="drop_sampel"))
    with pytest.raises(ConfigError, match="actors=0"):
        RemoteAgent(scoring, actors=0)


# --- runs -----------------------------------------------------------------------------------------------------------


def rating() -> RewardAgent:
    async def compute_score(ground_truth: str, **_others: Any) -> float:
        await asyncio.sleep(0.01 * (int(ground_truth) % 3))
        return float(ground_truth)

    return RewardAgent(compute_score)


def rating_in_two_actors() -> RemoteAgent:
    return RemoteAgent(rating, actors=2)


@pytest.mark.parametrize(("executor", "order"), [("inline", "index"), ("ray", "arrival")])
def test_a_run_that_streams_has_its_rewards_from_two_actors(
    executor: str, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "agent", rating_in_two_actors)
    policy = SchedulingPolicy(4, 1, order, stream_rollout=True)
    runs = RayExecutor(num_cpus=2) if executor == "ray" else InlineExecutor()
    engine = Hosted("rollout", FakeRollout, concurrent=True)
    _trace, trained, _asked = streaming.run(runs, policy, engine, steps=2, spare=2)
    assert len(trained) == 2 * 4
    for at in (0, 4):
        groups = [group for ids, _scores in trained[at : at + 4] for group in ids]
        assert len(set(groups)) == 8
        assert order == "arrival" or groups == list(range(8))


def test_token_ids_travel_small() -> None:
    ids = torch.tensor([[70, 71, 0], [72, 2**31 - 1, 5]])
    columns = {"responses": ids, "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    columns |= {"data_source": ["d", "d"], "ground_truth": ["0", "1"], "finish_reason": ["stop", "length"]}
    sent = needed(Batch([0, 1], columns))
    assert list(sent["finish_reason"]) == ["stop", "length"]
    written = Batch([0, 1], columns | {"response_text": ["x", "y"]})
    assert "responses" not in needed(written)
    assert "responses" in needed(written, ids=True)
    assert torch.equal(sent["responses"], ids)
    assert sent["responses"].dtype == torch.int32
    assert sent["response_mask"].tolist() == [[True, True, False], [True, True, True]]


def test_a_run_has_as_many_actors_as_its_configuration_says(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "import os, sys\n\nREADY = 'torch' in sys.modules\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(ground_truth), 'pid': os.getpid(), 'ready': READY}\n"
    )
    custom = {"path": str(file), "name": "compute_score", "reward_kwargs": {}}

    async def body() -> None:
        agent = host_agent(RewardConfig(actors=2), custom=custom, default={}, ledger=str(tmp_path / "rewards.sqlite"))
        agent.submit(1, samples(4, step=1))
        rewards = await agent.collect(1)
        assert scores(rewards) == expected(range(4), step=1)
        assert len(set(rewards["pid"])) == 2
        assert all(rewards["ready"]), "a step's first tensors need not wait for the import of torch"
        await agent.close()

    run(body)
