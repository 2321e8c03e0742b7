"""What a judge's service may be sent at most, and what may be spent: measured at the judge itself."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter

import pytest

from tests.contract.rig import Ask, Judge, Reply, Trainer, until, verdict

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(150)]

FAST = ("policy=both", "steps=2", "reward.timeout=60", "reward.backoff=0.01")


def test_as_many_requests_are_in_flight_as_allowed_and_never_more(train: Trainer, judge: Judge) -> None:
    """A judge's server would be overrun, or stand idle while rewards wait."""
    full = threading.Event()

    def rule(ask: Ask) -> float:
        if judge.open >= 5:
            full.set()
        assert full.wait(30), "five requests in flight"
        if ask in judge.asked[:5]:
            time.sleep(0.5)  # a sixth would come meanwhile
        return verdict(ask)

    judge.rule = rule
    record = train(*FAST, "reward.concurrency=5", judge=judge)
    assert judge.most == 5
    assert record.summary["rewards"]["scored"] == 32


def test_no_more_is_sent_in_a_minute_than_allowed(train: Trainer, judge: Judge) -> None:
    """A provider would refuse requests, or bill more than the contract says."""
    record = train(*FAST, "steps=1", "reward.rpm=240", "reward.concurrency=64", judge=judge)
    # At most one second's share comes at once, 4 of 16; the others at 4 a second, here with half of it as a margin.
    assert judge.asked[-1].at - judge.asked[0].at > (16 - 4) / 4 / 2
    assert record.metrics[1]["reward/rate_limit_wait_s"] > 0
    # 16 calls of 40 tokens: 640, of which 5 seconds' share comes at once, 400.
    record = train(*FAST, "steps=1", "reward.tpm=4800", "reward.concurrency=64", judge=judge)
    assert judge.asked[-1].at - judge.asked[16].at > (640 - 400) / 80 / 2
    assert record.metrics[1]["reward/tokens"] == 640


def test_a_spent_budget_ends_the_run(train: Trainer, judge: Judge) -> None:
    """A run over the weekend would spend whatever is on the account."""
    keys = ("steps=50", "judge.max_tokens=1000", "reward.concurrency=4", "reward.on_failure=drop_sample")
    record = train(*FAST, *keys, "reward.max_failed_share=1", judge=judge, fails=True)
    assert "judge.max_tokens" in record.error or "budget" in record.error
    # 40 tokens a call: 25 calls, and those that were in flight when the budget was spent.
    assert 25 <= len(judge.answered) <= 25 + 4
    assert record.summary["status"] == "failed"


def test_a_slow_call_is_overtaken_by_a_second_one(train: Trainer, judge: Judge) -> None:
    """One call that hangs would hold up the whole step; or its sample be counted twice."""
    judge.rule = lambda ask: Reply(hangs=True) if ask is judge.asked[3] else verdict(ask)
    record = train(*FAST, "steps=1", "reward.hedge_after=0.5", judge=judge)
    slow = judge.asked[3]
    assert sum(ask.text == slow.text for ask in judge.asked) >= 2
    found = record.summary["rewards"]
    assert (found["requested"], found["scored"], found["failed"]) == (16, 16, 0)
    assert found["hedged"] >= 1
    assert [row["score"] for row in record.samples if row["response"] == slow.response] == [
        pytest.approx(verdict(slow)) for row in record.samples if row["response"] == slow.response
    ]


def test_an_unknown_limit_is_found(train: Trainer, judge: Judge) -> None:
    """Against a service whose limit nobody knows, most tries would be refused; or the run creep along for ever."""

    def rule(ask: Ask) -> float | Reply:
        if judge.open > 4:
            return Reply(status=429, body="busy")
        threading.Event().wait(0.05)
        return verdict(ask)

    judge.rule = rule
    keys = ("steps=3", "reward.adaptive=true", "reward.concurrency=16", "reward.tries=100", "reward.deadline=100")
    record = train(*FAST, *keys, judge=judge)
    limits = record.levels["reward limit"]
    assert min(limits) < 16
    assert any(after > before for before, after in itertools.pairwise(limits)), "it rises again"
    assert record.summary["rewards"]["scored"] == 48


def test_equal_requests_in_flight_are_one_call(train: Trainer, judge: Judge) -> None:
    """Each of several equal responses to a prompt would be paid for."""

    def rule(ask: Ask) -> float:
        until(lambda: len(judge.asked) >= 4, "a request of each group")
        threading.Event().wait(0.2)
        return verdict(ask)

    judge.rule = rule
    # So all responses of a group are equal.
    keys = ("steps=1", "engine.top_k=1", "reward.share_equal=true", "policy=baseline")
    record = train(*FAST, *keys, judge=judge)
    assert max(Counter(ask.text for ask in judge.asked).values()) == 1
    found = record.summary["rewards"]
    assert (found["requested"], found["scored"], found["shared"]) == (16, 16, 12)
    assert len(judge.asked) == 4
