"""Several collectors: the first forms the parts, the others return the same groups, and the rest waits for all."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.errors import PipelineError
from dataflow.executors.base import Done
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline, TaskGraph, TaskId, stage
from dataflow.planning import workload
from dataflow.planning.config import PlanConfig
from dataflow.planning.simulation import Outcome
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import PRESETS, SchedulingPolicy, expand, preset
from dataflow.runner import Runner
from dataflow.testing import check_trace, grpo_pipeline
from dataflow.timeline.causes import culprits
from dataflow.timeline.spans import Trace
from tests.rigs.costs import RandomCosts, SteadyCosts
from tests.rigs.golden import check_golden
from tests.rigs.scheduling import simulate

QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))
RULE = {"reward_ticket": "rule_ticket", "rewards": "rule_scores"}
SECONDS = {"rule_request": 0.01, "combine": 0.01}


@stage(writes="scores", on="controller", splittable=True)
def combine(rewards, rule_scores): ...


def two_agents() -> Pipeline:
    """A judge that forms the parts, and a rule whose scores are added."""
    usual = grpo_pipeline().stages
    rule_request = workload.reward_request.bind(name="rule_request", renamed=RULE)
    rule_collect = workload.reward_collect.bind(name="rule_collect", renamed=RULE)
    advantage = workload.advantage.bind(renamed={"rewards": "scores"})
    stages = [advantage if s.name == "advantage" else s for s in usual]
    return Pipeline([*stages, rule_request, rule_collect, combine], inputs=["prompts"])


def graph_of(policy: SchedulingPolicy, steps: int = 4) -> TaskGraph:
    return expand(two_agents(), policy, steps, 4, groups=16)


def test_the_first_collector_listed_forms_the_parts():
    pipeline = two_agents()
    assert [s.name for s in pipeline.collectors] == ["reward_collect", "rule_collect"]
    assert pipeline.collector is pipeline.by_name["reward_collect"]
    assert "rule_collect    on reward, once a part, the same groups as reward_collect" in pipeline.explain()
    others = Pipeline(list(reversed(pipeline.stages)), inputs=["prompts"])
    assert others.collector is others.by_name["rule_collect"]


def test_a_collector_behind_another_does_not_form_the_parts():
    second = workload.reward_request.bind(name="second", renamed={"responses": "rewards", "reward_ticket": "again"})
    collect = workload.reward_collect.bind(name="second_collect", renamed={"reward_ticket": "again", "rewards": "more"})
    pipeline = Pipeline([collect, second, *grpo_pipeline().stages], inputs=["prompts"])
    assert pipeline.collector is pipeline.by_name["reward_collect"]
    with pytest.raises(PipelineError, match="'second_collect' runs once a part, but reads from 'second', which needs"):
        expand(pipeline, preset("mini-batch", 4), 2, 4, groups=16)


@pytest.mark.parametrize("order", ["arrival", "index"])
@pytest.mark.parametrize("name", ["baseline", "both", "both+stream"])
def test_all_scores_of_a_part_are_of_the_same_groups(name, order):
    usual = preset(name, 4)
    graph = graph_of(replace(usual, order=order))
    for seed in range(5):
        trace, seen = simulate(graph, RandomCosts(seed, 16, order))
        check_trace(trace, graph)
        for step in range(1, 5):
            parts = [seen[TaskId(step, "combine", p, usual.split)] for p in range(usual.split)]
            for p, part in enumerate(parts):
                for field, of in (("rewards", "reward_collect"), ("rule_scores", "rule_collect")):
                    assert part.fields[field] == (TaskId(step, of, p, usual.split),)
                assert seen[TaskId(step, "rule_collect", p, usual.split)].groups == part.groups or usual.split == 1
            if usual.split > 1:
                assert sorted(g for part in parts for g in part.groups) == list(range(16))


@QUICK
@given(st.sampled_from(PRESETS), st.integers(0, 999))
def test_the_parts_are_those_of_the_first_collector_in_its_order_of_arrival(name, seed):
    graph = graph_of(preset(name, 4))
    _trace, seen = simulate(graph, RandomCosts(seed, 16))
    for step in range(1, 5):
        ids = list(range(16))
        random.Random(f"{seed}/{step}").shuffle(ids)
        updates = [seen[TaskId(step, "actor_update", part, 4)].groups for part in range(4)]
        assert [g for groups in updates for g in groups] == ids


@pytest.mark.parametrize(("rule", "judge", "blamed"), [(4.0, 20.0, "reward_collect"), (20.0, 4.0, "rule_collect")])
def test_requests_are_told_apart_by_collector(rule, judge, blamed):
    class Marked(VirtualExecutor):
        async def events(self):
            async for done in super().events():
                if isinstance(done, Done) and "collect" in done.id.stage:
                    end = done.report.end - (0.5 if done.id.stage == "rule_collect" else 0.0)
                    done.report.marks.append({"name": "reward", "begin": end - 1.0, "end": end, "group": done.id.part})
                yield done

    graph, trace = graph_of(preset("mini-batch", 4), 2), Trace(meta={"steps": 2})
    costs = SteadyCosts({"reward_collect": judge, "rule_collect": rule}, 16, SECONDS)
    asyncio.run(Runner(graph, Marked(costs), inputs={"prompts": lambda step: None}, trace=trace).run())
    found = [c for c in culprits(trace) if c.request is not None]
    assert found[0].wait.by.partition("[")[0] == blamed
    for c in found:
        assert c.request.args["collector"] == c.wait.by.partition("[")[0]
        assert f"{c.request.args['collector']}, group" in c.words


@pytest.mark.parametrize("name", ["baseline", "both"])
def test_a_trace_of_two_agents_is_planned(name):
    graph = graph_of(preset(name, 4), 3)
    trace, _ = simulate(graph, SteadyCosts({"reward_collect": 12.0, "rule_collect": 1.0}, 16, SECONDS))
    job = {"pipeline": graph.pipeline.facts(), "prompts": 16, "responses": 1, "mini_batches": 4, "concurrency": 16}
    trace.meta |= {"policy": name, "job": job}
    asked = PlanConfig.model_validate({"log": {"latency": "uniform:0:12", "concurrency": 16}})
    load = of_trace(trace, "trace.json", asked)
    assert (load.roles.request, load.roles.collect) == ("reward_request", "reward_collect")
    assert Outcome.of(load, preset(name, 4)).end == pytest.approx(trace.wall, rel=0.1)


@pytest.mark.parametrize("name", ["baseline", "both"])
def test_golden_timelines_of_two_collectors(name):
    costs = SteadyCosts({"reward_collect": 12.0, "rule_collect": 4.0}, 16, SECONDS)
    check_golden(graph_of(preset(name, 4), 3), costs, f"two_collectors_{name}", name)
