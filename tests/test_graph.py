"""The pipeline: edges from names, and every error that is found when it is built."""

from __future__ import annotations

import json
import re

import pytest

from dataflow.drawing.graph_picture import stages_chart
from dataflow.errors import PipelineError
from dataflow.graph import Carried, Hosted, Latest, Pipeline, Read, TaskId, TaskInfo, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.testing import grpo_pipeline


@stage(writes="responses", on="gpu")
def rollout(prompts, weights: Carried): ...


@stage(writes="advantages", on="controller")
def advantage(responses): ...


@stage(writes=("actor", "weights"), on="gpu", per_mini_batch=True)
def actor_update(responses, advantages, actor: Latest): ...


@stage(writes="scaled", on="controller")
def scale(advantages, *, factor, offset=0, task: TaskInfo): ...


@stage(writes="accuracy", on="reward", every=3)
def validate(responses): ...


GRPO = [rollout, advantage, actor_update]


def test_a_stage_is_a_plain_function_with_named_fields_and_bind_leaves_it_as_it_was():
    @stage(writes=("a", "b"), on="gpu", after=["x"], every=2)
    def f(one, two: Carried, three: Latest, *, service, task): ...

    assert f.reads == (Read("one"), Read("two", "carried"), Read("three", "latest"))
    assert (f.name, f.writes, f.on, f.after, f.every, f.per) == ("f", ("a", "b"), "gpu", ("x",), 2, "step")
    assert f.accepts == ("service",)
    other = rollout.bind(name="val_rollout", on="io", every=5, renamed={"responses": "val_responses", "prompts": "val"})
    assert (other.name, other.on, other.every, other.writes) == ("val_rollout", "io", 5, ("val_responses",))
    assert other.reads == (Read("val"), Read("weights", "carried"))
    assert rollout.name == "rollout"


@stage(writes="loss", on="gpu")
def penalise(responses, accuracy=None, reference: Carried | None = None): ...


def test_an_optional_field_is_read_on_the_steps_that_have_it():
    assert penalise.reads == (Read("responses"), Read("accuracy", "none", True), Read("reference", "carried", True))
    pipeline = Pipeline([*GRPO, penalise, validate], inputs=["prompts"])
    assert "reads  reference absent, optional" in pipeline.explain()
    graph = expand(pipeline, SchedulingPolicy(), 4)
    read = {
        t.id.step: [i.sources for i in t.inputs]
        for step in range(1, 5)
        for t in graph.unroll(step)
        if t.stage is penalise
    }
    assert read[2] == [(TaskId(2, "rollout"),), (), ()]
    assert [read[step][1] for step in (1, 3, 4)] == [(), (TaskId(3, "validate"),), (TaskId(4, "validate"),)]
    again = Pipeline.from_facts(json.loads(json.dumps(pipeline.facts())))
    assert again.by_name["penalise"].reads == penalise.reads
    assert Pipeline([*GRPO, penalise], ["prompts"]).subset(["rollout", "penalise"]).inputs == ("prompts", "weights")


def test_fields_that_nobody_reads_are_said():
    pipeline = Pipeline([*GRPO, scale.bind(factor=2), validate], inputs=["prompts"])
    assert pipeline.unread() == [
        "stage 'scale' writes 'scaled', which no stage reads; let a stage read it, or leave out writes= if the stage "
        "only logs."
    ]
    assert pipeline.explain().endswith(pipeline.unread()[0])
    assert grpo_pipeline(val_every=2).unread() == []


def test_resources_are_added_to_those_that_there_are():
    @stage(writes="length", on="judge")
    def measure(text): ...

    @stage(writes="loss", on="gpu")
    def train(length): ...

    assert Pipeline([measure, train], ["text"], {"judge": 2}).resources == {"gpu": 1, "judge": 2}
    assert Pipeline([measure, train], ["text"], {"judge": 2, "gpu": 3}).resources == {"judge": 2, "gpu": 3}


