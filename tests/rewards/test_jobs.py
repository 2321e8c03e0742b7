"""Scoring jobs: one may serve several requests; their use of calls, and their reports."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.judge import Judge
from tests.rewards.groups.group_rig import BROKEN, Reward, agent_of, samples
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


# --- shared by several requests --------------------------------------------------------------------------------


def alike(step: int | str, texts: list[str]) -> tuple[int | str, Batch]:
    columns = {"response_text": texts, "data_source": ["d"] * len(texts), "ground_truth": ["t"] * len(texts)}
    return step, Batch(list(range(len(texts))), columns)


def test_an_ask_that_an_earlier_step_joins_goes_as_early_as_that_step() -> None:
    async def body() -> None:
        reward = Reward(**{str(n): ("after", 1.0, 0.0) for n in range(10)})
        agent = agent_of(reward, share_equal=True, limits=Limits(1))
        agent.submit(*alike(1, ["0"]))
        await asyncio.sleep(0.1)  # all others wait behind it
        agent.submit(*alike("val:1", ["7", "8"]))
        agent.submit(*alike(3, ["1", "2"]))
        agent.submit(*alike(2, ["8", "9"]))
        for step in (1, 2, 3, "val:1"):
            await agent.collect(step)
        await asyncio.sleep(10)  # in which a request that still waited would be sent
        assert reward.begun == ["0", "8", "9", "1", "2", "7"], "each once, and 8 with step 2"
        stats = agent.stats()
        assert (stats["shared"], stats["scored"], stats["running"], stats["waiting"]) == (1, 7, 0, 0)
        await agent.close()

    run_virtual(body)


def test_an_ask_that_waits_for_its_next_try_is_brought_forward_too() -> None:
    async def body() -> None:
        class Once(Reward):
            async def compute_score(self, **arguments: Any) -> Any:
                first = arguments["solution_str"] == "8" and "8" not in self.begun
                await super().compute_score(**arguments)
                await asyncio.sleep(1)
                if first:
                    raise ConnectionError
                return 1.0

        reward = Once()
        agent = agent_of(reward, share_equal=True, limits=Limits(1), retry=Retry(backoff_s=2.0))
        agent.submit(*alike("val:1", ["8"]))
        await asyncio.sleep(1.0)
        agent.submit(*alike(5, [str(n) for n in range(10, 20)]))
        await asyncio.sleep(0.01)
        agent.submit(*alike(4, ["8"]))
        await agent.collect(4)
        assert len(reward.begun) < 6, "not behind all of step 5"
        await agent.close()

    run_virtual(body)


def test_a_later_step_that_joins_does_not_hold_an_ask_back() -> None:
    async def body() -> None:
        reward = Reward(**{str(n): ("after", 1.0, 0.0) for n in range(10)})
        agent = agent_of(reward, share_equal=True, limits=Limits(1))
        agent.submit(*alike(1, ["0", "8", "1"]))
        agent.submit(*alike(2, ["8"]))
        await agent.collect(1)
        await agent.collect(2)
        assert reward.begun == ["0", "8", "1"]
        await agent.close()

    run_virtual(body)


# --- limits that would limit nothing ------------------------------------------------------------------------------


def test_limits_of_endpoints_need_a_reward_that_names_them() -> None:
    with pytest.raises(ConfigError, match=r"reward\.endpoints=\{http://a: \.\.\.\}: the reward does not say which"):
        RewardAgent(lambda **_: 1.0, limits=Limits(endpoints={"http://a": Limits(1)}))


@pytest.mark.parametrize("name", ["http://a:1/", "http://a:1/v1", "http://b:1"])
def test_a_judge_has_the_endpoint_of_its_url_and_no_other(name: str) -> None:
    judge = Judge(url="http://a:1")
    RewardAgent(judge, limits=Limits(endpoints={"http://a:1": Limits(1)}))
    with pytest.raises(ConfigError, match=r"the reward calls no such endpoint; .*http://a:1"):
        RewardAgent(judge, limits=Limits(endpoints={name: Limits(1)}))


@pytest.mark.parametrize("said", [1.0, {"score": 1.0, "tokens": 5}])
def test_a_rate_of_tokens_that_nobody_counts_is_said(logged: list[str], said: Any) -> None:
    async def body() -> None:
        agent = agent_of(Reward(_0_0=said, _0_1=said, _1_0=said, _1_1=said), limits=Limits(4, tpm=6000.0))
        agent.submit(1, samples(2))
        await agent.collect(1)
        await agent.close()

    run_virtual(body)
    words = "'Reward' has no method tokens, and its answers have no column 'tokens'."
    assert logged == ([] if isinstance(said, dict) else [f"WARNING reward.tpm limits nothing: {words}\n"])


@pytest.mark.parametrize(("used", "counted"), [(5, 20), (np.int64(5), 20), (True, 0), (5.5, 0), (None, 0)])
def test_tokens_are_counted_where_they_are_whole_numbers(used: Any, counted: int) -> None:
    async def body() -> None:
        said = {"score": 1.0, "tokens": used}
        agent = agent_of(Reward(_0_0=said, _0_1=said, _1_0=said, _1_1=said), limits=Limits(4, tpm=6000.0))
        agent.submit(1, samples(2))
        await agent.collect(1)
        assert agent.stats()["tokens"] == counted
        await agent.close()

    run_virtual(body)


# --- reports and their order ----------------------------------------------------------------------------------------


class Told:
    """Metrics that remember."""

    every_s = 1.0

    def __init__(self) -> None:
        self.all: list[Mapping[str, Any]] = []

    def report(self, stats: Mapping[str, Any]) -> None:
        self.all.append({name: stats[name] for name in ("requested", "scored", "running", "waiting", "cancelled")})


def test_metrics_are_told_of_the_last_end_too() -> None:
    async def body() -> None:
        told = Told()
        agent = agent_of(Reward(_1_1=("after", 0.5)), metrics=told)
        agent.submit(1, samples(2))
        await agent.collect(1)
        assert len(told.all) <= 1
        await asyncio.sleep(2)
        assert told.all[-1] == {"requested": 4, "scored": 4, "running": 0, "waiting": 0, "cancelled": 0}
        count = len(told.all)
        await asyncio.sleep(100)
        assert len(told.all) == count, "nothing has changed"
        agent.submit(2, samples(1, first=9))
        await agent.close()
        assert told.all[-1] == {"requested": 6, "scored": 4, "running": 0, "waiting": 0, "cancelled": 2}

    run_virtual(body)


def test_while_all_is_stuck_the_metrics_say_so() -> None:
    async def body() -> None:
        told = Told()
        agent = agent_of(Reward(_0_0="never", _0_1="never"), metrics=told, limits=Limits(2))
        agent.submit(1, samples(2))
        await asyncio.sleep(5)
        assert told.all[-1] == {"requested": 4, "scored": 0, "running": 2, "waiting": 2, "cancelled": 0}
        agent.cancel(1)
        await asyncio.sleep(5)
        assert told.all[-1] == {"requested": 4, "scored": 0, "running": 0, "waiting": 0, "cancelled": 4}
        await agent.close()

    run_virtual(body)


def test_the_requests_of_a_replaced_group_are_told_of_with_the_next_groups() -> None:
    async def body() -> None:
        agent = agent_of(Reward(_0_1=BROKEN), "replace_group")
        agent.submit(1, samples(4), extra_groups=1)
        first = await agent.collect(1, 2)
        rest = await agent.collect(1)
        found = {(r["group"], r["sample"]): r.get("how") for r in first.meta["replaced"] + rest.meta["replaced"]}
        assert found.keys() == {(0, 0), (0, 1)}
        assert found[0, 1] == "failed"
        assert rest.meta["step"]["failed"] == 1
        await agent.close()

    run_virtual(body)


# --- no hang, nothing kept ------------------------------------------------------------------------------------------


def test_who_still_waits_when_a_step_is_collected_for_the_last_time_hears_of_it() -> None:
    async def body() -> None:
        agent = agent_of(Reward())
        agent.submit(1, samples(2), more=True)
        first = asyncio.ensure_future(agent.collect(1, 2, last=True))
        second = asyncio.ensure_future(agent.collect(1, 2))
        assert len(await first) == 4
        with pytest.raises(DataflowError, match="step 1 has been collected in full"):
            await second
        await agent.close()

    run_virtual(body)


def test_an_answer_is_not_kept_behind_a_straggler() -> None:
    class Answer(dict[str, Any]):
        """A dict that can be referred to weakly."""

    refs: list[weakref.ref[Answer]] = []

    class Large(Reward):
        async def compute_score(self, **arguments: Any) -> Any:
            if arguments["solution_str"] == "0.0":
                await asyncio.sleep(50)
                return 1.0
            answer = Answer(score=1.0)
            refs.append(weakref.ref(answer))
            return answer

    async def body() -> None:
        agent = agent_of(Large(), retry=Retry(timeout_s=100.0))
        agent.submit(1, samples(1))
        agent.submit(2, samples(5, first=5))
        await agent.collect(2)
        await asyncio.sleep(1)
        assert len(refs) == 11
        gc.collect()
        assert not any(ref() is not None for ref in refs)
        await agent.close()

    run_virtual(body)


def test_a_user_object_that_does_not_close_keeps_nobody(logged: list[str]) -> None:
    class Stuck(Reward):
        async def close(self) -> None:
            await asyncio.get_running_loop().create_future()

    async def body() -> None:
        agent = agent_of(Stuck())
        agent.submit(1, samples(1))
        await agent.collect(1)
        await agent.close()
        assert asyncio.get_running_loop().time() < 11

    run_virtual(body)
    assert logged == ["WARNING reward agent: 'Stuck' has not closed within 10 s.\n"]


# --- what a reward object offers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["retry_on", "endpoint", "tokens", "usage"])
def test_what_is_asked_in_passing_must_not_be_async(name: str) -> None:
    async def later(*_: Any, **__: Any) -> Any:
        return 1

    reward = Reward()
    setattr(reward, name, later)
    with pytest.raises(ConfigError, match=f"reward 'Reward': its '{name}' is async, .*; write it as a plain def"):
        RewardAgent(reward)


@pytest.mark.parametrize("name", ["log", "post_process_scores", "tokens", "retry_on"])
def test_an_attribute_in_the_place_of_a_method_is_said(name: str) -> None:
    reward = Reward()
    setattr(reward, name, 0)
    with pytest.raises(ConfigError, match=f"reward 'Reward': its '{name}' is an int, where the agent expects a method"):
        RewardAgent(reward)


def test_what_a_try_takes_out_of_extra_info_is_there_at_the_next() -> None:
    seen: list[dict[str, Any]] = []

    async def takes(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        seen.append(dict(extra_info))
        extra_info.pop("group")
        if len(seen) < 3:
            raise ConnectionError
        return 1.0

    async def body() -> None:
        agent = agent_of(takes)
        step, batch = alike(1, ["0"])
        agent.submit(step, batch.like(**batch.columns, extra_info=[{"group": 4}]))
        assert (await agent.collect(1))["score"].tolist() == [1.0]
        await agent.close()

    run_virtual(body)
    assert seen == [{"group": 4}] * 3


def test_an_answer_that_cannot_be_read_has_failed() -> None:
    class Odd:
        shape = (1,)

        def item(self) -> float:
            raise RuntimeError("on another device")

    async def body() -> None:
        agent = agent_of(Reward(_0_0=Odd()), "drop_sample")
        agent.submit(1, samples(1))
        rewards = await agent.collect(1)
        assert rewards["kept"].tolist() == [False, True]
        await agent.close()

    run_virtual(body)


# --- a few at a time -------------------------------------------------------------------------------------------


def numbered(rows: int, first: int = 0) -> Batch:
    names = [str(number) for number in range(first, first + rows)]
    columns = {"response_text": names, "data_source": ["d"] * rows, "ground_truth": ["t"] * rows}
    return Batch(list(range(first, first + rows)), columns)


def test_an_older_steps_last_rows_go_before_a_newer_steps_first() -> None:
    async def body() -> None:
        reward = Reward(**{str(n): ("after", 1.0, 0.0) for n in range(500)})
        agent = agent_of(reward, limits=Limits(2))
        agent.submit(1, numbered(1, 999), more=True)
        for step, first, rows in (("val:1", 400, 100), (3, 200, 200), (2, 0, 200)):
            agent.submit(step, numbered(rows, first))
        for set_ in (600, 700):  # each set of a step is taken up
            agent.submit(1, numbered(100, set_), more=True)
        reward.plan |= {str(n): ("after", 1.0, 0.0) for n in range(600, 1000)}
        await agent.collect(1, 201, last=True)
        for step in (2, 3, "val:1"):
            await agent.collect(step)
        order = [int(name) for name in reward.begun]
        assert order[0] == 999
        assert sorted(order[1:3]) == [400, 600], "one slot was free before there was more of step 1"
        assert [row for row in order[1:] if row != 400] == [*range(600, 800), *range(400), *range(401, 500)]
        await agent.close()

    run_virtual(body)
