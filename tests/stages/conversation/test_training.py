"""Training on conversations: the tokens of tools' answers are in the context and in no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.engines.base import Sampling
from dataflow.graph import TaskInfo
from dataflow.models.tokenizer import load_chat_tokenizer, prompt_ids
from dataflow.rewards.arguments import Arguments
from dataflow.rewards.managers import build_manager
from dataflow.stages.advantage import advantage
from dataflow.stages.conversation import conversation
from dataflow.tools import Toolbox
from tests.engines.drawing import run
from tests.rigs.scripted_engine import ScriptedRollout, call

pytestmark = [pytest.mark.timeout(240), pytest.mark.heavy]

CHAT = [{"role": "user", "content": "6 * 7?"}]
LENGTH = 160


def talked(model: Path, groups: int = 2, n: int = 2) -> Batch:
    """Returns conversations of two turns and of one, by turns."""
    tokenizer = load_chat_tokenizer(str(model))

    def script(group: int, index: int, turn: int) -> str:
        if index or turn:
            return f"#### {group}{index}"
        return call("calculator", expression=f"{group} + 4")

    prompts = Batch(
        range(groups),
        {
            "prompt_ids": [prompt_ids(tokenizer, CHAT)] * groups,
            "raw_prompt": [CHAT] * groups,
            "data_source": ["test"] * groups,
            "ground_truth": ["42"] * groups,
            "extra_info": [{}] * groups,
        },
    )
    found = conversation(
        prompts,
        None,
        engine=ScriptedRollout(tokenizer, script),
        sampling=Sampling(n=n, max_tokens=100),
        tools=Toolbox(str(model), names=("calculator",)),
        max_turns=3,
        max_response_tokens=LENGTH,
        seed=0,
        task=TaskInfo(step=1),
    )
    return run(found)


def holes(batch: Batch) -> torch.Tensor:
    """Tokens that are there and not the model's, bool ``[rows, R]``."""
    there = batch["attention_mask"][:, batch["prompts"].shape[1] :].bool()
    return there & ~batch["response_mask"].bool()


