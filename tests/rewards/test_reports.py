"""What the agent reports of its requests: counts, usage, records in trace and ledger; what is shared."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.reward_agent import Limits, Retry
from dataflow.rewards.ledger import Ledger
from dataflow.stages.reward import _requests
from tests.rewards.groups.group_rig import BROKEN, Reward, agent_of, samples, scored
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


def alike(step: int | str, texts: list[str]) -> tuple[int | str, Batch]:
    columns = {"response_text": texts, "data_source": ["d"] * len(texts), "ground_truth": ["t"] * len(texts)}
    return step, Batch(list(range(len(texts))), columns)


def test_a_request_that_an_earlier_step_shares_goes_as_early_as_that_step() -> None:
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
        assert reward.begun == ["0", "8", "9", "1", "2", "7"], "each once, and 8 with step 2"
        assert (agent.stats()["shared"], agent.stats()["scored"]) == (1, 7)
        await agent.close()

    run_virtual(body)


# --- what a reward object offers -------------------------------------------------------------------------------


def test_an_estimate_that_is_none_stops_the_step() -> None:
    async def body() -> None:
        reward = Reward()
        vars(reward).update(tokens=lambda **_: -1)
        agent = agent_of(reward, limits=Limits(4, tpm=600))
        agent.submit(1, samples(1))
        with pytest.raises(DataflowError, match=r"step 1 cannot be sent: ValueError: .* returned -1; return a number"):
            await agent.collect(1)
        await agent.close()

    run_virtual(body)


@pytest.mark.parametrize(("used", "counted"), [(5, 20), (np.int64(5), 20), (True, 0), (5.5, 0), (None, 0)])
def test_tokens_are_counted_where_they_are_whole_numbers(used: Any, counted: int) -> None:
    said = {"score": 1.0, "tokens": used}
    _rewards, agent = scored(Reward(_0_0=said, _0_1=said, _1_0=said, _1_1=said), groups=2)
    assert agent.stats()["tokens"] == counted


@pytest.mark.parametrize("own", [{"lookups": 5}, {"lookups": 5, "tokens": 1}])
def test_the_usage_of_a_reward_class_joins_what_the_agent_counts(own: dict[str, int]) -> None:
    class Counted(Reward):
        def usage(self) -> dict[str, int]:
            return {name: number * len(self.begun) for name, number in own.items()}

    async def body() -> None:
        said = {"score": 1.0, "tokens": 3}
        agent = agent_of(Counted(_0_0=said, _0_1=said))
        tokens = 2 * own.get("tokens", 3)
        for step in (1, 2):
            agent.submit(step, samples(1))
            await agent.collect(step)
            stats = agent.stats()
            assert (stats["tokens"], stats["lookups"]) == (step * tokens, step * 10)
            used = agent.used(stats)  # of this step
            assert {"tokens": tokens, "lookups": 10}.items() <= used.items()
            assert not used.keys() & {"requested", "scored", "waiting", "running", "latency_s", "limit"}
        await agent.close()

    run_virtual(body)


def test_a_user_object_that_does_not_close_keeps_nobody(logged: list[str]) -> None:
    class Stuck(Reward):
        async def close(self) -> None:
            await asyncio.get_running_loop().create_future()

    scored(Stuck(), groups=1)
    assert logged == ["WARNING reward agent: 'Stuck' has not closed within 10 s.\n"]


# --- records ---------------------------------------------------------------------------------------------------


def test_the_requests_of_a_replaced_group_are_reported_with_the_next_groups() -> None:
    async def body() -> None:
        agent = agent_of(Reward(_0_1=BROKEN), "replace_group")
        agent.submit(1, samples(4), extra_groups=1)
        first, rest = await agent.collect(1, 2), await agent.collect(1)
        found = {(r["group"], r["sample"]): r.get("how") for r in first.meta["replaced"] + rest.meta["replaced"]}
        assert found.keys() == {(0, 0), (0, 1)}
        assert found[0, 1] == "failed"
        assert rest.meta["step"]["failed"] == 1
        await agent.close()

    run_virtual(body)


class Busy(Exception):
    status, retry_after = 429, 0.25


class Down(Exception):
    status = 500


def test_tries_and_why_they_ended_are_counted_for_the_samples_of_the_step() -> None:
    script: dict[str, list[Any]] = {  # then it is scored
        "0.0": [Busy(), Busy()],
        "0.1": [Down(), Down(), Down(), Busy()],
        "1.0": [TimeoutError("slow")],
    }

    class Scripted(Reward):
        async def compute_score(self, **arguments: Any) -> Any:
            if left := script.get(arguments["solution_str"]):
                raise left.pop()
            return 1.0

    retry = Retry(tries=3, backoff_s=0.0)
    rewards, agent = scored(Scripted(), "drop_sample", groups=2, retry=retry)
    counted = ("requested", "failed", "retried", "throttled", "timed_out")
    # A refusal uses up no try.
    assert [rewards.meta["step"][name] for name in counted] == [4, 1, 2 + 3 + 1, 2 + 1, 1]
    assert [agent.stats()[name] for name in counted] == [4, 1, 6, 3, 1]


@pytest.mark.parametrize("last", ["scored", "failed"])
def test_why_each_try_failed_and_how_long_it_waited_is_in_trace_column_and_ledger(tmp_path: Path, last: str) -> None:
    left = [Busy("later"), Down("crashed"), asyncio.sleep(60)]

    async def troubled(solution_str: str, **_others: Any) -> float:
        if left:
            trouble = left.pop(0)
            if isinstance(trouble, Exception):
                raise trouble
            await trouble
        return float(solution_str)

    retry = Retry(tries=4 if last == "scored" else 2, timeout_s=0.2, backoff_s=0)

    async def body() -> Any:
        agent = agent_of(troubled, "score:0", retry=retry, ledger=Ledger(tmp_path / "ledger"))
        agent.submit(1, samples(1, n=1))
        rewards = await agent.collect(1)
        await agent.close()
        return rewards.meta["records"]

    (record,) = asyncio.run(body())
    why = "HTTP 429, 0.25 s; HTTP 500, 0 s; time-out" + (", 0 s" if last == "scored" else "")
    assert (record["tries"], record["failed_tries"]) == (4 if last == "scored" else 3, why)
    with closing(sqlite3.connect(tmp_path / "ledger")) as db:
        assert db.execute("SELECT failed_tries, score IS NULL FROM request").fetchone() == (why, last == "failed")
    column = _requests(Batch([0], {}, {"records": [record]}))["request_failed_tries"]
    assert list(column) == [why]
