"""The runner on the virtual clock: rule 5 on random graphs, versions, closed forms, golden timelines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import DataflowError, PipelineError, StageFailed
from dataflow.executors.base import Chunk, Done
from dataflow.executors.inline import InlineExecutor
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Carried, Latest, Pipeline, TaskGraph, TaskId, stage
from dataflow.policy import PRESETS, SchedulingPolicy, divisors, expand, preset
from dataflow.runner import Runner
from dataflow.scheduler import Scheduler
from dataflow.testing import check_trace, grpo_pipeline
from dataflow.timeline.spans import Span, Trace
from tests.rigs.costs import SECONDS, RandomCosts, SteadyCosts
from tests.rigs.golden import check_golden
from tests.rigs.logs import logged
from tests.rigs.memory import size_of
from tests.rigs.scheduling import random_graph, simulate

DICE = st.randoms(use_true_random=False)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck))


def grpo(policy: SchedulingPolicy, steps: int = 6, groups: int = 16, mini_batches: int = 4, **more) -> TaskGraph:
    return expand(grpo_pipeline(**more), policy, steps, mini_batches, groups=groups)


@st.composite
def policies(draw) -> tuple[SchedulingPolicy, int]:
    mini_batches = draw(st.sampled_from([1, 2, 3, 4, 6]))
    split = draw(st.sampled_from(divisors(mini_batches)))
    order = draw(st.sampled_from(["arrival", "index"]))
    return SchedulingPolicy(split, draw(st.integers(0, 4)), order), mini_batches


def place(graph: TaskGraph, i: TaskId) -> tuple[int, int, int]:
    """Returns a task's share of the step, the number of shares, and the epoch."""
    s = graph.pipeline.by_name[i.stage]
    shares = i.parts // s.epochs
    if s.epochs_over == "step":
        return i.part % shares, shares, i.part // shares
    return i.part // s.epochs, shares, i.part % s.epochs


def covers(graph: TaskGraph, source: TaskId, reader: TaskId) -> bool:
    """Whether a source's share of the step overlaps its reader's, both as fractions of the step, in its last epoch."""
    one, ones, epoch = place(graph, source)
    other, others, _ = place(graph, reader)
    last = epoch == graph.pipeline.by_name[source.stage].epochs - 1
    return last and one * others < (other + 1) * ones and other * ones < (one + 1) * others


# --- rule 5: random pipelines, policies, slots, durations and orders of arrival --------------------------


@QUICK
@given(DICE, st.integers(0, 999), st.sampled_from([0.0, 0.5]))
def test_the_trace_keeps_every_rule(dice, seed, grain):
    try:
        graph = random_graph(dice)
    except PipelineError:
        reject()
    trace, _seen = simulate(graph, RandomCosts(seed, graph.groups, graph.order, grain))
    check_trace(trace, graph)


@QUICK
@given(DICE, st.integers(0, 999))
def test_each_reader_sees_exactly_the_values_that_the_policy_says(dice, seed):
    try:
        graph = random_graph(dice)
    except PipelineError:
        reject()
    _trace, seen = simulate(graph, RandomCosts(seed, graph.groups, graph.order))
    lags = {"none": 0, "latest": 1, "carried": 1 + graph.max_staleness}
    pipeline = graph.pipeline
    for i, what in seen.items():
        for read in pipeline.by_name[i.stage].reads:
            got = what.fields[read.field]
            if read.field not in pipeline.writer:
                assert got == (() if read.optional else (None,))
                continue
            writer = pipeline.writer[read.field].name
            source = [t for t in seen if t.stage == writer and t.step == i.step - lags[read.lag]]
            if pipeline.writer[read.field].streams and pipeline.follows_stream(pipeline.by_name[i.stage]):
                assert got == (i._replace(stage=writer),)
                continue
            if writer == i.stage and i.part:
                # A stage continues from the state that its previous part wrote, as mini-batch updates do.
                assert got == (i._replace(part=i.part - 1),)
            elif read.field in pipeline.states:
                assert got == tuple(sorted(source)[-1:]), f"{i} read {read.field} of {got}"
            else:
                assert sorted(got) == sorted(t for t in source if covers(graph, t, i)), (
                    f"{i} read {read.field} of {got}"
                )


# --- spare groups: a step is offered more than it trains on ------------------------------------------------


