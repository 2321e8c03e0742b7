"""The reward stages, run as an executor would: on one event loop, with a task; and evaluations by a rule."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.errors import RewardFailed
from dataflow.graph import TaskInfo
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.gsm8k import compute_score
from dataflow.running.recipe import greedy_stages, rollout_stages
from dataflow.stages.reward import greedy_score, reward_collect, reward_request, val_score
from dataflow.stages.validate import mean_scores, val_check

pytestmark = pytest.mark.timeout(60)


def responses(groups: list[int], n: int = 2) -> Batch:
    rows = [(group, index) for group in groups for index in range(n)]
    columns = {
        "response_text": [f"{group}.{index}" for group, index in rows],
        "data_source": ["other" if group == 9 else "openai/gsm8k" for group, _ in rows],
        "ground_truth": [str(group) for group, _ in rows],
        "extra_info": [{} for _ in rows],
    }
    return Batch([group for group, _ in rows], columns, {"weights_version": 3})


async def score(ground_truth: str, **_: Any) -> dict[str, Any]:
    await asyncio.sleep(0.02 * (4 - int(ground_truth) % 5))  # later groups finish first
    return {"score": float(ground_truth), "truth": ground_truth}


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


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
        mark = tasks[1].marks[0]
        assert (mark["name"], mark["step"], mark["group"], mark["sample"]) == ("reward", 7, 0, 0)
        assert tasks[0].metrics == {}, "metrics of a step are averaged over parts: said once, of all"
        metrics = tasks[1].metrics
        counts = {name: metrics[f"reward/{name}"] for name in ("scored", "failed", "retried", "hedged", "cached")}
        assert counts == {"scored": 8, "failed": 0, "retried": 0, "hedged": 0, "cached": 0}
        assert (metrics["reward/running"], metrics["reward/limit"]) == (0, 64)
        assert 0 < metrics["reward/latency_mean"] < metrics["reward/latency_max"]
        ticket = await reward_request(responses([0, 1, 2, 3]), agent=agent, task=TaskInfo(step=8))
        tasks = [TaskInfo(step=8, part=p, parts=2, take=2, order="index") for p in range(2)]
        parts = await asyncio.gather(*(reward_collect(ticket, agent=agent, task=task) for task in tasks))
        assert [part.ids for part in parts] == [(0, 1), (2, 3)]
        await agent.close()

    run(body())


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

    run(body())


def test_a_failure_reaches_the_stage() -> None:
    def bad(**_: Any) -> None:
        return None

    async def body() -> None:
        agent = RewardAgent(bad)
        ticket = await reward_request(responses([5]), agent=agent, task=TaskInfo(step=2))
        with pytest.raises(RewardFailed, match=r"sample \d of group 5 of step 2: 'bad' returned None"):
            await reward_collect(ticket, agent=agent, task=TaskInfo(step=2))
        with pytest.raises(RewardFailed, match=r"group 5 of step val:2"):
            await val_score(responses([5]), agent=agent, task=TaskInfo(step=2))
        await agent.close()

    run(body())


# Evaluations: by an agent, and by a rule.


def test_validation_scores_by_source() -> None:
    async def body() -> None:
        agent, task = RewardAgent(score), TaskInfo(step=3)
        scores = await val_score(responses([4, 9, 2], n=1), agent=agent, task=task)
        assert scores.ids == (2, 4, 9)
        by_source = {"val-core/openai/gsm8k/reward/mean@1": 3.0, "val-core/other/reward/mean@1": 9.0}
        assert task.metrics == {**by_source, "val-aux/score": 5.0}
        assert all(mark["validation"] and mark["step"] == 3 for mark in task.marks)
        many = TaskInfo(step=4)
        await val_score(responses([1, 2], n=3), agent=agent, task=many)
        assert many.metrics == {"val-core/openai/gsm8k/reward/mean@3": 1.5, "val-aux/score": 1.5}
        await agent.close()

    run(body())


@pytest.mark.parametrize("acc", [True, np.float32(1.0), np.bool_(True)])
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

    run(body())


def test_a_rule_scores_each_response_of_an_evaluation() -> None:
    task = TaskInfo(step=1)
    columns = {"data_source": ["a", "a", "b", "b"], "ground_truth": ["4"] * 4}
    batch = Batch([0, 0, 1, 1], {**columns, "response_text": ["#### 4", "#### 5", "#### 4", "#### 4"]})
    assert val_check(batch, compute_score=compute_score, task=task)["score"].tolist() == [1.0, 0.0, 1.0, 1.0]
    right = {"val-aux/score": 0.75, "val-aux/accuracy": 0.75}
    assert task.metrics == {"val-core/a/reward/mean@2": 0.5, "val-core/b/reward/mean@2": 1.0, **right}
    other = Batch(range(4), {"data_source": ["a", "b", "b", "b"]})
    assert mean_scores(other, [1.0, 0.0, 0.0, 0.5]) == pytest.approx(  # scores that are no accuracies
        {"val-core/a/reward/mean@1": 1.0, "val-core/b/reward/mean@1": 0.5 / 3, "val-aux/score": 1.5 / 4}
    )
    missing = mean_scores(batch, [1.0, float("nan"), float("nan"), float("nan")])
    assert missing == {"val-core/a/reward/mean@2": 1.0, "val-aux/score": 1.0, "val-aux/accuracy": 1.0}


# Greedy responses, whose scores are ReMax's baselines.


def test_the_score_of_a_groups_greedy_response_is_its_baseline() -> None:
    async def fails_once(ground_truth: str, **_: Any) -> float:
        if ground_truth == "3":
            raise ValueError("no answer")
        return float(ground_truth) / 2

    async def body() -> None:
        agent, task = RewardAgent(fails_once), TaskInfo(step=3)
        found = await greedy_score(responses([4, 1, 2], n=1), agent=agent, task=task)
        assert (found.ids, found["reward_baselines"].tolist()) == ((1, 2, 4), [0.5, 1.0, 2.0])
        assert (task.metrics, task.facts) == ({"reward/baseline": pytest.approx(7 / 6)}, {"requests": 3})
        assert [(m["step"], m["group"], m["greedy"]) for m in task.marks] == [(3, 1, True), (3, 2, True), (3, 4, True)]
        task = TaskInfo(step=4)
        dropping = RewardAgent(fails_once, on_failure="drop_sample", max_failed_share=1.0, retry=Retry(tries=1))
        found = await greedy_score(responses([3, 2], n=1), agent=dropping, task=task)
        assert (found["baseline_kept"].tolist(), found["reward_baselines"].tolist()) == ([True, False], [1.0, 0.0])
        assert task.metrics == {"reward/baseline": 1.0}

    run(body())


def test_baselines_are_scored_before_a_later_step_and_a_validation() -> None:
    seen: list[str] = []

    async def noted(ground_truth: str, **_: Any) -> float:
        seen.append(ground_truth)
        return 1.0

    async def body() -> None:
        agent = RewardAgent(noted, limits=Limits(1))
        for step, group in (("val:1", 9), (2, 2), ("beside:1", 1), (1, 0)):
            agent.submit(step, responses([group], n=1))
        await asyncio.gather(*(agent.collect(step) for step in (1, "beside:1", 2, "val:1")))

    run(body())
    assert max(seen.index("0"), seen.index("1")) < seen.index("2")


def test_the_greedy_stage_reads_the_weights_of_the_responses() -> None:
    def stages(*args: str) -> list[Any]:
        config = parse_overrides(RunConfig, args)
        return greedy_stages(config, rollout_stages(config)[1], engine=None, agent=None, on="gpu")

    assert stages() == []
    greedy, scoring = stages(
        "algorithm.adv_estimator=remax", "engine.n=3", "engine.temperature=0.7", "engine.top_p=0.9"
    )
    assert [(read.field, read.lag) for read in greedy.reads] == [("prompts", "none"), ("weights_version", "carried")]
    assert (greedy.writes, greedy.role, scoring.name) == (("greedy_responses",), None, "greedy_score")
    drawn = greedy.services["sampling"]
    assert (drawn.n, drawn.temperature, drawn.top_p) == (1, 0.0, 0.9)
