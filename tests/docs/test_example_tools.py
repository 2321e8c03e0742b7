"""The files of examples/tools work as described: with a scripted model, a random one, and the tiny one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.config.run import parse_overrides
from dataflow.graph import TaskInfo
from dataflow.models.problems import generate
from dataflow.models.tiny import tiny_model
from dataflow.models.tokenizer import load_chat_tokenizer, prompt_ids
from dataflow.stages.rollout import rollout
from dataflow.tools.calculator import calculator
from tests.engines.drawing import run
from tests.rigs.scripted_engine import ScriptedRollout, call

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "examples" / "tools"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_pipeline_file(TOOLS / "calculator.py")


def problems(tokenizer: Any, count: int, kwargs: Any = None) -> tuple[Batch, list[dict[str, Any]]]:
    """Returns generated problems as a step's prompts."""
    made = generate(count, 0, 0)[0]
    chats = [[{"role": "user", "content": one["question"]}] for one in made]
    columns: dict[str, Any] = {"prompt_ids": [prompt_ids(tokenizer, chat) for chat in chats], "raw_prompt": chats}
    columns["extra_info"] = [{"tools_kwargs": kwargs} if kwargs else {} for _ in made]
    columns |= {"data_source": ["test"] * count, "ground_truth": [one["answer"] for one in made]}
    return Batch(range(count), columns), made


def bound(example: ModuleType, model: Path, *words: str) -> tuple[Any, dict[str, Any]]:
    """Returns the engine of the example's pipeline, not built yet, and what else its rollout is given."""
    config = parse_overrides(example.Config, [f"model.path={model}", *words])
    stage = example.pipeline(config).by_name["rollout"]
    assert stage.services["talk"] is not None
    tools = dict(stage.services)
    return tools.pop("engine"), tools


def talk(engine: Any, tools: dict[str, Any], prompts: Batch) -> Batch:
    return run(rollout(prompts, None, engine=engine, task=TaskInfo(step=1), **tools))


def told(batch: Batch, tokenizer: Any, row: int) -> str:
    """Returns the tools' answers."""
    there = batch["attention_mask"][row, batch["prompts"].shape[1] :].bool()
    return tokenizer.decode(batch["responses"][row][there & ~batch["response_mask"][row].bool()].tolist())


def test_a_conversation_with_the_calculator(example: ModuleType, tiny_qwen: Path) -> None:
    tokenizer = load_chat_tokenizer(str(tiny_qwen))
    prompts, made = problems(tokenizer, 2)
    sums = [f"{'(' * (len(one['ops']) - 1)}{one['operands'][0]}" for one in made]
    for at, one in enumerate(made):
        for k, (op, operand) in enumerate(zip(one["ops"], one["operands"][1:], strict=True)):
            sums[at] += f" {op} {operand}" + (")" if k < len(one["ops"]) - 1 else "")
    results = [one["answer"].rpartition("#### ")[2] for one in made]

    def script(group: int, _index: int, turn: int) -> str:
        return f"#### {results[group]}" if turn else call("calculator", expression=sums[group])

    _engine, tools = bound(example, tiny_qwen, "engine.n=2", "engine.max_tokens=100", "tools.max_response_tokens=250")
    batch = talk(ScriptedRollout(tokenizer, script), tools, prompts)
    for row in range(4):
        assert (
            told(batch, tokenizer, row) == f"\n<|im_start|>tool\n{results[row // 2]}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert batch["response_text"][row].endswith(f"#### {results[row // 2]}")


def test_the_tiny_model_calls_in_mid_sentence(example: ModuleType) -> None:
    model = tiny_model()
    host, tools = bound(
        example,
        model,
        "engine.rollout=hf",
        "engine.n=2",
        f"tools.path={TOOLS / 'inline.py'}",
        "tools.format=Equation",
        "engine.stop=Ġ=",
    )
    engine = host.build()
    try:
        batch = talk(engine, tools, problems(engine.vocabulary.tokenizer, 8)[0])
    finally:
        engine.close()
    assert sum(batch["tool_calls"]) >= len(batch)
    assert not any(batch["tool_errors"])
    right = 0
    for row, text in enumerate(batch["response_text"]):
        said = [line.partition(" = ") for line in text.splitlines() if " = " in line]
        worked = [calculator(left.removeprefix("It is ").removeprefix("Then ")) for left, _, _ in said]
        assert told(batch, engine.vocabulary.tokenizer, row) == "".join(
            f" {number}" for number in worked[: batch["tool_calls"][row]]
        )
        right += batch["ground_truth"][row].rpartition("#### ")[2] == text.rpartition("#### ")[2]
    assert right, "some answers are right"
