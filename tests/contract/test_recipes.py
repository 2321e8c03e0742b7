"""Each recipe trains, with what a user brings along: verl's functions and managers, tools, programs, images."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.rig import ROOT, Trainer, problems, scripted_model, weights

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(150)]

RECIPES = sorted((ROOT / "pipelines").glob("*.py"))
LENGTH = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str.encode()) % 7 / 7
"""
TOOL = """
from dataflow.tools import tool

@tool("double")
def double(x: int) -> str:
    \"\"\"Doubles a number.

    Args:
        x: the number.
    \"\"\"
    return f"twice {x} is {2 * x}"
"""
PROGRAM = "```python\nprint(2 * int(input()))\n```"
CALL = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "length.py").write_text(LENGTH)
    return f"custom_reward_function.path={tmp_path / 'length.py'}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_each_recipe_trains_for_two_steps(recipe: Path, train: Trainer, tmp_path: Path, reward: str) -> None:
    """A recipe that a user copies would not run."""
    keys = {
        "agent": [reward, "engine.stop=[]"],
        "distill": [f"teacher.path={train.model}"],
        "ppo_critic": [reward, f"critic.path={train.model}"],
        "two_judges": ["judge.time_scale=0"],
        "dapo": [reward, "algorithm.filter_groups.enable=false", "data.gen_batch_size=null"],
    }.get(recipe.stem, [reward])
    run = train(*keys, folder=tmp_path, pipeline=str(recipe), without=["reward.backoff"])
    assert run.summary["status"] == "finished"
    assert {task.step for task in run.tasks if task.stage == "actor_update"} == {1, 2}
    assert all(math.isfinite(row["actor/grad_norm"]) for step, row in run.metrics.items() if step)


def test_dynamic_sampling_trains_only_on_groups_whose_scores_differ(train: Trainer, tmp_path: Path) -> None:
    """A step would be spent on groups that teach nothing."""
    (tmp_path / "some.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 if int(ground_truth) % 2 else len(solution_str.encode()) % 7 / 7\n"
    )
    run = train(
        f"custom_reward_function.path={tmp_path / 'some.py'}", "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=16", "steps=1", folder=tmp_path, pipeline=str(ROOT / "pipelines" / "dapo.py"),
    )  # fmt: skip
    trained = [row for row in run.samples if row["advantage"] is not None]
    groups: dict[int, set[float]] = {}
    for row in trained:
        groups.setdefault(row["group"], set()).add(row["score"])
    assert len(groups) == 4
    assert all(len(scores) > 1 for scores in groups.values())


@pytest.mark.parametrize(
    ("code", "scored"),
    [
        ("async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.25\n", 0.25),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
         "    return {'score': 0.5, 'kind': 'short'}\n", 0.5),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.75, 'q', ''\n", 0.75),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info, add=0):\n    return 0.5 + add\n", 1.5),
    ],
    ids=["async", "dict", "tuple", "reward_kwargs"],
)  # fmt: skip
def test_a_reward_function_with_verls_signature_is_used_as_it_is(
    code: str, scored: float, train: Trainer, tmp_path: Path
) -> None:
    """A function that a team has under verl would have to be rewritten."""
    (tmp_path / "score.py").write_text(code)
    extra = ["custom_reward_function.reward_kwargs={add: 1.0}"] if "add" in code else []
    run = train(f"custom_reward_function.path={tmp_path / 'score.py'}", "steps=1", *extra, folder=tmp_path)
    assert {row["score"] for row in run.samples} == {scored}
    if "kind" in code:
        assert {row["kind"] for row in run.samples} == {"short"}


def test_verls_dapo_manager_takes_its_penalty_from_the_score(train: Trainer, tmp_path: Path, reward: str) -> None:
    """Overlong responses would cost nothing, with the same settings as under verl."""
    kwargs = "reward.manager_kwargs={overlong_buffer_len: 8, overlong_penalty_factor: 0.5}"
    run = train(reward, "reward.manager=dapo", kwargs, "steps=1", folder=tmp_path)
    for row in run.samples:
        assert math.isclose(row["score"], row["acc"] - 0.5 * row["tokens"] / 8, abs_tol=1e-6)