@QUICK
@given(policies(), st.integers(0, 999), st.integers(1, 9))
def test_a_step_trains_on_as_many_groups_as_asked_of_those_it_is_offered(drawn, seed, spare):
    policy, mini_batches = drawn
    graph = grpo(policy, 5, mini_batches * 3, mini_batches)
    costs = RandomCosts(seed, graph.groups + spare, policy.order)
    trace, seen = simulate(graph, costs)
    check_trace(trace, graph)
    plain, _ = simulate(graph, RandomCosts(seed, graph.groups, policy.order))
    assert trace.spans == plain.spans, "spare groups alone change neither order nor times"
    for step in range(1, 6):
        taken = {
            name: [g for i in sorted(seen) if i.step == step and i.stage == name for g in seen[i].groups or ()]
            for name in ("advantage", "actor_update")
        }
        assert taken["advantage"] == taken["actor_update"]
        assert len(set(taken["advantage"])) == len(taken["advantage"]) == graph.groups
        assert set(taken["advantage"]) <= set(range(graph.groups + spare))
        if policy.order == "index":
            assert taken["advantage"] == list(range(graph.groups))


@stage(writes="responses", on="gpu")
def answer(prompts, weights: Carried):
    rows = prompts.repeat(2)
    return Batch(rows.groups, {"number": list(rows.groups)}, {"weights_version": weights or 0})


@stage(writes="rewards", on="reward", role="collects")
async def collect(responses, *, left, task):
    taken = [left.setdefault(task.step, list(responses.ids)).pop() for _ in range(task.take)]
    rows = [group for group in taken for _ in range(2)]
    return Batch(rows, {"score": [float(group) for group in rows]})


def log_probs(responses, actor: Latest):
    return responses.like(saw=[len(responses.ids)] * len(responses))


@stage(writes="report", on="io")
def tell(responses, rewards, early, held_out, *, told, task):
    whole = responses.merge(rewards, early)
    told[task.step] = (whole.ids, whole["score"].tolist(), held_out.ids)


@stage(writes="actor", on="gpu", per_mini_batch=True)
def learn(responses, early, late, rewards, actor: Latest, *, trained, task):
    batch = responses.merge(early, late, rewards)
    assert batch["score"].tolist() == batch["number"].tolist()
    trained.setdefault(task.step, []).append((batch.ids, set(batch["saw"])))
    return task.step


@stage(writes="weights", on="gpu")
def hand_over(actor):
    return actor


@pytest.mark.parametrize(("split", "staleness"), [(1, 0), (2, 1), (4, 0)])
def test_spare_groups_are_computed_on_until_the_collects_have_chosen(split, staleness):
    left, told, trained = {}, {}, {}
    log_prob = stage(writes="early", on="gpu")(log_probs)
    stages = [
        answer,
        log_prob.bind(name="before"),
        # One behind the collects: it still runs on all rows, since it reads nothing of them.
        log_prob.bind(name="behind", renamed={"early": "late"}, after=["collect"]),
        collect.bind(left=left),
        tell.bind(told=told),
        learn.bind(trained=trained),
        hand_over,
    ]
    graph = expand(Pipeline(stages, inputs=["prompts", "held_out"]), SchedulingPolicy(split, staleness), 3, 4, groups=8)
    inputs = {"prompts": lambda step: Batch(range(11)), "held_out": lambda step: Batch([4, 50])}
    run(graph, InlineExecutor(), inputs=inputs)
    for step in (1, 2, 3):
        assert left[step] == [0, 1, 2]
        assert [ids for ids, _ in trained[step]] == [(10, 9), (8, 7), (6, 5), (4, 3)]
        assert all(saw == {11} for _, saw in trained[step]), "log-probs are of all that was offered"
        ids, scores, held_out = told[step]
        assert ids == ((10, 9, 8, 7, 6, 5, 4, 3) if split == 1 else (3, 4, 5, 6, 7, 8, 9, 10))
        assert scores == [float(g) for g in ids for _ in range(2)]
        assert held_out == (4, 50)


def test_two_runs_are_the_same_and_costs_serve_several():
    graph, costs = grpo(SchedulingPolicy(4, 4, stream_rollout=True), 12, val_every=4), RandomCosts(7)
    first, second = (simulate(graph, costs) for _ in range(2))
    assert first[0].spans == second[0].spans
    assert first[1] == second[1]


# --- the shapes of the presets ---------------------------------------------------------------------------


def seconds(name: str, parts: int = 1) -> float:
    return SECONDS[name] * parts


def test_a_baseline_step_takes_the_sum_of_its_parts():
    graph = grpo(preset("baseline", 4), 5)
    trace, _ = simulate(graph, SteadyCosts(latency=8.0))
    wait = max(seconds("reward_request") + 8.0, seconds("old_log_prob"))
    step = seconds("rollout") + wait + seconds("advantage") + seconds("actor_update", 4)
    step += seconds("gather_weights") + seconds("sync_weights")
    assert trace.wall == pytest.approx(5 * step)


