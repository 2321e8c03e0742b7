"""What a policy's two numbers mean, in runs without a model: who waits for whom, and how old samples are."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import dataflow
from dataflow import Batch, Carried, Hosted, Latest, Pipeline, RewardAgent, Stage, stage
from tests.contract.rig import Record

pytestmark = pytest.mark.timeout(120)

GROUPS = MINI_BATCHES = 4
Wait = Callable[["Toy", int, int], Awaitable[None]]


async def until_(condition: Callable[[], bool], what: str) -> None:
    """Waits on the event loop."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.001)


class Toy:
    """Four groups of two samples a step; its weights are the number of updates so far.

    Args:
        wait: called before the rewards of a part (from 0) of a step are given out.
        more: stages of the pipeline besides.

    Attributes:
        done: the tasks that have ended, as (stage, step, part).
        drawn_with: the weights that a step's samples were drawn with.
        trained_on: the groups that each update trained on, by step.
    """

    def __init__(self, wait: Wait, *more: Stage) -> None:
        self.wait, self.more = wait, more
        self.done: list[tuple[str, int, int]] = []
        self.drawn_with: dict[int, int] = {}
        self.trained_on: dict[int, list[int]] = {}
        self.updates = 0

    def pipeline(self) -> Pipeline:
        toy = self

        @stage(writes="responses", on="gpu", role="samples")
        def rollout(prompts, weights: Carried, *, task):
            toy.drawn_with[task.step] = weights or 0
            toy.done.append(("rollout", task.step, 0))
            return Batch([g for g in range(GROUPS) for _ in range(2)], {"number": list(range(2 * GROUPS))})

        @stage(writes="rewards", on="reward", role="collects")
        async def collect(responses, *, task):
            await toy.wait(toy, task.step, task.part)
            toy.done.append(("collect", task.step, task.part))
            groups = sorted(responses.ids)[task.part * task.take :][: task.take]
            part = responses.select(groups)
            return part.like(score=[1.0] * len(part))

        @stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
        def update(responses, rewards, actor: Latest, *, task):
            toy.updates += 1
            toy.trained_on.setdefault(task.step, []).extend(rewards.ids)
            toy.done.append(("update", task.step, task.part))
            return toy.updates

        @stage(writes="weights", on="gpu", role="syncs")
        def sync(actor, *, task):
            toy.done.append(("sync", task.step, 0))
            return actor

        return Pipeline([rollout, collect, update, sync, *self.more], inputs=["prompts"])

    def run(self, folder: Path, *overrides: str, steps: int = 8, **more: Any) -> Record:
        done = dataflow.run(
            self.pipeline(),
            *overrides,
            inputs={"prompts": lambda step: step},
            steps=steps,
            groups=GROUPS,
            mini_batches=MINI_BATCHES,
            runs=str(folder),
            **more,
        )
        return Record(done.directory)


async def at_once(toy: Toy, step: int, part: int) -> None:
    """The rewards are there before anything else can begin."""


def all_that_may_overlap(split: int, staleness: int, steps: int) -> Wait:
    """The rewards of a part come after all that the policy lets run before them."""

    async def wait(toy: Toy, step: int, part: int) -> None:
        ahead = min(step + staleness, steps)
        await until_(lambda: ("rollout", ahead, 0) in toy.done, f"rollout {ahead} beside the rewards of step {step}")
        before = part * MINI_BATCHES // split - 1
        if part:
            await until_(lambda: ("update", step, before) in toy.done, f"update {step}.{before} before part {part}")

    return wait


@pytest.mark.parametrize("staleness", range(5))
def test_samples_are_exactly_as_old_as_the_policy_says(staleness: int, tmp_path: Path) -> None:
    """A sample would be staler than was agreed, or by luck; or the rollout would not run ahead as far as it may."""
    for split, wait in itertools.product((1, 2, 4), (at_once, None)):
        toy = Toy(wait or all_that_may_overlap(split, staleness, 8))
        numbers = (f"policy.split={split}", f"policy.max_staleness={staleness}")
        toy.run(tmp_path, "policy=baseline", *numbers)
        assert toy.drawn_with == {s: MINI_BATCHES * max(0, s - 1 - staleness) for s in range(1, 9)}, numbers
        assert all(sorted(groups) == list(range(GROUPS)) for groups in toy.trained_on.values())


PRESETS = {"baseline": (1, 0), "mini-batch": (4, 0), "off-policy": (1, 1), "both": (4, 1)}


def test_a_policy_by_its_name_overlaps_what_its_numbers_say(tmp_path: Path) -> None:
    """The table of policies in the README would be wrong."""
    for policy, (split, staleness) in PRESETS.items():
        toy = Toy(all_that_may_overlap(split, staleness, 4))
        record = toy.run(tmp_path, f"policy={policy}", steps=4)
        assert (record.summary["split"], record.summary["max_staleness"]) == (split, staleness)
        assert toy.drawn_with == {s: MINI_BATCHES * max(0, s - 1 - staleness) for s in range(1, 5)}
        # An update waits for the rewards of its part, and for no others.
        for step, update in itertools.product(range(1, 5), range(MINI_BATCHES)):
            part = update * split // MINI_BATCHES
            done = toy.done.index(("update", step, update))
            assert toy.done.index(("collect", step, part)) < done, policy
            assert part + 1 == split or done < toy.done.index(("collect", step, part + 1)), policy


