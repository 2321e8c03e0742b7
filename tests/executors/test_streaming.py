"""A rollout that emits groups as they finish, on the executors that run one: each is scored and used once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Hosted, Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.reward_agent import RewardAgent
from dataflow.runner import Runner
from dataflow.stages.reward import reward_collect, reward_request
from dataflow.stages.rollout import rollout
from dataflow.stages.sync import sync_weights
from dataflow.testing import check_trace
from dataflow.timeline.spans import Trace
from tests.rigs.fake_engine import FakeRollout

pytestmark = [pytest.mark.timeout(120), pytest.mark.shares_ray]

GROUPS, N, BATCHES = 8, 2, 4


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    group, index, seed, version = map(int, solution_str.split())
    assert str(group) == ground_truth
    await asyncio.sleep(0.003 * ((group * 7 + index * 3 + seed) % 5))
    return group + index / 10 + version / 100


def agent(**options: Any) -> RewardAgent:
    return RewardAgent(score, **options)


class Trainer:
    """Remembers the groups and scores of each update."""

    def __init__(self) -> None:
        self.updates: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def seen(self) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        return self.updates


@stage(writes="actor", on="gpu", per_mini_batch=True)
def update(responses: Batch, rewards: Batch, actor: Latest, *, trainer: Trainer, task) -> int:
    assert responses.ids == rewards.ids
    versions = set(responses["version"].tolist())
    assert len(versions) == 1, "the samples of a step come of one version of the weights"
    assert task.step - 1 - versions.pop() == min(task.step - 1, task.max_staleness)
    trainer.updates.append((rewards.ids, tuple(round(s, 3) for s in rewards["score"].tolist())))
    return task.step


@stage(writes="actor_weights", on="gpu")
def gather(actor: int) -> dict[str, Any]:
    return {}


def pipeline(engine: Hosted, spare: int = 0) -> Pipeline:
    rewards = Hosted("reward", agent, concurrent=True)
    return Pipeline(
        [
            rollout.bind(engine=engine, sampling=Sampling(n=N), seed=3),
            reward_request.bind(agent=rewards, extra_groups=spare),
            reward_collect.bind(agent=rewards),
            update.bind(trainer=Hosted("trainer", Trainer)),
            gather,
            sync_weights.bind(engine=engine),
        ],
        inputs=["prompts"],
    )


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Any:
    if request.param == "inline":
        return InlineExecutor()
    request.getfixturevalue("local_ray")
    from dataflow.executors.ray import RayExecutor

    return RayExecutor(num_cpus=2)


def run(executor: Any, policy: SchedulingPolicy, engine: Hosted, steps: int = 4, spare: int = 0) -> tuple[Any, ...]:
    """Returns the trace, what the trainer was given, and what the engine was asked for."""
    graph = expand(pipeline(engine, spare), policy, steps, BATCHES, groups=GROUPS)
    trace = Trace(meta={"resources": dict(graph.pipeline.resources)})
    prompts = Batch(range(GROUPS + spare), {"prompt_ids": [[1]] * (GROUPS + spare)})
    runner = Runner(graph, executor, inputs={"prompts": lambda step: prompts}, trace=trace)

    async def body() -> tuple[Any, ...]:
        try:
            await executor.open(graph.pipeline)
            await asyncio.wait_for(runner.run(), 60)
            return await executor.ask("trainer", "seen"), await executor.ask("rollout", "heard")
        finally:
            await executor.close()

    trained, asked = asyncio.run(body())
    check_trace(trace, graph, tolerance=0.02, busy=False)
    return trace, trained, asked


@pytest.mark.parametrize(
    ("executor", "name", "order"),
    [
        ("inline", "baseline+stream", "index"),
        ("inline", "both+stream", "arrival"),
    ],
    indirect=["executor"],
)
def test_each_group_is_scored_and_used_once(executor: Any, name: str, order: Any) -> None:
    found = preset(name, BATCHES)
    policy = SchedulingPolicy(found.split, found.max_staleness, order, stream_rollout=True)
    trace, trained, asked = run(executor, policy, Hosted("rollout", FakeRollout, concurrent=True))
    steps = [trained[i : i + BATCHES] for i in range(0, len(trained), BATCHES)]
    assert len(steps) == 4
    for updates in steps:
        groups = [group for ids, _scores in updates for group in ids]
        assert sorted(groups) == list(range(GROUPS))
        if order == "index":
            assert groups == list(range(GROUPS))
    assert [groups for _seed, groups in asked] == [tuple(range(GROUPS))] * 4
    spans = {span.task: span for span in trace.spans}
    for step in range(1, 5):
        emitted = spans[f"rollout[{step}]"].args["emitted_s"]
        assert len(emitted) == GROUPS, "a set of one group each"
        first = min(span.begin for task, span in spans.items() if task.startswith(f"reward_request[{step}."))
        assert min(emitted) <= first + 0.02
        assert min(emitted) < spans[f"rollout[{step}]"].end
        if isinstance(executor, InlineExecutor):  # between processes a chunk arrives later
            assert first < spans[f"rollout[{step}]"].end, "rewards start while others are still sampled"


def test_a_streaming_run_scores_what_a_whole_one_does() -> None:
    engine = Hosted("rollout", FakeRollout, concurrent=True)
    of: dict[bool, Any] = {}
    for streams in (False, True):
        policy = SchedulingPolicy(4, 0, "index", stream_rollout=streams)
        of[streams] = run(InlineExecutor(), policy, engine)[1]
    assert of[True] == of[False]


@pytest.mark.parametrize("order", ["arrival", "index"])
def test_spare_groups_stream_too(order: Any) -> None:
    engine = Hosted("rollout", FakeRollout, concurrent=True)
    _trace, trained, asked = run(InlineExecutor(), SchedulingPolicy(4, 1, order, stream_rollout=True), engine, 3, 3)
    assert [groups for _seed, groups in asked] == [tuple(range(GROUPS + 3))] * 3
    for at in range(0, len(trained), BATCHES):
        groups = [group for ids, _scores in trained[at : at + BATCHES] for group in ids]
        assert len(set(groups)) == GROUPS
        if order == "index":
            assert groups == list(range(GROUPS))


@pytest.mark.heavy
@pytest.mark.parametrize("executor", ["ray"], indirect=True)
def test_an_engine_that_dies_in_mid_rollout_is_synced_again_and_samples_only_the_rest(
    executor: Any, tmp_path: Path
) -> None:
    engine = Hosted("rollout", FakeRollout, {"deaths": str(tmp_path / "died")}, concurrent=True, restarts=1)
    policy = SchedulingPolicy(4, 0, "arrival", stream_rollout=True)
    trace, trained, asked = run(executor, policy, engine)
    assert (tmp_path / "died").exists()
    for at in range(0, len(trained), BATCHES):
        groups = [group for ids, _scores in trained[at : at + BATCHES] for group in ids]
        assert sorted(groups) == list(range(GROUPS))
    # The second engine only records its own rollouts: the rest of step 2, then 3 and 4.
    rest, *whole = [groups for _seed, groups in asked]
    assert 0 < len(rest) < GROUPS, "emitted groups are not sampled again"
    assert whole == [tuple(range(GROUPS))] * 2
    again = next(span for span in trace.spans if span.task == "rollout[2]")
    assert again.args["restarted"] == 1
    assert len(again.args["emitted_s"]) == GROUPS


@stage(writes="responses", on="gpu", streams=True)
def waits_for_a_reader(prompts: Batch, *, path: Path, task) -> Batch:
    task.emit(0, prompts.select([0]))
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, "the first chunk was not handed on while the function ran"
        time.sleep(0.01)
    task.emit(1, prompts.select([1]))
    return prompts


@stage(writes="read", on="controller", per_chunk=True)
async def reads_a_chunk(responses: Batch, *, path: Path) -> Batch:
    path.touch()
    return responses


@pytest.mark.heavy
@pytest.mark.parametrize("executor", ["ray"], indirect=True)
def test_chunks_of_a_plain_function_are_handed_on_while_it_runs(executor: Any, tmp_path: Path) -> None:
    stages = [each.bind(path=tmp_path / "read") for each in (waits_for_a_reader, reads_a_chunk)]
    graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(stream_rollout=True), 1, 2, groups=2)
    prompts = Batch([0, 1], {"text": ["a", "b"]})

    async def body() -> None:
        try:
            await executor.open(graph.pipeline)
            await Runner(graph, executor, inputs={"prompts": lambda step: prompts}, trace=Trace()).run()
        finally:
            await executor.close()

    asyncio.run(asyncio.wait_for(body(), 60))