def test_edges_come_from_names():
    pipeline = Pipeline(GRPO, inputs=["prompts"])
    assert [(a.name, b.name, field, lag) for a, b, field, lag in pipeline.edges] == [
        ("actor_update", "rollout", "weights", "carried"),
        ("rollout", "advantage", "responses", "none"),
        ("rollout", "actor_update", "responses", "none"),
        ("advantage", "actor_update", "advantages", "none"),
        ("actor_update", "actor_update", "actor", "latest"),
    ]
    assert pipeline.states == {"weights", "actor"}
    assert [s.name for s in pipeline.order] == ["rollout", "advantage", "actor_update"]


def test_stages_chart_gives_mermaid():
    lines = stages_chart(grpo_pipeline()).splitlines()
    assert lines[0] == "flowchart LR"
    ids = {name: id for id, name in re.findall(r'^    (\w+)\(?\["(\w+)', "\n".join(lines), re.MULTILINE)}
    assert f"    {ids['prompts']} --> {ids['rollout']}" in lines
    assert f'    {ids["rollout"]} -->|"responses"| {ids["old_log_prob"]}' in lines
    late = '-.->|"weights_version of 1 + max_staleness steps before"|'
    assert f"    {ids['sync_weights']} {late} {ids['rollout']}" in lines
    # Words of mermaid's own may be names of stages, not of nodes.
    assert all(re.fullmatch(r"[si]\d+", id) for id in ids.values())


def plain(name: str, **options):
    """A stage of that name that reads the responses."""

    def fn(responses): ...

    fn.__name__ = name
    return stage(**options)(fn)


@stage(writes="w", on="gpu")
def reads_advantage(advantage): ...


@stage(writes="w", on="gpu")
def reads_strange(zzz): ...


@stage(writes="weights", on="gpu")
def sync(actor_weights): ...


@stage(writes="actor_weights", on="gpu")
def gather(weights): ...


@stage(writes="report", on="io")
def report(accuracy): ...


@stage(writes="late", on="io")
def reads_back(accuracy: Latest): ...


def star():
    def starred(*fields): ...

    stage(writes="w", on="io")(starred)


def build(*stages, inputs=("prompts",), **more):
    return lambda: Pipeline(stages, inputs=inputs, **more)


def factored(one, factor=0.5): ...


def loop(prompts, weights: Carried): ...