def test_auto_leaves_the_baseline_for_what_is_faster_and_stays_within_its_limit(tmp_path: Path) -> None:
    """A run that plans itself would wait for rewards all the same, or train on staler samples than was allowed."""
    steps, record = 150, Record(tmp_path / "auto")

    def unchanged() -> bool:
        return "policy split" not in record.levels

    async def slow(toy: Toy, step: int, part: int) -> None:
        if part == 0 and unchanged():
            await asyncio.sleep(0.25)

    @stage(on="gpu")
    def work(responses):
        if unchanged():
            time.sleep(0.1)

    toy = Toy(slow, work)
    toy.run(tmp_path, "policy=auto", "policy.max_staleness=2", steps=steps, name="auto")
    policies = record.meta["policies"]
    assert (policies[0]["split"], policies[0]["max_staleness"]) == (1, 0)
    assert len(policies) > 1, "the rewards took most of each step"
    allowed = {
        step: [each for each in policies if each["step"] <= step][-1]["max_staleness"] for step in range(1, steps + 1)
    }
    assert max(allowed.values()) <= 2
    assert toy.drawn_with == {step: MINI_BATCHES * max(0, step - 1 - age) for step, age in allowed.items()}


class Shuffled:
    """Scores in a random order."""

    def __init__(self, seed: int) -> None:
        self._random, self.asked = random.Random(seed), []

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        self.asked.append(solution_str)
        await asyncio.sleep(self._random.uniform(0, 0.05))
        return float(solution_str)


def samples(step: int) -> Batch:
    texts = [str(100 * step + n) for n in range(16)]
    return Batch(
        [n // 4 for n in range(16)],
        {"data_source": ["sums"] * 16, "response_text": texts, "ground_truth": ["0"] * 16},
    )


def test_the_reward_agent_alone_gives_whole_groups_in_the_order_that_is_asked_for() -> None:
    """A training loop of one's own would get half a group, a score of another sample, or another order in each run."""

    async def collected(order: str, seed: int) -> list[tuple[int, ...]]:
        reward = Shuffled(seed)
        agent = RewardAgent(reward)
        agent.submit(1, samples(1))
        agent.submit(2, samples(2))
        parts = [(step, await agent.collect(step, k=2, order=order)) for step in (2, 1) for _ in range(2)]
        await agent.close()
        for step in (1, 2):
            scores = {g: s for of, part in parts if of == step for g, s in zip(part.ids, scored(part), strict=True)}
            assert scores == {g: [100.0 * step + 4 * g + n for n in range(4)] for g in range(4)}
        assert sorted(reward.asked) == sorted(str(100 * step + n) for step in (1, 2) for n in range(16))
        return [tuple(part.ids) for _, part in parts]

    def scored(part: Batch) -> list[list[float]]:
        return [list(map(float, part.select([group])["score"])) for group in part.ids]

    for seed in range(3):
        assert asyncio.run(collected("index", seed)) == [(0, 1), (2, 3)] * 2
        assert asyncio.run(collected("arrival", seed))


def test_a_streaming_rollout_has_its_groups_judged_while_it_samples(tmp_path: Path) -> None:
    """The first rewards of a step would wait for its longest response."""
    reward = Shuffled(0)
    emitted: list[int] = []

    @stage(writes="responses", on="gpu", role="samples", streams=True)
    async def rollout(prompts, version: Carried, *, task):
        drawn, size = samples(task.step), GROUPS // task.emits
        for chunk in range(task.emits):
            groups = range(chunk * size, (chunk + 1) * size)
            task.emit(chunk, drawn.select(groups))
            first = drawn.select(groups)["response_text"][0]
            if task.emits > 1:
                await until_(lambda first=first: first in reward.asked, "the judge, while the rollout samples")
        emitted.append(task.emits)
        return drawn

    @stage(writes="ticket", on="controller", role="requests", per_chunk=True)
    async def request(responses, *, agent, task):
        return agent.submit(task.step, responses, more=task.parts > 1)

    @stage(writes="rewards", on="reward", role="collects")
    async def collect(ticket, *, agent, task):
        return await agent.collect(task.step, k=task.take, order=task.order, last=task.last)

    @stage(writes="version", on="gpu", role="trains", per_mini_batch=True)
    def update(responses, rewards, version: Latest, *, task):
        assert list(responses.ids) == list(rewards.ids)
        assert list(rewards["score"]) == [float(text) for text in responses["response_text"]]
        return task.step

    agent = Hosted("reward", lambda: RewardAgent(reward), concurrent=True)
    pipeline = Pipeline([rollout, request.bind(agent=agent), collect.bind(agent=agent), update], inputs=["prompts"])
    keys = {"steps": 3, "groups": GROUPS, "mini_batches": 2, "inputs": {"prompts": lambda step: step}}
    for policy in ("both+stream", "mini-batch+stream", "both"):
        dataflow.run(pipeline, f"policy={policy}", runs=str(tmp_path), **keys)
        assert min(emitted) > 1 if "stream" in policy else max(emitted) == 1
        emitted.clear()
    assert sorted(set(map(int, reward.asked))) == sorted(100 * step + n for step in (1, 2, 3) for n in range(16))


def test_a_stage_that_needs_a_whole_step_is_not_split(tmp_path: Path) -> None:
    """A normalization over a step would see a part of it."""
    seen: list[int] = []

    @stage(on="controller")
    def whole(rewards):
        seen.append(len(rewards))

    Toy(at_once, whole).run(tmp_path, "policy=both", steps=3)
    assert seen == [2 * GROUPS] * 3
