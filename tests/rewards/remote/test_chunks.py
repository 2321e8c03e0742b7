"""A step submitted to actors in chunks: only missing groups are requested again, whatever dies or is reordered."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.cluster.log import KeptLines
from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, RewardAgent
from tests.rewards.groups.group_rig import BROKEN, Reward, agent_of, samples
from tests.rewards.remote.actor_rig import Book, RemoteAgents
from tests.rigs.virtual_time import run_virtual

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]
LATE = ("after", 10)


@pytest.fixture
def remote_of(monkeypatch: pytest.MonkeyPatch) -> RemoteAgents:
    return RemoteAgents(monkeypatch, agent_of)


def busy(host: RewardAgent) -> tuple[int, int]:
    """Returns the number of live steps, and of slots in use."""
    stats = host.stats()
    return stats["steps"], stats["running"]


def names(groups: Any, n: int = 2) -> list[str]:
    return [f"{group}.{sample}" for group in groups for sample in range(n)]


def told(rewards: Batch) -> list[Any]:
    """Returns group, sample and score of each row; None of one that was left out."""
    where = [(record["group"], record["sample"]) for record in rewards.meta["records"]]
    return [
        (*at, score if score == score else None) for at, score in zip(where, rewards["score"].tolist(), strict=True)
    ]


# --- whatever happens -----------------------------------------------------------------------------------------------


class Once(Reward):
    """Is never asked for what it has answered."""

    book: Book | None = None

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        if self.book is not None:
            assert solution_str not in {f"{group}.{sample}" for _, group, sample, _ in self.book.answers}
        return await super().compute_score(data_source, solution_str, ground_truth, extra_info)


class Plan:
    """A random step: its chunks and their times, the duration of each sample, which fail, and what is collected."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        groups = dice.randint(2, 12)
        self.n = dice.randint(1, 3)
        self.rule = dice.choice(["fail", "drop_group", "drop_sample", "replace_group"])
        self.spare = dice.randint(1, groups - 1) if self.rule == "replace_group" else 0
        self.order = dice.choice(["arrival", "index"])
        self.takes = {name: ("after", dice.uniform(0, 10)) for name in names(range(groups), self.n)}
        lost = 0 if self.rule == "fail" else self.spare or 2
        for group in dice.sample(range(groups), min(groups, lost)):
            name = f"{group}.{dice.randrange(self.n)}"
            self.takes[name] = (*self.takes[name], BROKEN)
        self.sets: list[tuple[float, range]] = []
        begin = 0
        while begin < groups:
            end = dice.randint(begin + 1, groups)
            self.sets.append((dice.uniform(0, 6), range(begin, end)))
            begin = end
        self.parts: list[int] = []
        while (left := groups - self.spare - sum(self.parts)) > 0:
            self.parts.append(dice.randint(1, left))
        self.kills = [(dice.uniform(0, 20), dice.randrange(2)) for _ in range(dice.randrange(4))]
        self.delays_s = [dice.choice([0.0, dice.uniform(0, 1)]) for _ in range(1000)]

    async def collected(self, agent: RewardAgent) -> list[Batch]:
        parts: list[asyncio.Future[Batch]] = []

        def collect(takes: list[int], last: bool = False) -> None:
            parts.extend(asyncio.ensure_future(agent.collect(1, k, order=self.order, last=last)) for k in takes)

        for after_s, groups in self.sets:
            await asyncio.sleep(after_s)
            agent.submit(1, samples(len(groups), self.n, groups[0]), extra_groups=self.spare, more=True)
            if not parts:
                collect(self.parts[:-1])
        collect(self.parts[-1:], last=True)  # not before: with spare groups it may need no more than there are
        return [await part for part in parts]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_collected_is_what_an_agent_here_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(seed)

    async def here() -> list[Batch]:
        agent = agent_of(Reward(**plan.takes), plan.rule)
        parts = await plan.collected(agent)
        await agent.close()
        return parts

    async def in_actors() -> list[Batch]:
        reward, book = Once(**plan.takes), Book()
        reward.book = book
        remote_of = RemoteAgents(monkeypatch, agent_of, iter(plan.delays_s))
        agent = remote_of(reward, plan.rule, ledger=book)

        async def kill(at: float, which: int) -> None:
            await asyncio.sleep(at)
            remote_of.kill(which)

        killing = [asyncio.ensure_future(kill(*each)) for each in plan.kills]
        parts = await plan.collected(agent)
        await asyncio.gather(*killing)
        await asyncio.sleep(5)
        assert agent.stats()["actors_died"] <= len(plan.kills), "one that is dead already is not killed again"
        for host in remote_of.hosted:
            assert not host.steps.live, "nobody wants more of it"
        assert max(Counter(reward.begun).values()) <= 1 + len(plan.kills)
        await agent.close()
        return parts

    wanted, got = run_virtual(here), run_virtual(in_actors)
    assert [len(part.ids) for part in got] == plan.parts
    if plan.order == "index":
        assert [told(part) for part in got] == [told(part) for part in wanted]
    elif not plan.spare:
        assert sorted(row for part in got for row in told(part)) == sorted(row for part in wanted for row in told(part))
    for mine, theirs in zip(got, wanted, strict=True):
        assert sorted(mine.names) == sorted(theirs.names)
        assert ("step" in mine.meta) == ("step" in theirs.meta)
    assert len({group for part in got for group in part.ids}) == sum(plan.parts)
    if not plan.spare and plan.rule != "drop_group":  # which samples of a group end before it is dropped is chance
        assert got[-1].meta["step"]["scored"] == wanted[-1].meta["step"]["scored"]


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_an_actor_that_dies_between_sets_is_given_the_next_one_alone(remote_of: RemoteAgents) -> None:
    async def body() -> None:
        reward = Reward()
        agent = remote_of(reward)  # without a ledger: nothing is owed
        agent.submit(1, samples(4), more=True)
        assert (await agent.collect(1, 4)).ids == (0, 1, 2, 3)
        for number in range(2):
            remote_of.kill(number)
        await asyncio.sleep(1)
        agent.submit(1, samples(4, first=4), more=True)
        assert (await agent.collect(1, 4, last=True)).ids == (4, 5, 6, 7)
        assert sorted(reward.begun) == names(range(8))
        assert agent.stats()["actors_died"] == 2
        assert [host.steps.counts["requested"] for host in remote_of.hosted] == [4, 4]
        await agent.close()

    run_virtual(body)