def estimated(batch: Batch, estimator: str) -> Batch:
    scores = torch.tensor([1.0, 0.0] * (len(batch) // 2))
    algorithm = AlgorithmConfig(adv_estimator=estimator)
    return advantage(batch, Batch(batch.groups, {"score": scores}), algorithm=algorithm, task=TaskInfo(step=1))


def test_rewards_see_the_whole_response_and_its_end(tiny_qwen: Path) -> None:
    batch = talked(tiny_qwen)
    rows = Arguments(batch, with_ids=True).rows(0, len(batch))
    there = batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(dim=1)
    own = there - holes(batch).sum(dim=1)
    assert [row["extra_info"]["response_length"] for row in rows] == own.tolist() != there.tolist()
    assert {row["extra_info"]["finish_reason"] for row in rows} == {"stop"}
    assert rows[0]["extra_info"]["response_ids"] == batch["responses"][0, : there[0]].tolist()
    assert [row["extra_info"]["num_turns"] for row in rows] == [2, 1, 2, 1]
    assert "tool\n4\n" in rows[0]["solution_str"]


def test_the_penalty_for_overlong_responses_is_for_the_models_own_tokens(tiny_qwen: Path) -> None:
    batch = talked(tiny_qwen)
    call = Arguments(batch).rows(0, 1)[0]
    own, told = int(batch["response_mask"][0].sum()), int(holes(batch)[0].sum())
    assert told > 0
    for limit, score in ((own + 1, 1.0), (own, 0.0)):
        penalised = build_manager("dapo", lambda **_: 1.0, overlong_buffer_len=1, max_response_length=limit)
        assert penalised.compute_score(**call)["score"] == score


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_advantages_are_those_of_the_score_and_0_on_what_tools_said(tiny_qwen: Path, estimator: str) -> None:
    batch = talked(tiny_qwen)
    assert holes(batch)[0].any()
    found = estimated(batch, estimator)["advantages"]
    mask = batch["response_mask"].bool()
    for row in range(len(batch)):
        assert len(set(found[row][mask[row]].tolist())) == 1
    assert found[0][mask[0]][0] > 0 > found[1][mask[1]][0]
    assert not found[~mask].any()


@pytest.fixture(scope="module")
def trainer(tiny_qwen: Path) -> Any:
    from tests.engines.verl.models import build

    made = build(tiny_qwen, lr=1e-3)
    yield made
    made.close()


def test_log_probs_are_those_of_the_whole_context(tiny_qwen: Path, trainer: Any) -> None:
    from tests.engines.verl.models import load

    batch, model = talked(tiny_qwen), load(tiny_qwen)
    mask = batch["response_mask"].bool()
    found = trainer.old_log_probs(batch)["old_log_probs"]
    prompt = batch["prompts"].shape[1]
    for row in range(len(batch)):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]  # no padding, and no mask but the causal one
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        wanted = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(1)[prompt - 1 :]
        mine = mask[row, : len(wanted)]
        assert torch.allclose(found[row, : len(wanted)][mine], wanted[mine], atol=1e-4)
    assert not found[~mask].any()


def test_an_update_does_not_see_advantages_of_what_tools_said(tiny_qwen: Path) -> None:
    from tests.engines.verl.models import build

    digests = []
    for noise in (0.0, 100.0):
        trainer = build(tiny_qwen, lr=1e-3)
        try:
            batch = talked(tiny_qwen)
            old = trainer.old_log_probs(batch)
            given = estimated(batch, "grpo")
            odd = given["advantages"] + noise * holes(batch)
            trainer.update(batch.merge(old, batch.like(advantages=odd)), last=True)
            digests.append(trainer.digest())
        finally:
            trainer.close()
    assert digests[0] == digests[1]


def test_a_real_engine_s_log_probs_are_the_trainer_s(tiny_qwen: Path, trainer: Any) -> None:
    """A random model calls no tool: the format takes every turn for a call, so that each has an answer behind it."""
    from dataflow.engines.hf import HfRollout

    class Always:
        def parse(self, text: str) -> list[Any]:
            from dataflow.tools import ToolCall

            return [ToolCall("calculator", {"expression": "6 * 7"})]

    engine = HfRollout(str(tiny_qwen), 300)
    tokenizer = engine.vocabulary.tokenizer
    box = Toolbox(str(tiny_qwen), names=("calculator",))
    box.__dict__["how"] = Always()
    # Turns of a random model end about once in 260 tokens: another token ends them sooner.
    stops = tuple(range(3, 40))
    prompts = Batch([0, 1, 2], {"prompt_ids": [prompt_ids(tokenizer, CHAT)] * 3, "raw_prompt": [CHAT] * 3})
    batches = []
    for _ in range(2):
        found = conversation(
            prompts,
            None,
            engine=engine,
            sampling=Sampling(n=2, max_tokens=40, stop_token_ids=stops),
            tools=box,
            max_turns=3,
            max_response_tokens=LENGTH,
            seed=0,
            task=TaskInfo(step=1),
        )
        batches.append(run(found))
    engine.close()
    batch = batches[0]
    assert torch.equal(batch["input_ids"], batches[1]["input_ids"]), "the seed says what is drawn"
    assert sum(batch["tool_calls"]) > 6
    assert holes(batch).any(dim=1).sum() >= 3
    # A turn that did not end by eos has it as a part of the frame.
    end, answer = "<|im_end|>", "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    for row in np.flatnonzero(np.array(batch["ended"]) != "budget"):
        told = tokenizer.decode(batch["responses"][row][holes(batch)[row]].tolist())
        assert told.replace(end + answer, answer) == answer * batch["tool_calls"][row]
    mask = batch["response_mask"].bool()
    own = trainer.old_log_probs(batch)["old_log_probs"]
    assert torch.allclose(own[mask], batch["rollout_log_probs"][mask], atol=1e-4)
    assert not batch["rollout_log_probs"][~mask].any()
