"""A judge that fails in each way, over HTTP: each request is scored, fails by the declared rule, or is cancelled.

The judge never gives 0 here, so a score of 0 in a run's files was made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.contract.rig import Ask, Judge, Record, Reply, Trainer, verdict

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(150)]

BUSY = 1.0
"""Seconds that a 429 asks to wait."""
# What may be gone with the next try.
PASSING = {
    "429": Reply(status=429, headers={"Retry-After": str(int(BUSY))}, body='{"error": "busy"}'),
    "500": Reply(status=500, body="oops"),
    "closed": Reply(closes=True),
    "timeout": Reply(hangs=True),
}
# What no further try mends.
LASTING = {
    "400": Reply(status=400, body='{"error": {"message": "the prompt is too long"}}'),
    "no score": Reply("I cannot judge this."),
    "nan": Reply("Score: nan"),
    "out of range": Reply("Score: 7"),
    "not json": Reply(body="<html>hello</html>"),
    "empty": Reply(body="{}"),
}
FAST = ("policy=both", "steps=1", "reward.timeout=60", "reward.tries=3", "reward.backoff=0.01")
MANY_MAY_FAIL = "reward.max_failed_share=1"


def counted(record: Record) -> dict[str, int]:
    """Returns the summary's counts of requests, of which none is lost."""
    found = record.summary["rewards"]
    assert found["requested"] == found["scored"] + found["failed"] + found["cancelled"], found
    return found


def judged_alone(record: Record) -> None:
    """Each score that trained is the judge's own of this response."""
    for row in record.samples:
        if row.get("kept") is not False:
            assert row["score"] == pytest.approx(verdict(Ask(row["prompt"], row["response"], 0, 0.0)))


def of_sample(judge: Judge, number: int) -> Callable[[Ask], bool]:
    """Returns whether a request is of the sample that came as this one, in all its tries."""

    def chosen(ask: Ask) -> bool:
        return list(dict.fromkeys(a.text for a in list(judge.asked)))[number : number + 1] == [ask.text]

    return chosen


@pytest.mark.parametrize("way", PASSING)
def test_what_passes_is_tried_again_and_scored(way: str, train: Trainer, judge: Judge) -> None:
    """A moment of the judge's service would end a run of days, or train on scores that it never gave."""
    judge.rule = lambda ask: PASSING[way] if ask.nth == 0 and int(ask.problem) % 2 else verdict(ask)
    record = train(*FAST, f"reward.timeout={2 if way == 'timeout' else 60}", judge=judge)
    again = [ask for ask in judge.asked if ask.nth > 0]
    assert again, "half of the problems failed at first"
    found = counted(record)
    assert (found["scored"], found["failed"]) == (16, 0)
    assert found["retried"] >= len(again) if way == "timeout" else found["retried"] == len(again)
    judged_alone(record)


def test_nothing_is_sent_while_a_server_asks_for_a_pause(train: Trainer, judge: Judge) -> None:
    """A provider would block the account of a client that goes on while it is told to wait."""
    judge.rule = lambda ask: PASSING["429"] if ask is judge.asked[0] else verdict(ask)
    record = train(*FAST, "reward.concurrency=1", judge=judge)
    assert judge.asked[1].at - judge.asked[0].at >= BUSY
    assert counted(record)["scored"] == 16
    assert record.metrics[1]["reward/throttled"] == 1


