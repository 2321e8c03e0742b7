"""The life of a request: tries, waits, time-outs, deadlines and hedges, on a virtual clock."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RewardFailed
from dataflow.reward_agent import BadScore, Limits, Retry, RewardAgent
from dataflow.rewards.ledger import Ledger
from dataflow.usercode.calls import GRACE_S
from dataflow.usercode.failures import TimedOut, UserExit
from tests.rigs.virtual_time import run_virtual, timers

pytestmark = pytest.mark.timeout(60)

AT_ONCE: dict[str, Any] = {"backoff_s": 0.0, "max_backoff_s": 0.0}
FIX = "correct it, or catch the error there and return a score."


def error(kind: type[BaseException] = Exception, text: str = "", **attributes: Any) -> BaseException:
    made = kind(text)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


LOST, BUSY, NO = ConnectionResetError("reset"), error(status=503), ValueError("no")


@dataclass(frozen=True)
class Does:
    """What one call does: it takes its time, then returns or raises."""

    seconds: float = 1.0
    result: Any = 1.0
    error: BaseException | None = None


FOR_EVER = Does(math.inf)


@dataclass
class End:
    """How a request ended."""

    score: float = math.nan
    record: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    message: str = ""
    at: float = 0.0

    @property
    def how(self) -> str:
        return str(self.record.get("how", ""))


class Life:
    """An agent whose requests are named by their texts, each a step of its own.

    Args:
        plan: what the calls of each request do, by its name; the last one again for all that follow.
        options: of the agent.
    """

    def __init__(self, plan: dict[str, list[Does]], **options: Any) -> None:
        self.plan, self.loop = plan, asyncio.get_running_loop()
        options.setdefault("retry", Retry(**AT_ONCE))
        self.agent = RewardAgent(self, **options)
        self.begun: list[tuple[float, str]] = []
        self.cancelled: Counter[str] = Counter()
        self.now = self.most = 0
        self.ends: dict[str, End] = {}
        self.changes: list[tuple[float, int]] = []
        self.steps: dict[str, int] = {}
        self.collects: list[asyncio.Task[None]] = []

    async def compute_score(self, solution_str: str, **_: Any) -> Any:
        name, done = solution_str, len(self.times(solution_str))
        self.begun.append((self.loop.time(), name))
        self.now += 1
        self.most = max(self.most, self.now)
        does = self.plan[name][min(done, len(self.plan[name]) - 1)]
        try:
            await (asyncio.sleep(does.seconds) if does.seconds < math.inf else self.loop.create_future())
        except asyncio.CancelledError:
            self.cancelled[name] += 1
            raise
        finally:
            self.now -= 1
        if does.error is not None:
            raise does.error
        return does.result

    def tokens(self, **_: Any) -> int:
        return 0

    def ask(self, *names: str) -> None:
        for name in names:
            step = self.steps[name] = len(self.steps) + 1
            columns = {"response_text": [name], "data_source": [""], "ground_truth": [""]}
            self.agent.submit(step, Batch([0], columns))
            self.collects.append(asyncio.create_task(self._collect(step, name)))

    async def _collect(self, step: int, name: str) -> None:
        end = End()
        try:
            rewards = await self.agent.collect(step)
            end.score, end.record = float(rewards["score"][0]), rewards.meta["records"][0]
            self.changes += rewards.meta["limits"]
        except RewardFailed as failed:
            end.error, end.message = failed.__cause__, str(failed).partition(": ")[2]
        end.at = self.loop.time()
        self.ends[name] = end

    async def finish(self) -> None:
        """Waits until all requests have ended; nothing is left of them."""
        await asyncio.gather(*self.collects)
        await asyncio.sleep(2 * GRACE_S)
        stats = self.agent.stats()
        assert (stats["running"], stats["waiting"], self.now, len(self.ends)) == (0, 0, 0, len(self.steps))
        await self.agent.close()
        assert not timers(), "nothing is left that would wake the loop"

    def times(self, name: str) -> list[float]:
        return [at for at, begun in self.begun if begun == name]

    def counts(self, *names: str) -> list[int]:
        return [self.agent.stats()[name] for name in names]


def lives(
    plan: dict[str, list[Does]], then: Callable[[Life], Coroutine[Any, Any, Any]] | None = None, **options: Any
) -> Life:
    """Runs requests to their ends: all of the plan, or what ``then`` asks for."""

    async def body() -> Life:
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dataflow.system.clock.now", loop.time)
            life = Life(plan, **options)
            if then is None:
                life.ask(*plan)
            else:
                await then(life)
            await life.finish()
        return life

    return run_virtual(body)  # type: ignore[no-any-return]


def life(*does: Does, **options: Any) -> tuple[Life, End]:
    """Runs one request."""
    found = lives({"a": list(does)}, **options)
    return found, found.ends["a"]


def about(*seconds: float) -> Any:
    return pytest.approx(list(seconds), abs=0.02)


# --- tries ---------------------------------------------------------------------------------------------------


def test_tries_until_one_succeeds_and_the_waits_between_them_double() -> None:
    found, end = life(
        *(Does(error=fails) for fails in (LOST, BUSY, LOST)),
        Does(1.0, 5.0),
        retry=Retry(tries=4, backoff_s=8.0, max_backoff_s=100.0),
    )
    assert (end.score, end.record["tries"], end.record["throttled"]) == (5.0, 4, 1)
    assert found.counts("scored", "retried", "throttled") == [1, 3, 1]
    waits = [b - a - 1.0 for a, b in zip(found.times("a"), found.times("a")[1:], strict=False)]
    assert all(-1e-3 <= wait <= most + 1e-3 for wait, most in zip(waits, (8, 16, 32), strict=True))
    assert len(set(waits)) == 3, "random"
    tries = [part.partition(",")[0] for part in end.record["failed_tries"].split("; ")]
    assert tries == ["ConnectionResetError", "HTTP 503", "ConnectionResetError"]


def test_a_service_that_refuses_everything_for_a_minute_ends_no_request() -> None:
    """The four tries of a default run took three seconds of a minute of 429."""
    refuses = Does(0.1, error=error(status=429, text=""))

    async def then(life: Life) -> None:
        life.ask("a", "b")
        await asyncio.sleep(60)
        life.plan["a"] = [Does(result=3.0)] * 99

    found = lives({"a": [refuses], "b": [refuses]}, then, retry=Retry(deadline_s=600.0))
    assert (found.ends["a"].score, found.ends["b"].at > 500) == (3.0, True)
    assert "its deadline of 600 s leaves no time for another" in found.ends["b"].message
    assert 20 < len(found.times("b")) < 99, "the waits grow"


def test_a_retry_goes_before_later_requests() -> None:
    found = lives({"a": [Does(error=LOST), Does()], **{name: [Does()] for name in "bcd"}}, limits=Limits(1))
    assert [name for _at, name in found.begun] == ["a", "b", "a", "c", "d"]


@pytest.mark.parametrize(
    "fails",
    [NO, error(retry=True, fatal=True), SystemExit(3)],
    ids=["ValueError", "fatal", "SystemExit"],
)
def test_an_error_that_will_not_change_is_not_tried_again(fails: BaseException) -> None:
    found, end = life(Does(error=fails), Does())
    assert end.error is fails or isinstance(end.error, UserExit)
    assert len(found.begun) == 1
    assert "tries" not in end.message


def test_the_users_retry_on_decides() -> None:
    again = Retry(predicate=lambda error: isinstance(error, BadScore), **AT_ONCE)
    _found, end = life(Does(result=math.nan), Does(result=3), retry=again)
    assert (end.score, end.record["tries"]) == (3.0, 2)
    found, end = life(Does(error=LOST), Does(), retry=again)
    assert (end.error, len(found.begun)) == (LOST, 1)


@pytest.mark.parametrize(
    ("does", "options", "parts"),
    [
        ([Does(error=LOST), Does(error=BUSY), Does(4.0, error=NO)], {"tries": 3},
         ["failed on each of 3 tries: ConnectionResetError, HTTP 503, ValueError; it raised ValueError: no (",
          f"(last: 4.0 s); {FIX}"]),
        ([Does(error=LOST), Does(error=BUSY)], {"tries": 99, "deadline_s": 5.5},
         ["ConnectionResetError, HTTP 503 (4 times), time-out; it raised Exception", "; its deadline of 5.5 s"]),
    ],
    ids=["different", "deadline"],
)  # fmt: skip
def test_a_failure_says_what_its_tries_did(does: list[Does], options: dict[str, Any], parts: list[str]) -> None:
    _found, end = life(*does, retry=Retry(**options, **AT_ONCE))
    assert all(part in end.message for part in parts), end.message


# --- time-outs and deadlines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "options", "begins", "ends_at"),
    [
        (FOR_EVER, {"tries": 2, "timeout_s": 30.0}, (0, 30), 60.0),
        (FOR_EVER, {"tries": 9, "timeout_s": 10.0, "deadline_s": 25.0}, (0, 10, 20), 25.0),
        (FOR_EVER, {"timeout_s": None, "deadline_s": 50.0}, (0,), 50.0),
        (Does(1e6, error=LOST), {"tries": 2, "timeout_s": None, "deadline_s": None}, (0, 1e6), 2e6),
        (Does(error=error(ConnectionError, retry_after=60.0)), {"deadline_s": 30.0}, (0,), 1.0),
    ],
    ids=["time-out", "what the deadline leaves", "deadline alone", "neither", "no try that would pass it"],
)
def test_tries_end_by_their_time_out_and_the_deadline(
    does: Does, options: dict[str, Any], begins: tuple[float, ...], ends_at: float
) -> None:
    found, end = life(does, retry=Retry(**options, **AT_ONCE))
    assert found.times("a") == about(*begins)
    assert end.at == pytest.approx(ends_at, abs=0.02)
    late = does is FOR_EVER
    assert isinstance(end.error, TimedOut) == late
    assert [*found.counts("timed_out"), found.cancelled["a"]] == [len(begins) * late] * 2, "a late call's code is ended"


def test_time_in_the_queue_before_the_first_try_does_not_count() -> None:
    found = lives({name: [Does(50.0)] for name in "abc"}, limits=Limits(1), retry=Retry(deadline_s=60.0))
    assert [end.score for end in found.ends.values()] == [1.0] * 3


# --- Retry-After ---------------------------------------------------------------------------------------------


def throttled(seconds: float) -> list[Does]:
    return [Does(error=error(status=429, retry_after=seconds)), Does()]


def test_retry_after_pauses_all_calls_and_nobody_polls() -> None:
    async def then(life: Life) -> None:
        life.ask("a", "b")
        await asyncio.sleep(4)
        assert timers() == about(21, 21), "the end of the pause, and of a's wait"

    found = lives({"a": throttled(20.0), "b": [Does()]}, then, limits=Limits(1))
    assert [found.times(name) for name in "ab"] == [about(0, 22), about(21)]
    assert found.ends["b"].record["held_by"] == "slot"


def test_a_service_that_is_away_for_longer_than_the_deadline_keeps_nobody_waiting() -> None:
    found = lives({name: throttled(1e8) for name in "abc"}, limits=Limits(1), retry=Retry(deadline_s=100.0))
    assert all("its deadline of 100 s leaves no time for another" in end.message for end in found.ends.values())
    assert max(end.at for end in found.ends.values()) < 400


# --- hedges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "score", "how", "begins", "ends_at"),
    [
        ([FOR_EVER, Does(2.0, 7.0)], 7.0, "hedged", (0, 5), 7.0),
        ([Does(6.0, 3.0), FOR_EVER], 3.0, "", (0, 5), 6.0),
        ([Does(4.9, 3.0)], 3.0, "", (0,), 4.9),
        ([Does(6.0, error=NO), Does(9.0, 7.0)], 7.0, "hedged", (0, 5), 14.0),
        ([Does(6.0, error=LOST), Does(6.0, error=LOST), FOR_EVER, Does(1.0, 7.0)], 7.0, "hedged", (0, 5, 11, 16), 17.0),
        ([FOR_EVER], math.nan, "", (0, 5), 20.0),
    ],
    ids=["wins", "loses", "not needed", "first fails", "both fail, next try", "late"],
)
def test_a_slow_call_gets_a_second_one(
    does: list[Does], score: float, how: str, begins: tuple[float, ...], ends_at: float
) -> None:
    found, end = life(*does, hedge_after=5.0, retry=Retry(timeout_s=30.0, deadline_s=20.0, **AT_ONCE))
    assert [end.score, end.at] == pytest.approx([score, ends_at], abs=0.02, nan_ok=True)
    assert (end.how, found.times("a")) == (how, about(*begins))
    assert found.counts("hedged") == [len(begins) // 2], "one hedge a try"
    endless = sum(each is FOR_EVER for each in (does * 2)[: len(begins)])
    assert found.cancelled["a"] == endless, "whichever is not needed any more is cancelled"


@pytest.mark.parametrize("fails", [NO, LOST], ids=["for good", "transient"])
def test_a_hedge_that_waits_for_a_slot_does_not_outlive_its_try(fails: BaseException) -> None:
    plan = {"a": [Does(6.0, error=fails), Does()], "b": [Does(8.0)]}
    found = lives(plan, limits=Limits(2), hedge_after=5.0)
    assert (found.ends["a"].error, found.times("a")) == ((NO, about(0)) if fails is NO else (None, about(0, 8)))
    assert (found.ends["a"].how, found.counts("retried")) == ("", [int(fails is LOST)])


# --- cancel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.0, 5.5, 20.0], ids=["queued", "hedged", "backing off"])
def test_a_cancelled_step_ends_its_calls_and_frees_its_slots(at: float) -> None:
    async def then(life: Life) -> None:
        life.ask("a", "b", "c")
        await asyncio.sleep(at)
        assert life.agent.cancel(1) == 1
        begun = len(life.times("a"))
        await asyncio.sleep(500)
        assert len(life.times("a")) == begun, "nothing begins for it any more"

    found = lives(
        {"a": [Does(6.0, error=LOST), Does(6.0, error=LOST), FOR_EVER], "b": [Does(30.0)], "c": [Does()]},
        then,
        hedge_after=5.0,
        limits=Limits(3),
        retry=Retry(backoff_s=200.0, max_backoff_s=200.0),
    )
    assert found.ends["a"].message == "its reward requests were cancelled."
    assert (found.ends["b"].score, found.ends["c"].score) == (1.0, 1.0)


# --- limits that follow the service --------------------------------------------------------------------------


def test_tokens_that_a_call_used_count_for_those_behind_it() -> None:
    used = [Does(0.1, {"score": 1, "tokens": 300})]
    found = lives({str(i): used for i in range(6)}, limits=Limits(1, tpm=600))
    assert found.begun[-1][0] >= 120, "1,800 tokens at 600 a minute, though none were estimated"


def test_an_adaptive_limit_falls_on_429_and_rises_again() -> None:
    plan = {f"{i:03}": [*[Does(error=BUSY)] * (i < 10), Does()] for i in range(200)}
    found = lives(plan, limits=Limits(10, adaptive=True))
    limits = [limit for _at, limit in found.changes]
    assert (limits[0], limits[-1], max(limits)) == (7, 10, 10), "cut once for calls in flight together, then raised"
    assert (found.most, found.agent.stats()["limit"]) == (10, 10)


# --- ends, and what is left behind -------------------------------------------------------------------------------


def one(text: str = "x") -> Batch:
    return Batch([0], {"data_source": ["d"], "ground_truth": [""], "response_text": [text]})


def test_a_second_call_that_is_not_sent_takes_nothing_of_the_rate() -> None:
    """A hedge that is granted the slot that the first call leaves would halve the rate."""

    async def body() -> None:
        loop, begun = asyncio.get_running_loop(), []

        async def score(**_: Any) -> float:
            begun.append(loop.time())
            await asyncio.sleep(10)
            return 1.0

        agent = RewardAgent(score, limits=Limits(1, rpm=6), hedge_after=5.0)
        for step in range(1, 6):
            agent.submit(step, one())
        for step in range(1, 6):
            await agent.collect(step)
        assert [round(at - begun[0]) for at in begun] == [0, 10, 20, 30, 40]
        await agent.close()

    run_virtual(body)


def test_post_processing_ends_with_its_step() -> None:
    """It would hold its slot, and pay for calls, for a step that nobody collects."""

    class Reward:
        cancelled = 0

        async def compute_score(self, **_: Any) -> float:
            return 1.0

        async def post_process_scores(self, scores: list[float]) -> list[float]:
            try:
                await asyncio.sleep(50)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return scores

    async def body() -> None:
        reward = Reward()
        agent = RewardAgent(reward, limits=Limits(1))
        agent.submit(1, one())
        await asyncio.sleep(2)
        agent.cancel(1)
        await asyncio.sleep(0.1)
        assert (reward.cancelled, agent.stats()["running"]) == (1, 0)
        await agent.close()

    run_virtual(body)


def test_the_last_log_is_called_before_the_end() -> None:
    """The rewards of a run's last step would be missing in the user's log."""

    class Reward:
        logged = 0

        def compute_score(self, **_: Any) -> float:
            return 1.0

        def log(self, **_: Any) -> None:
            self.logged += 1

        def close(self) -> None:
            raise TimeoutError("the service did not answer")

    async def body() -> None:
        reward = Reward()
        agent = RewardAgent(reward)
        agent.submit(1, one())
        await agent.collect(1)
        with pytest.raises(DataflowError, match="'close' raised TimeoutError: the service did not answer"):
            await agent.close()
        assert reward.logged == 1

    asyncio.run(body())


def test_an_answer_that_comes_as_its_step_is_cancelled_is_in_the_ledger(tmp_path: Path) -> None:
    """It is paid for, and a resumed run would pay again."""
    release = threading.Event()

    async def body() -> None:
        def score(**_: Any) -> float:
            release.wait(30)
            return 0.5

        ledger = Ledger(tmp_path / "rewards.sqlite")
        agent = RewardAgent(score, ledger=ledger)
        agent.submit(1, one())
        while not agent.stats()["running"]:
            await asyncio.sleep(0.01)
        agent.cancel(1)
        release.set()
        while agent.stats()["running"]:
            await asyncio.sleep(0.01)
        await agent.close()

        again = RewardAgent(score, ledger=Ledger(tmp_path / "rewards.sqlite"))
        again.submit(1, one())
        assert (await again.collect(1))["score"].tolist() == [0.5]
        assert again.stats()["cached"] == 1
        await again.close()

    asyncio.run(body())