WRONG = {
    "missing producer, guessed": (
        build(rollout, advantage, reads_advantage, inputs=["prompts", "weights"]),
        "stage 'reads_advantage' reads field 'advantage', but no stage writes it; "
        "did you mean 'advantages' (written by 'advantage')?",
    ),
    "missing producer, nothing near": (
        build(advantage, reads_strange, inputs=["responses"]),
        "stage 'reads_strange' reads field 'zzz', but no stage writes it; known fields: advantages, w, responses; "
        "name it in inputs=, or write it.",
    ),
    "two producers": (
        build(*GRPO, plain("mine", writes="advantages", on="io")),
        "field 'advantages' is written by 'advantage' and 'mine'; rename one with bind(renamed=...).",
    ),
    "an input written": (
        build(*GRPO, plain("mine", writes="prompts", on="io")),
        "field 'prompts' is one of inputs=, which 'mine' writes; rename one.",
    ),
    "two of one name": (
        build(*GRPO, plain("advantage", writes="other", on="io")),
        "two stages are named 'advantage'; give one another name with bind(name=...).",
    ),
    "cycle": (
        build(sync, gather),
        "the stages form a cycle: sync -> gather -> sync; mark the field of an earlier step as Latest, or as Carried.",
    ),
    "undeclared resource": (
        build(*GRPO, plain("mine", writes="m", on="gpus")),
        "stage 'mine' runs on 'gpus', which is not a resource; did you mean 'gpu'? "
        "(declared: gpu, reward, controller, io); declare it with Pipeline(resources={'gpus': 1}).",
    ),
    "no slots": (
        build(*GRPO, resources={"gpu": 0, "controller": 1}),
        "resource 'gpu' has 0 slots; give 1 or more, or None for no limit.",
    ),
    "a plain function": (
        build(*GRPO, len),
        "<built-in function len> in a pipeline is no stage; write @stage(...) above the function.",
    ),
    "optional feeds mandatory": (
        build(*GRPO, validate, report),
        "stage 'report' reads 'accuracy' from 'validate', which runs only every 3 steps; give both "
        "the same every=, or the field a default of None.",
    ),
    "optional state": (
        build(*GRPO, validate, reads_back),
        "stage 'reads_back' reads 'accuracy' of an earlier step, but 'validate' runs only every 3 steps; "
        "let it run on every step.",
    ),
    "optional collector": (
        build(*GRPO, plain("collect", writes="r", on="reward", role="collects", every=2)),
        "stage 'collect' collects the rewards of every step, so it cannot run only every 2.",
    ),
    "missing service": (
        build(*GRPO, scale),
        "stage 'scale' needs service or option 'factor'; bind it: scale.bind(factor=...).",
    ),
    "unknown service": (
        lambda: scale.bind(facto=2),
        "stage 'scale' takes no service or option 'facto'; did you mean 'factor'? (it takes factor, offset).",
    ),
    "two processes": (
        lambda: Pipeline([*GRPO, scale.bind(factor=Hosted("one", dict), offset=Hosted("two", dict))], ["prompts"]),
        "stage 'scale' uses services of two processes (one, two); split it in two, with a field between them.",
    ),
    "after nothing": (
        build(*GRPO, plain("mine", writes="m", on="io", after=["rolout"])),
        "stage 'mine' is after 'rolout', which is not a stage; did you mean 'rollout'?",
    ),
    "a default": (
        lambda: stage(on="gpu")(factored),
        "stage 'factored': field 'factor' has the default 0.5; give None, which makes the field optional, or move "
        "'factor' behind the *, which makes it an option.",
    ),
    "an optional field misspelt": (
        build(*GRPO, penalise.bind(renamed={"accuracy": "acuracy"}), validate),
        "stage 'penalise' reads the optional field 'acuracy', which no stage writes, and 'validate' writes "
        "'accuracy', which no stage reads; give both one name.",
    ),
    "a state that streams": (
        lambda: Pipeline([stage(writes="weights", on="gpu", streams=True)(loop)], ["prompts"]),
        "stage 'loop' streams, but 'weights' is a state that a later step reads; a state changes at the end of a "
        "task, so let another stage write it.",
    ),
    "mini-batches that stream": (
        lambda: stage(writes="x", on="gpu", streams=True, per_mini_batch=True)(loop),
        "stage 'loop' runs once a mini-batch, so it cannot stream; let it run once a step.",
    ),
    "nameless fields": (
        star,
        "stage 'starred': parameter '*fields' has no name to be a field; name each field that it reads.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_exact_sentence(case):
    make, sentence = WRONG[case]
    with pytest.raises(PipelineError) as error:
        make()
    assert str(error.value) == sentence


def test_a_subset_turns_what_others_wrote_into_inputs():
    part = grpo_pipeline(val_every=3).subset(["val_rollout", "val_score"])
    assert [s.name for s in part.stages] == ["val_rollout", "val_score"]
    assert part.inputs == ("weights_version",)
    assert all(s.every is None for s in part.stages)


def test_tasks_have_names_and_an_order():
    assert str(TaskId(3, "actor_update", 1, 4)) == "actor_update[3.2]"
    assert str(TaskId(3, "rollout")) == "rollout[3]"
    assert TaskId(2, "rollout") < TaskId(3, "advantage")
    assert TaskInfo(step=1, part=3, parts=4).last


def test_the_unrolled_graph_explains_itself():
    graph = expand(grpo_pipeline(), SchedulingPolicy(2, 1), 3, 2, groups=4)
    lines = graph.explain(2, 2).splitlines()
    assert "reward_collect[2.2]  reward      after reward_request[2], reward_collect[2.1]" in lines
    assert "rollout[2]           gpu         at once" in lines
    assert graph.window().number_of_nodes() == 3 * len(graph.unroll(1))
    assert graph.task("reward_collect[2.2]").id == TaskId(2, "reward_collect", 1, 2)
    with pytest.raises(KeyError):
        graph.task("rollout[2.1]")
