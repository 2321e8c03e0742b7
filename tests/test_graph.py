"""The pipeline: edges from names, and everything that can be wrong said when it is built."""

from __future__ import annotations

import pytest

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


def test_a_stage_is_a_plain_function_with_named_fields():
    @stage(writes=("a", "b"), on="gpu", after=["x"], every=2)
    def f(one, two: Carried, three: Latest, *, tool, task): ...

    assert f.reads == (Read("one"), Read("two", "carried"), Read("three", "latest"))
    assert (f.name, f.writes, f.on, f.after, f.every, f.grain) == ("f", ("a", "b"), "gpu", ("x",), 2, "step")
    assert f.accepts == ("tool",)
    assert f.missing_tools() == ["tool"]


def test_bind_renames_and_leaves_the_stage_as_it_was():
    other = rollout.bind(name="val_rollout", on="io", every=5, renamed={"responses": "val_responses", "prompts": "val"})
    assert (other.name, other.on, other.every, other.writes) == ("val_rollout", "io", 5, ("val_responses",))
    assert other.reads == (Read("val"), Read("weights", "carried"))
    assert rollout.name == "rollout"
    assert scale.bind(factor=2).tools == {"factor": 2}


def test_edges_come_from_names():
    pipeline = Pipeline(GRPO, inputs=["prompts"])
    assert [(a.name, b.name, field, lag) for a, b, field, lag in pipeline.edges()] == [
        ("actor_update", "rollout", "weights", "carried"),
        ("rollout", "advantage", "responses", "none"),
        ("rollout", "actor_update", "responses", "none"),
        ("advantage", "actor_update", "advantages", "none"),
        ("actor_update", "actor_update", "actor", "latest"),
    ]
    assert pipeline.states == {"weights", "actor"}
    assert [s.name for s in pipeline.order] == ["rollout", "advantage", "actor_update"]


def test_explain_says_what_feeds_what():
    text = grpo_pipeline(val_every=3).explain()
    assert "reads  weights from sync_weights (of 1 + max_staleness steps before)" in text
    assert "reads  actor from actor_update (of the step before)" in text
    assert "reads  prompts input" in text
    assert "on gpu, once a mini-batch" in text
    assert "on reward, every 3 steps" in text


def test_draw_gives_mermaid():
    lines = grpo_pipeline().draw().splitlines()
    assert lines[0] == "flowchart LR"
    assert "    prompts --> rollout" in lines
    assert "    rollout -->|responses| old_log_prob" in lines
    assert "    sync_weights -.->|weights| rollout" in lines


def error(make) -> str:
    with pytest.raises(PipelineError) as info:
        make()
    return str(info.value)


def build(*stages, inputs=("prompts",), **more):
    return lambda: Pipeline(stages, inputs=inputs, **more)


def another(fn_name: str, **stage_options):
    def fn(responses): ...

    fn.__name__ = fn_name
    return stage(**stage_options)(fn)


def sentence_cases():
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

    @stage(writes="w", on="io")
    def starred(*fields): ...

    two = {n: another(n, writes=f"{n}_out", on="reward", forms_parts=True) for n in ("collect", "gather_rewards")}
    weights = Pipeline([rollout], inputs=["prompts", "weights"]).stages
    yield (
        "missing producer, guessed",
        build(*weights, advantage, reads_advantage, inputs=["prompts", "weights"]),
        "stage 'reads_advantage' reads field 'advantage', but no stage writes it; "
        "did you mean 'advantages' (written by 'advantage')?",
    )
    yield (
        "missing producer, an input guessed",
        lambda: Pipeline([rollout], inputs=["prompt", "weights"]),
        "stage 'rollout' reads field 'prompts', but no stage writes it; did you mean 'prompt'?",
    )
    yield (
        "missing producer, nothing near",
        build(advantage, reads_strange, inputs=["responses"]),
        "stage 'reads_strange' reads field 'zzz', but no stage writes it; known fields: advantages, w, responses.",
    )
    yield (
        "two producers",
        build(*GRPO, another("mine", writes="advantages", on="io")),
        "field 'advantages' is written by 'advantage' and 'mine'.",
    )
    yield (
        "an input written",
        build(*GRPO, another("mine", writes="prompts", on="io")),
        "field 'prompts' is an input of the pipeline; 'mine' cannot write it.",
    )
    yield (
        "two of one name",
        build(*GRPO, another("advantage", writes="other", on="io")),
        "two stages are named 'advantage'; give one another name with bind(name=...).",
    )
    yield (
        "cycle",
        build(sync, gather),
        "the stages form a cycle: gather -> sync -> gather; "
        "mark the field that comes from an earlier step as Carried.",
    )
    yield (
        "undeclared resource",
        build(*GRPO, another("mine", writes="m", on="gpus")),
        "stage 'mine' runs on 'gpus', which is no resource; did you mean 'gpu'? "
        "(declared: gpu, reward, controller, io).",
    )
    yield (
        "no slots",
        build(*GRPO, resources={"gpu": 0, "controller": 1}),
        "resource 'gpu' has 0 slots; give 1 or more, or None for no limit.",
    )
    yield (
        "optional feeds mandatory",
        build(*GRPO, validate, report),
        "stage 'report' reads 'accuracy' from 'validate', which runs only every 3 steps; give both the same every=.",
    )
    yield (
        "optional state",
        build(*GRPO, validate, reads_back),
        "stage 'reads_back' reads 'accuracy' of an earlier step, but 'validate' runs only every 3 steps; "
        "let it run on every step.",
    )
    yield (
        "optional former",
        build(*GRPO, another("collect", writes="r", on="reward", forms_parts=True).bind(every=2)),
        "stage 'collect' forms the parts of every step, so it cannot run only every 2.",
    )
    yield (
        "missing tool",
        build(*GRPO, scale),
        "stage 'scale' needs a tool 'factor'; bind it: scale.bind(factor=...).",
    )
    yield (
        "unknown tool",
        lambda: scale.bind(facto=2),
        "stage 'scale' takes no tool 'facto'; did you mean 'factor'? (it takes factor, offset).",
    )
    yield "no tools at all", lambda: rollout.bind(x=1), "stage 'rollout' takes no tool 'x' (it takes none)."
    yield (
        "two processes",
        build(*GRPO, scale.bind(factor=Hosted("one", dict), offset=Hosted("two", dict))),
        "stage 'scale' uses tools of two processes (one, two); split it in two stages and pass a value between them.",
    )
    yield (
        "after nothing",
        build(*GRPO, another("mine", writes="m", on="io", after=["rolout"])),
        "stage 'mine' is after 'rolout', which is no stage; did you mean 'rollout'?.",
    )
    yield (
        "every",
        build(*GRPO, another("mine", writes="m", on="io", every=0)),
        "stage 'mine': every=0; give 1 or more.",
    )
    yield (
        "two formers",
        build(*GRPO, *two.values()),
        "stages 'collect' and 'gather_rewards' both form the parts of a step.",
    )
    yield (
        "nameless fields",
        lambda: stage(writes="w", on="io")(starred.fn),
        "stage 'starred': parameter '*fields' has no name to be a field.",
    )


def test_what_is_wrong_is_one_exact_sentence():
    @stage(writes="w", on="io")
    def fine(responses): ...

    cases = []

    def starred(*fields): ...

    with pytest.raises(PipelineError, match="parameter '\\*fields' has no name to be a field"):
        stage(writes="w", on="io")(starred)
    for name, make, sentence in cases:
        assert error(make) == sentence, name
