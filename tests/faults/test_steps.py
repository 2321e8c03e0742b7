"""Several steps at once, in every order, with parts of any size: none mixed, none lost, none held up by another.

"Row" names which failure of the published agent a test is (INTEGRATION.md, section 5).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import DataflowError, RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from tests.faults.rig.samples import check, run, samples, score_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


class Gate:
    """An async reward function that holds some of its calls until the test lets them go.

    Args:
        held: step, group and sample of those calls.
    """

    def __init__(self, *held: tuple[int | str, int, int]) -> None:
        self.held = {at: asyncio.Event() for at in held}
        self.began: list[tuple[int | str, int, int]] = []
        self.cancelled: list[tuple[int | str, int, int]] = []
        self.news = asyncio.Condition()

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        at = extra_info["at"]
        async with self.news:
            self.began.append(at)
            self.news.notify_all()
        try:
            await (self.held[at].wait() if at in self.held else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled.append(at)
            raise
        return float(ground_truth)

    async def begun(self, calls: int) -> None:
        async with self.news:
            await self.news.wait_for(lambda: len(self.began) >= calls)

    def let_go(self) -> None:
        for event in self.held.values():
            event.set()


def test_a_straggler_of_one_step_holds_up_no_request_of_the_next() -> None:
    """Row 4: a straggler of step N delays every request of step N+1."""

    async def body() -> None:
        gate = Gate((1, 5, 1))
        agent = RewardAgent(gate, limits=Limits(4), retry=Retry(timeout_s=None, deadline_s=None))
        agent.submit(1, samples(1, range(6)))
        agent.submit(2, samples(2, range(40)))
        check(await agent.collect(1, 5), 1)
        check(await agent.collect(2), 2)
        stats = agent.stats()
        assert (stats["running"], stats["waiting"], stats["peak"]) == (1, 0, 4), "it holds one slot, and no other"
        assert len(gate.began) == 12 + 80
        gate.let_go()
        check(await agent.collect(1), 1)
        await agent.close()

    run(body())


def test_slots_go_to_the_older_step_first() -> None:
    async def body() -> None:
        gate = Gate((1, 0, 0), (1, 0, 1))
        agent = RewardAgent(gate, limits=Limits(2))
        agent.submit(1, samples(1, [0]))
        await gate.begun(2)
        later: tuple[int | str, ...] = ("val:2", 3, 2)
        for step in later:
            agent.submit(step, samples(step, range(3)))
        gate.let_go()
        for step in (1, *later):
            check(await agent.collect(step), step)
        order = [step for step, _group, _sample in gate.began]
        assert order == [1] * 2 + [2] * 6 + [3] * 6 + ["val:2"] * 6
        await agent.close()

    run(body())


@pytest.mark.parametrize("order", ["arrival", "index"])
def test_steps_in_flight_are_collected_out_of_order_and_never_mixed(order: Any) -> None:
    """Row 5: get(750) mixes two steps without saying so."""

    async def body() -> None:
        dice = random.Random(3)

        async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
            await asyncio.sleep(dice.choice([0.0, 0.0, 0.002, 0.01]))
            return float(ground_truth)

        agent = RewardAgent(score, limits=Limits(16))
        steps: list[int | str] = [1, 2, 3, "val:2"]
        for step in steps:
            agent.submit(step, samples(step, range(24)))  # the same group ids in each
        collects = [(step, k) for step in steps for k in (10, 6, 8)]
        dice.shuffle(collects)
        parts = await asyncio.gather(*(agent.collect(step, k, order) for step, k in collects))
        got: dict[Any, list[int]] = {}
        for (step, k), part in zip(collects, parts, strict=True):
            assert len(part.ids) == k
            check(part, step)
            got.setdefault(step, []).extend(part.ids)
        assert {step: sorted(groups) for step, groups in got.items()} == {step: list(range(24)) for step in steps}
        for step in steps:
            with pytest.raises(DataflowError, match=f"step {step} has been collected in full"):
                await agent.collect(step, 1)
        await agent.close()

    run(body())


@pytest.mark.parametrize("order", ["arrival", "index"])
def test_parts_that_do_not_divide_the_step(order: Any) -> None:
    """Row 6: a mini-batch size that is not a multiple of the group loses those rewards.

    Here k counts groups: none is ever torn, and the last collect takes what is left.
    """

    async def body() -> None:
        agent = RewardAgent(Gate(), limits=Limits(8))
        agent.submit(1, samples(1, range(10), 5))
        got: list[int] = []
        for _ in range(3):
            part = await agent.collect(1, 3, order)
            check(part, 1, 5)
            got += part.ids
        message = "step 1 has 1 groups left to collect, not 3"
        with pytest.raises(DataflowError, match=message):
            await agent.collect(1, 3, order)
        last = await agent.collect(1, order=order)
        check(last, 1, 5)
        assert sorted([*got, *last.ids]) == list(range(10))
        assert agent.stats()["scored"] == 50
        await agent.close()

    run(body())


def test_what_cannot_be_collected_is_said_and_takes_nothing() -> None:
    async def body() -> None:
        agent = RewardAgent(Gate(), limits=Limits(8))
        agent.submit(1, samples(1, range(4)))
        for k, said in ((5, "step 1 has 4 groups left to collect, not 5"), (0, "not 0"), (-2, "not -2")):
            with pytest.raises(DataflowError, match=said):
                await agent.collect(1, k)
        with pytest.raises(DataflowError, match=r"step 7 was never submitted \(in flight: 1\)"):
            await agent.collect(7)
        check(await agent.collect(1, 4), 1)
        await agent.close()

    run(body())


def test_a_group_twice_a_step_twice_and_no_rows_are_refused() -> None:
    async def body() -> None:
        gate = Gate()
        agent = RewardAgent(gate, limits=Limits(8))
        torn = samples(1, [3, 4])
        torn.groups = np.array([3, 4, 3, 4])
        with pytest.raises(DataflowError, match="the rows of group 3 are not adjacent; sort rows by group"):
            agent.submit(1, torn)
        with pytest.raises(DataflowError, match="the rows of group 3 are not adjacent; sort rows by group"):
            Batch([3, 4, 3], {})
        with pytest.raises(DataflowError, match="step 1 has no samples to score"):
            agent.submit(1, samples(1, []))
        with pytest.raises(DataflowError, match="step 1 has 2 groups, 2 cannot be extra"):
            agent.submit(1, samples(1, [3, 4]), extra_groups=2)
        assert (agent.stats()["requested"], gate.began) == (0, []), "what was refused has left no trace"
        agent.submit(1, samples(1, [3, 4]))
        with pytest.raises(DataflowError, match="step 1 was submitted before; submit each step once"):
            agent.submit(1, samples(1, [5]))
        check(await agent.collect(1), 1)
        with pytest.raises(DataflowError, match="step 1 was submitted before"):
            agent.submit(1, samples(1, [3, 4]))
        await agent.close()

    run(body())


def test_cancel_in_flight_ends_that_step_only() -> None:
    async def body() -> None:
        held = [(1, group, 0) for group in range(3)]
        gate = Gate(*held)
        agent = RewardAgent(gate, limits=Limits(3))
        agent.submit(1, samples(1, range(12)))
        agent.submit(2, samples(2, range(12)))
        await gate.begun(5)
        waiting = [asyncio.create_task(agent.collect(1, 4)), asyncio.create_task(agent.collect(1))]
        await asyncio.sleep(0)
        left = agent.cancel(1)
        for collect in waiting:
            with pytest.raises(RewardFailed, match="step 1: its reward requests were cancelled"):
                await collect
        check(await agent.collect(2), 2)
        stats = agent.stats()
        assert stats["cancelled"] == left
        assert stats["requested"] == stats["scored"] + left == 48
        assert (stats["waiting"], stats["running"]) == (0, 0)
        assert sorted(gate.cancelled) == held, "each of its calls was told"
        assert agent.cancel(1) == 0
        with pytest.raises(RewardFailed, match="step 1: its reward requests were cancelled"):
            await agent.collect(1)
        await agent.close()

    run(body())


@pytest.mark.heavy
def test_a_reward_stands_on_the_last_token_of_its_own_response() -> None:
    """Row 8: rewards land on the wrong token, because lengths are not sorted with the scores."""
    import torch

    from dataflow.graph import TaskInfo
    from dataflow.stages.advantage import advantage

    n, groups, width = 2, 6, 9

    async def body() -> Batch:
        async def last_come_first(
            data_source: str, solution_str: str, ground_truth: str, extra_info: Any
        ) -> dict[str, float]:
            await asyncio.sleep(0.01 * (groups - extra_info["at"][1]))
            return {"score": float(ground_truth), "length": extra_info["response_length"]}

        agent = RewardAgent(last_come_first, limits=Limits(64))
        agent.submit(1, responses)
        parts = [await agent.collect(1, 2) for _ in range(3)]
        assert sorted(group for part in parts for group in part.ids) == list(range(groups))
        await agent.close()
        return Batch.concat(parts)

    rows = samples(1, range(groups), n)
    lengths = torch.tensor([1 + (5 * row) % width for row in range(n * groups)])
    mask = (torch.arange(width) < lengths[:, None]).long()
    responses = Batch(
        rows.groups,
        {
            **rows.columns,
            "prompts": torch.ones(len(rows), 2, dtype=torch.long),
            "responses": mask,
            "response_mask": mask,
            "attention_mask": torch.cat([torch.ones(len(rows), 2, dtype=torch.long), mask], dim=1),
        },
    )
    rewards = run(body())
    mine = responses.select(rewards.ids)
    assert rewards["length"].tolist() == mine["response_mask"].sum(dim=-1).tolist()
    options = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    found = advantage(mine, rewards, algorithm=options, task=TaskInfo(step=1))
    for row, (group, score) in enumerate(zip(rewards.groups.tolist(), rewards["score"].tolist(), strict=True)):
        baseline = sum(score_of(1, group, i) for i in range(n)) / n
        length = int(mine["response_mask"][row].sum())
        assert found["advantages"][row].tolist() == [score - baseline] * length + [0.0] * (width - length)
