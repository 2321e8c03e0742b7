"""Conversations to test: a toolbox, prompts, the stage on a scripted engine, and the result as text."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.graph import TaskInfo
from dataflow.models.tokenizer import prompt_ids
from dataflow.stages.conversation import conversation
from dataflow.tools import Tool, Toolbox
from tests.engines.drawing import run
from tests.rigs.scripted_engine import Script, ScriptedRollout, call

QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
FRAME = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"


def toolbox(
    tiny_qwen: Any, *targets: Any, timeout: float | None = 20, tokenizer: Any = None, **options: Any
) -> Toolbox:
    """Returns a box of these tools, and the calculator."""
    box = Toolbox(str(tiny_qwen), names=("calculator",), timeout=timeout, **options)
    box.tools.update({one.name: one for one in map(Tool.of, targets)})
    if tokenizer is not None:
        box.__dict__["tokenizer"] = tokenizer
    return box


def prompts_of(tokenizer: Any, groups: int = 1, kwargs: Any = None) -> Batch:
    extras = [{"index": g, **({"tools_kwargs": kwargs[g]} if kwargs else {})} for g in range(groups)]
    return Batch(
        range(groups),
        {
            "prompt_ids": [prompt_ids(tokenizer, QUESTION)] * groups,
            "raw_prompt": [QUESTION] * groups,
            "data_source": ["test"] * groups,
            "ground_truth": ["42"] * groups,
            "extra_info": extras,
        },
    )


def converse(
    engine: ScriptedRollout,
    box: Toolbox,
    prompts: Batch,
    *,
    n: int = 1,
    turns: int = 4,
    tokens: int = 400,
    most: int = 400,
    seed: int = 5,
    task: TaskInfo | None = None,
    longest: int | None = None,
) -> Batch:
    found = conversation(
        prompts,
        None,
        engine=engine,
        sampling=Sampling(n=n, max_tokens=most),
        tools=box,
        max_turns=turns,
        max_response_tokens=tokens,
        max_prompt_length=longest,
        seed=seed,
        task=task or TaskInfo(step=1),
    )
    return run(found)


def parts(batch: Batch, tokenizer: Any, row: int = 0) -> tuple[str, str, str]:
    """Returns the whole response, what is trained on and what is not, each as text; the padding left out."""
    prompt = batch["prompts"].shape[1]
    there = batch["attention_mask"][row, prompt:].bool()
    drawn = batch["response_mask"][row].bool()
    assert not (drawn & ~there).any(), "the padding is never trained on"
    ids = batch["responses"][row]
    return tuple(tokenizer.decode(ids[pick].tolist()) for pick in (there, there & drawn, there & ~drawn))  # type: ignore[return-value]


def by_turn(*texts: str) -> Script:
    return lambda _group, _index, turn: texts[turn]


CALLED, ANSWERED = call("calculator", expression="6 * 7"), "So it is 42.\n#### 42"