def test_a_gpu_that_never_waits_takes_its_load():
    # Rewards at once, a controller that takes no time: under every policy only the GPUs count.
    load = 5 * sum(seconds(name) for name in ("rollout", "old_log_prob", "gather_weights", "sync_weights"))
    load += 5 * seconds("actor_update", 4)
    for name in PRESETS:
        costs = SteadyCosts(latency=0.0, seconds={"reward_request": 0.0, "advantage": 0.0})
        trace, _ = simulate(grpo(preset(name, 4), 5), costs)
        assert trace.wall == pytest.approx(load), name


def test_slow_rewards_bound_a_policy_by_its_staleness():
    # Rewards so slow that all else hides: s + 1 steps' rewards are in flight at once.
    for staleness in range(5):
        trace, _ = simulate(grpo(SchedulingPolicy(1, staleness), 20), SteadyCosts(latency=1000.0))
        assert trace.wall == pytest.approx(1000.0 * -(-20 // (staleness + 1)), rel=0.05)


def test_policies_order_as_published_when_rewards_are_as_long_as_work():
    walls = {name: simulate(grpo(preset(name, 4), 30), SteadyCosts(latency=11.0))[0].wall for name in PRESETS}
    assert walls["baseline"] > walls["mini-batch"] > walls["both"]
    assert walls["baseline"] > walls["off-policy"] > walls["both"]


def test_the_next_rollout_starts_before_the_log_probs_when_rewards_are_slow():
    trace, _ = simulate(grpo(preset("both", 4), 8), SteadyCosts(latency=20.0))
    begin = {(s.stage, s.step): s.begin for s in trace.spans if s.part == 0}
    for step in range(1, 8):
        assert begin["rollout", step + 1] < begin["old_log_prob", step], step


@pytest.mark.parametrize("name", PRESETS)
def test_golden_timelines(name):
    check_golden(grpo(preset(name, 4), 4, val_every=2), SteadyCosts(latency=12.0), name, name)


# --- the runner itself -----------------------------------------------------------------------------------


def run(graph: TaskGraph, executor=None, **more) -> Runner:
    executor = executor or VirtualExecutor(RandomCosts(0, graph.groups))
    more.setdefault("inputs", {"prompts": lambda step: None})
    runner = Runner(graph, executor, trace=Trace(), **more)
    asyncio.run(runner.run())
    return runner


@pytest.mark.slow
def test_it_keeps_nothing_of_finished_steps():
    graph = grpo(SchedulingPolicy(4, 2), 200)
    executor, trace = VirtualExecutor(RandomCosts(0)), Trace()
    runner = Runner(graph, executor, inputs={"prompts": lambda step: None}, trace=trace)
    sizes: list[int] = []

    def size() -> int:
        return size_of([vars(runner)], [graph, executor, trace])

    def look(span: Span, *_inside: object) -> None:
        assert len(runner.handles(0)) <= (graph.ahead + 2) * 20
        if span.stage == "sync_weights" and span.step % 10 == 0:
            sizes.append(size())

    trace.sink = look
    asyncio.run(runner.run())
    assert not [step for _name, step in runner.handles(0) if step], "no field of a step"
    assert max(sizes) < 2 * sizes[0]
    assert size() < sizes[0] / 2


def test_each_step_is_reported_once_in_order():
    told: list[int] = []
    run(grpo(preset("both", 4), 7), on_step=lambda step, metrics: told.append(step))
    assert told == list(range(1, 8))


@pytest.mark.parametrize("broken", [False, True], ids=["reported", "not reported"])
def test_what_ended_late_is_reported_though_the_run_ends_before_the_rest_of_its_step(broken):
    async def score(actor, *, task):
        task.log({"val": 0.5})

    async def write(actor, scores):
        raise ValueError("first")

    def report(step, metrics):
        told.append((step, metrics))
        if metrics and broken:
            raise OSError("disk full")

    stages = [
        stage(writes="actor", on="gpu")(lambda prompts: 1).bind(name="train"),
        stage(writes="scores", on="reward", role="validates")(score).bind(every=1),
        stage(on="io")(write).bind(every=1),
    ]
    told: list[tuple[int, dict[str, float]]] = []
    graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(), 1)
    with logged() as warnings, pytest.raises(StageFailed, match="first"):
        run(graph, InlineExecutor(), on_step=report)
    assert told == [(1, {}), (1, {"val": 0.5})]
    assert ["disk full" in line for line in warnings] == [True] * broken


def test_tasks_start_before_the_one_that_they_waited_for_is_recorded():
    seen: dict[str, int] = {}

    class Noting(VirtualExecutor):
        def start(self, task, call, values):
            seen[f"start {task.id}"] = len(seen)
            super().start(task, call, values)

    trace = Trace(sink=lambda span, *_: seen.setdefault(span.task, len(seen)))
    runner = Runner(
        grpo(preset("both", 4), 3), Noting(SteadyCosts(0.0, 16)), inputs={"prompts": lambda step: step}, trace=trace
    )
    asyncio.run(runner.run())
    last = [span for span in trace.spans if span.stage == "actor_update" and span.part == span.parts - 1]
    after = [
        next(span for span in trace.spans if span.waited_for == one.task and span.begin == one.end) for one in last
    ]
    assert len(after) == 3  # the weight syncs, which find the GPUs free
    assert all(seen[f"start {span.task}"] < seen[span.waited_for] for span in after)


def test_what_a_callback_raises_stops_the_run():
    def broken(step, metrics) -> None:
        raise OSError("disk full")

    executor = VirtualExecutor(RandomCosts(0))
    cancelled: list[TaskId] = []
    executor.cancel = cancelled.append
    with pytest.raises(OSError, match="disk full"):
        run(grpo(preset("both", 4)), executor, on_step=broken)
    assert cancelled


def test_a_scheduler_that_stands_still_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(Scheduler, "_dispatch", lambda self: [])
    with pytest.raises(DataflowError, match="deadlock: tasks are left, but none is running"):
        run(grpo(preset("both", 4)))


def test_waited_for_names_the_last_dependency():
    trace, _ = simulate(grpo(preset("baseline", 4), 2), SteadyCosts())
    by_task = {s.task: s for s in trace.spans}
    assert by_task["actor_update[1.1]"].waited_for == "advantage[1]"
    assert by_task["rollout[2]"].waited_for == "sync_weights[1]"
    assert by_task["rollout[1]"].waited_for == ""


# --- check_trace itself: it must notice ------------------------------------------------------------------


def moved(span: Span, by: float = 0.0, **other) -> Span:
    return replace(span, **{"begin": span.begin + by, "end": span.end + by, **other})


BROKEN = {
    "ran twice": lambda spans: [*spans, spans[0]],
    "never ran": lambda spans: spans[:-1],
    r"old_log_prob\[2\] began before rollout\[2\] ended": lambda spans: [
        moved(s, by=-14.0) if s.task == "old_log_prob[2]" else s for s in spans
    ],
    "could start at": lambda spans: [moved(s, by=0.001) if s.stage == "val_score" else s for s in spans],
    "waited from .* beside a free slot of gpu": lambda spans: [
        moved(s, by=0.001) if s.task == "sync_weights[3]" else s for s in spans if s.stage != "val_rollout"
    ],
    "tasks on gpu|began before": lambda spans: [
        moved(s, end=s.end + 0.5) if s.task == "rollout[2]" else s for s in spans
    ],
}


@pytest.mark.parametrize("message", BROKEN)
def test_check_trace_notices(message):
    graph = grpo(preset("both", 4), 3, val_every=None if "free slot" in message else 3)
    trace, _ = simulate(graph, SteadyCosts())
    check_trace(trace, graph)
    with pytest.raises(AssertionError, match=message):
        check_trace(Trace(BROKEN[message](trace.spans), meta=trace.meta), graph)


def test_check_trace_notices_a_version_that_was_overwritten():
    wide = grpo(SchedulingPolicy(4, 1), 3, resources={"gpu": 9, "reward": None, "controller": 9, "io": 1})
    trace, _ = simulate(wide, RandomCosts(0))
    late = [s if s.task != "rollout[3]" else moved(s, end=s.end + 500) for s in trace.spans]
    with pytest.raises(AssertionError, match=r"overwrote it meanwhile|began before"):
        check_trace(Trace(late, meta=trace.meta), wide)


def test_events_of_the_run_before_on_the_same_executor_are_ignored() -> None:
    """Another runner saves an interrupted run, while answers of the cancelled tasks may still come."""

    @stage(writes="saved", on="gpu")
    def save(numbers):
        return numbers

    class Late(VirtualExecutor):
        async def events(self):
            yield Done(TaskId(3, "reward_collect", 1, 4), error=asyncio.CancelledError())
            yield Chunk(TaskId(4, "rollout", 0, 8), [0], (None,), 0.0)
            async for event in super().events():
                yield event

    graph = expand(Pipeline([save], inputs=["numbers"]), SchedulingPolicy(), 2)
    runner = Runner(
        graph, Late(SteadyCosts(seconds={"save": 1.0})), inputs={"numbers": lambda step: step}, trace=Trace()
    )
    assert [span.step for span in asyncio.run(runner.run()).spans] == [1, 2]