def test_what_lasts_is_never_a_score(train: Trainer, judge: Judge) -> None:
    """A judge that gives no score would be taken for one that gives 0, and the model be trained on it."""
    ways = list(LASTING)

    def rule(ask: Ask) -> float | Reply:
        number = list(dict.fromkeys(a.text for a in list(judge.asked))).index(ask.text)
        return LASTING[ways[number // 2]] if number % 2 and number // 2 < len(ways) else verdict(ask)

    judge.rule = rule
    record = train(*FAST, "reward.on_failure=drop_sample", MANY_MAY_FAIL, judge=judge)
    failed = list(dict.fromkeys(ask.text for ask in judge.asked))[1 : 2 * len(ways) : 2]
    assert (counted(record)["scored"], counted(record)["failed"]) == (16 - len(ways), len(ways))
    left_out = [f"{row['prompt']}\n{row['response']}" for row in record.samples if row["kept"] is False]
    assert sorted(left_out) == sorted(failed)
    judged_alone(record)


def test_a_failure_ends_the_run_by_default_and_names_the_sample(train: Trainer, judge: Judge) -> None:
    """The data would be changed by a rule that nobody chose; or nobody could tell what failed, and why."""
    judge.rule = lambda ask: LASTING["400"] if ask.problem % 2 else verdict(ask)
    record = train(*FAST, judge=judge, fails=True)
    assert "sample" in record.error
    assert "of step 1" in record.error
    assert "400" in record.error
    assert record.summary["status"] == "failed"
    counted(record)


def test_tries_end(train: Trainer, judge: Judge) -> None:
    """A request that always fails would keep the run waiting for ever, and cost money for ever."""
    judge.rule = lambda ask: PASSING["500"]
    record = train(*FAST, "reward.tries=2", judge=judge, fails=True)
    assert max(ask.nth for ask in judge.asked) == 1
    assert "500" in record.error


def run_with(rule: str, train: Trainer, judge: Judge, *more: str) -> tuple[Record, list[dict[str, object]]]:
    """Runs a step in which one sample has no score; returns the record and the samples of its group."""
    broken = of_sample(judge, 5)
    judge.rule = lambda ask: LASTING["400"] if broken(ask) else verdict(ask)
    record = train(*FAST, f"reward.on_failure={rule}", MANY_MAY_FAIL, *more, judge=judge)
    text = list(dict.fromkeys(ask.text for ask in judge.asked))[5]
    failed = [row for row in record.samples if f"{row['prompt']}\n{row['response']}" == text]
    return record, [row for row in record.samples if failed and row["group"] == failed[0]["group"]]


def test_a_failed_sample_gets_the_score_that_was_declared(train: Trainer, judge: Judge) -> None:
    """`score:X` would give another score than X, or give it to others."""
    record, group = run_with("score:0.05", train, judge)
    assert sorted(row["score"] == pytest.approx(0.05) for row in group) == [False, False, False, True]
    assert (counted(record)["scored"], counted(record)["failed"]) == (15, 1)
    assert record.metrics[1]["reward/failed"] == 1
    assert record.metrics[1]["critic/score/min"] == pytest.approx(0.05)


def test_a_failed_sample_is_dropped_alone(train: Trainer, judge: Judge) -> None:
    """`drop_sample` would train on a sample without a score, or count it in the mean and in its group's baseline."""
    record, group = run_with("drop_sample", train, judge)
    assert sorted(bool(row["kept"]) for row in group) == [False, True, True, True]
    assert (counted(record)["scored"], counted(record)["failed"]) == (15, 1)
    assert (record.metrics[1]["reward/dropped_samples"], record.metrics[1]["reward/dropped_groups"]) == (1, 0)
    judged_alone(record)
    kept = [row["score"] for row in record.samples if row.get("kept") is not False]
    assert len(kept) == 15
    assert min(kept) > 0


def test_a_failed_sample_takes_its_group_with_it(train: Trainer, judge: Judge) -> None:
    """`drop_group` would compare the samples of a group without one of them."""
    record, group = run_with("drop_group", train, judge)
    assert [bool(row["kept"]) for row in group] == [False] * 4
    assert record.metrics[1]["reward/dropped_groups"] == 1
    assert sum(row.get("kept") is not False for row in record.samples) == 12
    counted(record)
    judged_alone(record)


def test_a_failed_group_is_replaced_by_another(train: Trainer, judge: Judge) -> None:
    """`replace_group` would train a step on fewer prompts than declared, or on the failed group."""
    record, group = run_with("replace_group", train, judge, "reward.extra_groups=1")
    assert group == [], "the failed group trains nothing"
    assert len({row["group"] for row in record.samples}) == 4
    assert len(record.samples) == 16
    found = counted(record)
    assert found["requested"] == 20
    assert found["failed"] == 1
    judged_alone(record)


@pytest.mark.parametrize("rule", ["score:0", "drop_sample"])
def test_a_service_that_fails_as_a_whole_ends_the_run(rule: str, train: Trainer, judge: Judge) -> None:
    """A dead judge would be trained on for days, each sample by the rule for a rare failure."""
    judge.rule = lambda ask: LASTING["400"] if len(judge.asked) > 40 else verdict(ask)
    record = train(
        *FAST, "steps=20", f"reward.on_failure={rule}", "reward.max_failed_share=0.3", judge=judge, fails=True
    )
    assert "reward.max_failed_share" in record.error
    assert max(record.metrics) < 12
    counted(record)


def test_why_a_request_failed_is_recorded(train: Trainer, judge: Judge) -> None:
    """Nobody could find out what the judge said when it failed."""
    record, _ = run_with("drop_sample", train, judge)
    failed = [request for request in record.requests if request.facts.get("how") == "failed"]
    assert len(failed) == 1
    assert [row["how"] for row in record.samples].count("failed") == 1
    assert json.loads((record.directory / "metrics.jsonl").read_text().splitlines()[-1])["reward/failed"] == 1