def test_a_model_calls_a_tool_and_is_not_trained_on_its_answer(train: Trainer, tmp_path: Path, reward: str) -> None:
    """Conversations with tools would call nothing, or train the model to write what the tool wrote."""
    (tmp_path / "tools.py").write_text(TOOL)
    model = scripted_model(tmp_path / "caller", CALL)
    run = train(
        reward, f"model.path={model}", f"tools.path={tmp_path / 'tools.py'}", "tools.max_turns=2", "steps=1",
        "engine.max_tokens=160", "engine.stop=[]", "tools.names=[]", "tools.format=auto",
        "tools.max_response_tokens=160", folder=tmp_path, pipeline=str(ROOT / "pipelines" / "agent.py"),
    )  # fmt: skip
    assert all("twice 21 is 42" in row["response"] for row in run.samples)


def test_programs_in_responses_are_run_on_test_cases(train: Trainer, tmp_path: Path) -> None:
    """Code problems could not be scored without a service."""
    rows = []
    for n in range(8):
        truth = json.dumps({"inputs": ["3"], "outputs": ["6" if n % 2 else "7"]})
        rows.append({"prompt": [{"role": "user", "content": f"Problem {n}"}], "data_source": "code",
                     "reward_model": {"ground_truth": truth}})  # fmt: skip
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = scripted_model(tmp_path / "coder", PROGRAM)
    run = train(
        f"model.path={model}", f"data.train={tmp_path / 'code.jsonl'}", "reward.manager=sandbox", "steps=1",
        "data.prompts=8", "engine.n=2", "trainer.mini_batches=1", folder=tmp_path,
    )  # fmt: skip
    assert {PROGRAM in row["response"] for row in run.samples} == {True}
    truths = {row["group"]: json.loads(row["ground_truth"])["outputs"][0] for row in run.samples}
    assert {(truths[row["group"]], row["score"]) for row in run.samples} == {("6", 1.0), ("7", 0.0)}


def test_prompts_with_images_train_and_export_the_processor(tmp_path: Path, train: Trainer, reward: str) -> None:
    """A vision model could not be trained, or the export could not be served."""
    make = [sys.executable, str(ROOT / "examples" / "images" / "make.py"), str(tmp_path / "shapes")]
    subprocess.run(make, check=True, timeout=120, capture_output=True, cwd=ROOT)
    shapes = tmp_path / "shapes"
    run = train(
        reward, f"model.path={shapes}/model", f"data.train={shapes}/train.parquet", "checkpoint.export=true",
        "steps=1", folder=tmp_path,
    )  # fmt: skip
    assert all("How many squares" in row["prompt"] for row in run.samples)
    assert (run.directory / "model" / "preprocessor_config.json").is_file()


def test_an_adapter_is_trained_and_exported_merged(train: Trainer, tmp_path: Path, reward: str) -> None:
    """LoRA would train all weights, or export a model without what was learned."""
    run = train(reward, "trainer.lora.rank=4", "trainer.lr=0.01", "checkpoint.export=true", folder=tmp_path)
    before, after = weights(Path(train.model)), weights(run.directory / "model")
    changed = {name for name, value in before.items() if not (after[name] == value).all()}
    assert changed
    assert not any("embed" in name or "norm" in name for name in changed)


def test_several_rewards_are_added_by_their_weights(train: Trainer, tmp_path: Path, reward: str) -> None:
    """One of two judges would count for nothing, or twice."""
    keys = (reward, "steps=1", "weights.judge=0.5", "weights.rule=2", "weights.length=0.25")
    run = train(*keys, folder=tmp_path, pipeline=str(ROOT / "pipelines" / "two_judges.py"))
    assert any(row["judge_score"] for row in run.samples)
    assert all(math.isclose(row["score"], total(row), abs_tol=1e-5) for row in run.samples)


def total(row: dict[str, Any]) -> float:
    return 0.5 * row["judge_score"] + 2 * row["rule_score"] - 0.25 * row["length_penalty"]


def test_problems_of_gsm8ks_form_are_read(tmp_path: Path, train: Trainer, reward: str) -> None:
    """A user's JSON lines would need another format."""
    run = train(reward, f"data.train={problems(8, tmp_path / 'some.jsonl')}", "steps=1", folder=tmp_path)
    assert {int(row["ground_truth"].split()[-1]) for row in run.samples} <= set(range(8))
