"""The reward stages, run as an executor would: on one event loop, with a task."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import RewardFailed
from dataflow.graph import Pipeline, TaskInfo
from dataflow.reward_agent import RewardAgent
from dataflow.stages.reward import reward_collect, reward_request, val_score

pytestmark = pytest.mark.timeout(60)


def responses(groups: list[int], n: int = 2, source: str = "openai/gsm8k") -> Batch:
    rows = [(g, i) for g in groups for i in range(n)]
    return Batch(
        [g for g, _ in rows],
        {
            "response_text": [f"{g}.{i}" for g, i in rows],
            "data_source": [source if g != 9 else "other" for g, _ in rows],
            "ground_truth": [str(g) for g, _ in rows],
            "extra_info": [{} for _ in rows],
        },
        {"weights_version": 3},
    )


async def score(ground_truth: str, **_: Any) -> dict[str, Any]:
    # Later groups finish first.
    await asyncio.sleep(0.02 * (4 - int(ground_truth) % 5))
    return {"score": float(ground_truth), "truth": ground_truth}


def test_a_step_in_two_parts() -> None:
    async def body() -> None:
        agent = RewardAgent(score)
        ticket = await reward_request(responses([0, 1, 2, 3]), agent=agent, task=TaskInfo(step=7))
        assert (ticket.step, ticket.requests) == (7, 8)
        tasks = [TaskInfo(step=7, part=p, parts=2, take=2) for p in range(2)]
        parts = [await reward_collect(ticket, agent=agent, task=task) for task in tasks]
        assert [part.ids for part in parts] == [(2, 3), (0, 1)]
        assert parts[0]["score"].tolist() == [2, 2, 3, 3]
        assert parts[0]["truth"].tolist() == ["2", "2", "3", "3"]
        assert parts[0].meta == {}, "records do not travel on"
        times = [(mark["begin"], mark["end"]) for mark in tasks[0].marks]
        assert list(zip(*(parts[0][f"request_{at}"].tolist() for at in ("begin", "end")), strict=True)) == times
        assert parts[0]["request_tries"].tolist() == [1] * 4
        assert [len(task.marks) for task in tasks] == [4, 4]
        mark = tasks[0].marks[0]
        assert (mark["name"], mark["step"], mark["group"], mark["sample"]) == ("reward", 7, 2, 0)
        assert mark["begin"] < mark["end"]
        assert tasks[0].metrics == {}, "metrics of a step are averaged over parts: said once, of all"
        metrics = tasks[1].metrics
        counts = {name: metrics[f"reward/{name}"] for name in ("scored", "failed", "retried", "hedged", "cached")}
        assert counts == {"scored": 8, "failed": 0, "retried": 0, "hedged": 0, "cached": 0}
        assert {f"reward/latency_{q}" for q in ("p50", "p95", "p99", "max", "mean")} < set(metrics)
        assert (metrics["reward/running"], metrics["reward/limit"]) == (0, 64)
        assert 0.015 < metrics["reward/latency_mean"] < metrics["reward/latency_max"]
        await agent.close()

    asyncio.run(body())


def test_parts_by_index() -> None:
    async def body() -> None:
        agent = RewardAgent(score)
        ticket = await reward_request(responses([0, 1, 2, 3]), agent=agent, task=TaskInfo(step=1))
        tasks = [TaskInfo(step=1, part=p, parts=2, take=2, order="index") for p in range(2)]
        parts = await asyncio.gather(*(reward_collect(ticket, agent=agent, task=task) for task in tasks))
        assert [part.ids for part in parts] == [(0, 1), (2, 3)]
        await agent.close()

    asyncio.run(body())


def test_validation_scores_by_source() -> None:
    async def body() -> None:
        agent = RewardAgent(score)
        task = TaskInfo(step=3)
        scores = await val_score(responses([4, 9, 2], n=1), agent=agent, task=task)
        assert scores.ids == (2, 4, 9)
        assert task.metrics == {
            "val-core/openai/gsm8k/reward/mean@1": 3.0,
            "val-core/other/reward/mean@1": 9.0,
            "val-aux/score": 5.0,
        }
        assert all(mark["validation"] and mark["step"] == 3 for mark in task.marks)
        many = TaskInfo(step=4)
        await val_score(responses([1, 2], n=3), agent=agent, task=many)
        assert many.metrics == {"val-core/openai/gsm8k/reward/mean@3": 1.5, "val-aux/score": 1.5}
        await agent.close()

    asyncio.run(body())


@pytest.mark.parametrize("acc", [True, 1, np.float32(1.0), np.bool_(True)])
def test_validation_is_about_the_accuracy_where_the_rewards_have_one(acc: Any) -> None:
    def penalised(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        if ground_truth == "2":
            raise ValueError("it has no score")
        return {"score": -0.5, "acc": acc} if int(ground_truth) > 2 else -0.5

    async def body() -> None:
        agent = RewardAgent(penalised, on_failure="drop_sample", max_failed_share=1.0)
        task = TaskInfo(step=3)
        await val_score(responses([1, 2, 4], n=1), agent=agent, task=task)
        assert task.metrics["val-core/openai/gsm8k/acc/mean@1"] == pytest.approx((1 - 0.5) / 2)
        assert not [name for name in task.metrics if name.startswith("val-core/") and "/reward/" in name]
        await agent.close()

    asyncio.run(body())


def test_a_failure_reaches_the_stage() -> None:
    async def body() -> None:
        def bad(**_: Any) -> None:
            return None

        agent = RewardAgent(bad)
        ticket = await reward_request(responses([5]), agent=agent, task=TaskInfo(step=2))
        with pytest.raises(RewardFailed, match=r"sample \d of group 5 of step 2: 'bad' returned None"):
            await reward_collect(ticket, agent=agent, task=TaskInfo(step=2))
        with pytest.raises(RewardFailed, match=r"group 5 of step val:2"):
            await val_score(responses([5]), agent=agent, task=TaskInfo(step=2))
        await agent.close()

    asyncio.run(body())


def test_the_stages_declare_their_place() -> None:
    pipeline = Pipeline(
        [s.bind(agent=object()) for s in (reward_request, reward_collect, val_score)],
        inputs=["responses", "val_responses"],
    )
    assert pipeline.collector is pipeline.by_name["reward_collect"]
    assert {name: s.on for name, s in pipeline.by_name.items()} == {
        "reward_request": "controller",
        "reward_collect": "reward",
        "val_score": "reward",
    }
    assert reward_collect.per == "part"
    assert val_score.every is None


def test_what_a_step_used_is_its_own() -> None:
    """Sums of the agent since its start are logged by the step, as the step's counts are."""

    async def counted(**_: Any) -> dict[str, Any]:
        return {"score": 1.0, "tokens": 10}

    async def body() -> None:
        agent = RewardAgent(counted)
        for step, groups in enumerate(([0, 1], [0, 1, 2]), start=1):
            request, collect = TaskInfo(step=step), TaskInfo(step=step)
            ticket = await reward_request(responses(groups), agent=agent, task=request)
            await reward_collect(ticket, agent=agent, task=collect)
            assert request.facts == {"requests": 2 * len(groups)}
            assert collect.metrics["reward/tokens"] == 10 * collect.metrics["reward/requested"] == 20 * len(groups)
        assert agent.stats()["tokens"] == 100, "the agent's own stays a sum"

    asyncio.run(body())
