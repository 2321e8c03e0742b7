"""With ``policy.order=index`` a run repeats bit for bit, whatever the order in which its rewards come."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

import dataflow
from tests.contract.rig import Ask, Judge, Record, Trainer, verdict, weights

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(150)]

# By staleness: these train on the same samples, in the same mini-batches.
POLICIES = {0: ("baseline", "mini-batch", "mini-batch+stream"), 1: ("off-policy", "both", "both+stream")}


class Orders:
    """Answers the requests of each step in an order of its own: first those of the last groups, or at random."""

    def __init__(self, judge: Judge, order: str) -> None:
        self._judge, self._order, self._random = judge, order, random.Random(5)

    def rule(self, ask: Ask) -> float:
        if self._order == "random":
            time.sleep(self._random.uniform(0, 0.2))
        elif self._order == "last first":
            place = self._judge.order.index(ask.problem) // 4 * 4
            if ask.problem in self._judge.order[place : place + 2]:  # of the first two groups of its step
                self._judge.until_asked(place + 4)
                time.sleep(0.2)
        return verdict(ask)


@pytest.mark.parametrize("staleness", POLICIES)
def test_weights_are_equal_under_any_order_of_rewards(staleness: int, train: Trainer, judge: Judge) -> None:
    """A result could not be repeated, as the judge answers in another order each time; nor policies be compared."""
    found = {}
    for policy, order in itertools.product(POLICIES[staleness], ("last first", "random")):
        judge.rule = Orders(judge, order).rule
        judge.asked.clear()
        record = train(f"policy={policy}", "policy.order=index", "steps=3", judge=judge)
        assert min(record.metrics[step]["actor/grad_norm"] for step in (1, 2, 3)) > 0, "it learns"
        found[policy, order] = record.summary["weights_sha256"]
    assert len(set(found.values())) == 1, found


def test_another_seed_gives_other_weights(train: Trainer, judge: Judge) -> None:
    """Equal weights would say nothing, if all runs had them."""
    found = {
        train("policy=baseline", "policy.order=index", f"seed={seed}", "steps=1", judge=judge).summary["weights_sha256"]
        for seed in (0, 1)
    }
    assert len(found) == 2


@pytest.fixture(scope="module")
def ended(train: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """A run of two steps that was made longer by a third."""
    judge = Judge()
    keys = ("policy=baseline", "policy.order=index", "checkpoint.every=1", "checkpoint.export=true", "val.every=2")
    record = train(*keys, "data.val_size=4", judge=judge)
    first = len(judge.asked)
    longer = dataflow.resume(record.directory, "steps=3")
    assert longer.directory == record.directory
    yield Record(record.directory)
    assert len(judge.asked) > first
    judge.close()


def test_a_run_that_is_made_longer_equals_one_that_was_longer_from_the_start(
    ended: Record, train: Trainer, judge: Judge
) -> None:
    """A resume would begin with other random states, optimizer or data than the run had."""
    whole = train("policy=baseline", "policy.order=index", "steps=3", judge=judge)
    assert ended.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert ended.summary["steps"] == 3
    assert ended.summary["resumed"] == [2]
    assert sorted(ended.metrics) == [0, 1, 2, 3], "one row a step, with the evaluation before the first"
    assert [(r["step"], r["response"]) for r in ended.samples] == [(r["step"], r["response"]) for r in whole.samples]


def test_the_exported_model_is_one_of_transformers(ended: Record, train: Trainer) -> None:
    """What was trained could not be used: not loaded, without its tokenizer, or with the weights of the beginning."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(ended.directory / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ended.directory / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Problem 1"}], add_generation_prompt=True)
    ids = torch.tensor([ids if isinstance(ids, list) else ids["input_ids"]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, ids.shape[1] + 3)
    before, after = weights(train.model), weights(ended.directory / "model")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name].float(), after[name].float()) for name in before), "all of it was trained"


def test_evaluations_are_recorded_with_their_steps(ended: Record) -> None:
    """Whether a run learns could not be seen: an evaluation would be missing, or counted for another step."""
    assert sorted(map(int, ended.summary["evaluations"])) == [0, 2, 3]
    assert all(0.1 <= value <= 1 for value in ended.summary["evaluations"].values()), "the judge gives nothing less"
    assert [any("val-core/" in name for name in ended.metrics[step]) for step in (2, 3)] == [True, True]


def test_samples_say_what_was_said_and_what_it_got(ended: Record) -> None:
    """Nobody could read what the model says, and what the judge gave for it."""
    assert len(ended.samples) == 3 * 16
    for row in ended.samples:
        ask = Ask(row["prompt"], row["response"], 0, 0.0)
        assert row["score"] == pytest.approx(verdict(ask)), row
        assert row["explanation"].startswith("Looked at it.")
        assert row["ground_truth"] == str(ask.problem)
        assert 1 <= row["tokens"] <= 8
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in ended.samples:
        groups.setdefault((row["step"], row["group"]), []).append(row)
    assert {len(group) for group in groups.values()} == {4}
    for group in groups.values():
        mean = sum(row["score"] for row in group) / 4
        assert all((row["advantage"] > 0) == (row["score"] > mean) for row in group if row["score"] != mean)
