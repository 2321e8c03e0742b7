"""What each policy overlaps, on real runs: a judge holds answers back until the trace has what must not wait.

A policy that does not overlap this would wait for the judge, and the judge for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.rig import Ask, Judge, Record, Trainer, until, verdict

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(150)]


class Held:
    """Holds the answers to the first step back until a condition on the trace is true.

    Args:
        judge: whose answers.
        folder: of the run.
        condition: on the run's record.
        groups: how many of the step's four groups wait.
    """

    def __init__(self, judge: Judge, folder: Path, condition: Callable[[Record], object], groups: int = 4) -> None:
        self._judge, self._record = judge, Record(folder / "run")
        self._condition, self._groups = condition, groups
        judge.rule = self.rule

    def rule(self, ask: Ask) -> float:
        self._judge.until_asked(4)
        if ask.problem in self._judge.order[4 - self._groups : 4]:
            until(lambda: self._condition(self._record), "what the policy overlaps with pending rewards", 40)
        return verdict(ask)


def rewards_of(record: Record, step: int) -> float:
    """Returns when the last reward of a step came."""
    return max(request.end for request in record.requests if request.step == step)


def strictly_on_policy(record: Record) -> None:
    """Each rollout begins after the weights of the step before, and no sample is stale."""
    for step in (2, 3):
        assert record.task("rollout", step).begin >= record.task("sync_weights", step - 1).end
        assert record.metrics[step]["staleness/max"] == 0
    assert [row["weights_version"] for row in record.samples] == [row["step"] - 1 for row in record.samples]


def one_step_old(record: Record) -> None:
    """Each sample is drawn with the weights of exactly one step before, as soon as there is one."""
    assert [row["weights_version"] for row in record.samples] == [max(0, row["step"] - 2) for row in record.samples]
    assert [record.metrics[step]["staleness/max"] for step in (1, 2, 3)] == [0, 1, 1]


def after_all_rewards(record: Record) -> None:
    for step in (1, 2, 3):
        assert record.task("actor_update", step).begin >= rewards_of(record, step)


def test_baseline_computes_log_probs_while_rewards_come(train: Trainer, judge: Judge, tmp_path: Path) -> None:
    """The GPUs would wait for the judge before work that needs no reward, or train on stale samples."""
    Held(judge, tmp_path, lambda record: record.has("old_log_prob", 1))
    record = train("policy=baseline", "steps=3", "reward.tries=1", judge=judge, folder=tmp_path)
    after_all_rewards(record)
    strictly_on_policy(record)


def test_mini_batch_updates_while_rewards_come(train: Trainer, judge: Judge, tmp_path: Path) -> None:
    """The first update would wait for the slowest reward of the step; the samples stay strictly on-policy."""
    Held(judge, tmp_path, lambda record: record.has("actor_update", 1), groups=2)
    record = train("policy=mini-batch", "steps=3", "reward.tries=1", judge=judge, folder=tmp_path)
    assert record.task("actor_update", 1).begin < rewards_of(record, 1)
    strictly_on_policy(record)


def test_off_policy_samples_while_rewards_come(train: Trainer, judge: Judge, tmp_path: Path) -> None:
    """The GPUs would stand still for a whole round of rewards; the samples are one step old, and never more."""
    Held(judge, tmp_path, lambda record: record.has("rollout", 2))
    record = train("policy=off-policy", "steps=3", "reward.tries=1", judge=judge, folder=tmp_path)
    after_all_rewards(record)
    one_step_old(record)


def test_both_samples_and_updates_while_rewards_come(train: Trainer, judge: Judge, tmp_path: Path) -> None:
    """Rewards would hide behind the rollout or the updates alone, and a step be as slow as with the lesser one."""
    Held(judge, tmp_path, lambda record: record.has("rollout", 2) and record.has("actor_update", 1), groups=2)
    record = train("policy=both", "steps=3", "reward.tries=1", judge=judge, folder=tmp_path)
    one_step_old(record)