def test_an_actor_that_dies_in_mid_set_hands_on_what_it_owes_of_all_sets(
    remote_of: RemoteAgents,
) -> None:
    async def body() -> None:
        reward = Reward(_2_1=LATE, _4_0=LATE)
        agent = remote_of(reward, ledger=Book())
        agent.submit(1, samples(3), more=True)
        agent.submit(1, samples(3, first=3), more=True)
        await asyncio.sleep(1)
        remote_of.kill(0)
        agent.submit(1, samples(2, first=6), more=True)  # its death is not known yet
        assert (await agent.collect(1, 8, last=True)).ids == tuple(range(8))
        # Groups 2 and 4 come from two sets; what was answered of them is in the ledger.
        assert sorted(reward.begun) == sorted([*names(range(8)), "2.1", "4.0"])
        assert agent.stats()["cached"] == 2
        await agent.close()

    run_virtual(body)


def test_actors_that_die_between_chunks_and_in_the_middle_of_one_are_given_what_is_owed(
    remote_of: RemoteAgents,
) -> None:
    async def body() -> None:
        reward = Reward(_6_1=LATE)
        agent = remote_of(reward, ledger=Book())
        got = []

        async def collect(k: int, last: bool = False) -> list[int]:
            rewards = await agent.collect(1, k, last=last)
            got.extend(told(rewards))
            return sorted(rewards.ids)

        agent.submit(1, samples(4), more=True)
        assert await collect(4) == [0, 1, 2, 3]
        remote_of.kill(0)
        await asyncio.sleep(1)
        agent.submit(1, samples(4, first=4), more=True)
        assert await collect(3) == [4, 5, 7]
        remote_of.kill(0)
        await asyncio.sleep(1)
        agent.submit(1, samples(2, first=8), more=True)
        assert await collect(3, last=True) == [6, 8, 9]
        assert sorted(got) == [(g, i, pytest.approx(g + i / 10)) for g in range(10) for i in range(2)]
        assert [name for name, count in Counter(reward.begun).items() if count > 1] == ["6.1"]
        stats = await agent.refresh()
        assert (stats["actors_died"], stats["scored"], stats["cached"]) == (2, 20, 1)
        await agent.close()

    run_virtual(body)


def test_without_a_ledger_the_death_of_an_actor_cancels_the_step_in_the_others(
    remote_of: RemoteAgents,
) -> None:
    async def body() -> None:
        reward = Reward(**dict.fromkeys(names(range(4)), "never"))
        agent = remote_of(reward)
        agent.submit(1, samples(4))
        waiting = asyncio.ensure_future(agent.collect(1))
        await asyncio.sleep(1)
        assert sorted(reward.begun) == names(range(4))
        remote_of.kill(1)
        with pytest.raises(RewardFailed, match=r"'reward 1' died with 2 groups to come .*; with a ledger"):
            await waiting
        await asyncio.sleep(1)
        assert {*names([0, 2])} <= {*reward.cancelled}
        await agent.close()

    run_virtual(body)


