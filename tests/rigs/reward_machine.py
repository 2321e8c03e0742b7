"""The reward agent driven at random (submit, collect, cancel, failures, restarts) against a plain model of it.

The agent's clock stands still unless the machine moves it: time-outs and waits are events like all others, and an
example takes no longer than its work. A restart is a new agent on the same ledger.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.ledger import Ledger
from tests.rigs.reward_gate import Call, Clock, Fatal, Gate, Lost, Throttled
from tests.rigs.reward_model import DEADLINE, POST, TIMEOUT, TRIES, Model, Row, Step, Waiter

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

RULES = ("fail", "score:-7", "drop_sample", "drop_group", "replace_group")
MOST_OPEN = 40
RARELY = st.sampled_from([False, False, False, True])
"""For what ends much at once, so that the rest gets somewhere."""
STATS = ("requested", "scored", "failed", "cancelled", "cached", "shared", "retried", "timed_out", "throttled")


async def add(scores: list[float]) -> list[float]:
    return [score + POST for score in scores]


class Machine(RuleBasedStateMachine):
    on_failure = "fail"
    share_equal = False

    @initialize(
        concurrency=st.sampled_from([1, 3, 8, 64]),
        post=st.booleans(),
        cache=st.booleans(),
        most=st.sampled_from([1.0, 0.4]),
    )
    def begin(self, concurrency: int, post: bool, cache: bool, most: float) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="reward-machine-"))
        self.loop = Clock()
        self.concurrency = concurrency
        self.post = post and concurrency > MOST_OPEN  # else a group would wait for a slot before it is whole
        self.cache = cache and self.share_equal
        self.most = most
        self.journal: dict[Any, float] = {}
        self.plans: dict[int | str, tuple[dict[int, list[tuple[str, float]]], int]] = {}
        self.collected: set[tuple[int | str, int]] = set()
        self.waiters: list[tuple[Step, Waiter]] = []
        self.numbers = 0
        self.start()

    def start(self) -> None:
        self.model = Model(self.on_failure, self.share_equal, self.most, self.post, self.journal, self.cache)
        self.gate = Gate(self.model, self.loop)
        if self.post:
            self.gate.post_process_scores = add  # type: ignore[attr-defined]
        self.agent = RewardAgent(
            self.gate,
            limits=Limits(self.concurrency),
            retry=Retry(tries=TRIES, timeout_s=TIMEOUT, deadline_s=DEADLINE, backoff_s=0.0),
            on_failure=self.on_failure,
            max_failed_share=self.most,
            ledger=Ledger(self.directory / "ledger.db", "run", cache=self.cache),
            share_equal=self.share_equal,
        )

    # --- what happens -------------------------------------------------------------------------------------

    def fits(self) -> bool:
        return len(self.model.open) <= MOST_OPEN - 18

    @precondition(lambda self: self.fits() and len(self.live()) < 3)
    @rule(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
        spare=st.integers(0, 2),
        validation=st.booleans(),
        pooled=st.lists(st.booleans(), min_size=18, max_size=18),
    )
    def submit(self, sizes: list[int], spare: int, validation: bool, pooled: list[bool]) -> None:
        self.numbers += 1
        key: int | str = f"val:{self.numbers}" if validation else self.numbers
        plan: dict[int, list[tuple[str, float]]] = {}
        draws = iter(pooled)
        for group, size in enumerate(sizes):
            plan[group] = []
            for sample in range(size):
                score = float(64 * self.numbers + 8 * group + sample)
                text = f"{key}.{group}.{sample}"
                if next(draws):
                    text, score = f"pool {int(score) % 5}", -float(int(score) % 5)
                plan[group].append((text, score))
        self.plans[key] = plan, 0 if validation else min(spare, len(sizes) - 1)
        self.send(key)

    def send(self, key: int | str) -> None:
        """Submits what has not been collected of a step."""
        plan, spare = self.plans[key]
        groups = {
            group: [Row(key, group, sample, *what) for sample, what in enumerate(rows)]
            for group, rows in plan.items()
            if (key, group) not in self.collected
        }
        rows = [row for rows in groups.values() for row in rows]
        batch = Batch(
            [row.group for row in rows],
            {
                "response_text": [row.text for row in rows],
                "data_source": ["d"] * len(rows),
                "ground_truth": ["t"] * len(rows),
                "extra_info": [{} if self.share_equal else {"at": row.at} for row in rows],
            },
        )
        if self.model.halted:
            with pytest.raises(RewardFailed, match=self.model.halted):
                self.within(lambda: self.agent.submit(key, batch, extra_groups=spare))
            return
        self.model.submit(key, groups, spare)
        ticket = self.within(lambda: self.agent.submit(key, batch, extra_groups=spare))
        assert (ticket.groups, ticket.requests) == (tuple(groups), len(rows))

    def calls(self) -> bool:
        return bool(self.gate.calls)

    def end_call(self, data: st.DataObject, how: str, result: Any, wait: float = 0.0) -> None:
        call = data.draw(st.sampled_from(self.gate.calls))
        self.model.ended(call.key, how, self.loop.now, wait)
        if isinstance(result, Exception):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)

    @precondition(calls)
    @rule(data=st.data(), many=st.integers(1, 12))
    def score(self, data: st.DataObject, many: int) -> None:
        for _ in range(many):
            if self.gate.calls:  # one score may end a step, and with it other calls
                self.score_call(data.draw(st.sampled_from(self.gate.calls)))

    def score_call(self, call: Call) -> None:
        row = self.model.asks[call.key].rows[0]
        self.model.ended(call.key, "scored", self.loop.now)
        call.future.set_result({"score": row.score, "note": row.text})
        self.settled()

    @precondition(calls)
    @rule(data=st.data(), what=st.sampled_from([ValueError("no"), math.nan, None, (1.0, "query"), {"scores": 1}]))
    def fail(self, data: st.DataObject, what: Any) -> None:
        self.end_call(data, "failed", what)

    @precondition(calls)
    @rule(data=st.data(), wait=st.sampled_from([0.0, 3.0, 24.0]), throttled=st.booleans())
    def lose(self, data: st.DataObject, wait: float, throttled: bool) -> None:
        wait = 0.0 if self.post else wait  # a pause would hold up the post-processing too
        self.end_call(data, "throttled" if throttled else "lost", (Throttled if throttled else Lost)(wait), wait)

    @precondition(lambda self: self.gate.calls and self.numbers > 3)
    @rule(data=st.data(), really=RARELY, indeed=RARELY)
    def end_all(self, data: st.DataObject, really: bool, indeed: bool) -> None:
        if really and indeed:
            self.end_call(data, "fatal", Fatal("the budget is spent"))

    @rule(seconds=st.sampled_from([1, 2, 3, 12]))
    def wait(self, seconds: int) -> None:
        self.wait_until(self.loop.now + seconds)

    def wait_until(self, target: float) -> None:
        while self.loop.now < target:
            times = [call.limit for call in self.gate.calls]
            times += [time for ask in self.model.asks.values() if ask.tries for time in (ask.until, ask.deadline)]
            self.loop.now = min(time for time in [*times, self.model.paused, target] if time > self.loop.now)
            self.time_out()
            self.settled()

    def time_out(self) -> None:
        for call in list(self.gate.calls):
            if call.limit <= self.loop.now and call.key in self.model.asks:
                self.model.ended(call.key, "timed out", self.loop.now)
        self.model.late(self.loop.now)

    def live(self) -> list[Step]:
        return [step for step in self.model.steps.values() if not step.over]

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data(), order=st.sampled_from(["arrival", "index"]), beyond=st.integers(0, 9))
    def collect(self, data: st.DataObject, order: Any, beyond: int) -> None:
        step = data.draw(st.sampled_from(self.live()))
        if step.left < 1 or not beyond:
            for k, message in ((step.left + 1, "left to collect"), (0, "left to collect"), (None, "being collected")):
                if k is not None or not step.left:
                    with pytest.raises(DataflowError, match=message):
                        self.loop.run_until_complete(self.agent.collect(step.key, k, order))
            return
        k = data.draw(st.none() | st.integers(1, step.left))
        self.wait_for(step, k, order)

    def wait_for(self, step: Step, k: int | None, order: Any) -> None:
        waiter = Waiter(step.left if k is None else k, order)
        step.waiters.append(waiter)
        self.model.serve(step)
        waiter.task = self.loop.create_task(self.agent.collect(step.key, k, order))
        self.waiters.append((step, waiter))

    @precondition(lambda self: any(not step.over for step, _ in self.waiters))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        step, waiter = data.draw(st.sampled_from([pair for pair in self.waiters if not pair[0].over]))
        self.waiters.remove((step, waiter))
        step.waiters.remove(waiter)
        self.model.serve(step)
        waiter.task.cancel()

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data(), really=RARELY)
    def cancel(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        step = data.draw(st.sampled_from(self.live()))
        wanted = sum(row.step == step.key for row in self.model.open)
        self.model.end(step, "its reward requests were cancelled")
        assert self.within(lambda: self.agent.cancel(step.key)) == wanted
        assert self.within(lambda: self.agent.cancel(step.key)) == 0

    @precondition(lambda self: self.numbers)
    @rule(data=st.data(), really=RARELY)
    def restart(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        before = self.model
        self.close()
        self.start()
        for key, (plan, spare) in self.plans.items():
            old = before.steps.get(key)
            live = old is not None and old.over == "the reward agent was closed"
            unfinished = sum((key, group) not in self.collected for group in plan) > spare
            if unfinished and self.fits() and (live or data.draw(st.booleans())):
                self.send(key)
                self.settled()

    # --- what must hold -----------------------------------------------------------------------------------

    def within(self, act: Callable[[], Any]) -> Any:
        """Calls on the event loop."""

        async def body() -> Any:
            return act()

        return self.loop.run_until_complete(body())

    def settled(self) -> None:
        """Lets the agent do all that the last event brings about, and compares."""
        self.loop.settle()
        self.model.rest()
        self.check()

    @invariant()
    def holds(self) -> None:
        self.settled()

    def check(self) -> None:
        model, now, running = self.model, self.loop.now, self.gate.calls
        assert not model.asked_twice
        stats = self.agent.stats()
        assert {name: stats[name] for name in STATS} == {name: model.counts[name] for name in STATS}
        ended = stats["scored"] + stats["failed"] + stats["cancelled"]
        assert stats["requested"] == ended + len(model.open)
        assert stats["running"] == len(running) <= self.concurrency
        assert {call.key for call in running} == {key for key, ask in model.asks.items() if ask.running}
        assert stats["waiting"] == sum(len(ask.rows) for ask in model.asks.values() if not ask.running)
        assert stats["steps"] == len(self.live())
        if model.paused <= now:
            assert len(running) == min(self.concurrency, model.runnable(now)), "a slot idles while requests wait"
        for step, waiter in list(self.waiters):
            if waiter.groups is not None or step.over:
                self.waiters.remove((step, waiter))
                assert waiter.task.done(), f"step {step.key}: a collect of {waiter.take} groups hangs"
                self.answered(step, waiter)
            else:
                assert not waiter.task.done()

    def answered(self, step: Step, waiter: Waiter) -> None:
        if waiter.groups is None:
            error = waiter.task.exception()
            assert isinstance(error, RewardFailed)
            assert step.over in str(error)
            return
        batch = waiter.task.result()
        assert list(batch.ids) == waiter.groups
        mine = {(step.key, group) for group in batch.ids}
        assert not mine & self.collected, "collected twice"
        self.collected |= mine
        rows = [row for group in batch.ids for row in step.groups[group]]
        assert batch.groups.tolist() == [row.group for row in rows]
        expected = [row.got + row.post for row in rows]
        assert batch["score"].tolist() == [pytest.approx(score, nan_ok=True) for score in expected]
        if step.kind.startswith("drop"):
            assert batch["kept"].tolist() == [row.kept for row in rows]
        if "note" in batch:
            right = [(row.text, None)[row.state != "scored"] for row in rows if row.kept]
            assert [note for note, row in zip(batch["note"], rows, strict=True) if row.kept] == right
        assert [(r["group"], r["sample"]) for r in batch.meta["records"]] == [(r.group, r.sample) for r in rows]
        last = step.over == "has been collected in full"
        assert ("step" in batch.meta) <= last

    def close(self) -> None:
        for step in self.live():
            self.model.end(step, "the reward agent was closed")
        self.loop.run_until_complete(self.agent.close())
        self.settled()
        assert not self.waiters
        assert self.agent.stats()["running"] == 0

    def drain(self) -> None:
        """Collects all that is left in small parts, and lets what is open be scored, the last call first."""
        for step in self.live():
            while step.left > 0:
                waits = len(step.waiters)
                self.wait_for(step, min(step.left, 1 + waits % 2), "index" if waits % 3 else "arrival")
        self.settled()
        self.wait_until(max([self.loop.now, self.model.paused, *(ask.until for ask in self.model.asks.values())]))
        while self.gate.calls:
            self.score_call(self.gate.calls[-1])
        assert not self.waiters
        assert not self.live()
        assert not self.model.open

    def teardown(self) -> None:
        if not hasattr(self, "agent"):
            return
        try:
            self.settled()
            self.drain()
            for step in self.model.steps.values():
                with pytest.raises(DataflowError, match=step.over):
                    self.loop.run_until_complete(self.agent.collect(step.key))
            self.close()
        finally:
            with suppress(Exception):
                self.loop.run_until_complete(self.agent.close())
            self.loop.close()
            shutil.rmtree(self.directory)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("share_equal", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("on_failure", RULES)
def test_the_agent_does_what_the_model_does(on_failure: str, share_equal: bool) -> None:
    kind = type("M", (Machine,), {"on_failure": on_failure, "share_equal": share_equal})
    logger.disable("dataflow")
    assert settings.default is not None
    examples = max(4, settings.default.max_examples // 15)
    try:
        run_state_machine_as_test(
            kind,
            settings=settings(
                max_examples=examples, deadline=None, stateful_step_count=25, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        logger.enable("dataflow")
