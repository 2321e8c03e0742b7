"""Runs with several reward agents: toy engines, real agents, inline. Metrics, waits and failures name the agent."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.api import Run, run
from dataflow.batch import Batch
from dataflow.cli import main
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.errors import ConfigError, StageFailed
from dataflow.graph import Carried, Hosted, Latest, Pipeline, stage
from dataflow.reward_agent import RewardAgent
from dataflow.rewards.ledger import Ledger
from dataflow.running.resume import check_changes
from dataflow.stages.combine import combine_stage
from dataflow.stages.reward import agent_stages
from dataflow.timeline.agents import agents_of
from dataflow.timeline.causes import culprits, pool_waits
from dataflow.timeline.page import chart
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import gantt

pytestmark = pytest.mark.timeout(60)
SLOW_S = 0.2
GROUPS, ROWS = 4, 2


@stage(writes="responses", on="gpu", role="samples")
def rollout(prompts: Any, version: Carried) -> Batch:
    rows = GROUPS * ROWS
    texts = [f"{step}" for step in range(rows)]
    mask = torch.ones(rows, 4, dtype=torch.int64)
    known = {"data_source": ["toy"] * rows, "ground_truth": ["1"] * rows, "response_text": texts}
    return Batch(np.repeat(np.arange(GROUPS), ROWS), {**known, "response_mask": mask})


@stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
def update(scores: Batch, actor: Latest, *, task: Any) -> int:
    kept = scores["kept"] if "kept" in scores else torch.ones(len(scores), dtype=torch.bool)
    task.log({"dropped": float((~kept).sum()), "score": float(scores["score"][kept].sum())})
    return task.step


@stage(writes="version", on="gpu", role="syncs")
def sync(actor: int) -> int:
    return actor


async def ones(**_: Any) -> float:
    return 1.0


async def slow(**_: Any) -> float:
    await asyncio.sleep(SLOW_S)
    return 1.0


async def broken(solution_str: str, **_: Any) -> float:
    if solution_str == "3":
        raise ValueError("no such taste")
    return 2.0


def toy(reward: Callable[..., Any] = ones, style: Callable[..., Any] = ones, **options: Any) -> Pipeline:
    agents = [
        Hosted("reward", functools.partial(RewardAgent, reward), concurrent=True),
        Hosted("style", functools.partial(RewardAgent, style, name="style", **options), concurrent=True),
    ]
    return combined(agents)


def combined(agents: list[Hosted], train: Any = update) -> Pipeline:
    pairs = [agent_stages(agent) for agent in agents]
    scores = combine_stage({"judge": "reward", "taste": "style"}, weights={"judge": 1.0, "taste": 1.0}, length=4)
    stages = [rollout, *(stage for pair in pairs for stage in pair), scores, train, sync]
    return Pipeline(stages, ["prompts"], {"gpu": 1, "controller": 1, "reward": None, "style": None})


def ran(pipeline: Pipeline, tmp_path: Path, policy: str = "baseline", **more: Any) -> Run:
    keys = {"policy": policy, "steps": 2, "groups": GROUPS, "mini_batches": 2, "name": "a", "runs": str(tmp_path)}
    return run(pipeline, inputs={"prompts": lambda step: step}, **keys, **more)


def waited(done: Run) -> dict[str, float]:
    return pool_waits(done.trace)


@pytest.mark.parametrize("policy", ["baseline", "both+stream"])
def test_each_agent_scores_all_samples_under_each_policy(policy: str, tmp_path: Path) -> None:
    done = ran(toy(style=slow), tmp_path, policy)
    each = {"requested": 16, "scored": 16, "failed": 0, "cancelled": 0}
    rewards = done.summary["rewards"]
    assert list(rewards["agents"]) == ["reward", "style"]
    assert {name: rewards["agents"]["style"][name] for name in each} == each
    assert {name: rewards["agents"]["reward"][name] for name in each} == each
    assert (rewards["requested"], rewards["scored"]) == (32, 32)
    assert rewards["agents"]["style"]["latency_s"]["p50"] >= 0.9 * SLOW_S
    steps = [row for row in done.metrics if "reward/style/scored" in row]
    assert [(row["reward/scored"], row["reward/style/scored"]) for row in steps] == [(8, 8), (8, 8)]
    assert all(row["reward/style/latency_p50"] >= 0.9 * SLOW_S for row in steps)
    assert all(
        {"reward/judge/mean", "reward/taste/mean", "reward/style/limit", "reward/limit"} <= set(r) for r in steps
    )


@pytest.mark.parametrize(("reward", "style", "cause"), [(slow, ones, "rewards"), (ones, slow, "style")])
def test_a_wait_is_for_the_agent_that_came_last(
    reward: Callable[..., Any], style: Callable[..., Any], cause: str, tmp_path: Path
) -> None:
    done = ran(toy(reward, style), tmp_path)
    # Its calls take that long in each of the two steps, whatever else the machine does.
    assert waited(done)[cause] >= 1.5 * SLOW_S
    trace = perfetto_of(done)
    worst = next(c for c in culprits(trace) if c.wait.cause == cause)
    collect = {"rewards": "reward_collect", "style": "style_collect"}[cause]
    assert worst.wait.by.partition("[")[0] == collect
    assert worst.request is not None
    assert (worst.request.resource, worst.request.args["collector"]) == (collect.removesuffix("_collect"), collect)
    assert f"{collect}, group" in worst.words
    timed = [row for row in done.metrics if "timing_s/step" in row]
    name = {"rewards": "reward", "style": "style"}[cause]
    assert sum(row[f"timing_s/reward/{name}"] for row in timed) >= 1.5 * SLOW_S
    for row in timed:
        both = row["timing_s/reward/reward"] + row["timing_s/reward/style"]
        assert row["timing_s/reward"] == pytest.approx(both)


def perfetto_of(done: Run) -> Trace:
    from dataflow.timeline import perfetto

    return perfetto.load(str(done.directory))


def test_each_agent_has_its_track(tmp_path: Path) -> None:
    trace = perfetto_of(ran(toy(slow, slow), tmp_path, "both"))
    assert agents_of(trace) == ["reward", "style"]
    rows = [line.split("  ")[0] for line in gantt(trace, 120).splitlines()]
    assert {"reward", "style", "reward in flight", "style in flight"} <= set(rows)
    assert len(chart({"a": trace}, {})["bands"]) == 2
    found = json.loads((tmp_path / "a" / "trace.json").read_text())
    counters = {event["name"] for event in found if event.get("ph") == "C"}
    assert {"rewards in flight", "style in flight"} <= counters


def test_a_sample_that_one_agent_fails_is_dropped_and_nothing_becomes_0(tmp_path: Path) -> None:
    done = ran(toy(ones, broken, on_failure="drop_sample", max_failed_share=1.0), tmp_path, "mini-batch")
    agents = done.summary["rewards"]["agents"]
    assert (agents["reward"]["scored"], agents["reward"]["failed"]) == (16, 0)
    assert (agents["style"]["scored"], agents["style"]["failed"]) == (14, 2)
    rows = [row for row in done.metrics if "score" in row]
    # Means over the two updates of a step: one sample in eight is dropped, each other one scores 1 + 2.
    assert [(row["dropped"], row["score"]) for row in rows] == [(0.5, 3.5 * 3.0)] * 2
    assert [row["reward/style/failed"] for row in rows] == [1, 1]


def test_a_failure_names_its_agent_and_its_section(tmp_path: Path) -> None:
    with pytest.raises(StageFailed) as caught:
        ran(toy(ones, broken), tmp_path, "both")
    said = str(caught.value)
    assert "style_collect[step 1" in said
    assert "failed on 'style'" in said
    assert "reward agent 'style': sample 1 of group 1 of step 1: 'broken' raised ValueError: no such taste" in said
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["status"] == "failed"
    each = summary["rewards"]["agents"]
    for counts in each.values():
        assert counts["requested"] == counts["scored"] + counts["failed"] + counts["cancelled"]


TWO_JUDGES = load_pipeline_file(Path(__file__).parents[2] / "pipelines" / "two_judges.py")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("rule.on_failure=replace_group", "rule.extra_groups=1"), "give rule.on_failure=drop_group"),
        (("rule.floor=9", "rule.concurrency=8"), "rule.floor=9; give 1 to rule.concurrency=8"),
        (("rule.judge.latency=long",), "latency"),
        (("rule.concurency=8",), "did you mean 'rule.concurrency'"),
    ],
)
def test_a_wrong_key_of_an_agent_is_one_sentence(
    keys: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(TWO_JUDGES.__file__), *keys, "executor=inline", f"runs={tmp_path}", "--quiet"]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_takes_the_answers_of_each_agent_from_its_ledger(tmp_path: Path) -> None:
    def with_ledger(name: str, score: Callable[..., Any]) -> Hosted:
        def agent() -> RewardAgent:
            return RewardAgent(score, name=name, ledger=Ledger(tmp_path / f"{name}.sqlite"))

        return Hosted(name, agent, concurrent=True)

    asked: list[str] = []

    async def counted(solution_str: str, **_: Any) -> float:
        asked.append(solution_str)
        return 1.0

    @stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
    def fails(scores: Batch, actor: Latest) -> int:
        raise ValueError("out of memory")

    hosts = [with_ledger("reward", counted), with_ledger("style", counted)]
    with pytest.raises(StageFailed, match="out of memory"):
        ran(combined(hosts, fails), tmp_path, resume="auto")
    agents = ran(combined(hosts), tmp_path, resume="auto").summary["rewards"]["agents"]
    assert {name: of["cached"] for name, of in agents.items()} == {"reward": 8, "style": 8}
    assert len(asked) == 2 * 16, "each once"


def test_the_limits_of_each_agent_may_change_when_a_run_resumes() -> None:
    def config(*keys: str) -> Any:
        return parse_overrides(TWO_JUDGES.Config, ["name=a", *keys])

    for key in ("rule.concurrency=4", "rule.judge.url=http://judge", "reward.concurrency=4", "rule.timeout=9"):
        check_changes(config(), config(key), Path("a"))
    for key in ("rule.on_failure=score:0", "rule.manager=dapo", "rule.custom_reward_function.path=x.py"):
        with pytest.raises(ConfigError, match="it would be another run"):
            check_changes(config(), config(key), Path("a"))