def test_without_a_ledger_a_death_in_mid_set_ends_the_step(remote_of: RemoteAgents) -> None:
    async def body() -> None:
        agent = remote_of(Reward(_0_1=LATE))
        agent.submit(1, samples(2), more=True)
        await asyncio.sleep(1)
        remote_of.kill(0)
        with pytest.raises(RewardFailed, match=r"'reward 0' died with 1 group to come .*; with a ledger"):
            await agent.collect(1, 3)
        with pytest.raises(RewardFailed, match="with a ledger"):
            agent.submit(1, samples(1, first=2), more=True)
        await agent.close()

    run_virtual(body)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_cancel_between_sets_ends_the_step_everywhere(remote_of: RemoteAgents) -> None:
    async def body() -> None:
        reward = Reward(_1_1="never")
        agent = remote_of(reward)
        agent.submit(1, samples(2), more=True)
        assert (await agent.collect(1, 1)).ids == (0,)
        waiting = asyncio.ensure_future(agent.collect(1, 2))
        await asyncio.sleep(1)
        agent.cancel(1)
        with pytest.raises(RewardFailed, match="step 1: its reward requests were cancelled"):
            await waiting
        await asyncio.sleep(1)
        assert reward.cancelled == ["1.1"]
        assert [busy(host) for host in remote_of.hosted] == [(0, 0)] * 2
        with pytest.raises(RewardFailed, match="step 1: its reward requests were cancelled"):
            agent.submit(1, samples(1, first=2), more=True)
        assert sorted(reward.begun) == names(range(2))
        await agent.close()

    run_virtual(body)


@pytest.mark.parametrize("more", [False, True])
def test_a_cancel_comes_after_what_it_cancels(monkeypatch: pytest.MonkeyPatch, more: bool) -> None:
    async def body() -> None:
        reward = Reward(**dict.fromkeys(names(range(4)), "never"))
        # Calls overtake each other: each actor's first set is longest on its way.
        delays_s = iter([9.0, 9.0, 5.0, 5.0, *[0.0] * 99])
        remote_of = RemoteAgents(monkeypatch, agent_of, delays_s)
        agent = remote_of(reward)
        agent.submit(1, samples(2), more=more)
        if more:
            agent.submit(1, samples(2, first=2), more=True)
        await asyncio.sleep(1)
        agent.cancel(1)
        await asyncio.sleep(20)
        assert [busy(host) for host in remote_of.hosted] == [(0, 0)] * 2
        assert sorted(reward.cancelled) == sorted(reward.begun)
        await agent.close()

    run_virtual(body)


def test_actors_share_small_sets_evenly(remote_of: RemoteAgents) -> None:
    async def body() -> None:
        agent = remote_of(Reward(), actors=3)
        begin = 0
        for groups in (1, 2, 1, 1, 4):
            agent.submit(1, samples(groups, first=begin), more=True)
            begin += groups
        await agent.collect(1, 9, last=True)
        assert [host.steps.counts["requested"] for host in remote_of.hosted] == [6, 6, 6]
        await agent.close()

    run_virtual(body)


def test_a_step_of_one_set_ends_in_its_actors_by_itself(remote_of: RemoteAgents) -> None:
    async def body() -> None:
        agent = remote_of(Reward())
        agent.submit(1, samples(3))
        assert (await agent.collect(1)).meta["step"]["scored"] == 6
        assert [host.steps.live for host in remote_of.hosted] == [{}, {}]
        await agent.close()

    run_virtual(body)


def test_limits_of_endpoints_hold_in_actors_whose_reward_names_them(remote_of: RemoteAgents) -> None:
    class Two(Reward):
        def endpoint(self, solution_str: str, **_arguments: Any) -> str:
            return "odd" if solution_str.endswith("1") else "even"

    async def body() -> None:
        limits = Limits(8, endpoints={"odd": Limits(1), "even": Limits(1)})
        agent = remote_of(Two(), limits=limits)
        assert agent.limits == limits
        agent.submit(1, samples(4))
        assert (await agent.collect(1)).ids == (0, 1, 2, 3)
        await agent.close()

    run_virtual(body)


def test_warnings_of_an_actor_reach_the_runs_log(
    monkeypatch: pytest.MonkeyPatch, logged: list[str], remote_of: RemoteAgents
) -> None:
    kept = KeptLines()
    monkeypatch.setattr("dataflow.rewards.remote.host.KEPT", kept)

    class Message:
        def __init__(self) -> None:
            self.record = {"message": "the service is slow", "level": SimpleNamespace(name="WARNING")}

    async def body() -> None:
        agent = remote_of(Reward())
        kept(Message())
        agent.submit(1, samples(2))
        await agent.collect(1)
        assert logged == ["WARNING the service is slow\n"]
        kept(Message())
        await agent.close()
        assert logged == ["WARNING the service is slow\n"] * 2, "also those after the last news"

    run_virtual(body)
